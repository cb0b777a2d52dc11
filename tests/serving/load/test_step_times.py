"""Step times against steps whose costs are known, and what is refused."""

import numpy as np
import pytest

from kvprof.serving.load.step_times import StepSample, StepTimes, fit_step_times


def pairs_of(before, tokens):
    """Return the pairs that a piece of a prompt attends to, behind others of its tokens."""
    return tokens * before + tokens * (tokens + 1) / 2


def test_means_of_few_tokens_count_for_little_and_lie_on_one_line():
    rng = np.random.default_rng(5)
    samples = []
    for number in range(300):
        decode, prefill = float(rng.uniform(1, 40)), float(rng.choice([0.0, rng.uniform(0, 90)]))
        context = decode * float(rng.uniform(100, 900))
        seconds = 5e-3 + 1e-4 * decode + 6e-5 * prefill + 4e-7 * context
        few = number % 10 == 0  # tokens that came together, or after a pause
        seconds *= float(rng.choice([0.01, 3.0])) if few else float(rng.uniform(0.9, 1.1))
        weight = 2.0 if few else 500.0
        samples.append(StepSample(decode, context, prefill, 0.0, seconds, mean=True, weight=weight))
    found = fit_step_times(samples)
    assert found.tokens == (0.0,)
    for decode, context, prefill in ((1, 500.0, 0), (30, 12_000.0, 0), (10, 5000.0, 512)):
        expected = 5e-3 + 1e-4 * decode + 6e-5 * prefill + 4e-7 * context
        assert found.step(decode, context, prefill) == pytest.approx(expected, rel=0.05)
    assert found.residual < 0.1


def test_few_steps_that_the_form_can_have_are_met():
    times = StepTimes((1.0, 8.0, 512.0), (5e-3, 6e-3, 2e-2), 3e-5, 2e-8, 8e-10)
    steps = [(1, 100.0, 0), (1, 9e4, 0), (8, 5e3, 0), (8, 1e6, 0), (0, 0.0, 512)]
    steps += [(0, 0.0, 8192), (0, 0.0, 65536)]
    samples = [
        StepSample(decode, context, prefill, pairs_of(0, prefill), 0.0)
        for decode, context, prefill in steps
    ]
    samples = [
        StepSample(
            one.decode,
            one.context,
            one.prefill,
            one.pairs,
            times.step(one.decode, one.context, one.prefill, one.pairs),
        )
        for one in samples
    ]
    found = fit_step_times(samples)
    assert found.residual == pytest.approx(0.0, abs=1e-6)
    for one in samples:
        step = found.step(one.decode, one.context, one.prefill, one.pairs)
        assert step == pytest.approx(one.seconds, rel=1e-6)
    # Beyond what was measured it goes on as a line, in between it is one.
    assert found.dense(260) == pytest.approx((6e-3 + 2e-2) / 2)
    assert found.dense(100_000) - found.dense(50_000) == pytest.approx(50_000 * 3e-5, rel=1e-3)


def test_more_tokens_never_take_less_time_whatever_was_measured():
    rng = np.random.default_rng(1)
    for _ in range(20):
        samples = [
            StepSample(
                int(d), float(d * c), int(p), pairs_of(0, int(p)), float(rng.random()) + 0.01
            )
            for d, c, p in zip(
                rng.integers(1, 50, 30),
                rng.integers(1, 9999, 30),
                rng.choice([0, 64, 700], 30),
                strict=True,
            )
        ]
        found = fit_step_times(samples)
        seconds = [found.dense(tokens) for tokens in range(1, 9000, 37)]
        assert (np.diff(seconds) >= 0).all()
        assert min(found.per_context, found.per_pair, found.beyond) >= 0


def test_steps_of_one_kind_alone_are_refused():
    decode, prompt = StepSample(1, 50, 0, 0, 0.01), StepSample(0, 0, 9, 45, 0.01)
    for samples in ([decode], [prompt], []):
        with pytest.raises(ValueError, match="prefill"):
            fit_step_times(samples)
