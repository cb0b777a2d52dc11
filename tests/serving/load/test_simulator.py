"""The simulator against one that goes step by step, conservation laws, and queues' closed forms."""

import numpy as np
import pytest

from kvprof.serving.load.replica import EngineSettings
from kvprof.serving.load.requests import Request
from kvprof.serving.load.simulator import TOO_LONG, SimulationStoppedError, simulate
from kvprof.serving.load.step_times import StepTimes
from tests.serving.load.naive import NaiveEngine

#: A step of a millisecond whatever is in it.
CONSTANT = StepTimes((1.0,), (1e-3,), 0.0)


def times_of(per_context=1e-5, per_pair=1e-6, per_sequence=0.0):
    points = (1.0, 8.0, 100.0), (0.01, 0.012, 0.05)
    return StepTimes(*points, 4e-4, per_context, per_pair, per_sequence)


def drawn(rng):
    """Return requests that may share prefixes, and an engine that is mostly too small for them."""
    count, longest = int(rng.integers(1, 40)), int(rng.choice([20, 200]))
    arrivals = np.cumsum(rng.exponential(1 / rng.choice([0.5, 5.0, 50.0]), count))
    if rng.random() < 0.3:
        arrivals = np.round(arrivals, 1)  # several at once
    sessions = rng.random() < 0.5
    requests = []
    for number, arrival in enumerate(arrivals):
        prompt, output = int(rng.integers(1, longest)), int(rng.integers(1, longest // 2))
        prefix = int(rng.integers(0, prompt + 1)) if sessions else 0
        session = int(rng.integers(0, 3)) if sessions else None
        requests.append(Request(number, float(arrival), prompt, output, prefix, session))
    size, seqs = int(rng.choice([1, 4, 16])), int(rng.choice([1, 3, 16]))
    largest = max(-(-(one.prompt + one.output) // size) for one in requests)
    settings = EngineSettings(
        int(largest * rng.choice([1.0, 1.5, 4.0]) + rng.integers(0, 3)),
        size,
        seqs,
        seqs + int(rng.choice([0, 1, 7, 64, 500])),
        bool(rng.random() < 0.8),
    )
    times = times_of(*(rng.choice([0.0, cost]) for cost in (1e-5, 1e-6, -1e-4)))
    return requests, settings, times


def test_every_token_comes_when_a_simulation_step_by_step_says():
    preempted = found = 0
    for seed in range(150):
        requests, settings, times = drawn(np.random.default_rng(seed))
        naive = NaiveEngine(settings, times)
        expected = naive.serve(requests)
        simulated = simulate(requests, settings, times)
        for one, outcome in zip(expected, simulated.outcomes, strict=True):
            np.testing.assert_allclose(list(outcome.tokens), one, rtol=1e-9, err_msg=f"{seed}")
        assert simulated.totals.preemptions == naive.preemptions
        assert simulated.totals.computed == naive.computed
        preempted += naive.preemptions
        found += simulated.totals.found
    assert preempted > 100  # else nothing was compared there
    assert found > 10_000


def test_every_token_is_written_once_and_the_cache_is_never_overfull():
    for seed in range(60):
        requests, settings, times = drawn(np.random.default_rng(1000 + seed))
        simulated = simulate(requests, settings, times)
        totals, outcomes = simulated.totals, simulated.outcomes
        for outcome in outcomes:
            tokens = np.array(outcome.tokens)
            assert len(tokens) == outcome.request.output
            assert (np.diff(tokens) > 0).all()
        for admitted, outcome in zip(simulated.admitted, outcomes, strict=True):
            assert outcome.request.arrival <= admitted < outcome.tokens[0]
        # Each token goes through the model once, but for the last one that a request writes and
        # what was found, and again for what preemptions gave up and did not find.
        once = sum(one.prompt + one.output - 1 for one in requests)
        assert totals.computed + totals.found == once + totals.again - totals.kept
        end = max(outcome.tokens[-1] for outcome in outcomes)
        for moment in simulated.moments(np.linspace(0, end * 1.01, 200)):
            assert 0 <= moment.pages <= settings.pages
            assert 0 <= moment.running <= settings.max_num_seqs
            assert moment.waiting >= 0
        assert moment.pages == moment.running == moment.waiting == 0
        assert moment.preemptions == totals.preemptions


def test_littles_law():
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.05, 3000))
    requests = [
        Request(number, float(arrival), int(rng.integers(1, 300)), int(rng.integers(1, 60)))
        for number, arrival in enumerate(arrivals)
    ]
    simulated = simulate(requests, EngineSettings(400, 16, 8, 256), times_of())
    end = max(outcome.tokens[-1] for outcome in simulated.outcomes)
    moments = simulated.moments(np.linspace(0, end, 200_001)[:-1] + end / 400_000)
    inside = np.mean([moment.waiting + moment.running for moment in moments])
    stays = np.mean([one.tokens[-1] - one.request.arrival for one in simulated.outcomes])
    assert inside == pytest.approx(len(requests) / end * stays, rel=1e-3)


def lindley(arrivals, services):
    """Return when each of the requests ends that are served one at a time, in order."""
    ends, free = [], 0.0
    for arrival, service in zip(arrivals, services, strict=True):
        free = max(free, arrival) + service
        ends.append(free)
    return np.array(ends)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_sequence_of_one_token_at_a_time_is_the_queue_m_d_1(load):
    rng = np.random.default_rng(7)
    count, service = 40_000, 1e-3
    arrivals = np.cumsum(rng.exponential(service / load, count))
    requests = [Request(number, float(at), 1, 1) for number, at in enumerate(arrivals)]
    outcomes = simulate(requests, EngineSettings(16, 16, 1, 16), CONSTANT).outcomes
    ends = np.array([one.tokens[0] for one in outcomes])
    np.testing.assert_allclose(ends, lindley(arrivals, np.full(count, service)), rtol=1e-9)
    waits = ends - arrivals - service
    assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_prompts_of_exponential_length_one_at_a_time_are_the_queue_m_m_1():
    rng = np.random.default_rng(11)
    load, mean, count = 0.6, 20_000, 40_000
    seconds = 1e-6  # a token
    arrivals = np.cumsum(rng.exponential(mean * seconds / load, count))
    lengths = np.ceil(rng.exponential(mean, count)).astype(int)
    requests = [
        Request(number, float(at), int(length), 1)
        for number, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]
    by_token = StepTimes((1.0,), (seconds,), seconds)
    settings = EngineSettings(100_000, 16, 1, 1_000_000)
    outcomes = simulate(requests, settings, by_token).outcomes
    ends = np.array([one.tokens[0] for one in outcomes])
    np.testing.assert_allclose(ends, lindley(arrivals, lengths * seconds), rtol=1e-9)
    assert (ends - arrivals).mean() == pytest.approx(mean * seconds / (1 - load), rel=0.05)


def test_decoding_alone_grows_by_a_token_a_step():
    times = times_of(per_context=1e-5, per_pair=0.0)
    (outcome,) = simulate([Request(0, 2.0, 50, 1000)], EngineSettings(1000), times).outcomes
    expected = [2.0 + times.dense(50)]
    for context in range(51, 50 + 1000):
        expected.append(expected[-1] + 0.01 + 1e-5 * context)
    np.testing.assert_allclose(outcome.tokens, expected, rtol=1e-12)
    assert outcome.tokens[-1] == pytest.approx(expected[-1], rel=1e-12)
    assert outcome.tokens[3:5] == pytest.approx(expected[3:5])
    with pytest.raises(IndexError):
        outcome.tokens[1000]


def test_long_prompts_are_read_in_pieces_beside_those_that_decode():
    times = times_of(per_context=0.0, per_pair=0.0)
    first, second = Request(0, 0.0, 10, 100), Request(1, 0.05, 1000, 2)
    simulated = simulate([first, second], EngineSettings(1000, 16, 8, 101), times)
    # One token of the budget is the first request's: ten pieces of 100.
    steps = [one for one in simulated.outcomes[0].tokens if one <= simulated.outcomes[1].tokens[0]]
    mixed = times.dense(101)
    assert np.diff(steps)[-10:] == pytest.approx(mixed)
    assert np.diff(steps)[:-10] == pytest.approx(times.dense(1))


def test_a_request_that_fits_into_no_cache_is_said_to_have_failed():
    requests = [Request(0, 0.0, 100, 61), Request(1, 0.0, 100, 62)]
    fits, too_long = simulate(requests, EngineSettings(10, 16), CONSTANT).outcomes
    assert fits.failure is None
    assert len(fits.tokens) == 61
    assert too_long.failure == TOO_LONG
    assert not too_long.tokens


def test_blocks_of_a_trace_are_found_as_far_as_they_are_equal():
    times = times_of(0.0, 0.0)
    prompts = [(1, 2, 3), (1, 2, 4), (5, 2, 3)]
    settings = EngineSettings(10_000, 16, 8, 8192)
    for block in (512, 16, 8):  # 8: a page of both blocks that all have
        requests = [
            Request(number, 10.0 * number, 3 * block + 7, 4, 3 * block, None, blocks, block)
            for number, blocks in enumerate(prompts)
        ]
        assert simulate(requests, settings, times).totals.found == 2 * block
    off = EngineSettings(10_000, 16, 8, 8192, prefix_caching=False)
    assert simulate(requests, off, times).totals.found == 0


def test_replicas_in_turn_are_engines_of_their_own():
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(0.01, 300))
    requests = [
        Request(number, float(at), int(rng.integers(1, 200)), int(rng.integers(1, 50)))
        for number, at in enumerate(arrivals)
    ]
    settings = EngineSettings(100, 16, 4, 64, replicas=3, route="round-robin")
    together = simulate(requests, settings, times_of()).outcomes
    for replica in range(3):
        own = requests[replica::3]
        alone = simulate(own, EngineSettings(100, 16, 4, 64), times_of()).outcomes
        for one, other in zip(together[replica::3], alone, strict=True):
            assert list(one.tokens) == list(other.tokens)


def test_the_shortest_queue_is_where_four_times_the_waiting_and_the_running_are_fewest():
    # The first replica gets one that runs long; a second request goes to the second, and a third,
    # when that one has ended, there again.
    requests = [Request(0, 0.0, 1, 1000), Request(1, 0.1, 1, 2), Request(2, 0.5, 1, 2)]
    requests += [Request(3, 0.6, 1, 500), Request(4, 0.601, 1, 1)]
    settings = EngineSettings(1000, 16, 1, 16, replicas=2, refresh=0.0)
    outcomes = simulate(requests, settings, CONSTANT).outcomes
    # None of the first three waits; the last one waits behind 999 tokens or 500: both run one
    # and none waits, so that the first replica gets it.
    assert [one.tokens[0] - one.request.arrival < 0.003 for one in outcomes] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert outcomes[4].tokens[0] == pytest.approx(outcomes[0].tokens[-1] + 1e-3)
    # What the router hears late it does not know: all are sent by what it sent itself.
    in_turn = EngineSettings(1000, 16, 1, 16, replicas=2, route="round-robin")
    late = EngineSettings(1000, 16, 1, 16, replicas=2, refresh=100.0)
    assert [list(one.tokens) for one in simulate(requests, late, CONSTANT).outcomes] == [
        list(one.tokens) for one in simulate(requests, in_turn, CONSTANT).outcomes
    ]


def test_the_shortest_queue_waits_less_than_taking_turns():
    rng = np.random.default_rng(2)
    arrivals = np.cumsum(rng.exponential(0.05, 4000))
    lengths = rng.choice([10, 2000], 4000, p=[0.9, 0.1])
    requests = [
        Request(number, float(at), int(length), 20)
        for number, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]
    waits = {}
    for route in ("shortest-queue", "round-robin"):
        settings = EngineSettings(600, 16, 8, 128, replicas=8, route=route)
        outcomes = simulate(requests, settings, times_of()).outcomes
        waits[route] = np.mean([one.tokens[0] - one.request.arrival for one in outcomes])
    assert waits["shortest-queue"] < 0.9 * waits["round-robin"]


def test_a_simulation_ends_when_it_is_asked_to():
    requests = [Request(number, float(number), 10, 10) for number in range(10_000)]
    asked = iter((False, False, True))
    with pytest.raises(SimulationStoppedError):
        simulate(requests, EngineSettings(100), CONSTANT, lambda: next(asked))
