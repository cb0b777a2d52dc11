"""Decoding from pages of one stretch against float64; run by test_cases.py and test_pages_cpu.py.

Pages lie in any order with a gap of NaN behind each, are shared by sequences, and what a table
names behind a sequence's last page is no page.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.decode.reference import reference_decode
from kvprof.kernels.decode.step import Tuning, decode_step
from kvprof.kernels.dispatch import interpreted, uses_triton
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized.append import addresses_of, read, write
from kvprof.kernels.quantized.launch import tuning_for
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout
from kvprof.kernels.quantized.moving import token_move
from kvprof.kernels.quantized.reference import reference_segments
from kvprof.kernels.quantized.step import segments_step
from kvprof.kernels.reconstruct.rebuild_config import Tuning as RebuildTuning
from kvprof.kernels.reconstruct.reference import reference_reconstruct
from kvprof.kernels.reconstruct.step import reconstruct_step
from tests.kernels.column_runs import format_pairs, segment
from tests.kernels.numbers import error, whole

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16 if GPU else torch.float32]
LIMITS = {torch.float16: 3e-3, torch.float32: 1e-5, torch.bfloat16: 1e-2}
widths = st.integers(1, 16).map(lambda n: 16 * n)
narrow = st.integers(1, 7).map(lambda n: 16 * n)
# On a GPU every example compiles a kernel of its own, and the interpreter is slow.
EXAMPLES = 4 if GPU else 2 if interpreted() else 25
few = settings(max_examples=EXAMPLES)
# Interpreted, an example of many tiles takes half a minute.
LONGEST, TILES = (90, [8192]) if interpreted() else (200, [1024, 8192])


class Pool:
    """Pages, and a table of them, for sequences of some lengths."""

    def __init__(self, lengths: list[int], page: int, shared: bool, seed: int) -> None:
        self.lengths, self.page = lengths, page
        self.generator = torch.Generator().manual_seed(seed)
        own = [-(-length // page) for length in lengths]
        self.most = max(own) + int(torch.randint(2, (1,), generator=self.generator))
        self.pages = sum(own) + 2
        order = torch.randperm(self.pages, generator=self.generator).int()
        # What no sequence has is named as no page.
        table = torch.full((len(lengths), self.most), 2**30, dtype=torch.int32)
        for row, count in enumerate(own):
            table[row, :count] = order[sum(own[:row]) : sum(own[: row + 1])]
            if shared:
                table[row, 0] = table[0, 0]
        self.table = table.to(DEVICE)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def sides(self, layout: RaggedLayout) -> list[list[torch.Tensor]]:
        return [
            [self.random(self.pages, self.page, width) for width in side]
            for side in (layout.key_widths, layout.value_widths)
        ]

    def with_gaps(self, packed: torch.Tensor, gap: int) -> torch.Tensor:
        """Return pages with a gap behind each: sliced out of what is wider."""
        rows = packed.view(self.pages, -1)
        nothing = packed.new_full(
            (self.pages, gap), float("nan") if packed.is_floating_point() else 255
        )
        return torch.cat([rows, nothing], dim=1).to(DEVICE)[:, : rows.shape[1]]

    def slots(self, row: int) -> list[int]:
        """Return where each of a sequence's tokens lies."""
        table = self.table[row].tolist()
        return [
            table[token // self.page] * self.page + token % self.page
            for token in range(self.lengths[row])
        ]


@st.composite
def pools(draw, pages):
    lengths = [draw(st.integers(1, LONGEST)) for _ in range(draw(st.integers(1, 3)))]
    return Pool(lengths, draw(pages), draw(st.booleans()), draw(st.integers(0, 10**6)))


gaps = st.sampled_from([0, 32, 448])


@few
@given(
    pools(st.sampled_from([16, 32, 48, 64, 80, 128])),
    st.lists(st.tuples(widths, widths), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(DTYPES),
    gaps,
    st.sampled_from(TILES),
    st.booleans(),
    st.booleans(),
)
def test_decoding_from_pages_is_attention(pool, heads, group, dtype, gap, tile, windows, sunk):
    keys, values = zip(*heads, strict=True)
    layout = RaggedLayout(keys, values, group, pool.pages, pool.page)
    buffer = pool.with_gaps(layout.packed(*pool.sides(layout)).to(dtype), gap)
    rows = len(pool.lengths)
    query = pool.random(rows, layout.query_offsets[-1]).to(DEVICE, dtype)
    sinks = pool.random(layout.heads, group).to(DEVICE) if sunk else None
    starts = [(7 * length + 3) % length for length in pool.lengths] if windows else None
    step = decode_step(
        layout,
        DEVICE,
        tuning=Tuning(pieces=3, tile=tile),
        multiprocessors=2,
        page_tokens=pool.page,
        rows=rows,
    )
    cut = step.cut(whole(pool.lengths), None if starts is None else whole(starts))
    found = step.run(query, buffer, cut, 0.09, sinks=sinks, table=pool.table)
    wanted = reference_decode(
        query, buffer, layout, pool.lengths, 0.09, sinks=sinks, starts=starts, table=pool.table
    )
    assert error(found, wanted) < LIMITS[dtype]


@pytest.mark.parametrize("page", [16, 48])
def test_what_a_tile_over_several_pages_leaves_looks_for_its_pages_too(page):
    """Tiles of 32 tokens, whose rest is taken 16 at a time, which a page holds whole."""
    pool = Pool([40, 1], page, False, 0)
    layout = RaggedLayout((16,), (128,), 1, pool.pages, page)
    buffer = layout.packed(*pool.sides(layout)).to(DTYPES[0]).to(DEVICE)
    query = pool.random(2, layout.query_offsets[-1]).to(DEVICE, DTYPES[0])
    step = decode_step(
        layout,
        DEVICE,
        tuning=Tuning(pieces=3, tile=8192),
        multiprocessors=2,
        page_tokens=page,
        rows=2,
    )
    found = step.run(query, buffer, step.cut(whole(pool.lengths)), 0.09, table=pool.table)
    wanted = reference_decode(query, buffer, layout, pool.lengths, 0.09, table=pool.table)
    assert error(found, wanted) < LIMITS[DTYPES[0]]


def paged_segment(pool: Pool, heads, group: int, bits, columns) -> Segment:
    batch, capacity = pool.pages, pool.page
    return segment(
        heads, *bits, group=group, batch=batch, capacity=capacity, columns=columns, paged=True
    )


@few
@given(
    pools(st.sampled_from([128, 256, 384])),
    st.lists(st.tuples(narrow, narrow), min_size=1, max_size=3),
    st.integers(1, 9),
    format_pairs,
    st.sampled_from([16, 32, 64, None]),
    st.sampled_from(DTYPES),
    gaps,
    st.booleans(),
    st.booleans(),
)
def test_decoding_from_quantised_pages_is_attention(
    pool, heads, group, bits, columns, dtype, gap, sunk, int8
):
    layout = SegmentsLayout((paged_segment(pool, heads, group, bits, columns),), dtype)
    states = [[x.to(dtype) for x in side] for side in pool.sides(layout.segments[0].layout)]
    buffer = pool.with_gaps(layout.packed([states]), gap)
    rows = len(pool.lengths)
    query = pool.random(rows, layout.widest.query_offsets[-1]).to(DEVICE, dtype)
    sinks = pool.random(layout.heads, group).to(DEVICE) if sunk else None
    tuning = replace(tuning_for(layout), int8=int8)
    step = segments_step(layout, DEVICE, multiprocessors=3, rows=rows, tuning=tuning)
    found = step.run(
        query, buffer, step.cut(whole([pool.lengths])), 0.09, sinks=sinks, table=pool.table
    )
    wanted = reference_segments(
        query, buffer, layout, [pool.lengths], 0.09, sinks=sinks, table=pool.table
    )
    assert error(found, wanted) < (1e-2 if GPU else max(4e-3, LIMITS[dtype]))


@pytest.mark.parametrize(
    ("bits", "page", "int8"),
    [
        (8, 32, False), (8, 32, True), ("fp8", 32, False), (4, 64, False), (4, 64, True),
        (4, 192, True), (None, 32, False),
    ],
)  # fmt: skip
def test_the_smallest_quantised_pages_and_odd_ones(bits, page, int8):
    pool = Pool([page, 3 * page - 5, 1], page, False, 1)
    layout = SegmentsLayout((paged_segment(pool, [(64, 48)], 4, (bits, bits), 32),), torch.float16)
    states = [[x.half() for x in side] for side in pool.sides(layout.segments[0].layout)]
    buffer = pool.with_gaps(layout.packed([states]), 32)
    query = pool.random(3, layout.widest.query_offsets[-1]).to(DEVICE, torch.float16)
    tuning = replace(tuning_for(layout), int8=int8)
    step = segments_step(layout, DEVICE, multiprocessors=1, rows=3, tuning=tuning)
    found = step.run(query, buffer, step.cut([pool.lengths]), 0.1, table=pool.table)
    wanted = reference_segments(query, buffer, layout, [pool.lengths], 0.1, table=pool.table)
    assert error(found, wanted) < 1e-2


@few
@given(
    pools(st.sampled_from([128, 256])),
    st.lists(st.tuples(narrow, narrow), min_size=1, max_size=2),
    format_pairs,
    st.sampled_from([16, 32, None]),
    gaps,
)
def test_tokens_get_into_quantised_pages_and_out(pool, heads, bits, columns, gap):
    """All at once as for a prompt, the last of each sequence by the launch of a decoding step."""
    layout = SegmentsLayout((paged_segment(pool, heads, 2, bits, columns),), torch.float16)
    own = layout.segments[0].layout
    states = [[x.half() for x in side] for side in pool.sides(own)]
    whole_pool = torch.full((pool.pages, layout.row + gap), 17, dtype=torch.uint8, device=DEVICE)
    buffer = whole_pool[:, : layout.row]
    wanted = layout.packed([states]).to(DEVICE).view(pool.pages, -1)
    # Sequences that share a page would write it twice.
    slots = sorted({slot for row in range(len(pool.lengths)) for slot in pool.slots(row)})
    places = torch.tensor([[*slots, -1, pool.pages * pool.page, 2**40]], device=DEVICE)
    rows = [torch.cat(side, dim=-1).flatten(0, 1).to(DEVICE) for side in states]
    taken = [side[places.clamp(0, len(side) - 1)] for side in rows]
    there = torch.tensor(slots, device=DEVICE)
    at = addresses_of(layout, 0, places, stride=whole_pool.stride(0))
    write(buffer, at, *taken)
    assert (whole_pool[:, layout.row :] == 17).all()
    for found, full in zip(
        read(buffer, at), read(wanted, addresses_of(layout, 0, places)), strict=True
    ):
        assert torch.equal(found[:, : len(slots)], full[:, : len(slots)])
    for side in range(2):
        found, full = (
            torch.cat([layout.head(cache, 0, head)[side] for head in range(own.heads)], dim=-1)
            for cache in (buffer, wanted)
        )
        assert torch.equal(found.flatten(0, 1)[there], full.flatten(0, 1)[there])
    if not uses_triton(DEVICE):
        return
    # Each once, as a sequence shares no page that it writes; those that share bytes side by side.
    last = torch.tensor(
        sorted({pool.slots(row)[-1] for row in range(len(pool.lengths))}), device=DEVICE
    )
    planes = RaggedLayout(own.key_widths, own.value_widths, 2, len(last), 3)
    fresh = [
        [pool.random(len(last), 3, w).half() for w in side]
        for side in (own.key_widths, own.value_widths)
    ]
    again = buffer.clone()
    one_by_one = addresses_of(layout, 0, last[:, None])
    write(
        again, one_by_one, *(torch.cat([x[:, 1:2] for x in side], -1).to(DEVICE) for side in fresh)
    )
    ones = torch.ones(len(last), dtype=torch.int32, device=DEVICE)
    token_move(layout, 0, planes, DEVICE).run(buffer, planes.packed(*fresh).to(DEVICE), ones, last)
    assert torch.equal(buffer, again)
    assert (whole_pool[:, layout.row :] == 17).all()


@few
@given(
    pools(st.sampled_from([16, 48, 64, 128])),
    st.lists(st.tuples(narrow, narrow), min_size=1, max_size=2),
    st.sampled_from([(1, 4), (2, 3), (4, 1)]),
    st.sampled_from([(64, 64), (80, 40), (40, 8)]),
    st.sampled_from(DTYPES),
    gaps,
    st.booleans(),
    st.booleans(),
)
def test_keys_rebuilt_from_pages_give_attention(
    pool, groups, heads, head, dtype, gap, kept, per_row
):
    keys, values = zip(*groups, strict=True)
    layout = RaggedLayout(keys, values, heads[0] * heads[1], pool.pages, pool.page)
    buffer = pool.with_gaps(layout.packed(*pool.sides(layout)).to(dtype), gap)
    rows, most = len(pool.lengths), max(pool.lengths)
    query = pool.random(rows, len(keys) * heads[0] * heads[1] * head[0]).to(DEVICE, dtype)
    up = [pool.random(heads[0] * head[0], w) * w**-0.5 for w in keys]
    up = [matrix.to(DEVICE, dtype) for matrix in up]
    angles = 3 * pool.random(*([rows] if per_row else []), most, head[1] // 2).to(DEVICE)
    step = reconstruct_step(
        layout,
        up,
        head[0],
        heads[0],
        DEVICE,
        tuning=RebuildTuning(pieces=3, height=32, columns=32, kept=kept),
        multiprocessors=2,
        rotary_dim=head[1],
        page_tokens=pool.page,
        rows=rows,
        most_tokens=most,
    )
    # A length beyond what there are pages and angles for is cut.
    promised = [length if length < most else length + 999 for length in pool.lengths]
    found = step.run(
        query, buffer, step.cut(whole(promised)), angles.cos(), angles.sin(), 0.2, table=pool.table
    )
    wanted = reference_reconstruct(
        query,
        buffer,
        layout,
        up,
        heads[0],
        pool.lengths,
        angles.cos(),
        angles.sin(),
        0.2,
        table=pool.table,
    )
    assert error(found, wanted) < 1.5 * LIMITS[dtype]


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError):
        Segment(RaggedLayout((32,), (32,), 2, 4, 96), 4, 4, paged=True)
    pool = Pool([70, 9], 64, False, 2)
    pages = paged_segment(pool, [(32, 32)], 2, (4, 4), 32)
    with pytest.raises(UsageError, match="segment"):
        SegmentsLayout((pages, pages), torch.float16)
    layout = SegmentsLayout((pages,), torch.float16)
    with pytest.raises(UsageError, match="rows"):
        segments_step(layout, DEVICE)
    step = segments_step(layout, DEVICE, multiprocessors=1, rows=2)
    query = pool.random(2, 64).to(DEVICE, torch.float16)
    buffer = layout.empty(DEVICE)
    cut = step.cut([pool.lengths])
    with pytest.raises(UsageError, match="page table"):
        step.run(query, buffer, cut, 0.1)
    with pytest.raises(UsageError):
        step.run(query, buffer, cut, 0.1, table=pool.table[:1])
    with pytest.raises(UsageError):
        step.run(query, buffer.view(pool.pages, -1)[:, 16:], cut, 0.1, table=pool.table)
    plain = RaggedLayout((32,), (32,), 2, pool.pages, 64)
    up = [pool.random(16, 32).to(DEVICE)]
    with pytest.raises(UsageError, match="rows"):
        reconstruct_step(plain, up, 16, 1, DEVICE, page_tokens=64)
    short = reconstruct_step(plain, up, 16, 1, DEVICE, page_tokens=64, rows=2, most_tokens=500)
    angles = pool.random(500, 8).to(DEVICE)
    with pytest.raises(UsageError, match="500"):
        short.run(
            pool.random(2, 32).to(DEVICE),
            torch.zeros(plain.elements, device=DEVICE),
            short.cut(pool.lengths),
            angles,
            angles,
            0.1,
            table=pool.table,
        )
