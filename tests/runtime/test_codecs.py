"""Packing is lossless; quantised rows are as near as their formula says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprof.methods.quantisers import codebook, normal_distortion, normal_levels
from kvprof.methods.storage import Quantiser, SideQuantiser
from kvprof.runtime.codecs import codec_for, pack, unpack
from kvprof.runtime.rows import joined, picked, plain_part


def rows(tokens: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, tokens, columns, generator=generator) * 3 + 1


@settings(max_examples=60)
@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 40), st.integers(0, 99))
def test_packing_is_dense_and_lossless(bits: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, columns), generator=generator)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, math.ceil(columns * bits / 8))
    assert torch.equal(unpack(packed, bits, columns).long(), codes)


def by_hand(x: Tensor, bits: int, kind: str) -> Tensor:
    """Quantise one vector, written out with float16 scale and zero."""
    steps = 1 if kind == "codebook" else 2**bits - 1
    zero = x.min().half().float()
    scale = ((x.max() - x.min()) / steps).half().float()
    if kind == "codebook":
        levels = codebook(bits)
        nearest = ((x - zero) / scale).unsqueeze(-1).sub(levels).abs().argmin(-1)
        return zero + scale * levels[nearest]
    return zero + scale * ((x - zero) / scale).round().clamp(0, steps)


@pytest.mark.parametrize("kind", ["affine", "codebook"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("axis", "group"), [("token", None), ("token", 4), ("channel", 5)])
def test_rows_are_quantised_by_the_formula(kind: str, bits: int, axis: str, group: int) -> None:
    x = rows(15, 10)
    side = SideQuantiser((bits,), axis, group)
    codec = codec_for(Quantiser(kind, side, side), side, 0)
    found = codec.decode(codec.encode(x), 10, torch.float32)
    wanted = x.clone()
    for b, g in ((0, 0), (1, 2)):
        if axis == "token":
            for t in range(15):
                for start in range(0, 10, group or 10):
                    part = slice(start, start + (group or 10))
                    wanted[b, g, t, part] = by_hand(x[b, g, t, part], bits, kind)
        else:
            for c in range(10):
                for start in range(0, 15, group):
                    part = slice(start, start + group)
                    wanted[b, g, part, c] = by_hand(x[b, g, part, c], bits, kind)
        assert torch.allclose(found[b, g], wanted[b, g], atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "levels", "error"),
    [
        (2, [0.4528, 1.510], 0.1175),
        (3, [0.2451, 0.7560, 1.344, 2.152], 0.03454),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
    ],
)
def test_levels_for_normal_variables_are_those_of_max(
    bits: int, levels: list[float], error: float
) -> None:
    """Max (1960), tables I and II."""
    found = normal_levels(bits)
    assert torch.allclose(found[len(levels) :], torch.tensor(levels), atol=1e-3)
    assert torch.allclose(found, -found.flip(0), atol=1e-6)
    assert normal_distortion(bits) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_normal_rows_lose_what_the_levels_promise(bits: int) -> None:
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(bits)) * 5
    side = SideQuantiser((bits,))
    codec = codec_for(Quantiser("lloyd-max-rms", side, side), side, 0)
    stored = codec.encode(x)
    found = codec.decode(stored, 64, torch.float32)
    assert stored["codes"].shape[-1] == 8 * bits
    error = float((found - x).square().mean() / x.square().mean())
    assert error == pytest.approx(normal_distortion(bits), rel=0.15)


def test_runs_of_columns_have_bits_of_their_own_and_no_bits_read_as_zero() -> None:
    x, runs = rows(7, 13), ((3, 4), (6, 2), (4, 0))
    side = SideQuantiser(())
    quantiser = Quantiser("lloyd-max-rms", side, side, scale_dtype="float8_e4m3fn")
    codec = codec_for(quantiser, side, 0, runs)
    stored = codec.encode(x)
    assert {name: tensor.shape[-1] for name, tensor in stored.items()} == {"codes": 4, "scale": 1}
    assert all(tensor.dtype == torch.uint8 for tensor in stored.values())
    found = codec.decode(stored, 13, torch.float32)
    assert torch.equal(found[..., 9:], torch.zeros(2, 3, 7, 4))
    scale = x[..., :9].square().mean(-1, keepdim=True).sqrt().to(torch.float8_e4m3fn).float()
    for columns, bits in ((slice(0, 3), 4), (slice(3, 9), 2)):
        levels = normal_levels(bits)
        nearest = (x[..., columns, None] / scale[..., None] - levels).abs().argmin(-1)
        assert torch.allclose(found[..., columns], scale * levels[nearest])
    # A row of nothing stays nothing to speak of, and the largest one a scale can be is enough.
    empty = codec.decode(codec.encode(torch.zeros(1, 13)), 13, torch.float32)
    assert empty.abs().max() < 0.05
    assert torch.isfinite(codec.decode(codec.encode(1e6 * torch.ones(1, 13)), 13, torch.half)).all()


def test_outliers_are_kept_exactly() -> None:
    x = rows(6, 20)
    x[..., 7] = 100.0
    side = SideQuantiser((3,))
    codec = codec_for(Quantiser("codebook", side, side, outliers=0.1), side, 0)
    stored = codec.encode(x)
    found = codec.decode(stored, 20, torch.float32)
    assert stored["outliers"].shape[-1] == 2
    largest = x.abs().topk(2, dim=-1).indices
    assert torch.equal(found.gather(-1, largest), x.gather(-1, largest))
    assert (found - x).abs().max() < 4  # the outlier does not stretch the others' range


def test_e4m3_saturates() -> None:
    side = SideQuantiser((8,))
    codec = codec_for(Quantiser("fp8", side, side), side, 0)
    x = torch.tensor([[[[1.0, -1000.0, 0.3, 500.0]]]])
    found = codec.decode(codec.encode(x), 4, torch.float32)
    assert found[0, 0, 0, 1] == -448.0
    assert found[0, 0, 0, 3] == 448.0
    assert found[0, 0, 0, 2] == pytest.approx(0.3, rel=2**-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_of_e4m3_is_read_as_torch_casts_it(dtype: torch.dtype) -> None:
    side = SideQuantiser((8,))
    codec = codec_for(Quantiser("fp8", side, side), side, 0)
    codes = torch.arange(256, dtype=torch.uint8).view(1, 2, 2, 64).transpose(1, 2)
    found = codec.decode({"codes": codes}, 64, dtype)
    assert found.dtype == dtype
    cast = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(found.nan_to_num(nan=999.0), cast.nan_to_num(nan=999.0))
    assert found.isnan().sum() == 2


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_what_is_quantised_is_not_quantised_again(axis: str) -> None:
    side = SideQuantiser((4,), axis, 4)
    codec = codec_for(Quantiser("affine", side, side), side, 0)
    old = plain_part(rows(8, 6)).recoded(codec, 6)
    more = joined([(old, 0, 8), (plain_part(rows(4, 6, 1)), 0, 4)], codec, 6)
    assert more.tokens == 12
    assert torch.equal(more.cut(0, 8).rows(), old.rows())
    assert all(torch.equal(more.cut(0, 8).stored[n], old.stored[n]) for n in old.stored)


def test_picked_tokens_keep_their_codes() -> None:
    side = SideQuantiser((4,))
    codec = codec_for(Quantiser("affine", side, side), side, 0)
    old, new = plain_part(rows(8, 6)).recoded(codec, 6), plain_part(rows(3, 6, 1))
    index = torch.tensor([[[0, 5, 9], [1, 2, 10], [6, 7, 8]]]).expand(2, 3, 3)
    found = picked([old, new], index, codec, 6).rows()
    every = torch.cat([old.rows(), new.recoded(codec, 6).rows()], dim=2)
    assert torch.equal(found, every.gather(2, index.unsqueeze(-1).expand(2, 3, 3, 6)))


def test_tokens_are_picked_from_later_parts_alone() -> None:
    parts = [plain_part(rows(n, 6, n)) for n in (4, 3, 5)]
    index = torch.tensor([[[8, 9], [7, 11], [10, 11]]]).expand(2, 3, 2)
    found = picked(parts, index, parts[0].codec, 6).rows()
    every = torch.cat([part.rows() for part in parts], dim=2)
    assert torch.equal(found, every.gather(2, index.unsqueeze(-1).expand(2, 3, 2, 6)))
