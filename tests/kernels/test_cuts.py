"""Work is cut into whole pieces of nearly equal cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.decode.cuts import (
    COST_PER_TOKEN,
    DEEP_TILES,
    LEAST_TILES,
    Tuning,
    at_once,
    checked_lengths,
    configs,
    equal_shares,
    most_pieces,
    pieces_for,
    predicted_makespan_over_mean,
    tile_height,
)
from kvprof.kernels.planes import RaggedLayout

widths = st.integers(1, 16).map(lambda n: 16 * n)
RAGGED = ((112, 32), (96, 48), (80, 64), (64, 64), (48, 112), (48, 80), (32, 64), (32, 48))


@given(
    st.lists(st.tuples(widths, widths), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=3),
    st.integers(1, 300),
)
def test_every_visible_token_of_every_head_is_in_exactly_one_piece(pairs, rows, pieces):
    keys, values = zip(*pairs, strict=True)
    starts, lengths = zip(*(sorted(row) for row in rows), strict=True)
    layout = RaggedLayout(keys, values, 4, len(lengths), 5000)
    cut = equal_shares(layout, lengths, pieces, 8192, starts)
    assert sum(count for _, count in cut.parts) == len(cut.items)
    # The device has room for no more than this.
    assert len(cut.items) <= pieces + len(cut.parts)
    for number, (first, count) in enumerate(cut.parts):
        row, head = divmod(number, layout.heads)
        at = starts[row]
        for item in cut.items[first : first + count]:
            assert item[:3] == (row, head, at)
            assert item[3] > at or starts[row] == lengths[row]
            assert configs(layout)[item[4]] == (keys[head], values[head])
            at = item[3]
        assert at == lengths[row]


def test_pieces_of_a_long_context_cost_the_same_whatever_their_head_is_wide():
    layout = RaggedLayout((112, 32, 64), (32, 48, 64), 4, 2, 100_000)
    cut = equal_shares(layout, [100_000, 60_000], 512, 8192)
    costs = [
        (stop - start) * (sum(configs(layout)[kind]) + COST_PER_TOKEN)
        for _, _, start, stop, kind in cut.items
    ]
    assert 490 <= len(costs) <= 534
    assert max(costs) / (sum(costs) / len(costs)) < 1.1


def test_tiles_hold_as_much_whatever_their_width():
    for key, value in ((16, 16), (64, 64), (112, 32), (256, 256)):
        height = tile_height(key, value, 8192)
        assert height & (height - 1) == 0
        assert height == 512 or 4096 < height * (key + value) <= 8192 or height == 16


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 12), st.integers(1, 200))
def test_more_tiles_are_no_fewer_pieces_and_short_ones_fit_in_one_round(tiles, more, pieces, count):
    tuning = Tuning(pieces=pieces)
    found = most_pieces(tiles, tuning, count)
    assert 1 <= found <= most_pieces(tiles + more, tuning, count) <= pieces * count
    if tiles < DEEP_TILES * pieces * count:
        assert found <= at_once(tuning) * count
        assert found == 1 or tiles / found >= LEAST_TILES


def test_pieces_of_a_short_context_fill_one_round_and_leave_none_over():
    keys, values = zip(*RAGGED, strict=True)
    # 51,200 bytes of shared memory a program: four lie on a multiprocessor of 227 KiB.
    assert at_once(Tuning()) == 4
    for heads, tokens in ((8, 8192), (8, 32_768), (2, 32_768), (2, 102_400)):
        layout = RaggedLayout(keys[:heads], values[:heads], 4, 1, tokens)
        cut = equal_shares(layout, [tokens], pieces_for(layout, [tokens], Tuning(), 132), 8192)
        assert 0.97 * 528 < len(cut.items) <= 528
    layout = RaggedLayout(keys, values, 4, 1, 102_400)
    cut = equal_shares(layout, [102_400], pieces_for(layout, [102_400], Tuning(), 132), 8192)
    assert 0.97 * 1056 < len(cut.items) <= 1056


def test_many_tasks_have_all_the_pieces_of_several_rounds():
    """Four pieces a task: with one less some of them are much longer."""
    keys, values = zip(*RAGGED, strict=True)
    layout = RaggedLayout(keys, values, 4, 32, 32_768)
    assert pieces_for(layout, [32_768] * 32, Tuning(), 132) == 8 * 132
    # As many tasks as multiprocessors still leave room, and so does a single round of any number.
    assert pieces_for(layout, [32_768] * 16, Tuning(), 128) == 8 * 128 - 64
    assert pieces_for(layout, [1024] * 32, Tuning(), 132) == 4 * 132 - 66


def test_a_long_context_loads_every_multiprocessor_alike():
    keys, values = zip(*RAGGED, strict=True)
    layout = RaggedLayout(keys, values, 4, 1, 102_400)
    assert 1.0 <= predicted_makespan_over_mean(layout, [102_400], 132) < 1.25


def test_one_multiprocessor_has_all_the_work():
    layout = RaggedLayout((64, 32), (64, 16), 4, 2, 1000)
    assert predicted_makespan_over_mean(layout, [1000, 3], 1) == 1.0


def test_lengths_that_make_no_sense_are_refused():
    checked_lengths([1, 64], [0, 63], 2, 64)
    for lengths, starts in (
        ([0, 1], None),
        ([65, 1], None),
        ([1], None),
        ([5, 5], [5, 0]),
        ([5, 5], [-1, 0]),
        ([5, 5], [0]),
    ):
        with pytest.raises(UsageError):
            checked_lengths(lengths, starts, 2, 64)
