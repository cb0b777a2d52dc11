"""Tokens moved, and read back, by one launch against torch, bit by bit; run by test_cases.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized import moving
from kvprof.kernels.quantized.append import addresses_of, read, write
from kvprof.kernels.quantized.codes import e4m3
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout
from kvprof.kernels.quantized.moving import token_move, token_restore
from tests.kernels.column_runs import format_pairs, runs, segment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (
    [torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float16, torch.float32]
)
few = settings(max_examples=10 if DEVICE.type == "cuda" else 40)
narrow = st.integers(1, 9).map(lambda n: 16 * n)


@st.composite
def layouts(draw):
    """A segment at full precision, and one of the first columns in any format."""
    heads, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    wide = [tuple(draw(narrow) for _ in range(heads)) for _ in range(2)]
    low = [tuple(draw(st.integers(1, n // 16)) * 16 for n in side) for side in wide]
    formats = draw(format_pairs)
    columns = draw(st.sampled_from([16, 32, 48, 64, None]))
    rooms = [draw(st.integers(1, 300)) for _ in range(2)]
    return SegmentsLayout(
        (
            Segment(RaggedLayout(*wide, 2, batch, rooms[0])),
            segment(
                list(zip(*low, strict=True)),
                *formats,
                batch=batch,
                capacity=rooms[1],
                columns=columns,
                of=lambda width: draw(runs(width)),
            ),
        ),
        draw(st.sampled_from(DTYPES)),
    )


def anything(layout: SegmentsLayout, generator: torch.Generator) -> torch.Tensor:
    """Return a buffer of random bytes, and of numbers where a segment is at full precision."""
    buffer = torch.randint(0, 256, (layout.nbytes,), generator=generator, dtype=torch.uint8)
    end = layout.offsets[1][0]
    numbers = torch.randn(layout.batch * end // layout.dtype.itemsize, generator=generator)
    # Groups of one number too, and such as float16 makes nothing of.
    scale = 10.0 ** torch.randint(-6, 3, (len(numbers) // 16 + 1, 1), generator=generator)
    numbers = (numbers * scale.expand(-1, 16).flatten()[: len(numbers)]).to(layout.dtype)
    buffer.view(layout.batch, -1)[:, :end] = numbers.view(torch.uint8).view(layout.batch, -1)
    return buffer.to(DEVICE)


def slots_of(layout: SegmentsLayout, segment: int, data, *, outside: bool) -> torch.Tensor:
    room = layout.segments[segment].layout.capacity
    inside = st.integers(0, room - 1)
    beyond = st.sampled_from([-1, room, room + 70]) if outside else st.nothing()
    found = [data.draw(inside | beyond) for _ in range(layout.batch)]
    return torch.tensor(found, dtype=torch.int32, device=DEVICE)


def first_columns(layout: SegmentsLayout, rows: torch.Tensor, side: int, segment: int):
    """Return what a segment keeps of rows of segment 0, heads side by side."""
    wide, kept = (
        (own.layout.value_widths if side else own.layout.key_widths)
        for own in (layout.segments[0], layout.segments[segment])
    )
    parts = torch.split(rows, list(wide), dim=-1)
    return torch.cat([p[..., :width] for p, width in zip(parts, kept, strict=True)], dim=-1)


@few
@given(layouts(), st.integers(0, 10**6), st.data())
def test_a_move_between_segments_leaves_the_bytes_that_torch_leaves(layout, seed, data):
    buffer = anything(layout, torch.Generator().manual_seed(seed))
    origins = slots_of(layout, 0, data, outside=False)
    targets = slots_of(layout, 1, data, outside=True)
    wanted = buffer.clone()
    found = read(wanted, addresses_of(layout, 0, origins[:, None]))
    pair = [first_columns(layout, own.to(layout.dtype), i, 1) for i, own in enumerate(found)]
    write(wanted, addresses_of(layout, 1, targets[:, None]), *pair)
    token_move(layout, 1, 0, DEVICE).run(buffer, None, origins, targets)
    assert torch.equal(buffer, wanted)


@few
@given(layouts(), st.integers(0, 10**6), st.booleans(), st.booleans(), st.data())
def test_a_token_from_planes_leaves_the_bytes_that_torch_leaves(layout, seed, cut, straight, data):
    generator = torch.Generator().manual_seed(seed)
    buffer, batch = anything(layout, generator), layout.batch
    segment = 1 if straight else 0
    wide = layout.segments[0].layout
    planes = RaggedLayout(
        wide.key_widths, wide.value_widths, 2, batch, data.draw(st.integers(1, 3))
    )
    numbers = torch.randn(planes.elements, generator=generator).to(DEVICE, layout.dtype)
    origins = torch.randint(planes.capacity, (batch,), generator=generator).to(DEVICE)
    targets = slots_of(layout, segment, data, outside=True)
    low = torch.rand(batch, generator=generator).to(DEVICE) < 0.5 if cut else None
    rows = torch.arange(batch, device=DEVICE)
    pair = []
    for side in (0, 1):
        heads = [planes.head(numbers, head)[side][rows, origins] for head in range(wide.heads)]
        if low is not None:
            last = layout.segments[1].layout
            for head, kept in enumerate(last.value_widths if side else last.key_widths):
                heads[head][:, kept:].masked_fill_(low[:, None], 0)
        pair.append(first_columns(layout, torch.cat(heads, dim=-1)[:, None], side, segment))
    wanted = buffer.clone()
    write(wanted, addresses_of(layout, segment, targets[:, None]), *pair)
    token_move(layout, segment, planes, DEVICE).run(buffer, numbers, origins, targets, low)
    assert torch.equal(buffer, wanted)


@few
@given(layouts(), st.integers(0, 10**6), st.booleans(), st.data())
def test_tokens_from_a_pool_of_pages_leave_the_bytes_that_torch_leaves(layout, seed, gaps, data):
    generator = torch.Generator().manual_seed(seed)
    buffer, wide = anything(layout, generator), layout.segments[0].layout
    segment = data.draw(st.integers(0, 1))
    own = layout.segments[segment]
    pages, room = data.draw(st.integers(1, 3)), own.layout.capacity
    planes = RaggedLayout(
        wide.key_widths, wide.value_widths, 2, pages, data.draw(st.integers(1, 3))
    )
    numbers = torch.randn(planes.elements, generator=generator).to(DEVICE, layout.dtype)
    # Several of a row, those of one place of a block beside one another, in any order.
    slots = []
    for _ in range(layout.batch):
        places = data.draw(
            st.lists(st.integers(0, (room - 1) // own.slots), unique=True, max_size=4)
        )
        together = [data.draw(st.permutations(range(own.slots))) for _ in places]
        some = [data.draw(st.integers(1, own.slots)) for _ in places]
        slots.append(
            [
                place * own.slots + slot
                for place, order, count in zip(places, together, some, strict=True)
                for slot in order[:count]
                if place * own.slots + slot < room
            ]
        )
    flat = [row * room + slot for row, own_slots in enumerate(slots) for slot in own_slots]
    targets = torch.tensor([*flat, -1, layout.batch * room], dtype=torch.int64, device=DEVICE)
    origins = torch.randint(pages * planes.capacity, (len(targets),), generator=generator)
    origins = origins.to(DEVICE)
    heads = [planes.head(numbers, head) for head in range(wide.heads)]
    came = [torch.cat([head[side].flatten(0, 1) for head in heads], dim=-1) for side in (0, 1)]
    wanted, done = buffer.clone(), 0
    for row, own_slots in enumerate(slots):
        if not own_slots:
            continue
        count = len(own_slots)
        where = torch.full((layout.batch, count), -1, device=DEVICE)
        where[row] = torch.tensor(own_slots, device=DEVICE)
        pair = []
        for side in (0, 1):
            rows = came[side][origins[done : done + count]]
            given_rows = rows.new_zeros(layout.batch, count, rows.shape[-1])
            given_rows[row] = rows
            pair.append(first_columns(layout, given_rows, side, segment))
        write(wanted, addresses_of(layout, segment, where), *pair)
        done += count
    if gaps:
        far = numbers.new_zeros(pages, planes.row + 24)
        far[:, : planes.row] = numbers.view(pages, -1)
        numbers = far
    token_move(layout, segment, planes, DEVICE).run(buffer, numbers, origins, targets, pooled=True)
    assert torch.equal(buffer, wanted)


def test_a_long_list_goes_in_several_launches(monkeypatch):
    """Of which one may begin in the middle of a place."""
    monkeypatch.setattr(moving, "_MOST", 3)
    layout = SegmentsLayout(
        (segment([(32, 16)] * 2, 4, 2, batch=2, capacity=128, columns=32, paged=True),), DTYPES[0]
    )
    planes = RaggedLayout((32, 32), (16, 16), 2, 1, 16)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(planes.elements, generator=generator).to(DEVICE, DTYPES[0])
    found = torch.zeros(layout.nbytes, dtype=torch.uint8, device=DEVICE)
    targets = torch.arange(5, 15, device=DEVICE)
    origins = torch.arange(10, device=DEVICE)
    move = token_move(layout, 0, planes, DEVICE)
    move.run(found, numbers, origins, targets, pooled=True)
    wanted = torch.zeros_like(found)
    for origin, target in zip(origins, targets, strict=True):
        move.run(wanted, numbers, origin[None], target[None], pooled=True)
    assert torch.equal(found, wanted)


@st.composite
def pools(draw):
    """A pool of pages in any format."""
    heads, formats = draw(st.integers(1, 3)), draw(format_pairs)
    widths = [(draw(narrow), draw(narrow)) for _ in range(heads)]
    columns = draw(st.sampled_from([16, 32, 48, 64, None]))
    own = segment(
        widths,
        *formats,
        batch=draw(st.integers(1, 4)),
        capacity=128 * draw(st.integers(1, 2)),
        columns=columns,
        of=lambda width: draw(runs(width)),
        paged=True,
    )
    return SegmentsLayout((own,), draw(st.sampled_from(DTYPES)))


@few
@given(layouts() | pools(), st.integers(0, 10**6), st.booleans(), st.data())
def test_tokens_come_back_into_planes_as_torch_reads_them(layout, seed, gaps, data):
    generator = torch.Generator().manual_seed(seed)
    number = data.draw(st.integers(0, len(layout.segments) - 1))
    own = layout.segments[number].layout
    if layout.paged:
        buffer = torch.randint(0, 256, (layout.nbytes,), generator=generator, dtype=torch.uint8)
        buffer = buffer.to(DEVICE)
    else:
        buffer = anything(layout, generator)
    pool = own.capacity * layout.batch
    slots = torch.randint(-1, pool + 1, (data.draw(st.integers(0, 24)),), generator=generator)
    slots = slots.to(DEVICE)
    rows, room = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 27))
    wide = data.draw(st.sampled_from([0, 16, 48]))  # columns that the segment lacks
    key_widths, value_widths = (
        tuple(width + wide for width in side) for side in (own.key_widths, own.value_widths)
    )
    planes = RaggedLayout(key_widths, value_widths, 2, rows, room)
    order = torch.randperm(rows * room + 24, generator=generator) - 1
    targets = order[: len(slots)].to(DEVICE)
    blank = torch.randn(planes.elements, generator=generator).to(DEVICE, layout.dtype)
    spread_buffer = buffer
    if gaps and layout.batch > 1:
        spread_buffer = torch.cat([buffer.view(layout.batch, -1)] * 2, dim=-1)
        spread_buffer[:, layout.row :] = 0
    found, wanted = blank.clone(), blank.clone()
    restore = token_restore(layout, number, planes, DEVICE)
    restore.run(found, spread_buffer, slots, targets, rows)
    there = (slots >= 0) & (slots < pool) & (targets >= 0) & (targets < rows * room)
    rows, at = slots[there] // own.capacity, targets[there]
    for row in range(layout.batch):
        mine = rows == row
        within = slots[there][mine] % own.capacity
        # Slots of pages count on; else all rows are read at the slots of one.
        where = (
            (row * own.capacity + within)[None] if layout.paged else within.expand(layout.batch, -1)
        )
        for side, states in enumerate(read(buffer, addresses_of(layout, number, where))):
            widths = (own.key_widths, own.value_widths)[side]
            for head, part in enumerate(
                torch.split(states[0 if layout.paged else row], list(widths), -1)
            ):
                begin, part = 0, part.to(layout.dtype)
                for plane in planes.planes(wanted, head)[side]:
                    piece = part[:, begin : begin + plane.shape[-1]]
                    plane[at[mine] // room, at[mine] % room, : piece.shape[-1]] = piece
                    begin += plane.shape[-1]
    whole = {2: torch.int16, 4: torch.int32}[layout.dtype.itemsize]
    # What is no number has many forms.
    both = found.isnan() & wanted.isnan()
    assert torch.equal(*(x.masked_fill(both, 0).view(whole) for x in (found, wanted)))


def test_a_million_tokens_come_back_by_one_launch(monkeypatch):
    """CUDA counts no more than 65,535 programs in a grid's second direction."""
    layout = SegmentsLayout((segment([(288, 320)], 4, 4, columns=None),), DTYPES[0])
    grids = []

    def watched(kernel, grid):
        grids.append(grid)
        return lambda *given, **named: None

    monkeypatch.setattr(moving, "launching", watched)
    restore = token_restore(layout, 0, layout.segments[0].layout, DEVICE)
    blank = torch.zeros(1, dtype=DTYPES[0], device=DEVICE)
    slots = torch.zeros(2**20, dtype=torch.int64, device=DEVICE)
    restore.run(blank, layout.empty(DEVICE), slots, slots)
    assert grids == [(2**20, 2)]


