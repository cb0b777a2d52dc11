"""Samples are taken in turn, stop when asked, and what a call forgot to write is seen."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.stats import median_ends
from kvprof.benchmark.timing import interleaved, sampler, spread
from kvprof.errors import Interrupted

CPU = torch.device("cpu")


class Clock:
    """A clock that only samples move on."""

    now = 0.0

    def __call__(self):
        return self.now


class Fake:
    def __init__(self, name, log, seconds=0.0, clock=None):
        self.name, self.log, self.seconds, self.note = name, log, seconds, None
        self.clock = clock or Clock()

    def output(self):
        return torch.zeros(1)

    def sample(self):
        self.log.append(self.name)
        self.clock.now += self.seconds
        return float(len(self.log))


def test_samplers_take_turns_every_second_round_in_reverse():
    log = []
    found = interleaved([Fake("a", log), Fake("b", log)], 3, seconds=10, should_stop=lambda: False)
    assert "".join(log) == "abbaab"
    assert found == [[1.0, 4.0, 5.0], [2.0, 3.0, 6.0]]


def test_time_that_runs_out_leaves_three_rounds(monkeypatch):
    log, clock = [], Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    slow, far_too_slow = (Fake("a", log, seconds, clock) for seconds in (0.02, 0.05))
    found = interleaved([slow], 50, seconds=0.03, should_stop=lambda: False)
    assert len(found[0]) == 3
    # One that is far too slow is sampled once.
    found = interleaved([far_too_slow], 50, seconds=0.01, should_stop=lambda: False)
    assert len(found[0]) == 1


def test_a_stop_is_seen_between_rounds():
    log = []
    with pytest.raises(Interrupted):
        interleaved([Fake("a", log)], 50, seconds=10, should_stop=lambda: len(log) >= 4)
    assert len(log) == 4


def test_a_call_is_timed_on_each_copy_in_turn():
    seen = []

    def run(number):
        def call():
            seen.append(number)
            time.sleep(0.005 * (number + 1))
            return torch.zeros(2)

        return call

    timed = sampler([run(0), run(1)], CPU)
    seen.clear()
    times = [timed.sample() for _ in range(4)]
    assert seen == [0, 1, 0, 1]
    assert times[0] >= 0.005
    assert times[1] >= 0.010


def test_what_a_call_does_not_write_is_poisoned():
    kept = torch.zeros(8)

    def forgets():
        kept[:4] = 1.0
        return kept

    output = sampler([forgets], CPU).output()
    assert output[:4].tolist() == [1.0] * 4
    assert all(math.isnan(value) for value in output[4:].tolist())


@settings(max_examples=30)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40))
def test_the_interval_holds_the_median_and_lies_within_the_samples(samples):
    low, high = median_ends(samples)
    assert min(samples) <= low <= high <= max(samples)
    middle = sorted(samples)[len(samples) // 2]
    assert low <= middle * (1 + 1e-12)
    assert median_ends(samples) == (low, high)  # the same samples say the same


def test_one_sample_has_no_interval_and_no_spread():
    assert median_ends([1.0]) is None
    assert spread([2.0, 2.0, 2.0]) == 0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)
