"""Decoding over quantised segments against float64 attention; run by test_cases.py."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.quantized.columns import ColumnsLayout
from kvprof.kernels.quantized.cuts import tile_places, token_cost
from kvprof.kernels.quantized.launch import constants
from kvprof.kernels.quantized.layout import SegmentsLayout, of_configs, segment_of
from kvprof.kernels.quantized.operand_layout import Runs
from kvprof.kernels.quantized.reference import reference_segments
from kvprof.kernels.quantized.step import SegmentsStep, Tuning, segments_step
from kvprof.kernels.quantized.tables import Item, Unit
from kvprof.kernels.split_kv import Attended
from kvprof.kernels.tables import Part, column
from tests.kernels.column_runs import FORMATS, format_pairs, runs
from tests.kernels.column_runs import segment as segment_in
from tests.kernels.numbers import error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (
    [torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float16, torch.float32]
)
# On a GPU weights of quantised values are bfloat16 whatever the run: their range is what counts.
LIMITS = {
    torch.bfloat16: 1e-2,
    torch.float16: 1e-2 if DEVICE.type == "cuda" else 4e-3,
    torch.float32: 1e-5,
}


def counted(layout: SegmentsLayout) -> bool:
    """Whether there are rows of codes that can be multiplied as int8."""
    return any(
        segment.key_bits in (2, 3, 4, 8) and segment.value_bits in (2, 3, 4, 8)
        for segment in layout.segments
    )


def limit(layout: SegmentsLayout, int8: bool) -> float:
    """Return the largest error.

    As int8 the same codes are read exactly, but queries and weights are rounded to whole multiples
    of their largest over 32,512, whatever the run's dtype: 1.5e-5 of the largest at most, and more
    of every smaller one. Float32's own limit is below that: of 42 runs over random rows the worst
    was 1.7e-4 off, with extreme scores, and 9.0e-7 with codes read as float32. Where columns have
    bits of their own weights are rounded up or down by turns, and of every second token to four
    times as much.
    """
    coded = any(segment.key_kinds for segment in layout.segments)
    return max(LIMITS[layout.dtype], 2e-3 if coded else 1e-3 if int8 and counted(layout) else 0.0)


# On a GPU every example compiles a kernel of its own.
few = settings(max_examples=3 if DEVICE.type == "cuda" else 5)


def random_states(layout: SegmentsLayout, seed: int, *, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)

    def random(capacity: int, width: int) -> torch.Tensor:
        states = torch.randn(layout.batch, capacity, width, generator=generator)
        return (scale * states + 0.3).to(layout.dtype)

    states = [
        tuple(
            [random(segment.layout.capacity, width) for width in widths]
            for widths in (segment.layout.key_widths, segment.layout.value_widths)
        )
        for segment in layout.segments
    ]
    row = layout.widest.query_offsets[-1]
    query = torch.randn(layout.batch, row, generator=generator).to(layout.dtype)
    return query.to(DEVICE), layout.packed(states).to(DEVICE)


def step(
    layout: SegmentsLayout, *, pieces: int = 4, tile: int = 4096, int8: bool = True
) -> SegmentsStep:
    warps = segments_step(layout, DEVICE, multiprocessors=1).tuning.warps
    tuning = Tuning(pieces=pieces, tile=tile, warps=warps, int8=int8)
    return segments_step(layout, DEVICE, multiprocessors=2, tuning=tuning)


def run(prepared: SegmentsStep, query, buffer, lengths, scaling, **options):
    """Run a step whose workspace and output begin as NaN."""
    schedule = prepared.cut(lengths)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is empty with NaN
    try:
        assert torch.empty(1).isnan().all()
        return prepared.run(query, buffer, schedule, scaling, **options)
    finally:
        torch.use_deterministic_algorithms(False)


def check(layout: SegmentsLayout, lengths, query, buffer, scaling=0.09, **options) -> None:
    """Hold attention against float64, in both forms where rows of codes have two."""
    cut = {key: options.pop(key) for key in ("pieces", "tile") if key in options}
    wanted = reference_segments(query, buffer, layout, lengths, scaling, **options)
    for int8 in (False, True) if counted(layout) else (False,):
        found = run(step(layout, int8=int8, **cut), query, buffer, lengths, scaling, **options)
        assert torch.isfinite(found).all()
        assert error(found, wanted) < limit(layout, int8)


def one(widths, key_bits, value_bits, *, group=2, batch=1, capacity=100, columns=32):
    return segment_in(
        widths, key_bits, value_bits, group=group, batch=batch, capacity=capacity, columns=columns
    )


narrow = st.integers(1, 7).map(lambda n: 16 * n)


@st.composite
def layouts(draw):
    heads, batch, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 9))
    segments, lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        own = [draw(st.integers(0, 100)) for _ in range(batch)]
        keys, values = (tuple(draw(narrow) for _ in range(heads)) for _ in range(2))
        capacity = max(1, *own) + draw(st.integers(0, 9))
        segments.append(
            segment_in(
                list(zip(keys, values, strict=True)),
                *draw(format_pairs),
                group=group,
                batch=batch,
                capacity=capacity,
                columns=draw(st.sampled_from([16, 32, 64, None])),
                of=lambda width: draw(runs(width)),
            )
        )
        lengths.append(own)
    for row in range(batch):
        lengths[0][row] = lengths[0][row] or 1  # every row has a context
    return SegmentsLayout(tuple(segments), draw(st.sampled_from(DTYPES))), lengths


@few
@given(layouts(), st.integers(1, 9), st.sampled_from([1024, 8192]), st.integers(0, 10**6))
def test_any_formats_widths_and_lengths_give_attention(found, pieces, tile, seed):
    layout, lengths = found
    check(layout, lengths, *random_states(layout, seed), pieces=pieces, tile=tile)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FORMATS)
def test_each_format_alone(bits, dtype):
    layout = SegmentsLayout((one([(80, 16), (16, 112)], bits, bits, batch=2, capacity=201),), dtype)
    check(layout, [[201, 64]], *random_states(layout, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tale_levels_with_nested_values(dtype):
    # The middle keeps the first columns of what the others hold whole; one row has no middle yet.
    wide, cut = [(64, 96)], [(64, 48)]
    layout = SegmentsLayout(
        (
            one(wide, None, None, batch=2, capacity=4),
            one(cut, 2, 2, batch=2, capacity=200),
            one(wide, 4, 4, batch=2, capacity=70),
        ),
        dtype,
    )
    query, buffer = random_states(layout, 2)
    check(layout, [[4, 4], [200, 0], [70, 9]], query, buffer)
    # Tokens of the middle level leave the columns behind their own alone.
    found = run(step(layout), query, buffer, [[0, 0], [200, 200], [0, 0]], 0.09)
    first = found.view(2, 2, 96)
    assert first[..., 48:].abs().max() == 0
    assert first[..., :48].abs().min() > 0


def test_many_query_heads_on_wide_grouped_latents():
    layout = SegmentsLayout((one([(48, 512)], 4, 4, group=12, capacity=70),), DTYPES[0])
    check(layout, [[70]], *random_states(layout, 3), pieces=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, "fp8", 4])
def test_sinks_softcap_and_extreme_scores(bits, dtype):
    layout = SegmentsLayout((one([(16, 80), (128, 16)], bits, bits, capacity=100),), dtype)
    query, buffer = random_states(layout, 4, scale=20.0)
    sinks = torch.randn(2, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    check(layout, [[100]], query, buffer, 1.0)
    check(layout, [[100]], query, buffer, 0.05, softcap=30.0, sinks=sinks)


@pytest.mark.parametrize("bits", FORMATS)
def test_what_lies_behind_a_context_does_not_count(bits):
    layout = SegmentsLayout((one([(48, 32)], bits, bits, batch=2, capacity=150),), DTYPES[0])
    query, buffer = random_states(layout, 6)
    lengths = [[101, 7]]
    before = run(step(layout), query, buffer, lengths, 0.1)
    garbage = layout.empty(DEVICE).fill_(255)  # NaN in float16, bfloat16 and e4m3
    tokens = torch.arange(150)
    for side, mine, theirs in zip(
        layout.sides(0, 0), layout.blocks(buffer, 0, 0), layout.blocks(garbage, 0, 0), strict=True
    ):
        for row, length in enumerate(lengths[0]):
            kept = (tokens < length).nonzero().flatten().tolist()
            for token in kept:
                _copy_token(side, mine, theirs, row, token)
    assert torch.equal(run(step(layout), query, garbage, lengths, 0.1), before)


@pytest.mark.parametrize(
    ("values", "tile", "largest"),
    [
        (((16, 3),), 4096, 3.0),
        (((32, 3),), 8192, 3.5),
        (((32, 4),), 8192, 3.5),
        (((32, 8),), 12_288, 3.5),
    ],
)
def test_values_that_are_alike_sum_up_in_tiles_of_any_size(
    values: Runs, tile: int, largest: float
) -> None:
    """Of the largest code in a whole tile, with the largest weights."""
    layout = SegmentsLayout(
        (segment_of([(((16, 2),), values)], 1, 1, 256, "uniform-rms", "uniform-rms", None),),
        DTYPES[0],
    )
    assert tile_places(layout, 0, 0, tile) == 64
    generator = torch.Generator().manual_seed(3)
    wide = 0.3 * torch.randn(1, 256, sum(width for width, _ in values), generator=generator)
    wide[..., 0] = largest
    own = [torch.zeros(1, 256, 16).to(DTYPES[0])], [wide.to(DTYPES[0])]
    buffer = layout.packed([own]).to(DEVICE)
    query = torch.zeros(1, 16).to(DTYPES[0]).to(DEVICE)
    wanted = reference_segments(query, buffer, layout, [[256]], 1.0)
    assert error(run(step(layout, tile=tile), query, buffer, [[256]], 1.0), wanted) < 1e-2


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("slot", [0, 1])
def test_many_small_weights_beside_a_large_one_are_not_lost(bits: int, slot: int) -> None:
    """Each is less than half of what is told apart, and all together are not."""
    layout = SegmentsLayout(
        (segment_of([(((16, 8),), ((32, bits),))], 1, 1, 128, "uniform-rms", "uniform-rms", None),),
        DTYPES[0],
    )
    keys = torch.zeros(1, 128, 16)
    keys[..., 0] = 1.0
    keys[:, slot, 0] = -1.0
    values = torch.ones(1, 128, 32)
    values[..., ::2] *= -1.0
    values[:, slot] = torch.randn(32, generator=torch.Generator().manual_seed(0))
    buffer = layout.packed([([keys.to(DTYPES[0])], [values.to(DTYPES[0])])]).to(DEVICE)
    stored = layout.head(buffer, 0, 0)[0][0, :, 0]
    apart = float(stored[slot] - stored[slot + 1])
    prepared = step(layout)
    # Powers of two by which the others' weights are smaller, where rounding takes most.
    for power in (8.0, 12.9, 13.2, 14.2, 15.9, 16.5):
        query = torch.zeros(1, 16)
        query[0, 0] = power * math.log(2.0) / apart
        query = query.to(DTYPES[0]).to(DEVICE)
        wanted = reference_segments(query, buffer, layout, [[128]], 1.0)
        found = error(run(prepared, query, buffer, [[128]], 1.0), wanted)
        assert found < limit(layout, True), power


@pytest.mark.parametrize("runs", [((144, 4), (16, 2)), ((256, 3),)])
def test_keys_whose_codes_are_the_farthest_from_0_sum_up(runs: Runs) -> None:
    """Of every fourth token, whose codes lie in the highest bits; larger than scales can be."""
    layout = SegmentsLayout(
        (segment_of([(runs, ((16, 8),))], 1, 1, 128, "uniform-rms", "uniform-rms", None),),
        DTYPES[0],
    )
    width = sum(columns for columns, _ in runs)
    keys = torch.zeros(1, 128, width)
    keys[..., : runs[0][0]] = 2000.0
    keys[:, 3::4] *= -1.0
    values = torch.ones(1, 128, 16)
    values[:, 3::4] = -1.0
    buffer = layout.packed([([keys.to(DTYPES[0])], [values.to(DTYPES[0])])]).to(DEVICE)
    query = torch.zeros(1, width)
    query[:, : runs[0][0]] = -1e-4
    query = query.to(DTYPES[0]).to(DEVICE)
    wanted = reference_segments(query, buffer, layout, [[128]], 1.0)
    assert error(run(step(layout), query, buffer, [[128]], 1.0), wanted) < 1e-2


def _copy_token(side, source, target, row: int, token: int) -> None:
    """Copy what is stored of a token, bit by bit, and nothing else."""
    block, inside = divmod(token, 32 * side.slots)
    place, slot = divmod(inside, side.slots)
    if isinstance(side, ColumnsLayout):
        for piece in side.pieces:
            number, part = divmod(slot, piece.apart // 2)
            mask = (2**piece.bits - 1) << piece.shift + piece.apart * number
            at = piece.at + piece.part * part + piece.place * place
            old = target[row, block, at]
            old.copy_((old & (255 - mask)) | (source[row, block, at] & mask))
        side.row_scales(target)[row, block, place, slot] = side.row_scales(source)[
            row, block, place, slot
        ]
        return
    for plane in side.planes:
        if side.bits is None:
            mine, theirs = side.rows(source, plane), side.rows(target, plane)
            theirs[row, block, inside] = mine[row, block, inside]
            continue
        part, number = divmod(slot, side.per_byte)
        mask = (2**side.container - 1) << (side.container * number)
        mine = side.codes(source, plane)[row, block, part, place]
        theirs = side.codes(target, plane)[row, block, part, place]
        theirs.copy_((theirs & (255 - mask)) | (mine & mask))
    if side.groups:
        for mine, theirs in zip(side.kept(source), side.kept(target), strict=True):
            theirs[row, block, :, place, slot] = mine[row, block, :, place, slot]


def equal_shares(
    layout: SegmentsLayout, lengths: list[list[int]], pieces: int, tuning: Tuning
) -> tuple[list[Item], list[Part]]:
    """All units in `pieces` pieces of equal cost: items by head and row, parts by row.

    What costs less than a piece is one, and the others share those that are left, unless theirs
    were longer by more than a seventh.
    """
    count = len(layout.segments)
    units = [
        (row, head, segment)
        for head in range(layout.heads)
        for row in range(len(lengths[0]))
        for segment in range(count)
    ]
    costs = [
        lengths[segment][row] * token_cost(layout, segment, head, tuning.per_token, tuning.int8)
        for row, head, segment in units
    ]
    total = max(1, sum(costs))
    larger = [cost if cost * pieces >= total else 0 for cost in costs]
    left = pieces - sum(cost > 0 and not own for cost, own in zip(costs, larger, strict=True))
    fair = max(1, max(1, sum(larger)) * pieces // total)
    left, total = left if left * 8 >= fair * 7 else fair, max(1, sum(larger))
    items: list[Item] = []
    parts = {}
    before = 0
    for (row, head, segment), cost in zip(units, larger, strict=True):
        if segment == 0:
            first = len(items)
        length = lengths[segment][row]
        slots = layout.segments[segment].slots
        height = slots * tile_places(layout, segment, head, tuning.tile)
        tiles = -(-length // height)
        share = (before + cost) * left // total - before * left // total
        share = min(tiles, max(1, share))
        before += cost
        bounds = [min(length, tiles * part // max(1, share) * height) for part in range(share + 1)]
        items += [Item(row, head, segment, start, stop) for start, stop in pairwise(bounds)]
        if segment == count - 1:
            parts[row, head] = Part(first, len(items) - first)
    return items, [parts[task] for task in sorted(parts)]


@few
@given(layouts(), st.integers(1, 40), st.sampled_from([1024, 8192]))
def test_the_device_cuts_as_the_host_states(found, pieces, tile):
    layout, lengths = found
    prepared = step(layout, pieces=pieces, tile=tile)
    device, parts, counters = prepared.cut(
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    ).scheduled
    items, wanted = equal_shares(layout, lengths, 2 * pieces, prepared.tuning)
    assert list(map(Item._make, device.tolist()))[: len(items)] == items
    assert list(map(Part._make, parts.tolist())) == wanted
    assert (device[len(items) :, column(Item, "segment")] == -1).all()
    tiles = sum(
        -(-tokens // (segment.slots * tile_places(layout, number, head, tile)))
        for number, segment in enumerate(layout.segments)
        for head in range(layout.heads)
        for tokens in lengths[number]
    )
    shared = int(tiles >= 16 * 2 * pieces)
    assert counters.tolist() == [shared] + [0] * prepared.multiprocessors


def test_the_device_cuts_many_rows_as_the_host_states():
    """More units than are looked at at once, of rows most of which have nothing, as in a graph."""
    batch, heads = 700, 2
    widths = [(32, 32), (16, 48)]
    exact = one(widths, None, None, batch=batch, capacity=32)
    layout = SegmentsLayout((exact, one(widths, 4, 4, batch=batch, capacity=900)), DTYPES[0])
    draw = torch.Generator().manual_seed(3)
    seen = torch.randint(1, 900, (batch,), generator=draw)
    seen[torch.rand(batch, generator=draw) < 0.6] = 0
    seen[-5:] = 0
    lengths = [seen.clamp(max=32).tolist(), (seen - 32).clamp(min=0).tolist()]
    prepared = step(layout, pieces=40)
    assert batch * heads * 2 > 1024
    device, parts, _ = prepared.cut(
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    ).scheduled
    items, wanted = equal_shares(layout, lengths, 80, prepared.tuning)
    assert list(map(Item._make, device.tolist()))[: len(items)] == items
    assert list(map(Part._make, parts.tolist())) == wanted
    assert (device[len(items) :, column(Item, "segment")] == -1).all()


@pytest.mark.parametrize("rows", [85, 86])
def test_layers_with_many_pieces_are_cut_as_the_host_states(rows):
    """By several programs a layer: 255 units share themselves out, of 258 a launch before does."""
    widths = [[(32, 32), (16, 48), (16, 16)], [(16, 16), (64, 32), (48, 64)]]
    layouts = [
        SegmentsLayout((one(own, 4, 4, batch=rows, capacity=3000),), DTYPES[0]) for own in widths
    ]
    steps = [step(layout, pieces=150, tile=1024) for layout in layouts]
    draw = torch.Generator().manual_seed(rows)
    seen = torch.randint(1, 3001, (rows,), generator=draw)
    seen[torch.rand(rows, generator=draw) < 0.3] = 0
    tables = torch.stack([each.cut_table for each in steps])
    together = steps[0].cut_alike(tables, seen[None].to(DEVICE, torch.int32))
    for layout, found in zip(layouts, together, strict=True):
        device, parts, _ = found.scheduled
        items, wanted = equal_shares(layout, [seen.tolist()], 300, steps[0].tuning)
        assert len(items) > 256
        assert list(map(Item._make, device.tolist()))[: len(items)] == items
        assert list(map(Part._make, parts.tolist())) == wanted
        assert (device[len(items) :, column(Item, "segment")] == -1).all()


def test_exact_tokens_beside_many_are_among_the_pieces():
    """One piece more than there is room for would run when all others are done."""
    exact = one([(32, 32)] * 2, None, None, batch=3, capacity=36)
    layout = SegmentsLayout((exact, one([(32, 32)] * 2, 4, 4, batch=3, capacity=9000)), DTYPES[0])
    prepared = step(layout, pieces=30)
    lengths = torch.tensor([[36] * 3, [9000] * 3], dtype=torch.int32, device=DEVICE)
    items = prepared.cut(lengths).scheduled[0]
    segments = items[:, column(Item, "segment")]
    assert int((segments >= 0).sum()) == 60
    assert int((segments == 0).sum()) == 6
    tokens = (items[:, column(Item, "stop")] - items[:, column(Item, "start")])[segments == 1]
    # 54 for six of them: nine each, in whole tiles.
    assert int(tokens.max()) <= 9000 // 9 + 64


def test_a_long_row_beside_many_short_ones_is_cut_all_the_same():
    layout = SegmentsLayout((one([(32, 32)] * 2, 4, 4, batch=21, capacity=9000),), DTYPES[0])
    prepared = step(layout, pieces=10)
    lengths = torch.tensor([[9000] + [11] * 20], dtype=torch.int32, device=DEVICE)
    items = prepared.cut(lengths).scheduled[0]
    items = items[items[:, column(Item, "segment")] >= 0]
    tokens = items[:, column(Item, "stop")] - items[:, column(Item, "start")]
    # Both heads of it share nearly all of 20 pieces.
    assert int(tokens.max()) <= 9000 // 9 + 128


def test_values_of_unlike_size_are_as_near_as_the_largest_of_them_allows():
    """A token that nearly all look at may have small values, beside larger ones in its tile."""
    segment = segment_of(
        [(((32, 4),), ((16, 4), (16, 2)))], 4, 1, 256, "uniform-rms", "uniform-rms", None
    )
    layout = SegmentsLayout((segment,), DTYPES[0])
    draw = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 256, 32, generator=draw).to(DEVICE) for _ in range(2))
    values[:, 70] /= 30
    buffer = layout.packed([([keys.to(DTYPES[0])], [values.to(DTYPES[0])])])
    query = (keys[:, 70] * 0.5).repeat(1, 4).to(DTYPES[0])
    output = run(step(layout), query, buffer, [[256]], 1.0)
    wanted = reference_segments(query, buffer, layout, [[256]], 1.0)
    # Weights are rounded to a 2^-15 of what the largest weight and the largest values make.
    apart = float((output.double() - wanted).abs().max())
    assert apart < 2e-3 * float(values.abs().max())


# On a GPU each is compiled for a minute or more, of many kinds for seven and longer; side by side
# with the others, and the first example of any is the simplest that there is.
MOST_MORE = 1 if DEVICE.type == "cuda" else 3


@pytest.mark.parametrize("turn", range(3 if DEVICE.type == "cuda" else 1))
@settings(few, max_examples=2 if DEVICE.type == "cuda" else 5)
@given(layouts(), st.integers(1, 9), st.integers(0, 10**6), st.data())
def test_a_step_built_for_more_kinds_gives_the_same_attention(turn, found, pieces, seed, data):
    layout, lengths = found
    more = st.tuples(
        *[
            st.tuples(
                *(narrow.flatmap(runs) if own == "uniform-rms" else narrow for own in formats)
            )
            for formats in ((x.key_bits, x.value_bits) for x in layout.segments)
        ]
    )
    configs = *layout.configs, *data.draw(st.lists(more, min_size=1, max_size=MOST_MORE))
    tuning = step(layout, pieces=pieces).tuning
    prepared = segments_step(layout, DEVICE, multiprocessors=2, tuning=tuning, configs=configs)
    query, buffer = random_states(layout, seed)
    output = run(prepared, query, buffer, lengths, 0.09)
    wanted = reference_segments(query, buffer, layout, lengths, 0.09)
    assert error(output, wanted) < limit(layout, True)


def test_layers_with_the_same_head_configs_are_compiled_once():
    wide, narrow = ((96, 48), (96, 16)), ((32, 64), (16, 64))
    configs = [wide, narrow, ((64, 64), (64, 64))]
    forms, tunings = [], []
    for heads in ([wide, wide, narrow], [narrow, narrow, wide], [narrow] * 3):
        first, second = zip(*heads, strict=True)
        segments = one(first, None, None), one(second, 4, 4, batch=1)
        layout = SegmentsLayout(segments, DTYPES[0])
        prepared = segments_step(layout, DEVICE, configs=configs)
        family = of_configs(layout, prepared.configs)
        tunings.append(prepared.tuning)
        forms.append(constants(layout.heads, family, prepared.tuning, softcap=False, fast=True))
    assert forms[0] == forms[1] == forms[2]
    assert tunings[0] == tunings[1] == tunings[2]
    with pytest.raises(UsageError):
        segments_step(layout, DEVICE, configs=[wide])


def test_exact_sinks_and_an_exact_window_share_their_code():
    whole = [(32, 32)] * 2
    segments = (
        one(whole, None, None, batch=2, capacity=4),
        one([(32, 16), (16, 32)], 4, 2, batch=2, capacity=300),
        one(whole, None, None, batch=2, capacity=32),
    )
    layout = SegmentsLayout(segments, DTYPES[0])
    prepared = step(layout, pieces=5)
    family = of_configs(layout, prepared.configs)
    found = constants(layout.heads, family, prepared.tuning, softcap=False, fast=True)
    assert found["COUNT"] == 3
    assert prepared.units[:, column(Unit, "kind")].tolist() == [0, 0, 2, 1, 0, 0]
    query, buffer = random_states(layout, 5)
    lengths = [[4, 3], [300, 77], [32, 9]]
    output = run(prepared, query, buffer, lengths, 0.2)
    wanted = reference_segments(query, buffer, layout, lengths, 0.2)
    assert error(output, wanted) < limit(layout, True)


def test_layers_share_a_cut():
    layout = SegmentsLayout((one([(48, 32), (16, 64)], 4, 2, batch=2, capacity=300),), DTYPES[0])
    prepared = step(layout, pieces=5, tile=1024)
    cut = prepared.cut([[300, 77]])
    for seed in (1, 2, 3):
        query, buffer = random_states(layout, seed)
        found = prepared.run(query, buffer, cut, 0.2)
        wanted = reference_segments(query, buffer, layout, [[300, 77]], 0.2)
        assert error(found, wanted) < limit(layout, True)
        assert (cut.scheduled[2] == 0).all(), "what was counted is left to the next layer"


def test_layers_are_cut_together_as_each_is_by_itself():
    widths = ([(48, 32), (16, 64)], [(16, 16), (64, 96)], [(80, 16), (32, 32)])
    steps = [
        step(SegmentsLayout((one(own, 4, 8, batch=2, capacity=700),), DTYPES[0])) for own in widths
    ]
    assert len({each.cut_by for each in steps}) == 1
    lengths = torch.tensor([[650, 77]], dtype=torch.int32, device=DEVICE)
    together = steps[1].cut_alike(torch.stack([each.cut_table for each in steps]), lengths)
    for each, found in zip(steps, together, strict=True):
        alone = each.cut(lengths)
        items, wanted = found.scheduled[0], alone.scheduled[0]
        there = wanted[:, column(Item, "segment")] >= 0
        assert torch.equal(items[there], wanted[there])
        assert (items[~there, column(Item, "segment")] == -1).all()
        for tensor, own in zip(found.scheduled[1:], alone.scheduled[1:], strict=True):
            assert torch.equal(tensor, own)


@pytest.mark.parametrize(("pieces", "near"), [(1, 1), (5, 0)])
def test_shares_of_multiprocessors_are_for_long_pieces(pieces, near):
    layout = SegmentsLayout((one([(48, 32), (16, 64)], 4, 4, capacity=1100),), DTYPES[0])
    prepared = step(layout, pieces=pieces, tile=1024)
    query, buffer = random_states(layout, 4)
    wanted = reference_segments(query, buffer, layout, [[1090]], 0.2)
    cut = prepared.cut([[1090]])
    for _ in range(2):
        assert cut.scheduled[2].tolist() == [near, 0, 0]
        assert error(prepared.run(query, buffer, cut, 0.2), wanted) < limit(layout, True)


@pytest.mark.parametrize("near", [0, 1])
@pytest.mark.parametrize("multiprocessors", [1, 3, 7])
def test_every_piece_is_run_where_multiprocessors_have_neighbours(multiprocessors, near):
    segment = one([(48, 32), (16, 64)], 4, 4, group=20, batch=2, capacity=700)
    layout = SegmentsLayout((segment,), DTYPES[0])
    tuning = replace(step(layout, pieces=5, tile=1024).tuning, near=near, dealt=True)
    prepared = segments_step(layout, DEVICE, multiprocessors=multiprocessors, tuning=tuning)
    query, buffer = random_states(layout, 5)
    wanted = reference_segments(query, buffer, layout, [[690, 130]], 0.2)
    found = run(prepared, query, buffer, [[690, 130]], 0.2)
    assert error(found, wanted) < limit(layout, True)


def test_lengths_on_the_device_are_clamped_and_empty_rows_give_zeros():
    layout = SegmentsLayout((one([(32, 32)], 4, 4, batch=2, capacity=70),), DTYPES[0])
    query, buffer = random_states(layout, 7)
    lengths = torch.tensor([[999, -5]], dtype=torch.int32, device=DEVICE)
    found = run(step(layout), query, buffer, lengths, 0.1)
    wanted = reference_segments(query, buffer, layout, [[70, 0]], 0.1)
    assert error(found[0], wanted[0]) < limit(layout, True)
    assert (found[1] == 0).all()


def test_pieces_in_order_need_no_counters_and_a_cut_for_another_tuning_is_refused():
    layout = SegmentsLayout((one([(48, 32), (16, 64)], 4, 4, capacity=200),), DTYPES[0])
    near = step(layout)
    ordered = segments_step(layout, DEVICE, multiprocessors=2, tuning=replace(near.tuning, near=0))
    query, buffer = random_states(layout, 3)
    wanted = reference_segments(query, buffer, layout, [[200]], 0.2)
    cut = ordered.cut([[200]])
    assert error(ordered.run(query, buffer, cut, 0.2), wanted) < limit(layout, True)
    with pytest.raises(UsageError):
        near.run(query, buffer, cut, 0.2)
    with pytest.raises(UsageError):
        ordered.run(query, buffer, near.cut([[200]]), 0.2)


def test_what_cannot_run_is_refused():
    layout = SegmentsLayout((one([(32, 32)], 4, 4, capacity=64),), DTYPES[0])
    query, buffer = random_states(layout, 8)
    prepared = step(layout)
    schedule = prepared.cut([[64]])
    with pytest.raises(UsageError):
        prepared.run(query[:, :-1], buffer, schedule, 1.0)
    with pytest.raises(UsageError):
        prepared.run(query, buffer[:-1], schedule, 1.0)
    with pytest.raises(UsageError, match="sinks"):
        prepared.run(query, buffer, schedule, 1.0, sinks=torch.zeros(1, 1))
    wrong = torch.bfloat16 if DEVICE.type == "cpu" else torch.float32
    layout = SegmentsLayout(layout.segments, wrong)
    with pytest.raises(UsageError, match=r"interpreter|GPU"):
        step(layout).run(query.to(wrong), layout.empty(DEVICE), schedule, 1.0)


@few
@given(
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 0, 33])), min_size=1, max_size=9),
    st.integers(1, 9),
)
@example([(0, 0), (70, 0), (0, 0), (0, 33), (0, 0)], 5)
def test_rows_without_tokens_have_no_items(rows, pieces):
    """Whichever they are, the last too: all others are cut as without them."""
    lengths = list(map(list, zip(*rows, strict=True)))
    segments = (
        one([(32, 48), (64, 16)], 4, 4, batch=len(rows)),
        one([(32, 48), (64, 16)], None, None, batch=len(rows)),
    )
    layout = SegmentsLayout(segments, DTYPES[0])
    prepared = step(layout, pieces=pieces, tile=1024)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    device, parts, _ = prepared.cut(on_device).scheduled
    items, wanted = equal_shares(layout, lengths, 2 * pieces, prepared.tuning)
    assert list(map(Item._make, device.tolist()))[: len(items)] == items
    assert (device[len(items) :, column(Item, "segment")] == -1).all()
    found = list(map(Part._make, parts.tolist()))
    assert [own.items for own in found] == [own.items for own in wanted]
    assert [own.first for own in found if own.items] == [own.first for own in wanted if own.items]
    # Where all items end the kernel reads of the last.
    assert found[-1].first + found[-1].items == len(items)


def seen_beside(query, buffer, layout: SegmentsLayout, lengths, scaling: float) -> Attended:
    """Return what queries see of a layout's last segment, in float64; NaN where they see none."""
    segment, wide = len(layout.segments) - 1, layout.widest
    output = query.new_full((len(query), wide.output_offsets[-1]), float("nan"))
    logs = torch.full((len(query), layout.heads, layout.group), float("-inf"), device=DEVICE)
    for head in range(layout.heads):
        keys, values = (side.double() for side in layout.head(buffer, segment, head))
        own = query[:, slice(*wide.query_offsets[head : head + 2])].double()
        for row, tokens in enumerate(lengths[segment]):
            if not tokens:
                continue
            scores = own[row].view(layout.group, -1) @ keys[row, :tokens].T * scaling
            found = torch.softmax(scores, dim=-1) @ values[row, :tokens]
            columns = slice(*wide.output_offsets[head : head + 2])
            output[row, columns] = found.flatten().to(query.dtype)
            logs[row, head] = (torch.logsumexp(scores, dim=-1) / math.log(2)).float()
    return Attended(output, logs.flatten(1))


