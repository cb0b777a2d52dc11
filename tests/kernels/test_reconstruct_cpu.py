"""Rebuilding keys without a GPU, and the operators as torch sees them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct import cpu
from kvprof.kernels.reconstruct.rebuild_config import (
    RebuildConfig,
    Target,
    Tuning,
    arranged,
    blocks_of,
    tuning_for,
)
from kvprof.kernels.reconstruct.reference import reference_reconstruct
from kvprof.kernels.reconstruct.step import reconstruct_operator, reconstruct_step, stored_step
from tests.kernels.folded import folded_queries
from tests.kernels.numbers import error

LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


def states(layout: RaggedLayout, heads: int, head_dim: int, rotary_dim: int, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    shape = (layout.batch, layout.capacity)
    keys = [random(*shape, width) for width in layout.key_widths]
    values = [random(*shape, width) for width in layout.value_widths]
    buffer = layout.packed(keys, values).to(dtype)
    up = [(random(heads * head_dim, w) * w**-0.5).to(dtype) for w in layout.key_widths]
    query = random(layout.batch, layout.heads * layout.group * head_dim).to(dtype)
    angles = 3 * random(layout.capacity, rotary_dim // 2)
    return query, buffer, up, angles.cos(), angles.sin()


@settings(max_examples=25)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 8),
    st.sampled_from([16, 64, 80, 96, 112, 128]),
    st.lists(st.integers(1, 12).map(lambda n: 16 * n), min_size=2, max_size=4),
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([0.0, 4.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_blocks_of_rebuilt_keys_give_attention(
    heads, group, head_dim, widths, lengths, interleaved, dtype, softcap, sinks, seed
):
    half = len(widths) // 2
    layout = RaggedLayout(
        tuple(widths[:half]),
        tuple(widths[half : 2 * half]),
        heads * group,
        len(lengths),
        max(1, *lengths) + 1,
    )
    rotary_dim = (head_dim, head_dim // 2)[seed % 2]
    query, buffer, up, cos, sin = states(layout, heads, head_dim, rotary_dim, dtype, seed)
    given_sinks = torch.randn(layout.heads, layout.group) if sinks else None
    step = reconstruct_step(
        layout, up, head_dim, heads, "cpu", interleaved=interleaved, rotary_dim=rotary_dim
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_BLOCK", 64)
        found = step.run(
            query, buffer, step.cut(lengths), cos, sin, 0.2, softcap=softcap, sinks=given_sinks
        )
    wanted = reference_reconstruct(
        query,
        buffer,
        layout,
        up,
        heads,
        lengths,
        cos,
        sin,
        0.2,
        interleaved=interleaved,
        softcap=softcap,
        sinks=given_sinks,
    )
    for row, length in enumerate(lengths):
        if length:
            assert error(found[row], wanted[row]) < LIMITS[dtype]
        else:
            assert (found[row] == 0).all()


def test_no_context_is_ever_rebuilt_whole():
    layout = RaggedLayout((16,), (16,), 2, 1, 5000)
    query, buffer, up, cos, sin = states(layout, 2, 16, 16, torch.float32)
    step = reconstruct_step(layout, up, 16, 2, "cpu")
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                largest.append(result.numel())
            return result

    schedule = step.cut([5000])
    # Below the operator, which is one opaque call to whoever watches from outside.
    with Watch():
        cpu.reconstruct_cpu(query, buffer, step.up, step.config, schedule.lengths, cos, sin, 0.2)
    # A block's keys: tokens, heads, columns.
    assert max(largest) == cpu._BLOCK * 2 * 16


def operator_arguments():
    layout = RaggedLayout((32, 48), (16, 64), 4, 2, 40)
    query, buffer, up, cos, sin = states(layout, 2, 32, 32, torch.float32)
    step = reconstruct_step(layout, up, 32, 2, "cpu")
    return step, (query, buffer, cos, sin)


def test_the_operator_is_one_that_torch_can_trace():
    step, (query, buffer, cos, sin) = operator_arguments()
    schedule = step.cut([40, 3])
    given = (step.up, schedule.lengths, schedule.scheduled, step.groups, cos, sin, None, None)
    how = (0.2, 0.0, step.config.encoded())
    torch.library.opcheck(reconstruct_operator, (query, buffer, *given, *how))


def test_compiled_code_runs_through_it():
    step, (query, buffer, cos, sin) = operator_arguments()
    schedule = step.cut([40, 3])

    def layer(query):
        return step.run(2.0 * query, buffer, schedule, cos, sin, 0.2) + 1.0

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(query), layer(query))


def test_a_config_survives_its_numbers():
    tuning = Tuning(3, 32, 4096, 16, True, 4, 3, False)
    config = RebuildConfig((32, 64), (48, 16), 2, 100, 2, 4, 80, 32, True, 2, tuning)
    assert RebuildConfig.decoded(config.encoded()) == config


@pytest.mark.parametrize(("width", "most"), [(40, 64), (128, 64), (56, 32), (0, 64), (112, 128)])
def test_blocks_cover_a_half(width, most):
    blocks = blocks_of(width, most)
    assert all(16 <= block <= most and block & (block - 1) == 0 for block in blocks)
    assert sum(blocks) - width in range(16)


@pytest.mark.parametrize("target", [Target(80, 166912), Target(86, 101376), Target(), Target(100)])
@pytest.mark.parametrize("row", [16, 64, 256, 512])
def test_what_is_chosen_leaves_room_in_shared_memory(target, row):
    for heads, queries, element in ((1, 16, 2), (4, 16, 2), (8, 64, 2), (4, 16, 4)):
        tuning = tuning_for(target, heads * 128 * row * element, row, queries, element)
        config = RebuildConfig((row,), (row,), 1, 64, heads, 4, 128, 128, False, element, tuning)
        tile = config.height(row, row) * row * element
        blocks = 2 * tuning.columns * (row + queries) * element
        if tuning.kept:
            # Tiles of K and V, and of cos and sin in float32.
            tables = config.height(row, row) * 64 * 4
            used = heads * 128 * row * element + 2 * tuning.stages * (tile + tables)
        else:
            used = tile + tuning.stages * blocks
        assert used <= target.shared


def test_rows_are_sorted_as_the_kernel_reads_them():
    config = RebuildConfig((48,), (16,), 1, 8, 1, 2, 40, 24, False, 4, Tuning(columns=16))
    matrix = torch.arange(40 * 48, dtype=torch.float32).view(40, 48)
    found = arranged([matrix], config)
    assert config.paired == (16,)
    assert config.plain == (16,)
    assert len(found) == config.padded * 48

    def block(rows):
        filled = torch.zeros(16, 48)
        filled[: len(rows)] = matrix[rows]
        return [filled[:, :32].flatten(), filled[:, 32:].flatten()]

    wanted = [*block(range(12)), *block(range(12, 24)), *block(range(24, 40))]
    assert torch.equal(found, torch.cat(wanted))
    sorted_pairs = arranged([matrix], replace(config, interleaved=True))
    wanted = [*block(range(0, 24, 2)), *block(range(1, 24, 2)), *block(range(24, 40))]
    assert torch.equal(sorted_pairs, torch.cat(wanted))


def test_without_the_rebuild_queries_meet_the_latents():
    step, (query, buffer, cos, sin) = operator_arguments()
    layout = step.config.layout
    _, _, up, _, _ = states(layout, 2, 32, 32, torch.float32)
    folded = folded_queries(query, up, layout, 2)
    found = stored_step(step).run(folded, buffer, step.cut([40, 3]), None, None, 0.2)
    wanted = reference_reconstruct(
        query, buffer, layout, up, 2, [40, 3], torch.ones_like(cos), torch.zeros_like(sin), 0.2
    )
    assert error(found, wanted) < 1e-5


def test_what_cannot_be_rebuilt_is_refused():
    layout = RaggedLayout((32,), (32,), 4, 1, 10)
    _, _, up, _, _ = states(layout, 2, 16, 16, torch.float32)

    def step(matrices=up, head_dim=16, heads=2, **options):
        return reconstruct_step(layout, matrices, head_dim, heads, "cpu", **options)

    with pytest.raises(UsageError):
        step(head_dim=32)
    with pytest.raises(UsageError, match="3 KV heads"):
        step(heads=3)
    with pytest.raises(UsageError):
        step(head_dim=20)
    for rotary_dim in (0, 7, 18):
        with pytest.raises(UsageError):
            step(rotary_dim=rotary_dim)
    with pytest.raises(UsageError, match="float64"):
        step([matrix.double() for matrix in up])
    with pytest.raises(UsageError, match="no matrix"):
        step([])
    two = RaggedLayout((32, 32), (32, 32), 4, 1, 10)
    with pytest.raises(UsageError, match="dtype"):
        reconstruct_step(two, [up[0], up[0].half()], 16, 2, "cpu")
