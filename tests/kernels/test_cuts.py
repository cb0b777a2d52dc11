"""Work is cut into whole pieces of nearly equal cost."""

from hypothesis import given
from hypothesis import strategies as st

from kvprof.kernels.decode.cuts import COST_PER_TOKEN, equal_shares, tile_height
from kvprof.kernels.planes import RaggedLayout

widths = st.integers(1, 16).map(lambda n: 16 * n)


@given(
    st.lists(st.tuples(widths, widths), min_size=1, max_size=5),
    st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    st.integers(1, 300),
)
def test_every_token_of_every_head_is_in_exactly_one_piece(pairs, lengths, pieces):
    keys, values = zip(*pairs, strict=True)
    layout = RaggedLayout(keys, values, 4, len(lengths), max(lengths))
    cut = equal_shares(layout, lengths, pieces, 8192)
    assert sum(count for _, count in cut.parts) == len(cut.items)
    for number, (first, count) in enumerate(cut.parts):
        row, head = divmod(number, layout.heads)
        at = 0
        for item in cut.items[first : first + count]:
            assert item[:3] == (row, head, at)
            assert item[3] > at
            assert cut.pairs[item[4]][:2] == (keys[head], values[head])
            at = item[3]
        assert at == lengths[row]


def test_pieces_of_a_long_context_cost_the_same_whatever_their_head_is_wide():
    layout = RaggedLayout((112, 32, 64), (32, 48, 64), 4, 2, 100_000)
    cut = equal_shares(layout, [100_000, 60_000], 512, 8192)
    costs = [
        (stop - start) * (sum(cut.pairs[kind][:2]) + COST_PER_TOKEN)
        for _, _, start, stop, kind in cut.items
    ]
    assert 490 <= len(costs) <= 534
    assert max(costs) / (sum(costs) / len(costs)) < 1.1


def test_tiles_hold_as_much_whatever_their_width():
    for key, value in ((16, 16), (64, 64), (112, 32), (256, 256)):
        height = tile_height(key, value, 8192)
        assert height & (height - 1) == 0
        assert height == 512 or 4096 < height * (key + value) <= 8192 or height == 16
