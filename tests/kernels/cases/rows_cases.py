"""Unlike numbers of new tokens, over pages too, against float64 attention; run by test_cases.py."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.planes import RaggedLayout, of_sequence
from kvprof.kernels.prefill.reference import reference_rows
from kvprof.kernels.prefill.rows import RowsStep, rows_step
from kvprof.kernels.prefill.schedules import BlockRow
from kvprof.kernels.prefill.step import Tile, Tuning
from kvprof.kernels.tables import column
from tests.kernels.numbers import whole

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if GPU else [])]
LIMITS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.bfloat16: 1e-2}
widths = st.integers(1, 16).map(lambda n: 16 * n)
# The interpreter is slow, and tiles are small.
LONGEST = 40 if interpreted() else 90


def tuned(rows: int, keys: int) -> Tuning:
    """Small tiles, so that short prompts have many."""
    tile, small = Tile(rows, keys, 4, 2, 1), Tile(rows // 2, keys, 4, 2, 1)
    return Tuning(tile, small, small, small)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


class Chunk:
    """Random queries and a cache of a step, in pages in any order or in rows of their own.

    Sequences may share their first page, and every page has a gap behind it.
    """

    def __init__(self, step, dtype: torch.dtype, seed: int) -> None:
        heads, group, self.new, past, page, spare, shared = step
        self.lengths = [new + old for new, old in zip(self.new, past, strict=True)]
        self.starts = [0, *accumulate(self.new)]
        self.page, rows = page, len(self.new)
        generator = torch.Generator().manual_seed(seed)
        most = -(-max(self.lengths) // page) if page else 0
        pool = rows * most + 2 if page else rows
        keys, values = zip(*heads, strict=True)
        self.layout = RaggedLayout(keys, values, group, pool, page or max(self.lengths) + 3)
        states = [
            [torch.randn(pool, self.layout.capacity, w, generator=generator) for w in side]
            for side in (keys, values)
        ]
        packed = self.layout.packed(*states).to(dtype).view(pool, -1)
        gap = torch.full((pool, spare), float("nan"), dtype=dtype)
        # Sliced out of what is wider: the stride is not the row.
        self.buffer = torch.cat([packed, gap], dim=1).to(DEVICE)[:, : self.layout.row]
        self.query = torch.randn(
            self.starts[-1], self.layout.query_offsets[-1], generator=generator
        ).to(DEVICE, dtype)
        self.table = None
        if page:
            order = torch.randperm(pool, generator=generator)[: rows * most].view(rows, most)
            if shared:
                order[:, 0] = order[0, 0]
            self.table = order.int().contiguous().to(DEVICE)

    def step(self, tuning: Tuning | None = None, **more) -> RowsStep:
        paged = {"page_tokens": self.page, "rows": len(self.new)} if self.page else {}
        return rows_step(self.layout, DEVICE, self.buffer.dtype, tuning=tuning, **paged, **more)


@st.composite
def chunks(draw):
    rows = draw(st.integers(1, 4))
    new = [draw(st.sampled_from([0, 1, 1]) | st.integers(0, LONGEST)) for _ in range(rows)]
    new[draw(st.integers(0, rows - 1))] = draw(st.integers(1, LONGEST))
    past = [draw(st.sampled_from([0, 0]) | st.integers(0, LONGEST)) for _ in range(rows)]
    return (
        [(draw(widths), draw(widths)) for _ in range(draw(st.integers(1, 3)))],
        draw(st.integers(1, 8)),
        new,
        past,
        draw(st.sampled_from([0, 16, 48, 64, 96])),
        draw(st.sampled_from([0, 16, 112])),
        draw(st.booleans()),
    )


def summed_scores(made: Chunk, scaling: float, window: int, softcap: float, sinks) -> torch.Tensor:
    """Return log2 of the sum of exponentiated scores of every token and query head, in float64."""
    layout = made.layout
    found = torch.empty(len(made.query), layout.heads, layout.group, dtype=torch.float64)
    for head in range(layout.heads):
        stored = layout.head(made.buffer, head)[0].double()
        columns = slice(*layout.query_offsets[head : head + 2])
        for row, (begin, end) in enumerate(pairwise(made.starts)):
            keys = of_sequence(stored, row, made.table, made.lengths[row])
            for token in range(begin, end):
                position = made.lengths[row] - end + token
                seen = keys[max(0, position - window + 1) if window else 0 : position + 1]
                own = made.query[token, columns].double().view(layout.group, -1)
                scores = own @ seen.T * scaling
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[:, None]], dim=1)
                found[token, head] = torch.logsumexp(scores, dim=1) / math.log(2)
    return found.flatten(1).to(DEVICE)


@settings(max_examples=5 if GPU or interpreted() else 25)
@given(
    chunks(),
    st.sampled_from(DTYPES),
    st.sampled_from([(64, 32), (32, 64), (32, 16)]),
    st.sampled_from([0, 0, 1, 17, 40]),
    st.sampled_from([0.0, 0.0, 3.0]),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 10**6),
)
def test_any_widths_pages_and_new_tokens_give_attention(
    chunk, dtype, tile, window, softcap, sunk, behind, seed
):
    made = Chunk(chunk, dtype, seed)
    layout = made.layout
    sinks = torch.randn(layout.heads, layout.group).to(DEVICE) if sunk else None
    step = made.step(tuned(*tile))
    # Room behind the last sequence's tokens, as a captured graph has it.
    query = torch.cat([made.query, made.query.new_full((behind, made.query.shape[1]), 9.0)])
    cut = step.cut(whole(made.starts), whole(made.lengths), len(query))
    options = {"softcap": softcap, "sinks": sinks, "window": window, "table": made.table}
    logs = torch.full((len(query), layout.heads * layout.group), float("nan"), device=DEVICE)
    found = step.run(query, made.buffer, cut, 0.09, **options, logs=logs)[: made.starts[-1]]
    sums = summed_scores(made, 0.09, window, softcap, sinks)
    torch.testing.assert_close(logs[: made.starts[-1]].double(), sums, atol=2e-2, rtol=2e-3)
    assert logs[made.starts[-1] :].isnan().all()
    wanted = reference_rows(
        made.query, made.buffer, layout, made.starts, made.lengths, 0.09, **options
    )
    assert torch.isfinite(found).all()
    assert error(found, wanted) < LIMITS[dtype]


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(-9, 300)), min_size=1, max_size=40),
    st.sampled_from([1, 3, 4, 40]),
    st.sampled_from([16, 64]),
)
def test_every_tile_is_cut_once_and_the_longest_come_first(rows, group, height):
    new = [own for own, _ in rows]
    starts = [0, *accumulate(new)]
    lengths = [max(0, own + old) for own, old in rows]
    layout = RaggedLayout((16,), (16,), group, len(rows), 400)
    step = rows_step(layout, DEVICE, torch.float16, tuning=tuned(2 * height, 16))
    tokens = starts[-1] + 3
    cut = step.cut(whole(starts), whole(lengths), tokens)
    (number,) = (n for n, own in enumerate(cut.heights) if own == 2 * height)
    blocks = [tuple(row) for row in cut.blocks[number].tolist()]
    tiles = [block for block in blocks if block[column(BlockRow, "sequence")] >= 0]
    assert blocks[: len(tiles)] == tiles
    wanted = [
        BlockRow(row, 0, first, min(2 * height, own * group - first))
        for row, own in enumerate(new)
        for first in range(0, own * group, 2 * height)
    ]
    drop = column(BlockRow, "head")
    assert sorted(b[:drop] + b[drop + 1 :] for b in tiles) == sorted(
        (w.sequence, w.first, w.rows) for w in wanted
    )
    seen = [lengths[row] - new[row] + -(-(first + rows) // group) for row, _, first, rows in tiles]
    assert all(one >= other for one, other in pairwise(seen))


def test_layers_of_other_kinds_share_a_cut_and_pages_are_told_apart():
    heads = [(64, 48), (128, 112)]
    made = Chunk((heads[:1], 2, [5, 40], [33, 0], 16, 0, False), torch.float16, 1)
    other = Chunk((heads[1:], 2, [5, 40], [33, 0], 16, 0, False), torch.float16, 2)
    tuning = tuned(64, 32)
    steps = [one.step(tuning, pairs=heads) for one in (made, other)]
    cut = steps[0].cut(made.starts, made.lengths, 45)
    for one, step in zip((made, other), steps, strict=True):
        found = step.run(one.query, one.buffer, cut, 0.1, table=one.table)
        wanted = reference_rows(
            one.query, one.buffer, one.layout, one.starts, one.lengths, 0.1, table=one.table
        )
        assert error(found, wanted) < 2e-3
    lacking = made.step(tuning).cut(made.starts, made.lengths, 45)
    with pytest.raises(UsageError, match="pairs"):
        other.step(tuning).run(other.query, other.buffer, lacking, 0.1, table=other.table)


@pytest.mark.parametrize("sunk", [False, True])
def test_a_query_before_the_first_token_sums_up_nothing(sunk):
    """With a sink too, which is no token."""
    made = Chunk(([(32, 16)], 2, [5, 3], [0, 4], 16, 0, False), torch.float16, 6)
    lengths = [3, 7]  # two of the first sequence's five stand before its first token
    sinks = torch.randn(1, 2).to(DEVICE) if sunk else None
    step = made.step(tuned(32, 16))
    logs = torch.zeros(8, 2, device=DEVICE)
    cut = step.cut(made.starts, lengths, 8)
    found = step.run(made.query, made.buffer, cut, 0.1, sinks=sinks, table=made.table, logs=logs)
    assert (logs[:2] == float("-inf")).all()
    assert torch.isfinite(logs[2:]).all()
    assert not found[:2].any()


def test_what_does_not_fit_is_refused():
    made = Chunk(([(32, 16)], 2, [5, 4], [0, 3], 16, 0, False), torch.float16, 3)
    step = made.step()
    cut = step.cut(made.starts, made.lengths, 9)
    with pytest.raises(UsageError, match="page table"):
        step.run(made.query, made.buffer, cut, 0.1)
    with pytest.raises(UsageError):
        step.run(made.query, made.buffer[1:], cut, 0.1, table=made.table)
    with pytest.raises(UsageError):
        step.run(made.query[1:], made.buffer, cut, 0.1, table=made.table)
    with pytest.raises(UsageError, match="starts"):
        step.cut(made.lengths, made.lengths, 9)
    logs = torch.zeros(9, 1, device=DEVICE)
    with pytest.raises(UsageError, match="logs"):
        step.run(made.query, made.buffer, cut, 0.1, table=made.table, logs=logs)
    odd = made.buffer.new_zeros(len(made.buffer), made.layout.row + 4)
    with pytest.raises(UsageError, match="16 bytes"):
        step.run(made.query, odd, cut, 0.1, table=made.table)
    with pytest.raises(UsageError, match="24"):
        rows_step(made.layout, DEVICE, torch.float16, page_tokens=24, rows=2)
    assert step.run(
        made.query[:0], made.buffer, step.cut([0, 0, 0], [0, 0], 0), 0.1, table=made.table
    ).shape == (0, 32)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_graph_holds_cut_and_run():
    made = Chunk(([(80, 64), (48, 112)], 4, [90, 30], [0, 70], 64, 0, False), torch.bfloat16, 4)
    step = made.step()
    starts, lengths = whole(made.starts), whole(made.lengths)

    def attended() -> torch.Tensor:
        cut = step.cut(starts, lengths, len(made.query))
        return step.run(made.query, made.buffer, cut, 0.1, table=made.table)

    attended()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attended()
    for now, long in (([0, 10, 120], [70, 115]), ([0, 90, 120], [90, 100])):
        starts.copy_(whole(now))
        lengths.copy_(whole(long))
        graph.replay()
        wanted = reference_rows(
            made.query, made.buffer, made.layout, now, long, 0.1, table=made.table
        )
        assert error(found, wanted) < 1e-2
