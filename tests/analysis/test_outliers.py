"""What a cast to e4m3 loses, told from counts by octave, is what a plain computation finds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.outliers import clipped_shares, flushed_shares, magnitude_counts, scales_for


def vectors(seed: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    """Values of three heads over many octaves, some of them zero."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 3, 40, 8, generator=source)
    octaves = spread * torch.randn(2, 3, 40, 8, generator=source)
    drawn = drawn * 2.0**octaves * torch.tensor([1e-3, 1.0, 300.0]).view(3, 1, 1)
    drawn[torch.rand(drawn.shape, generator=source) < 0.05] = 0.0
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25)
@given(seed=st.integers(0, 999), spread=st.floats(0, 6), octave=st.integers(-12, 12))
def test_shares_are_those_of_the_values_themselves(
    dtype: torch.dtype, seed: int, spread: float, octave: int
) -> None:
    x = vectors(seed, spread, dtype)
    x = x.clamp(-6e4, 6e4)
    counts, scale = magnitude_counts(x), 2.0**octave
    clipped = clipped_shares(counts, [scale] * 3)
    flushed = flushed_shares(counts, [scale] * 3)
    for head in range(3):
        own = np.abs(x[:, head].double().numpy()) / scale
        assert counts[head].sum() == own.size
        assert clipped[head] == pytest.approx((own > 448).mean(), abs=1e-12)
        there = own[own > 0]
        wanted = (there < 2.0**-10).mean() if there.size else 0.0
        assert flushed[head] == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), spread=st.floats(0, 6))
def test_scales_are_the_least_powers_of_two_that_hold_twice_the_largest(
    seed: int, spread: float
) -> None:
    x = vectors(seed, spread, torch.float32)
    for head, scale in enumerate(scales_for(magnitude_counts(x))):
        largest = float(x[:, head].abs().max())
        assert np.log2(scale) % 1 == 0
        assert 2 * largest <= 448 * scale < 4 * largest
        cast = (x[:, head] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        # Three bits behind the point, and steps of 2^-9 below 2^-6.
        bound = torch.maximum(x[:, head].abs() / 16, torch.tensor(scale * 2.0**-10))
        assert bool(((cast - x[:, head]).abs() <= bound).all())


@pytest.mark.parametrize("value", [224.0, 224.00002, 448.0, 447.99997, 2.0**-10, 0.0])
def test_the_borders_belong_where_the_cast_puts_them(value: float) -> None:
    counts = magnitude_counts(torch.full((1, 1, 2, 2), value))
    assert clipped_shares(counts, [1.0]) == [0.0]
    assert flushed_shares(counts, [1.0]) == [0.0]
    wanted = 1.0 if value in (0.0, 224.0) else 2.0 if value > 1 else 2.0**-17
    assert scales_for(counts) == [wanted]
    if value:
        below = magnitude_counts(torch.full((1, 1, 2, 2), value / 4))
        assert flushed_shares(below, [1.0]) == [1.0 if value < 1 else 0.0]