@few
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=4),
    st.sampled_from([4, 8]),
    st.sampled_from([0.09, 3.0]),
    st.booleans(),
    st.integers(0, 99),
)
@example([(0, 5), (7, 0), (0, 0), (9, 3)], 4, 0.09, True, 0)
def test_what_is_seen_beside_is_merged(rows, bits, scaling, sunk, seed):
    """As if it lay in a segment of its own; rows may see nothing in one of them, or in both."""
    widths, lengths = ((32, 48), (64, 16)), list(map(list, zip(*rows, strict=True)))
    segments = one(widths, bits, bits, batch=len(rows)), one(widths, None, None, batch=len(rows))
    layout, first = SegmentsLayout(segments, DTYPES[0]), SegmentsLayout(segments[:1], DTYPES[0])
    query, buffer = random_states(layout, seed)
    beside = seen_beside(query, buffer, layout, lengths, scaling)
    # The same numbers are drawn for the first segment.
    _, own = random_states(first, seed)
    prepared = step(first)
    schedule = prepared.cut(torch.tensor(lengths[:1], dtype=torch.int32, device=DEVICE))
    sinks = torch.randn(2, 2).to(DEVICE) if sunk else None
    found = prepared.run(query, own, schedule, scaling, sinks=sinks, beside=beside)
    wanted = reference_segments(query, buffer, layout, lengths, scaling, sinks=sinks)
    assert torch.isfinite(found).all()
    # What comes from beside was rounded to the run's dtype.
    assert float((found.double() - wanted).norm()) <= 2 * limit(first, True) * float(wanted.norm())


def test_what_was_seen_beside_in_another_shape_is_refused():
    layout = SegmentsLayout((one(((32, 48),), 4, 4, batch=2),), DTYPES[0])
    query, buffer = random_states(layout, 1)
    prepared = step(layout)
    schedule = prepared.cut([[5, 6]])
    logs = torch.zeros(2, 2, device=DEVICE)
    output = query.new_zeros(2, 96)
    for beside in (Attended(output[:1], logs), Attended(output, logs[:, :1]), Attended(logs, logs)):
        with pytest.raises(UsageError):
            prepared.run(query, buffer, schedule, 0.1, beside=beside)
