"""Decoding on a CPU, by itself and as an operator of torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.decode import cpu
from kvprof.kernels.decode.cpu import decode_cpu
from kvprof.kernels.decode.cuts import (
    Head,
    Tuning,
    built_for,
    configs,
    page_tile,
    rows_of,
    tuning_for,
)
from kvprof.kernels.decode.reference import reference_decode
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.tables import column
from tests.kernels.numbers import error

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
widths = st.sampled_from([*range(16, 257, 16), *range(288, 513, 32)])


def states(layout: RaggedLayout, rows: int, dtype: torch.dtype, seed: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        [
            scale * torch.randn(layout.batch, layout.capacity, width, generator=generator)
            for width in side
        ]
        for side in (layout.key_widths, layout.value_widths)
    )
    query = torch.randn(rows, layout.query_offsets[-1], generator=generator)
    return query.to(dtype), layout.packed(keys, values).to(dtype)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(widths, widths), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 900)), min_size=1, max_size=2),
    st.integers(1, 20),
    st.sampled_from(list(LIMITS)),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
    st.sampled_from([0, 16, 48]),
    st.integers(0, 10**6),
)
def test_any_widths_lengths_and_options_give_attention(
    pairs, rows, group, dtype, softcap, with_sinks, page, seed
):
    keys, values = zip(*pairs, strict=True)
    lengths = [stop for _, stop in rows]
    starts = [start % stop for start, stop in rows]
    table = None
    batch, capacity = len(rows), 901
    if page:
        most = -(-max(lengths) // page)
        batch, capacity = most * len(rows) + 1, page
        table = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))[1:]
        table = table.view(len(rows), most).int()
    layout = RaggedLayout(keys, values, group, batch, capacity)
    query, buffer = states(layout, len(rows), dtype, seed)
    sinks = torch.randn(layout.heads, group) if with_sinks else None
    options = {"softcap": softcap, "sinks": sinks, "starts": starts, "table": table}
    found = decode_cpu(query, buffer, layout, lengths, 0.09, **options)
    wanted = reference_decode(query, buffer, layout, lengths, 0.09, **options)
    assert found.dtype == dtype
    assert error(found, wanted) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_many_blocks_on_threads_give_the_same(dtype, threads, monkeypatch):
    monkeypatch.setattr(cpu, "_SMALLEST", 2**13)
    monkeypatch.setattr(cpu, "_LARGEST", 2**14)
    monkeypatch.setattr(cpu, "_CACHED", 2**11)
    layout = RaggedLayout((112, 16), (48, 64), 4, 2, 5001)
    query, buffer = states(layout, 2, dtype, 1, scale=10.0)
    found = decode_cpu(query, buffer, layout, [5001, 77], 1.0)
    assert error(found, reference_decode(query, buffer, layout, [5001, 77], 1.0)) < LIMITS[dtype]
    assert torch.isfinite(found).all()
    # A process that forks, or another count of threads, makes workers of its own.
    torch.set_num_threads(3)
    again = decode_cpu(query, buffer, layout, [5001, 77], 1.0)
    torch.set_num_threads(threads)
    assert error(again, found.double()) < LIMITS[dtype]


def test_what_lies_outside_the_context_does_not_count_and_a_row_of_nothing_is_zero():
    layout = RaggedLayout((48, 32), (16, 64), 2, 3, 100)
    query, buffer = states(layout, 3, torch.float32, 2)
    lengths, starts = torch.tensor([40, 700, 0]), torch.tensor([5, -1, 3])
    wanted = reference_decode(query, buffer, layout, [40, 100, 0], 0.1, starts=[5, 0, 0])
    for head in range(2):
        for plane in (part for side in layout.planes(buffer, head) for part in side):
            plane[0, 40:] = plane[0, :5] = plane[2] = float("nan")
    found = decode_cpu(query, buffer, layout, lengths, 0.1, starts=starts)
    assert error(found, wanted) < 1e-5
    assert not found[2].any()
    with pytest.raises(UsageError, match="2 lengths for 3"):
        decode_cpu(query, buffer, layout, [1, 2], 0.1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_goes_through_the_operators(backend):
    layout = RaggedLayout((48, 32), (16, 64), 2, 2, 100)
    query, buffer = states(layout, 2, torch.bfloat16, 3)
    step = decode_step(layout, "cpu")
    sinks = torch.randn(2, 2)

    def layer(query, buffer, lengths):
        schedule = step.cut(lengths)
        once = step.run(query * 1.0, buffer, schedule, 0.1, softcap=5.0, sinks=sinks)
        return once + step.run(query, buffer, schedule, 0.1)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for lengths in ([100, 3], [7, 64]):
        given_lengths = torch.tensor(lengths, dtype=torch.int32)
        wanted = layer(query, buffer, given_lengths)
        assert torch.equal(compiled(query, buffer, given_lengths), wanted)


def test_the_operators_keep_the_contract_of_torch():
    layout = RaggedLayout((48, 32), (16, 64), 2, 2, 40)
    query, buffer = states(layout, 2, torch.float32, 4)
    step = decode_step(layout, "cpu")
    lengths = torch.tensor([40, 3], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.kvprof.decode.default,
        (
            query,
            buffer,
            lengths,
            None,
            step.heads,
            [],
            None,
            None,
            0.1,
            0.0,
            layout.key_widths,
            layout.value_widths,
            (2, 2, 40),
            (32, 64, 48, 16),
            (8, 8192, 4, 1),
        ),
    )


def test_a_step_on_a_cpu_checks_what_it_is_given():
    layout = RaggedLayout((32,), (32,), 2, 1, 64)
    query, buffer = states(layout, 1, torch.float32, 5)
    step = decode_step(layout, "cpu")
    schedule = step.cut([64])
    with pytest.raises(UsageError, match="float64"):
        step.run(query.double(), buffer.double(), schedule, 1.0)
    with pytest.raises(UsageError, match="64"):
        step.cut([65])
    assert step.predicted_makespan_over_mean([64]) == 1.0


def test_tuning_follows_widths_and_groups():
    def layout(key: int, value: int, group: int) -> RaggedLayout:
        return RaggedLayout((key,), (value,), group, 1, 1)

    assert tuning_for(layout(112, 128, 4)) == Tuning()
    assert tuning_for(layout(256, 64, 4)).warps > 1
    assert tuning_for(layout(512, 512, 4)).warps > tuning_for(layout(256, 256, 4)).warps
    for group, width, rows in ((4, 512, 16), (17, 256, 32), (64, 128, 64), (64, 512, 16)):
        assert rows_of(layout(width, 16, group)) == rows
    base = Tuning()
    assert built_for(base, 2, 0) == base
    assert built_for(base, 2, 64).stages > base.stages
    assert built_for(base, 4, 0).tile < base.tile
    # A tile lies in one page where that is large enough.
    assert [page_tile(page) for page in (0, 16, 32, 64, 96, 192, 256)] == [
        512,
        512,
        512,
        64,
        512,
        64,
        256,
    ]


def test_layers_that_share_their_kinds_are_built_alike():
    first, second = RaggedLayout((48, 32), (16, 64), 2, 2, 40), RaggedLayout((48,), (16,), 2, 2, 40)
    pairs = [(48, 16), (32, 64), (96, 96)]
    steps = [decode_step(layout, "cpu", pairs=pairs) for layout in (first, second)]
    assert configs(steps[0].family) == configs(steps[1].family) == tuple(sorted(pairs))
    assert steps[0].tuning == steps[1].tuning
    columns = [step.heads[:, column(Head, "kind")].tolist() for step in steps]
    assert columns == [[1, 0], [1]]
    with pytest.raises(UsageError, match=r"\(32, 64\)"):
        decode_step(first, "cpu", pairs=pairs[:1])
