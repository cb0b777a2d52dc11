"""What the buffer of segments holds: bytes, codes, appended tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.quantized.append import addresses_of, append, read, write
from kvprof.kernels.quantized.codes import FORMATS, quantise, spread
from kvprof.kernels.quantized.column_kernel import sums_are_whole
from kvprof.kernels.quantized.columns import dequantised_columns, quantise_columns
from kvprof.kernels.quantized.cuts import token_bytes, token_cost
from kvprof.kernels.quantized.launch import tuning_for
from kvprof.kernels.quantized.layout import SegmentsLayout, segment_of
from kvprof.kernels.quantized.layout_registry import bits_numbered, format_of
from kvprof.kernels.quantized.operand_layout import Runs
from kvprof.kernels.tables import joined_rows
from kvprof.methods.storage import Quantiser, SideQuantiser
from kvprof.runtime.codecs import codec_for, unpack
from tests.kernels.column_runs import format_pairs, segment
from tests.kernels.column_runs import spread as spread_bits
from tests.kernels.dequantised import dequantised

WIDTHS = st.integers(1, 9).map(lambda n: 16 * n)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(
    st.sampled_from([8, 4, 3, 2]), WIDTHS, st.sampled_from([16, 32, 48, None]), st.integers(0, 99)
)
def test_codes_scales_and_rows_are_those_of_the_runtime(bits, width, columns, seed):
    rows = 3 * random(2, 5, width, seed=seed).to(torch.bfloat16)
    rows[0, 0] = 1.25  # no range: scale 0
    side = SideQuantiser((bits,), "token", columns)
    codec = codec_for(Quantiser("affine", side, side), side, 0)
    stored = codec.encode(rows)
    found = quantise(rows, bits, columns)
    assert torch.equal(found.scale, stored["scale"])
    # The kernels count codes from the middle of a group, the runtime from its minimum: the same
    # numbers but for where a float16 is rounded, which moves a code by one at most.
    codes = found.codes.long() - (2 ** (format_of(bits).container - 1) - 2 ** (bits - 1))
    assert codes.min() >= 0
    assert codes.max() < 2**bits
    scale = spread(found.scale.double(), columns, width)
    moved = (codes - unpack(stored["codes"], bits, width).long()).abs()
    assert moved[scale > 0].max() <= 1
    rounding = 2**-10 * rows.double().abs().amax()
    missed = (dequantised(found, bits, columns).double() - rows.double()).abs()
    assert (missed <= 0.5 * scale + rounding).all()
    theirs = (codec.decode(stored, width, torch.float32).double() - rows.double()).norm()
    assert missed.norm() <= 1.05 * theirs + rounding


def test_e4m3_is_that_of_the_runtime():
    layout = SegmentsLayout((segment([(48, 32)], "fp8", "fp8"),))
    keys, values = 300 * random(2, 100, 48), random(2, 100, 32, seed=1)
    codec = codec_for(Quantiser("fp8", None, None), SideQuantiser((8,)), 0)
    buffer = layout.packed([([keys], [values])])
    for found, rows in zip(layout.head(buffer, 0, 0), (keys, values), strict=True):
        wanted = codec.decode(codec.encode(rows), rows.shape[-1], torch.float32)
        assert torch.equal(found, wanted)


@settings(max_examples=30)
@given(
    format_pairs,
    st.sampled_from([16, 32, 64, None]),
    st.lists(WIDTHS, min_size=2, max_size=4),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_every_token_is_found_where_it_was_put(formats, columns, widths, capacity, seed):
    pairs = list(zip(widths[::2], widths[1::2], strict=False))
    layout = SegmentsLayout(
        (
            segment(pairs, *formats, columns=columns, capacity=capacity),
            segment(pairs, None, None, columns=columns, capacity=7),
        )
    )
    states = [
        tuple(
            [random(2, own.layout.capacity, width, seed=seed + width).bfloat16() for width in sides]
            for sides in (own.layout.key_widths, own.layout.value_widths)
        )
        for own in layout.segments
    ]
    buffer = layout.packed(states)
    assert buffer.numel() == layout.nbytes
    assert buffer.dtype == torch.uint8
    for number, own in enumerate(layout.segments):
        for head in range(layout.heads):
            formats = (own.key_bits, own.value_bits)
            for found, given_states, bits in zip(
                layout.head(buffer, number, head), states[number], formats, strict=True
            ):
                rows = given_states[head]
                if bits is None:
                    wanted = rows.float()
                elif bits == "fp8":
                    wanted = rows.to(torch.float8_e4m3fn).float()
                elif bits == "uniform-rms":
                    runs = spread_bits(rows.shape[-1])
                    wanted = dequantised_columns(*quantise_columns(rows, runs), runs)
                else:
                    wanted = dequantised(quantise(rows, bits, columns), bits, columns)
                assert torch.equal(found, wanted)


def test_formats_are_found_by_name_and_by_number():
    assert [bits_numbered(format_of(bits).number) for bits in FORMATS] == list(FORMATS)
    with pytest.raises(UsageError, match=r"5 bits .* 2, 3, 4, 8,"):
        format_of(5)


def test_bytes_are_counted_with_scales_middles_and_padding():
    # 102,400 tokens: 64 columns in 32 bytes, and per group of 32 columns 2 bytes twice.
    layout = SegmentsLayout((segment([(64, 64)], 4, 4, batch=1, capacity=102_400),))
    assert layout.nbytes == 102_400 * 2 * (32 + 2 * 4)
    # 4 tokens take the room of 64, a pair of blocks.
    sinks = SegmentsLayout((segment([(64, 64)], None, None, batch=1, capacity=4),))
    assert sinks.nbytes == 64 * 2 * 64 * 2
    assert [format_of(bits).container for bits in (None, 2, 3, 4, 8, "fp8")] == [0, 2, 4, 4, 8, 8]


def of_one(pair: tuple[int, int], bits: int | None) -> SegmentsLayout:
    return SegmentsLayout((segment([pair], bits, bits, columns=32),))


def test_a_token_costs_its_bytes_and_what_a_plane_of_keys_is_padded_by():
    def more(pair: tuple[int, int], bits: int | None) -> float:
        layout = of_one(pair, bits)
        return token_cost(layout, 0, 0, 20) / 16 - token_bytes(layout, 0, 0) - 20

    assert more((64, 48), 8) == 0
    assert more((48, 64), 8) == 16
    assert more((112, 64), 8) == 16
    assert more((48, 64), None) == 0


def test_at_4_bits_keys_cost_less_than_values_of_the_same_bytes_but_not_as_int8():
    wide_keys, wide_values = of_one((128, 32), 4), of_one((32, 128), 4)
    own = token_bytes(wide_keys, 0, 0)
    assert own == token_bytes(wide_values, 0, 0)
    for layout in (wide_keys, wide_values):
        assert token_cost(layout, 0, 0, 26, int8=True) == 16 * (own + 26)
    # 48 bytes of codes more of one and less of the other, 3 scales and middles with them.
    difference = token_cost(wide_values, 0, 0, 26) - token_cost(wide_keys, 0, 0, 26)
    assert difference == pytest.approx(16 * (0.25 * 48 - 0.05 * 3 * 4), abs=1)
    beside = SegmentsLayout(tuple(segment([(128, 32)], bits, bits, columns=32) for bits in (4, 2)))
    assert token_cost(beside, 0, 0, 26) == 16 * (token_bytes(beside, 0, 0) + 26)


def test_columns_with_bits_of_their_own_cost_bytes_products_and_pieces_of_keys():
    def cost(pair: tuple[Runs, Runs]) -> float:
        own = segment_of([pair], 4, 1, 128, "uniform-rms", "uniform-rms", None)
        return token_cost(SegmentsLayout((own,)), 0, 0, 26) / 16

    def more(new: tuple[Runs, Runs], old: tuple[Runs, Runs]) -> float:
        return cost(new) - cost(old)

    wide = ((64, 2),)
    # 64 columns of values: 4 slots, 4 times 16 columns, 16 bytes.
    assert more((wide, ((128, 2),)), (wide, wide)) == pytest.approx(0.6 * 16 + 0.15 * 16, abs=0.1)
    # The highest of 3 bits have as many products, half as many bytes, and of keys a piece.
    three = ((64, 3),)
    assert more((wide, three), (wide, wide)) == pytest.approx(0.6 * 16 + 0.15 * 8, abs=0.1)
    assert more((three, wide), (wide, wide)) == pytest.approx(0.6 * 16 + 0.15 * 8 + 3.0, abs=0.1)
    # The lower ones are in one piece with columns of 2 bits, as products of 128 columns.
    both = ((64, 3), (32, 2))
    assert more((both, wide), (three, wide)) == pytest.approx(0.6 * 16 + 0.15 * 8, abs=0.1)
    assert more((((64, 3), (64, 2)), wide), (both, wide)) == pytest.approx(0.15 * 8, abs=0.1)
    # 8 bits lie in four pieces, of 16 columns in two, and 4 bits of these in one.
    assert more((((64, 8),), wide), (wide, wide)) == pytest.approx(0.15 * 48 + 9.0, abs=0.1)
    narrow, four = ((((16, bits), (64, 2)), wide) for bits in (4, 8))
    assert more(four, narrow) == pytest.approx(0.15 * 8 + 3.0, abs=0.1)


def test_columns_of_three_bits_lie_with_those_of_two_and_of_16_by_themselves():
    own = segment_of([(((48, 3), (32, 2)), ((48, 3),))], 4, 1, 128, *("uniform-rms",) * 2, None)
    keys, values = SegmentsLayout((own,)).sides(0, 0)
    assert [(row.start, row.width, row.depth, row.bits, row.at) for row in keys.table(0)] == [
        (0, 16, 32, 3, 0),
        (16, 64, 64, 2, 48 * 16),
        (16, 32, 32, 1, 48 * 16 + 32 * 64),
    ]
    assert [(row.start, row.width, row.bits, row.at) for row in values.table(0)] == [
        (0, 32, 3, 0),
        (32, 16, 3, 48 * 32),
    ]
    assert keys.code_bytes == sum(plane.nbytes for plane in keys.planes)
    # A plane of 112 columns is summed over as 128, of 80 as 64 and 16.
    for width, depths in ((112, [128]), (96, [128]), (80, [64, 32]), (144, [128, 32])):
        own = segment_of([(((width, 2),), ((16, 2),))], 4, 1, 128, *("uniform-rms",) * 2, None)
        side = SegmentsLayout((own,)).sides(0, 0)[0]
        assert [row.depth for row in side.table(0)] == depths


@pytest.mark.parametrize(
    ("runs", "whole"),
    [
        (((512, 2),), True),
        # Of 3 bits the lower ones meet queries half as large.
        (((320, 3),), True),
        (((352, 3),), False),
        # 16 of them, both of whose planes are taken together, as much as others.
        (((16, 8), (240, 3)), True),
        (((48, 4), (208, 3)), True),
        (((80, 4), (176, 3)), False),
        # Products with 4 bits are four times as large before those of fewer.
        (((512, 4),), True),
        (((112, 4), (32, 2)), True),
        (((128, 4), (32, 2)), False),
    ],
)
def test_sums_of_keys_are_joined_as_whole_numbers_where_these_hold_them(
    runs: Runs, whole: bool
) -> None:
    own = segment_of([(runs, ((16, 2),))], 4, 1, 128, "uniform-rms", "uniform-rms", None)
    table = SegmentsLayout((own,)).sides(0, 0)[0].table(0)
    assert sums_are_whole(joined_rows(table), 0, len(table)) == whole


EXACT, CODED = (None, None), (4, 4)


@pytest.mark.parametrize(
    ("formats", "group", "paged", "int8"),
    [
        ([CODED], 4, False, True),
        ([(8, 2)], 1, False, True),
        ([EXACT, CODED, EXACT], 4, False, True),
        ([CODED], 5, False, False),
        ([CODED], 4, True, False),
        ([EXACT, (2, 2), CODED], 4, False, False),
        ([EXACT], 4, False, False),
        ([("uniform-rms", "uniform-rms")], 4, False, False),
        ([("fp8", "fp8")], 4, False, False),
        ([("fp8", 4)], 4, False, False),
    ],
)
def test_one_segment_of_codes_for_few_query_heads_is_multiplied_as_int8(
    formats, group, paged, int8
):
    layout = SegmentsLayout(
        tuple(
            segment([(64, 48)], *own, group=group, capacity=128, columns=32, paged=paged)
            for own in formats
        )
    )
    assert tuning_for(layout).int8 == int8


def test_few_kinds_of_head_are_cut_into_longer_pieces():
    pairs = [(16 * at, 64) for at in range(1, 6)]
    found = [
        tuning_for(SegmentsLayout((segment(pairs[:kinds], 4, 4, columns=32, group=group),))).pieces
        for group in (4, 8)
        for kinds in (1, 2, 4, 5)
    ]
    assert found == [12, 12, 12, 16, 16, 16, 16, 16]


def test_exact_tokens_at_an_end_are_no_kinds_that_ask_for_shares():
    pairs = [(16 * at, 64) for at in range(1, 6)]

    def shared(kinds, *formats):
        own = (segment(pairs[:kinds], *bits, columns=32) for bits in formats)
        return tuning_for(SegmentsLayout(tuple(own))).near > 0

    assert [shared(kinds, EXACT, CODED) for kinds in (2, 3)] == [False, True]
    assert [shared(kinds, EXACT, (8, "fp8")) for kinds in (2, 3)] == [False, True]


def test_planes_never_lie_in_two_groups_and_begin_on_16_bytes():
    for width in (16, 48, 112, 240, 256, 512):
        for columns in (16, 32, 48, 64, None):
            own = segment([(width, width)], 2, 4, columns=columns)
            for side in SegmentsLayout((own,)).sides(0, 0):
                assert sum(plane.width for plane in side.planes) == width
                for plane in side.planes:
                    last = plane.start + plane.width - 1
                    assert plane.start // (columns or width) == last // (columns or width)
                    assert plane.group == plane.start // (columns or width)
                    assert side.plane_at(plane) % 16 == 0
                assert side.nbytes % 16 == 0


@settings(max_examples=25)
@given(
    format_pairs,
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.tuples(st.integers(0, 60), st.integers(0, 60)),
    st.integers(0, 99),
)
def test_appending_is_packing(formats, sizes, starts, seed):
    layout = SegmentsLayout((segment([(48, 80)], *formats, capacity=70),), torch.float16)
    keys, values = (random(2, 70, width, seed=seed).half() for width in (48, 80))
    wanted = layout.packed([([keys.clone()], [values.clone()])])
    buffer = layout.packed([([keys], [values])])
    at = torch.tensor(starts, dtype=torch.int32)
    wiped_keys, wiped_values = keys.clone(), values.clone()
    for row, start in enumerate(starts):
        stop = min(70, start + sum(sizes))
        wiped_keys[row, start:stop] = 77.0
        wiped_values[row, start:stop] = -5.0
    buffer = layout.packed([([wiped_keys], [wiped_values])])
    for size in sizes:
        places = (at[:, None] + torch.arange(size)).clamp(max=69).long()[..., None]
        new = [x.gather(1, places.expand(-1, -1, x.shape[-1])) for x in (keys, values)]
        append(buffer, layout, 0, [new[0]], [new[1]], at)
        at = at + size
    assert torch.equal(buffer, wanted)


@settings(max_examples=25)
@given(
    format_pairs,
    st.lists(st.tuples(WIDTHS, WIDTHS), min_size=1, max_size=4),
    st.sampled_from([16, 32, None]),
    st.integers(0, 99),
)
def test_single_tokens_of_many_heads_are_read_where_they_lie(formats, widths, columns, seed):
    """Segment 1 of two; slots in any order, some of which it does not have."""
    both = [segment(widths, *bits, columns=columns, capacity=90) for bits in ((8, None), formats)]
    layout = SegmentsLayout(tuple(both), torch.float16)
    sides = [
        [random(2, 90, pair[side], seed=seed + n).half() for n, pair in enumerate(widths)]
        for side in (0, 1)
    ]
    buffer = layout.packed([sides, sides])
    generator = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(120, generator=generator)[:17] - 5 for _ in range(2)])
    there = (slots >= 0) & (slots < 90)
    places = addresses_of(layout, 1, slots)
    for side, found in enumerate(read(buffer, places)):
        heads = [layout.head(buffer, 1, head)[side] for head in range(len(widths))]
        whole = torch.cat(heads, dim=-1)
        wanted = whole.gather(1, slots.clamp(0, 89)[..., None].expand(-1, -1, whole.shape[-1]))
        assert torch.equal(found[there], wanted[there])
    blank = layout.packed([sides, [[torch.zeros_like(x) for x in side] for side in sides]])
    rows = [torch.cat(side, dim=-1) for side in sides]
    chosen = [x.gather(1, slots.clamp(0, 89)[..., None].expand(-1, -1, x.shape[-1])) for x in rows]
    write(blank, places, *chosen)
    for found, wanted in zip(read(blank, places), read(buffer, places), strict=True):
        assert torch.equal(found[there], wanted[there])


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="5"):
        segment([(32, 32)], 5, 4)
    with pytest.raises(UsageError, match="24"):
        segment([(32, 32)], 4, 4, columns=24)
    with pytest.raises(UsageError, match="same heads"):
        SegmentsLayout((segment([(32, 32)], 4, 4), segment([(32, 32), (16, 16)], 4, 4)))
    with pytest.raises(UsageError, match="same heads"):
        SegmentsLayout(())
    with pytest.raises(UsageError, match="float64"):
        SegmentsLayout((segment([(32, 32)], 4, 4),), torch.float64)
    layout = SegmentsLayout((segment([(32, 32)], 4, 4),))
    new = [random(2, 1, 16)]
    with pytest.raises(UsageError, match="32 columns"):
        append(layout.empty(), layout, 0, new, new, torch.zeros(2, dtype=torch.int32))
