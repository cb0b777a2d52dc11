"""The ragged decode kernels against float64 attention; run by test_cases.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels import split_kv
from kvprof.kernels.decode.cuts import Item, equal_shares, pieces_for
from kvprof.kernels.decode.reference import reference_decode
from kvprof.kernels.decode.step import DecodeStep, Tuning, decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.tables import Part, column
from tests.kernels.numbers import error, whole

pytestmark = pytest.mark.usefixtures("poisoned")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
LIMITS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.bfloat16: 1e-2}

widths = st.integers(1, 16).map(lambda n: 16 * n)
# On a GPU every example compiles a kernel of its own.
few = settings(max_examples=3 if DEVICE.type == "cuda" else 5)


def states(layout: RaggedLayout, rows: int, dtype: torch.dtype, seed: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys, values = (
        [scale * random(layout.batch, layout.capacity, width) for width in side]
        for side in (layout.key_widths, layout.value_widths)
    )
    query = random(rows, layout.query_offsets[-1]).to(dtype)
    return query.to(DEVICE), layout.packed(keys, values).to(dtype).to(DEVICE)


def step(layout: RaggedLayout, *, pieces: int = 4, tile: int = 2048, **more) -> DecodeStep:
    return decode_step(
        layout, DEVICE, multiprocessors=2, tuning=Tuning(pieces=pieces, tile=tile), **more
    )


@st.composite
def layers(draw):
    heads = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 2))
    lengths = [draw(st.integers(1, 200)) for _ in range(batch)]
    layout = RaggedLayout(
        tuple(draw(widths) for _ in range(heads)),
        tuple(draw(widths) for _ in range(heads)),
        draw(st.integers(1, 8)),
        batch,
        max(lengths) + draw(st.integers(0, 9)),
    )
    return layout, lengths, [draw(st.integers(0, length - 1)) for length in lengths]


@few
@given(
    layers(),
    st.sampled_from(DTYPES),
    st.integers(1, 9),
    st.sampled_from([512, 4096]),
    st.booleans(),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.lists(st.tuples(widths, widths), max_size=2),
    st.integers(0, 10**6),
)
def test_any_widths_lengths_and_options_give_attention(
    layer, dtype, pieces, tile, windows, softcap, with_sinks, others, seed
):
    """Also by a kernel that is built for the heads of `others` too."""
    layout, lengths, starts = layer
    query, buffer = states(layout, layout.batch, dtype, seed)
    sinks = torch.randn(layout.heads, layout.group).to(DEVICE) if with_sinks else None
    pairs = [*zip(layout.key_widths, layout.value_widths, strict=True), *others]
    prepared = step(layout, pieces=pieces, tile=tile, pairs=pairs)
    cut = prepared.cut(whole(lengths), whole(starts) if windows else None)
    found = prepared.run(query, buffer, cut, 0.09, softcap=softcap, sinks=sinks)
    wanted = reference_decode(
        query,
        buffer,
        layout,
        lengths,
        0.09,
        softcap=softcap,
        sinks=sinks,
        starts=starts if windows else None,
    )
    assert error(found, wanted) < LIMITS[dtype]


@few
@given(
    st.integers(1, 3).map(lambda n: 16 * n),
    st.lists(st.integers(1, 90), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 10**6),
)
def test_pages_in_any_order_give_attention(page, lengths, dtype, seed):
    most = -(-max(lengths) // page)
    pool = RaggedLayout((48, 16), (32, 80), 3, most * len(lengths) + 2, page)
    query, buffer = states(pool, len(lengths), dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(pool.batch, generator=generator)[: most * len(lengths)]
    table = table.view(len(lengths), most).int().to(DEVICE)
    prepared = step(pool, tile=1024, page_tokens=page, rows=len(lengths))
    # What a length promises beyond the table's last page is left out.
    long = [length if length < most * page else length + 500 for length in lengths]
    found = prepared.run(query, buffer, prepared.cut(whole(long)), 0.1, table=table)
    wanted = reference_decode(query, buffer, pool, lengths, 0.1, table=table)
    assert error(found, wanted) < LIMITS[dtype]


@pytest.mark.parametrize("group", [16, 40])
def test_large_groups_and_wide_latents(group):
    for key, value in ((32, 48), (512, 480)):
        layout = RaggedLayout((key,), (value,), group, 1, 50)
        query, buffer = states(layout, 1, torch.float32, group)
        prepared = decode_step(layout, DEVICE, multiprocessors=1)
        found = prepared.run(query, buffer, prepared.cut([50]), 0.05)
        assert error(found, reference_decode(query, buffer, layout, [50], 0.05)) < 1e-5


def test_narrow_beside_wide_and_extreme_scores():
    layout = RaggedLayout((16, 256, 112), (240, 16, 80), 4, 1, 511)
    query, buffer = states(layout, 1, torch.float32, 1, scale=30.0)
    prepared = step(layout, tile=8192)
    found = prepared.run(query, buffer, prepared.cut([511]), 1.0)
    assert error(found, reference_decode(query, buffer, layout, [511], 1.0)) < 1e-5


def test_what_lies_outside_the_context_does_not_count_and_a_row_of_nothing_is_zero():
    layout = RaggedLayout((48, 32), (16, 64), 2, 3, 100)
    query, buffer = states(layout, 3, torch.float32, 2)
    prepared = step(layout)
    cut = prepared.cut(whole([40, 7, 0]), whole([5, 0, 3]))
    before = prepared.run(query, buffer, cut, 0.1)
    assert torch.equal(before[2], torch.zeros_like(before[2]))
    for head in range(2):
        for plane in (part for side in layout.planes(buffer, head) for part in side):
            plane[0, 40:] = plane[0, :5] = plane[1, 7:] = plane[2] = float("nan")
    assert torch.equal(prepared.run(query, buffer, cut, 0.1), before)
    sinks = torch.full((2, 2), 3.0, device=DEVICE)
    assert not prepared.run(query, buffer, cut, 0.1, sinks=sinks)[2].any()


def test_lengths_on_the_device_are_clamped_and_one_schedule_serves_layers_of_equal_widths():
    layout = RaggedLayout((48, 32), (16, 64), 2, 2, 100)
    prepared, other = step(layout), step(layout)
    cut = prepared.cut(whole([1000, -5]))
    query, buffer = states(layout, 2, torch.float32, 4)
    found = other.run(query, buffer, cut, 0.1)
    assert error(found, reference_decode(query, buffer, layout, [100, 0], 0.1)) < 1e-5


@few
@given(layers(), st.integers(1, 9), st.booleans(), st.integers(1, 5))
def test_the_device_schedules_as_the_host_does(layer, pieces, windows, workers):
    layout, lengths, starts = layer
    starts = starts if windows else None
    begins = None if starts is None else whole(starts)
    tuning = Tuning(pieces=pieces, tile=512)
    prepared = decode_step(layout, DEVICE, tuning=tuning, multiprocessors=workers)
    items, parts = prepared.cut(whole(lengths), begins).scheduled
    aim = pieces_for(layout, lengths, tuning, workers, starts)
    wanted = equal_shares(layout, lengths, aim, 512, starts)
    there = len(wanted.items)
    assert items[:there].tolist() == [list(item) for item in wanted.items]
    assert (items[there:, column(Item, "kind")] == -1).all()
    assert parts.tolist() == [list(part) for part in wanted.parts]


def test_the_device_cuts_many_rows_as_the_host_does():
    """More tasks than are looked at at once, of rows most of which have nothing, as in a graph."""
    layout = RaggedLayout((48, 32, 16), (16, 64, 32), 2, 500, 700)
    assert layout.batch * layout.heads > 1024
    draw = torch.Generator().manual_seed(5)
    seen = torch.randint(1, 701, (layout.batch,), generator=draw)
    seen[torch.rand(layout.batch, generator=draw) < 0.6] = 0
    seen[-5:] = 0
    lengths, tuning = seen.tolist(), Tuning(pieces=8, tile=512)
    prepared = decode_step(layout, DEVICE, tuning=tuning, multiprocessors=30)
    items, parts = prepared.cut(whole(lengths)).scheduled
    wanted = equal_shares(layout, lengths, pieces_for(layout, lengths, tuning, 30), 512)
    there = len(wanted.items)
    assert items[:there].tolist() == [list(item) for item in wanted.items]
    assert (items[there:, column(Item, "kind")] == -1).all()
    assert parts.tolist() == [list(part) for part in wanted.parts]


@pytest.mark.parametrize("rows", [85, 86])
def test_layers_with_many_pieces_are_cut_as_the_host_states(rows):
    """By several programs a layer: 255 tasks share themselves out, of 258 a launch before does."""
    layouts = [
        RaggedLayout(*own, 2, rows, 3000)
        for own in (((48, 32, 16), (16, 64, 32)), ((16, 16, 80), (16, 96, 32)))
    ]
    tuning = Tuning(pieces=20, tile=512)
    steps = [decode_step(layout, DEVICE, tuning=tuning, multiprocessors=20) for layout in layouts]
    draw = torch.Generator().manual_seed(rows)
    seen = torch.randint(1, 3001, (rows,), generator=draw)
    seen[torch.rand(rows, generator=draw) < 0.3] = 0
    lengths = seen.tolist()
    tables = torch.stack([each.cut_table for each in steps])
    together = steps[0].cut_alike(tables, whole(lengths), None)
    for layout, found in zip(layouts, together, strict=True):
        items, parts = found.scheduled
        wanted = equal_shares(layout, lengths, pieces_for(layout, lengths, tuning, 20), 512)
        there = len(wanted.items)
        assert there > 256
        assert items[:there].tolist() == [list(item) for item in wanted.items]
        assert (items[there:, column(Item, "kind")] == -1).all()
        assert parts.tolist() == [list(part) for part in wanted.parts]


def test_rows_without_tokens_change_no_cut():
    """A graph has room for many rows, of which most batches fill few."""
    few, many = (RaggedLayout((48, 32), (16, 64), 2, rows, 700) for rows in (2, 40))
    tuning = Tuning(pieces=2, tile=512)
    (items, parts), (padded, more) = (
        decode_step(layout, DEVICE, tuning=tuning, multiprocessors=4)
        .cut(whole([650, 77] + [0] * (layout.batch - 2)))
        .scheduled[:2]
        for layout in (few, many)
    )
    own = items[items[:, column(Item, "kind")] >= 0]
    assert torch.equal(padded[: len(own)], own)
    assert (padded[len(own) :, column(Item, "kind")] == -1).all()
    assert torch.equal(more[:4], parts)
    assert not more[4:, column(Part, "items")].any()


def test_layers_are_cut_together_as_each_is_by_itself():
    widths = (((48, 16), (32, 64)), ((16, 16), (16, 96)), ((80, 32), (16, 32)))
    steps = [step(RaggedLayout(*own, 2, 2, 700)) for own in widths]
    assert len({each.cut_by for each in steps}) == 1
    tables = torch.stack([each.cut_table for each in steps])
    together = steps[1].cut_alike(tables, whole([650, 77]), whole([0, 50]))
    for each, found in zip(steps, together, strict=True):
        alone = each.cut(whole([650, 77]), whole([0, 50]))
        items, wanted = found.scheduled[0], alone.scheduled[0]
        there = wanted[:, column(Item, "kind")] >= 0
        assert torch.equal(items[there], wanted[there])
        assert (items[~there, column(Item, "kind")] == -1).all()
        assert torch.equal(found.scheduled[1], alone.scheduled[1])


def test_more_splits_than_a_combine_reads_at_once(monkeypatch):
    monkeypatch.setattr(split_kv, "combine_sizes", lambda *_: (16, 16, 1))
    layout = RaggedLayout((16, 32), (48, 16), 1, 1, 1280)
    query, buffer = states(layout, 1, torch.float32, 5)
    prepared = decode_step(layout, DEVICE, multiprocessors=10, tuning=Tuning(pieces=8, tile=16))
    cut = prepared.cut([1280])
    assert int(cut.scheduled[1][:, column(Part, "items")].max()) > 32
    found = prepared.run(query, buffer, cut, 0.3)
    assert error(found, reference_decode(query, buffer, layout, [1280], 0.3)) < 1e-5
    many = RaggedLayout((16,) * 4, (16,) * 4, 1, 12, 40)
    lengths = [1 + 7 * row % 40 for row in range(12)]
    query, buffer = states(many, 12, torch.float32, 6)
    prepared = step(many, tile=512)
    found = prepared.run(query, buffer, prepared.cut(lengths), 0.3)
    assert error(found, reference_decode(query, buffer, many, lengths, 0.3)) < 1e-5


def test_what_cannot_run_is_refused():
    layout = RaggedLayout((32,), (32,), 2, 1, 64)
    query, buffer = states(layout, 1, torch.float32, 3)
    prepared = step(layout)
    for lengths in ([0], [65], [1, 2]):
        with pytest.raises(UsageError):
            prepared.cut(lengths)
    with pytest.raises(UsageError, match="int64"):
        prepared.cut(whole([3]).long())
    cut = prepared.cut([64])
    with pytest.raises(UsageError):
        prepared.run(query[:, :-1], buffer, cut, 1.0)
    with pytest.raises(UsageError):
        prepared.run(query, buffer[:-1], cut, 1.0)
    with pytest.raises(UsageError):
        prepared.run(query, buffer, cut, 1.0, softcap=-1.0)
    with pytest.raises(UsageError, match="sinks"):
        prepared.run(query, buffer, cut, 1.0, sinks=torch.zeros(2, 2, device=DEVICE))
    with pytest.raises(UsageError):
        prepared.run(query, buffer, cut, 1.0, table=whole([0])[None])
    for more in ({"page_tokens": 32, "rows": 1}, {"rows": 2}, {"page_tokens": 64}):
        with pytest.raises(UsageError):
            decode_step(layout, DEVICE, **more)
    if DEVICE.type == "cpu":
        with pytest.raises(UsageError, match="interpreter"):
            prepared.run(query.bfloat16(), buffer.bfloat16(), cut, 1.0)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_graph_holds_cut_and_step():
    layout = RaggedLayout((112, 32, 64), (32, 48, 64), 4, 2, 4096)
    query, buffer = states(layout, 2, torch.bfloat16, 7)
    lengths = whole([4096, 100])
    prepared = decode_step(layout, DEVICE)
    prepared.run(query, buffer, prepared.cut(lengths), 0.09)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = prepared.run(query, buffer, prepared.cut(lengths), 0.09)
    for now in ([17, 4000], [4096, 1]):
        lengths.copy_(whole(now))
        graph.replay()
        assert error(found, reference_decode(query, buffer, layout, now, 0.09)) < 1e-2
