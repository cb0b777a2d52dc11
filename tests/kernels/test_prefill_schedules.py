"""A prompt's work is cut into blocks that cover every row once and cost what they should."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.launch import prefill_step
from kvprof.kernels.prefill.paths import best_paths
from kvprof.kernels.prefill.schedules import SCHEDULES, Work, cut_blocks, makespan_over_mean
from kvprof.kernels.prefill.tuning import Tile, Tuning, head_tiles
from kvprof.kernels.tables import Chunks

widths = st.integers(1, 16).map(lambda n: 16 * n)
RAGGED = RaggedLayout((112, 96, 80, 64, 48, 48, 32, 32), (32, 48, 64, 64, 112, 80, 64, 48), 4, 1, 1)


def work_of(layout, tokens, past=None, window=0, tuning=None):
    tiles = head_tiles(layout, tuning or Tuning())
    return Work(layout, tokens, past or (0,) * layout.batch, tiles, window)


def slow_cost(work, sequence, head, first, rows):
    """Count scores tile by tile, key by key."""
    tile, total = work.tiles[head], 0
    for at in range(first, first + rows, tile.rows):
        tokens = [row // work.layout.group for row in range(at, min(at + tile.rows, first + rows))]
        positions = [work.past[sequence] + token for token in tokens]
        low = max(0, positions[0] - work.window + 1) if work.window else 0
        tiles = {key // tile.keys for key in range(low, max(0, positions[-1] + 1))}
        total += tile.rows * tile.keys * (len(tiles) + 1)
    return total * work.score_cost(head)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(widths, widths), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 700),
    st.lists(st.integers(-50, 900), min_size=1, max_size=2),
    st.sampled_from([0, 0, 1, 100]),
    st.sampled_from(SCHEDULES),
    st.integers(1, 40),
    st.data(),
)
def test_every_row_is_in_exactly_one_block(
    pairs, group, tokens, past, window, schedule, programs, data
):
    keys, values = zip(*pairs, strict=True)
    layout = RaggedLayout(keys, values, group, len(past), 2000)
    heads = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(pairs))), min_size=1))))
    step = prefill_step(
        layout,
        tokens,
        torch.device("cpu"),
        past=tuple(past),
        window=window,
        schedule=schedule,
        multiprocessors=programs,
        heads=heads,
    )
    seen = torch.zeros(len(past), len(pairs), tokens * group, dtype=torch.int64)
    table = step.table.tolist()
    for row, head, first, rows in table:
        assert rows > 0
        assert first + rows <= tokens * group
        seen[row, head, first : first + rows] += 1
    assert (seen[:, heads] == 1).all()
    assert int(seen.sum()) == seen[:, heads].numel()
    # Every launch has its own part of the table, and the kind of its heads.
    at = 0
    for launch in step.launches:
        assert launch.first == at
        at += launch.blocks
        for _, head, _, _ in table[launch.first : at]:
            own = launch.kind[: len(Chunks._fields)]
            assert (sum(own[:4]), sum(own[4:])) == pairs[head]
    assert at == len(table)
    assert len(step.launches) == len({pairs[head] for head in heads})


@settings(max_examples=30)
@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(-40, 300),
    st.sampled_from([0, 1, 90]),
    st.sampled_from(SCHEDULES),
    st.integers(1, 9),
)
def test_costs_are_what_the_kernel_visits(group, tokens, past, window, schedule, programs):
    layout = RaggedLayout((112, 16), (48, 128), group, 1, 700)
    tile = Tile(32, 16, 4, 2, 1)
    tuning = Tuning(tile, tile, tile, tile)
    work = work_of(layout, tokens, (past,), window, tuning=tuning)
    blocks = cut_blocks(schedule, work, (0, 1), programs, pieces=3)
    for item, cost in zip(blocks.items, blocks.costs, strict=True):
        assert cost == pytest.approx(slow_cost(work, *item))
        assert work.cost(item) == pytest.approx(cost)


def test_equal_blocks_are_tall_where_the_causal_length_is_short():
    work = work_of(RAGGED, 32768)
    blocks = cut_blocks("equal", work, range(8), 132, pieces=4)
    assert list(blocks.costs) == sorted(blocks.costs, reverse=True)
    mean = sum(blocks.costs) / len(blocks.costs)
    assert 490 <= len(blocks.costs) <= 560
    assert max(blocks.costs) < 1.3 * mean
    own = sorted(item[2:] for item in blocks.items if item[1] == 0)
    assert own[0][1] > 3 * own[-1][1]
    plain = cut_blocks("plain", work, range(8), 132, pieces=4)
    assert blocks.makespan_over_mean < plain.makespan_over_mean


def test_a_makespan_is_that_of_whoever_is_free_first():
    assert makespan_over_mean([4, 3, 2, 1], 2) == 1.0
    assert makespan_over_mean([1, 1, 1, 3], 2) == pytest.approx(4 / 3)
    assert makespan_over_mean([5], 4) == 4.0


def test_an_unknown_schedule_is_refused():
    work = work_of(RaggedLayout((64, 32), (64, 32), 2, 1, 1), 256)
    with pytest.raises(UsageError, match="schedule"):
        cut_blocks("none", work, (0,), 1, pieces=1)


def test_each_class_takes_its_faster_path():
    layout = RaggedLayout((112, 64, 64), (48, 64, 80), 4, 1, 1)
    price = {("triton", 0): 3.0, ("triton", 1): 2.0, ("triton", 2): 1.0}

    def seconds(paths):
        own = [(path, head) for head, path in enumerate(paths) if path is not None]
        return sum(price.get(key, 2.0) for key in own)

    mixed = best_paths(layout, seconds)
    assert mixed.paths == ("library", "triton", "triton")
    assert mixed.seconds == {"triton": 6.0, "library": 6.0, "mixed": 5.0}
    assert best_paths(RaggedLayout((512,), (64,), 1, 1, 1), seconds).paths == ("triton",)
