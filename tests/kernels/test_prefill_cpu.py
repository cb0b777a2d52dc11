"""Prefill without a GPU: blocked torch, torch's own kernels, and what is refused."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import LackingError, UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill import cpu
from kvprof.kernels.prefill import paths as measured
from kvprof.kernels.prefill.paths import (
    Choice,
    best_paths,
    library_refuses,
    padded_width,
    quick_path,
    width_classes,
)
from kvprof.kernels.prefill.reference import reference_prefill
from kvprof.kernels.prefill.step import Tile, Tuning, measured_path, prefill, prefill_operator
from kvprof.kernels.prefill.tuning import HOPPER_WIDEST, shared_bytes
from tests.kernels.numbers import error

widths = st.integers(1, 10).map(lambda n: 16 * n)


def states(layout, tokens, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)

    def stored(width):
        shape = (layout.batch, layout.capacity, width)
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    query = torch.randn(layout.batch, tokens, layout.query_offsets[-1], generator=generator)
    keys = [stored(width) for width in layout.key_widths]
    return query.to(dtype), layout.packed(keys, [stored(width) for width in layout.value_widths])


def whole(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@st.composite
def prompts(draw):
    heads, batch, tokens = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 90)),
    )
    lengths = [max(1, tokens + draw(st.integers(-20, 60))) for _ in range(batch)]
    layout = RaggedLayout(
        tuple(draw(widths) for _ in range(heads)),
        tuple(draw(widths) for _ in range(heads)),
        draw(st.integers(1, 5)),
        batch,
        max(lengths) + draw(st.integers(0, 9)),
    )
    return layout, tokens, lengths


@settings(max_examples=30)
@given(
    prompts(),
    st.sampled_from([0, 1, 17, 40]),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 10**6),
)
def test_blocked_attention_is_attention(prompt, window, softcap, sunk, dtype, seed):
    layout, tokens, lengths = prompt
    query, buffer = states(layout, tokens, dtype, seed)
    options = {
        "window": window,
        "softcap": softcap,
        "sinks": torch.randn(layout.heads, layout.group) if sunk else None,
    }
    found = cpu.prefill_cpu(query, buffer, layout, lengths, 0.1, **options)
    wanted = reference_prefill(query, buffer, layout, lengths, 0.1, **options)
    assert found.dtype == dtype
    assert error(found, wanted) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_blocks_of_keys_join_whatever_their_size(monkeypatch):
    layout = RaggedLayout((112,), (32,), 3, 1, 500)
    query, buffer = states(layout, 333, scale=30.0)
    monkeypatch.setattr(cpu, "KEYS", 64)
    monkeypatch.setattr(cpu, "_LEAST_ROWS", 16)
    for options in ({}, {"window": 70}):
        found = cpu.prefill_cpu(query, buffer, layout, [500], 1.0, **options)
        assert torch.isfinite(found).all()
        assert error(found, reference_prefill(query, buffer, layout, [500], 1.0, **options)) < 1e-5


def test_padding_pays_for_nearly_equal_widths_only():
    assert cpu.padding_pays(64, 64)
    assert cpu.padding_pays(32, 64)
    assert not cpu.padding_pays(112, 32)


@settings(max_examples=20)
@given(prompts(), st.booleans(), st.integers(0, 10**6))
def test_the_library_path_is_attention(prompt, uniform, seed):
    layout, tokens, _ = prompt
    if uniform:
        # Views of the planes instead of copies.
        pair = ((64,) * layout.heads, (128,) * layout.heads)
        layout = RaggedLayout(*pair, layout.group, layout.batch, layout.capacity)
    tokens = min(tokens, layout.capacity)
    query, buffer = states(layout, tokens, seed=seed)
    lengths = [tokens] * layout.batch
    found = prefill(query, buffer, layout, whole(lengths), 0.1, path="library")
    assert error(found, reference_prefill(query, buffer, layout, lengths, 0.1)) < 1e-5


def test_the_library_path_says_what_it_cannot_run():
    layout = RaggedLayout((64,), (48,), 2, 2, 40)
    assert library_refuses(layout, 40, [40, 40]) is None
    for lengths, options in (
        (None, {}),
        ([40, 39], {}),
        ([40, 40], {"softcap": 1.0}),
        ([40, 40], {"sinks": True}),
        ([40, 40], {"window": 3}),
    ):
        assert library_refuses(layout, 40, lengths, **options)
    wide = RaggedLayout((288,), (48,), 2, 1, 40)
    assert "288" in library_refuses(wide, 40, [40])
    with pytest.raises(UsageError, match="288"):
        padded_width(288)
    query, buffer = states(layout, 8)
    with pytest.raises(UsageError, match="8 tokens"):
        prefill(query, buffer, layout, whole([8, 9]), 0.1, path="library")


def test_heads_are_grouped_by_what_libraries_reward():
    layout = RaggedLayout((112, 64, 48, 80), (32, 80, 64, 16), 4, 1, 8)
    assert width_classes(layout, (0, 1, 2, 3)) == {
        (128, 64): (0, 3),
        (64, 128): (1,),
        (64, 64): (2,),
    }


def test_it_compiles_as_one_operator():
    layout = RaggedLayout((112, 32), (32, 80), 2, 2, 50)
    query, buffer = states(layout, 40)
    lengths, tuning = whole([40, 50]), Tuning(pieces=3)

    def twice(query):
        return prefill(query * 2, buffer, layout, lengths, 0.1, tuning=tuning) * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(query), twice(query), atol=1e-5)
    numbers = ([112, 32], [32, 80], [2, 2, 50], tuning.numbers)
    arguments = (query, buffer, lengths, None, 0.1, 0.0, 0, "equal", "auto", None, *numbers)
    torch.library.opcheck(prefill_operator, arguments)


def test_tuning_survives_as_numbers():
    tuning = Tuning(Tile(1, 2, 3, 4, 5, 6), narrow_values=48, pieces=9)
    assert Tuning.of(tuning.numbers) == tuning
    small, large = Tuning().tile(128, 128, 2, 64 * 1024), Tuning().tile(128, 128)
    assert (small.keys, small.stages) == (16, 2)  # never one: the kernel says why
    assert large.keys > small.keys


@pytest.mark.parametrize("widest", [Tuning.widest, HOPPER_WIDEST])
@pytest.mark.parametrize("kilobytes", [64, 99, 163, 227])
def test_tiles_fit_what_a_gpu_shares(kilobytes, widest):
    tuning, shared = Tuning(widest=widest), kilobytes * 1024
    widths = range(16, 257, 16)
    elements = (2,) if kilobytes == 64 else (2, 4)  # no tile of float32 is small enough there
    for key, value, element in itertools.product(widths, widths, elements):
        tile = tuning.tile(key, value, element, shared)
        assert shared_bytes(tile, key, value, element) <= shared, (key, value, element)


def test_a_runtime_measures_only_what_is_soon_measured(monkeypatch):
    asked, times = [], {"triton": 2.0, "library": 1.0}

    def found(layout, tokens, *_, **__):
        asked.append((layout.batch, tokens))
        return Choice((min(times, key=times.get),) * layout.heads, times)

    monkeypatch.setattr(measured, "measured_path", found)

    def path(keys, values, tokens):
        layout = RaggedLayout(keys, values, 4, 3, tokens)
        return quick_path(layout, tokens, torch.bfloat16, torch.device("cuda", 0))

    assert path((64, 64), (64, 64), 30_000) == "library"
    assert path((128, 128), (64, 64), 700) == "library"
    assert asked == [(1, 16_384), (1, 700)]
    # Unlike heads, a width that is padded, one that no library takes, and a short prompt.
    assert path((64, 128), (64, 64), 30_000) == "triton"
    assert path((96, 96), (64, 64), 30_000) == "triton"
    assert path((512, 512), (512, 512), 30_000) == "triton"
    assert path((64, 64), (64, 64), 100) == "triton"
    assert len(asked) == 2
    # Hardly faster, and a library that has no kernel.
    for times["library"] in (1.95, float("inf")):
        assert path((64, 64), (64, 64), 30_000) == "triton"


def test_a_library_without_a_kernel_is_never_the_faster(monkeypatch):
    def lacking(paths, *_, **__):
        if "library" in paths:
            raise LackingError("none of torch's attention kernels")

    class Event:
        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, _):
            return 1.0

    monkeypatch.setattr(measured, "run_paths", lacking)
    monkeypatch.setattr(measured, "_event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for widths in ((64, 64), (64, 128)):
        layout = RaggedLayout(widths, (64, 64), 4, 1, 64)
        timed = measured._timed(layout, torch.float32, torch.device("cpu"), "equal", Tuning())
        choice = best_paths(layout, timed)
        assert choice.paths == ("triton", "triton")
        assert choice.seconds["library"] == float("inf")


def test_what_makes_no_sense_is_refused():
    layout = RaggedLayout((32,), (48,), 2, 1, 64)
    query, buffer = states(layout, 8)
    for options in (
        {"softcap": -1.0},
        {"window": -1},
        {"schedule": "none"},
        {"path": "none"},
        {"sinks": torch.zeros(2, 1)},
        {"host_lengths": [64, 64]},
        {"host_lengths": [65]},
        {"path": "triton"},
    ):
        with pytest.raises(UsageError):
            prefill(query, buffer, layout, whole([64]), 0.1, **options)
    for arguments in (
        (query[..., :-1], buffer, whole([64])),
        (query, buffer[:-1], whole([64])),
        (query, torch.stack([buffer, buffer], 1)[:, 0], whole([64])),
        (query, buffer, whole([64, 64])),
        (query, buffer, whole([64]).long()),
        (query.double(), buffer.double(), whole([64])),
    ):
        with pytest.raises(UsageError):
            prefill(arguments[0], arguments[1], layout, arguments[2], 0.1)
    with pytest.raises(UsageError, match="above 0"):
        prefill(query, buffer, layout, whole([64]), 0.0)
    with pytest.raises(LackingError, match="GPU"):
        measured_path(layout, 8, torch.float32, torch.device("cpu"))
    assert prefill(query[:, :0], buffer, layout, whole([64]), 0.1).shape == (1, 0, 96)
