"""The layout of a layer's buffer, whole and in pages."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import MOST_CHUNKS, RaggedLayout, chunks, in_rows, of_sequence, widened

RUNNING = [*range(16, 257, 16), *range(288, 513, 32)]
widths = st.sampled_from(RUNNING)


def test_every_width_is_at_most_four_falling_powers_of_two():
    for width in RUNNING:
        found = chunks(width)
        assert sum(found) == width
        assert len(found) <= MOST_CHUNKS
        assert list(found) == sorted(set(found), reverse=True)
        assert all(chunk & (chunk - 1) == 0 and chunk >= 16 for chunk in found)


@pytest.mark.parametrize("width", [0, 8, 24, 272, 304, 496, 528, -16])
def test_other_widths_are_refused(width):
    with pytest.raises(UsageError, match=str(width)):
        chunks(width)


def test_a_width_is_widened_to_the_next_that_runs():
    for width in range(1, 513):
        assert widened(width) == min(runs for runs in RUNNING if runs >= width)
    for width in (0, 513):
        with pytest.raises(UsageError):
            widened(width)


def test_groups_and_sizes_that_cannot_run_are_refused():
    assert RaggedLayout((16,), (16,), 64, 1, 1).group == 64
    for group, batch, capacity in ((0, 1, 1), (65, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(UsageError):
            RaggedLayout((16,), (16,), group, batch, capacity)
    with pytest.raises(UsageError):
        RaggedLayout((16, 32), (16,), 1, 1, 1)


@given(
    st.lists(st.tuples(widths, widths), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([0, 16, 80]),
)
def test_every_value_lies_where_the_documentation_says(pairs, batch, capacity, gap):
    keys, values = zip(*pairs, strict=True)
    layout = RaggedLayout(keys, values, 1, batch, capacity)
    states = [
        [torch.randn(batch, capacity, width) for width in side]
        for side in (layout.key_widths, layout.value_widths)
    ]
    flat = layout.packed(*states)
    assert flat.numel() == layout.elements == batch * layout.row
    assert layout.row == capacity * sum(keys + values)
    # The same in rows with something behind each.
    rows = torch.full((batch, layout.row + gap), float("nan"))[:, : layout.row]
    rows.copy_(flat.view(batch, -1))
    row, token = batch - 1, capacity - 1
    for buffer in (flat, rows):
        stretch = in_rows(buffer, batch)[row]
        start = 0
        for head, side in product(range(layout.heads), range(2)):
            assert torch.equal(layout.head(buffer, head)[side], states[side][head])
            assert start == layout.offsets[head][side]
            column = 0
            for plane in layout.planes(buffer, head)[side]:
                chunk = plane.shape[-1]
                at = start + token * chunk
                wanted = states[side][head][row, token, column : column + chunk]
                assert torch.equal(stretch[at : at + chunk], wanted)
                assert plane[row].data_ptr() == stretch[start:].data_ptr()
                start += capacity * chunk
                column += chunk


def test_a_sequence_is_read_out_of_its_pages():
    pool = torch.arange(5 * 4 * 2).view(5, 4, 2)
    table = torch.tensor([[3, 0, -7], [2, 3, 1]], dtype=torch.int32)
    assert torch.equal(of_sequence(pool, 0, table, 6), torch.cat([pool[3], pool[0, :2]]))
    assert torch.equal(of_sequence(pool, 1, table, 12), pool[[2, 3, 1]].flatten(0, 1))
    assert torch.equal(of_sequence(pool, 1, None, 3), pool[1, :3])
    assert of_sequence(pool, 0, table, 0).shape == (0, 2)
