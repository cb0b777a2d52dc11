"""The ragged prefill kernel against float64 attention; run by test_cases.py."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.paths import measured_path, quick_path, run_paths
from kvprof.kernels.prefill.reference import reference_prefill
from kvprof.kernels.prefill.step import Tile, Tuning, prefill, prefill_step
from tests.kernels.numbers import error, whole

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if GPU else [])]
LIMITS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def tuned(rows: int, keys: int) -> Tuning:
    """Small tiles, so that short prompts have many."""
    tile = Tile(rows, keys, 4, 2, 1)
    return Tuning(tile, tile, tile, tile, pieces=2)


def states(layout: RaggedLayout, tokens: int, dtype: torch.dtype, seed: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def stored(width: int) -> torch.Tensor:
        return (scale * random(layout.batch, layout.capacity, width)).to(dtype)

    keys = [stored(width) for width in layout.key_widths]
    values = [stored(width) for width in layout.value_widths]
    query = random(layout.batch, tokens, layout.query_offsets[-1]).to(dtype)
    return query.to(DEVICE), layout.packed(keys, values).to(DEVICE)


def poison(buffer: torch.Tensor, layout: RaggedLayout, row: int, tokens: slice) -> None:
    for head in range(layout.heads):
        for plane in (part for side in layout.planes(buffer, head) for part in side):
            plane[row, tokens] = float("nan")


widths = st.integers(1, 16).map(lambda n: 16 * n)


@st.composite
def prompts(draw):
    heads, batch, tokens = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 90)),
    )
    lengths = [max(1, tokens + draw(st.integers(-20, 60))) for _ in range(batch)]
    layout = RaggedLayout(
        tuple(draw(widths) for _ in range(heads)),
        tuple(draw(widths) for _ in range(heads)),
        draw(st.integers(1, 8)),
        batch,
        max(lengths) + draw(st.integers(0, 9)),
    )
    options = {
        "window": draw(st.sampled_from([0, 0, 1, 17, 40])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
    }
    return layout, tokens, lengths, options, draw(st.booleans())


@settings(max_examples=6 if GPU else 8)
@given(
    prompts(),
    st.sampled_from(DTYPES),
    st.sampled_from(["equal", "plain"]),
    st.sampled_from([(64, 32), (32, 64)]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_widths_lengths_pasts_and_schedules_give_attention(
    prompt, dtype, schedule, tile, known, seed
):
    layout, tokens, lengths, options, sunk = prompt
    query, buffer = states(layout, tokens, dtype, seed)
    sinks = torch.randn(layout.heads, layout.group).to(DEVICE) if sunk else None
    for row, length in enumerate(lengths):
        poison(buffer, layout, row, slice(length, None))
    found = prefill(
        query,
        buffer,
        layout,
        whole(lengths),
        0.09,
        sinks=sinks,
        schedule=schedule,
        path="triton",
        tuning=tuned(*tile),
        host_lengths=lengths if known else None,
        **options,
    )
    wanted = reference_prefill(query, buffer, layout, lengths, 0.09, sinks=sinks, **options)
    assert torch.isfinite(found).all()
    assert error(found, wanted) < LIMITS[dtype]
    for row, length in enumerate(lengths):
        assert not found[row, : max(0, tokens - length)].any()


def test_narrow_beside_wide_and_extreme_scores():
    layout = RaggedLayout((16, 256, 112), (240, 16, 80), 4, 1, 131)
    query, buffer = states(layout, 131, torch.float32, 1, scale=30.0)
    found = prefill(query, buffer, layout, whole([131]), 1.0, tuning=tuned(64, 64), path="triton")
    wanted = reference_prefill(query, buffer, layout, [131], 1.0)
    assert torch.isfinite(found).all()
    assert error(found, wanted) < 1e-5


def test_latents_that_many_query_heads_share():
    layout = RaggedLayout((480, 32), (32, 512), 20, 1, 33)
    query, buffer = states(layout, 9, torch.float16, 2)
    found = prefill(query, buffer, layout, whole([33]), 0.05, path="triton", tuning=tuned(64, 32))
    assert error(found, reference_prefill(query, buffer, layout, [33], 0.05)) < 2e-3


def test_the_default_tuning_and_a_single_token():
    layout = RaggedLayout((64, 48), (32, 64), 4, 2, 140)
    query, buffer = states(layout, 1, torch.float16, 3)
    found = prefill(query, buffer, layout, whole([1, 140]), 0.1)
    assert error(found, reference_prefill(query, buffer, layout, [1, 140], 0.1)) < 2e-3
    query, _ = states(layout, 70, torch.float16, 4)
    found = prefill(query, buffer, layout, whole([70, 131]), 0.1)
    assert error(found, reference_prefill(query, buffer, layout, [70, 131], 0.1)) < 2e-3


def test_what_lies_before_every_window_is_not_read():
    layout = RaggedLayout((48, 32), (16, 64), 2, 1, 100)
    query, buffer = states(layout, 30, torch.float32, 5)
    options = {"window": 11, "path": "triton", "tuning": tuned(32, 16)}
    before = prefill(query, buffer, layout, whole([90]), 0.1, **options)
    poison(buffer, layout, 0, slice(0, 60 - 10))
    assert torch.equal(prefill(query, buffer, layout, whole([90]), 0.1, **options), before)


def test_unequal_heads_may_go_different_ways():
    layout = RaggedLayout((64, 48, 128), (32, 64, 80), 2, 2, 40)
    # torch has no kernel for grouped queries in float32 on a GPU.
    dtype = torch.float16 if GPU else torch.float32
    query, buffer = states(layout, 40, dtype, 6)
    found = run_paths(
        ("library", "triton", "library"),
        query,
        buffer,
        layout,
        whole([40, 40]),
        0.1,
        schedule="equal",
        tuning=tuned(32, 32),
    )
    wanted = reference_prefill(query, buffer, layout, [40, 40], 0.1)
    assert error(found, wanted) < LIMITS[dtype]


def replayed(call):
    """Capture a call, and return what its replay writes over poison."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    found.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return found


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_graph_holds_it():
    layout = RaggedLayout((64, 112), (64, 48), 4, 2, 300)
    query, buffer = states(layout, 300, torch.bfloat16, 8)
    lengths = whole([300, 300])
    for path in ("triton", "library", "auto"):
        options = {"path": path, "host_lengths": [300, 300]}
        wanted = prefill(query, buffer, layout, lengths, 0.1, **options)
        found = replayed(partial(prefill, query, buffer, layout, lengths, 0.1, **options))
        assert error(found, wanted.double()) < 1e-2


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_paths_are_measured_once():
    layout = RaggedLayout((64, 112), (64, 48), 4, 1, 600)
    choice = measured_path(layout, 600, torch.bfloat16, DEVICE)
    assert {"triton", "library"} <= set(choice.seconds)
    assert measured_path(layout, 600, torch.bfloat16, DEVICE) is choice


