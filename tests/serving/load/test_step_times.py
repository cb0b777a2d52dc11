"""Step times against steps whose costs are known, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from kvprof.serving.load.step_times import StepSample, StepTimes, fit_step_times, pairs_of


def known(rng, count, noise=0.0):
    """Return steps of a known cost: weights are read, or products bound the time."""
    samples = []
    for _ in range(count):
        decode = int(rng.integers(0, 64))
        prefill = int(rng.choice([0, 0, 16, 500, 2000])) if decode else 512
        context = float(decode * rng.integers(10, 10_000))
        pairs = pairs_of(int(rng.integers(0, 5000)), prefill)
        seconds = max(5e-3, 4e-5 * (decode + prefill)) + 3e-8 * context + 9e-10 * pairs
        seconds *= 1 + noise * rng.standard_normal()
        samples.append(StepSample(decode, context, prefill, pairs, seconds))
    return samples


def test_pairs_are_counted_one_by_one():
    for before, tokens in ((0, 1), (5, 3), (100, 17)):
        assert pairs_of(before, tokens) == sum(before + i + 1 for i in range(tokens))
    whole = pairs_of(0, 100)
    assert pairs_of(0, 30) + pairs_of(30, 70) == whole


def test_a_fit_finds_the_costs_of_attention_from_few_and_from_many_steps():
    rng = np.random.default_rng(0)
    for count, noise, within in ((12, 0.0, 0.05), (3000, 0.0, 0.03), (3000, 0.02, 0.05)):
        found = fit_step_times(known(rng, count, noise))
        assert found.samples == count
        if count > 100:
            assert found.per_context == pytest.approx(3e-8, rel=within)
            assert found.per_pair == pytest.approx(9e-10, rel=0.2)
            assert found.dense(32) == pytest.approx(5e-3, rel=within)
            assert found.dense(2000) == pytest.approx(0.08, rel=0.05)


def test_steps_that_vary_much_are_met_in_the_mean():
    rng = np.random.default_rng(4)
    samples = known(rng, 4000)
    # Gamma of mean 1 and deviation 0.7: some take three times as long.
    noisy = [replace(one, seconds=one.seconds * rng.gamma(2.0, 0.5)) for one in samples]
    found = fit_step_times(noisy)
    for chosen in ([o for o in samples if not o.prefill], [o for o in samples if o.prefill]):
        told = sum(found.step(o.decode, o.context, o.prefill, o.pairs) for o in chosen)
        assert told == pytest.approx(sum(one.seconds for one in chosen), rel=0.05)


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
        with pytest.raises(ValueError, match="steps that decode and steps that read prompts"):
            fit_step_times(samples)


def test_what_steps_that_are_alike_do_not_tell_is_named():
    """All of them read as many prompt tokens: what one of these costs nobody can know."""
    alike = [
        StepSample(2, 900.0 + n, 20, 2000.0, 0.005 + 1e-5 * n, "", True, 50.0) for n in range(30)
    ]
    told = fit_step_times(alike)
    assert told.untold == ("a prompt's token",)
    assert fit_step_times([*alike, StepSample(0, 0, 4000, 8e6, 0.1, "", True, 1.0)]).untold == ()
