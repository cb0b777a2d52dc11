"""The ragged decode kernel against float64 attention; run by test_cases.py."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.decode.reference import reference_decode
from kvprof.kernels.decode.step import DecodeStep, Tuning, decode_step
from kvprof.kernels.planes import RaggedLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def states(layout: RaggedLayout, dtype: torch.dtype, seed: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)

    def random(width: int) -> torch.Tensor:
        shape = (layout.batch, layout.capacity, width)
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    keys = [random(width) for width in layout.key_widths]
    values = [random(width) for width in layout.value_widths]
    query = torch.randn(layout.batch, layout.query_offsets[-1], generator=generator).to(dtype)
    return query.to(DEVICE), layout.packed(keys, values).to(DEVICE)


def step(layout: RaggedLayout, lengths: list[int], *, pieces: int = 4, tile: int = 2048):
    return decode_step(
        layout, lengths, DEVICE, multiprocessors=2, tuning=Tuning(pieces=pieces, tile=tile)
    )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def poisoned(prepared: DecodeStep) -> DecodeStep:
    prepared._partial.fill_(float("nan"))
    prepared._logs.fill_(float("nan"))
    return prepared


widths = st.integers(1, 16).map(lambda n: 16 * n)


@st.composite
def layers(draw):
    heads = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 2))
    lengths = [draw(st.integers(1, 200)) for _ in range(batch)]
    layout = RaggedLayout(
        tuple(draw(widths) for _ in range(heads)), tuple(draw(widths) for _ in range(heads)),
        draw(st.integers(1, 8)), batch, max(lengths) + draw(st.integers(0, 9)),
    )  # fmt: skip
    return layout, lengths


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers(), st.sampled_from([torch.float16, torch.float32]), st.integers(1, 9),
    st.sampled_from([512, 4096]), st.integers(0, 10**6),
)  # fmt: skip
def test_any_widths_lengths_and_cuts_give_attention(layer, dtype, pieces, tile, seed):
    layout, lengths = layer
    query, buffer = states(layout, dtype, seed)
    found = poisoned(step(layout, lengths, pieces=pieces, tile=tile)).run(query, buffer, 0.09)
    limit = 2e-3 if dtype == torch.float16 else 1e-5
    assert error(found, reference_decode(query, buffer, layout, lengths, 0.09)) < limit


def test_narrow_beside_wide_and_extreme_scores():
    layout = RaggedLayout((16, 256, 112), (240, 16, 80), 4, 1, 333)
    query, buffer = states(layout, torch.float32, 1, scale=30.0)
    found = poisoned(step(layout, [333])).run(query, buffer, 1.0)
    wanted = reference_decode(query, buffer, layout, [333], 1.0)
    assert error(found, wanted) < 1e-5
    assert torch.isfinite(found).all()


def test_what_lies_behind_the_context_does_not_count():
    layout = RaggedLayout((48, 32), (16, 64), 2, 2, 100)
    query, buffer = states(layout, torch.float32, 2)
    before = step(layout, [40, 7]).run(query, buffer, 0.1)
    for head in range(2):
        for start, width in zip(
            layout.offsets[head], (layout.key_widths[head], layout.value_widths[head]), strict=True
        ):
            for chunk in (c for c in (64, 32, 16) if width & c):
                plane = buffer[start : start + 200 * chunk].view(2, 100, chunk)
                plane[0, 40:] = float("nan")
                plane[1, 7:] = float("nan")
                start += 200 * chunk
    assert torch.equal(step(layout, [40, 7]).run(query, buffer, 0.1), before)


def test_what_cannot_run_is_refused():
    layout = RaggedLayout((32,), (32,), 2, 1, 64)
    query, buffer = states(layout, torch.float32, 3)
    for lengths in ([0], [65], [1, 2]):
        with pytest.raises(UsageError):
            step(layout, lengths)
    with pytest.raises(UsageError, match="24"):
        RaggedLayout((24,), (32,), 2, 1, 64)
    with pytest.raises(UsageError, match="do not fit"):
        step(layout, [64]).run(query[:, :-1], buffer, 1.0)
    with pytest.raises(UsageError, match="does not fit"):
        step(layout, [64]).run(query, buffer[:-1], 1.0)
    if DEVICE.type == "cpu":
        with pytest.raises(UsageError, match="interpreter"):
            step(layout, [64]).run(query.bfloat16(), buffer.bfloat16(), 1.0)