def test_bf16_is_refused_where_it_would_be_wrong():
    layout = RaggedLayout((32,), (32,), 2, 1, 64)
    query, buffer = states(layout, 8, torch.float32, 9)
    if not GPU:
        with pytest.raises(UsageError, match="interpreter"):
            prefill(query.bfloat16(), buffer.bfloat16(), layout, whole([64]), 1.0)
    with pytest.raises(UsageError, match="schedule"):
        prefill_step(replace(layout, capacity=63), 8, DEVICE, schedule="none")


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(64, 64), (128, 64), (256, 64)])
def test_the_quick_way_is_right_and_a_graph_holds_it(dtype, widths):
    """Also where torch has no kernel: grouped queries in float32, unlike wide sides."""
    layout = RaggedLayout((widths[0],) * 2, (widths[1],) * 2, 4, 2, 600)
    query, buffer = states(layout, 600, dtype, 9)
    options = {"path": "quick", "host_lengths": [600, 600]}
    wanted = reference_prefill(query, buffer, layout, [600, 600], 0.1)
    lengths = whole([600, 600])

    def attended():
        return prefill(query, buffer, layout, lengths, 0.1, **options)

    assert error(attended(), wanted) < LIMITS[dtype]
    assert error(replayed(attended), wanted) < LIMITS[dtype]
    if dtype == torch.float32:
        assert quick_path(layout, 600, dtype, DEVICE) == "triton"
