"""Transform coding against brute force and plain numpy."""

import zlib
from itertools import pairwise, product

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.moments import AcrossMoments, layer_groups
from kvprof.analysis.transform_coding import (
    BITS,
    OVERHEAD,
    BlockErrors,
    decoded,
    encoded,
    packed_bytes,
    principal_components,
)


def sample(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return coefficients whose spread falls from column to column."""
    draw = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return draw * torch.linspace(3, -3, columns).exp()


def in_numpy(values: np.ndarray, blocks: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Return what blocks of integers stand for, in float64 but for what is stored in 16 bits."""
    found = np.zeros_like(values, dtype=np.float64)
    start = 0
    for width, bits in blocks:
        own = values[:, start : start + width].astype(np.float64)
        if bits:
            low, high = own.min(1, keepdims=True), own.max(1, keepdims=True)
            shift = low.astype(np.float16).astype(np.float64)
            scale = ((high - low).astype(np.float32) / np.float32(2**bits - 1)).astype(np.float16)
            scale = scale.astype(np.float64)
            codes = np.round((own - shift) / np.maximum(scale, np.finfo(np.float16).tiny))
            found[:, start : start + width] = shift + scale * codes.clip(0, 2**bits - 1)
        start += width
    return found


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 21), st.sampled_from(BITS)), min_size=0, max_size=6),
    st.integers(1, 9),
    st.booleans(),
)
def test_what_comes_back_is_what_the_integers_say(
    blocks: list[tuple[int, int]], rows: int, deflate: bool
) -> None:
    values = sample(rows, sum(width for width, _ in blocks))
    stored = encoded(values, tuple(blocks), deflate=deflate)
    found = decoded(stored, rows, tuple(blocks), deflate=deflate)
    wanted = in_numpy(values.numpy(), tuple(blocks))
    # A code may fall the other way where float32 rounds to the middle between two.
    assert np.sum(np.abs(found.numpy() - wanted) > 1e-5) <= 1
    plain = encoded(values, tuple(blocks), deflate=False)
    assert len(plain) == rows * packed_bytes(tuple(blocks))
    assert (zlib.decompress(stored) if deflate else stored) == plain


def lost(values: torch.Tensor, blocks: tuple[tuple[int, int], ...]) -> float:
    """The mean squared error per token."""
    left = values.double().numpy() - in_numpy(values.numpy(), blocks)
    return float(np.square(left).sum(1).mean())


def test_no_cut_of_as_many_bytes_loses_less() -> None:
    """All cuts of 18 columns, at all bits of the blocks of 16; single ones take their best."""
    values = sample(7, 18)
    errors = BlockErrors(values)
    total = values.double().square().sum(-1).mean()

    every = []
    # A single column costs the same at 2 bits as at 4: its shift has it all.
    for kept in product((0, 2), repeat=2):
        for bits in BITS:
            every.append(((16, bits), *((1, one) for one in kept)))
            every.append(((16, bits), (2, kept[0])))  # the last block of 16 is cut short
    every += [tuple((1, 2 * (x < count)) for x in range(18)) for count in range(19)]
    known = [(packed_bytes(blocks), lost(values, blocks)) for blocks in every]
    for price in (float(total) / 2**power for power in range(0, 24)):
        found = errors.priced(price)
        assert sum(width for width, _ in found) == 18
        own, size = lost(values, found), packed_bytes(found)
        for other_size, other in known:
            assert own + price * size <= (other + price * other_size) * (1 + 1e-3)
            if other_size <= size:
                assert own <= other * (1 + 1e-3) + 1e-9


def test_a_budget_is_kept_and_used() -> None:
    values = sample(40, 300)
    errors = BlockErrors(values)
    found = [errors.within(budget) for budget in (0, 40, 80, 160, 320, 1e9)]
    sizes = [packed_bytes(blocks) for blocks in found]
    assert sizes[0] == 0
    assert all(low < high for low, high in pairwise(sizes))
    for budget, size in zip((40, 80, 160, 320), sizes[1:], strict=False):
        assert 0.7 * budget < size <= budget
    left = [lost(values, blocks) for blocks in found]
    assert left == sorted(left, reverse=True)
    # A kept block has its overhead, and adjacent ones without bits are one.
    assert packed_bytes(((16, 4), (3, 0), (1, 2))) == 8 + 1 + 2 * OVERHEAD
    for blocks in found:
        assert not any(a[1] == b[1] == 0 for a, b in pairwise(blocks))


def test_components_are_those_of_the_rows() -> None:
    """Rows of two groups of layers that come layer by layer, against numpy's SVD of the rest."""
    draw = torch.Generator().manual_seed(1)
    states = [torch.randn(3, 2, 30, 4, generator=draw) + 2 for _ in range(3)]  # layers
    assert layer_groups((0, 2, 3), 2) == ((0, 2), (3,))
    assert layer_groups((0, 2, 3), 0) == ((0, 2, 3),)
    moments = AcrossMoments(layer_groups((0, 2, 3), 2), 5)
    for layer, one in zip((0, 1, 2, 3), (states[0], states[0], states[1], states[2]), strict=True):
        moments.add(layer, {"keys": one, "values": -one})
    for number, own in enumerate(((0, 1), (2,))):
        rows = torch.cat([states[x][:, :, 5:].transpose(1, 2).flatten(2) for x in own], -1)
        assert torch.equal(moments.samples["keys", number], rows[0])
        rest = rows[1:].flatten(0, 1).double().numpy()
        mean, basis, variances = principal_components(moments.grams["keys", number])
        assert int(moments.grams["keys", number][-1, -1]) == len(rest)
        assert np.allclose(mean.numpy(), rest.mean(0))
        _, singular, right = np.linalg.svd(rest - rest.mean(0), full_matrices=False)
        assert np.allclose(variances.numpy(), singular**2 / len(rest))
        assert np.allclose(np.abs(right @ basis.numpy()), np.eye(len(right)), atol=1e-6)
        negative, *_ = principal_components(moments.grams["values", number])
        assert torch.allclose(negative, -mean)