def test_every_e4m3_and_what_lies_between():
    dtype = DTYPES[-1]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    odd = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 464.0, 465.0, 1e4, -1e4, torch.inf, -torch.inf])
    numbers = torch.cat([codes, between, between * 1.01, between * 0.99, odd]).to(dtype)
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 128)]).to(DEVICE)
    count = len(numbers) // 128
    planes = RaggedLayout((64,), (64,), 1, count, 1)
    layout = SegmentsLayout((Segment(planes, "fp8", "fp8"),), dtype)
    buffer = layout.empty(DEVICE)
    zeros = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    token_move(layout, 0, planes, DEVICE).run(buffer, numbers, zeros, zeros)
    for side, blocks in zip(layout.sides(0, 0), layout.blocks(buffer, 0, 0), strict=True):
        half = numbers.view(count, 2, 64)[:, int(side.values)]
        stored = side.codes(blocks, side.planes[0])[:, 0, 0, 0]
        assert torch.equal(stored, e4m3(half))


def test_what_cannot_be_moved_is_refused():
    planes = RaggedLayout((32,), (64,), 1, 1, 9)
    full, coded = Segment(planes), Segment(planes, 4, None)
    layout = SegmentsLayout((full, coded), DTYPES[0])
    with pytest.raises(UsageError, match="segment 1 is quantised"):
        token_move(layout, 0, 1, DEVICE)
    with pytest.raises(UsageError):
        token_move(layout, 1, RaggedLayout((32,), (48,), 1, 1, 1), DEVICE)
    if DEVICE.type == "cpu":
        layout = SegmentsLayout((full, coded), torch.bfloat16)
        slot = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(UsageError, match="interpreter"):
            token_move(layout, 1, 0, DEVICE).run(layout.empty(), None, slot, slot)
