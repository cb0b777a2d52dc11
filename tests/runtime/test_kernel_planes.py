"""Planes of rows of unlike length: rings, growth, selection, and what the host counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.runtime.backends.ragged import PlaneStore, planes_of
from kvprof.runtime.backends.state import KernelState

CPU = torch.device("cpu")
KEYS, VALUES = (48, 16), (16, 32)


def store(window: int | None = None, capacity: int | None = None) -> PlaneStore:
    return PlaneStore(KEYS, VALUES, 2, window, capacity)


def put(layout: RaggedLayout, buffer: Tensor, row: int, slot: int, token: int) -> None:
    """Store a token whose values are its number, plus one per plane."""
    for place, plane in enumerate(planes_of(layout, buffer)):
        plane[row, slot] = token + 1000 * row + 0.001 * place


def tokens_in(found: PlaneStore, row: int, seen: int) -> list[list[float]]:
    """Return the first columns of every head's K and V of a row."""
    pairs = [found.head_rows(head, row, seen) for head in range(2)]
    return [side[:, 0].round().tolist() for pair in pairs for side in pair]


def poisoned(found: PlaneStore, batch: int, tokens: int, reach: int | None = None) -> RaggedLayout:
    before = found.layout
    layout = found.make_room(batch, tokens, reach, CPU, torch.float32)
    if before is None:
        found.buffer.fill_(float("nan"))
    return layout


@settings(max_examples=60)
@given(
    st.integers(2, 9),
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=2, max_size=2),
    st.sampled_from([None, 80]),
)
def test_a_ring_keeps_the_newest_tokens_of_every_row(
    window: int, passes: list[int], late: list[int], capacity: int | None
) -> None:
    """Passes of any length; each row has had `late` tokens fewer, which were padding."""
    ring, total = store(window, capacity), 0
    for tokens in passes:
        seen = [max(0, total - hidden) for hidden in late]
        after = [max(0, total + tokens - hidden) for hidden in late]
        start = torch.tensor(seen, dtype=torch.int32)
        end = torch.tensor(after, dtype=torch.int32)
        poisoned(ring, 2, total + tokens)
        if tokens == 1:
            for row in range(2):
                if after[row] > seen[row]:
                    assert ring.layout is not None
                    put(ring.layout, ring.buffer, row, seen[row] % window, seen[row])
        else:
            past = min(max(seen), window - 1)
            layout, buffer = ring.unrolled(start, past, tokens)
            for row in range(2):
                kept = min(seen[row], window - 1)
                planes = list(planes_of(layout, buffer))
                held = [value - 1000 * row for value in planes[0][row, :kept, 0].round().tolist()]
                assert held == list(range(seen[row] - kept, seen[row]))
                for number, token in enumerate(range(seen[row], after[row])):
                    put(layout, buffer, row, kept + number, token)
            ring.roll(layout, buffer, start, end)
        total += tokens
        for row in range(2):
            wanted = [
                float(token + 1000 * row)
                for token in range(max(0, after[row] - window + 1), after[row])
            ]
            assert tokens_in(ring, row, after[row]) == [wanted] * 4
            assert ring.layout is not None
            # A decoding step sees the first of these slots, in whatever order.
            shown = next(planes_of(ring.layout, ring.buffer))[row, : min(after[row], window), 0]
            assert sorted(value - 1000 * row for value in shown.round().tolist()) == list(
                range(max(0, after[row] - window), after[row])
            )


def test_growth_and_selection_take_every_token_along() -> None:
    planes = store()
    poisoned(planes, 3, 5)
    for row in range(3):
        for token in range(5):
            assert planes.layout is not None
            put(planes.layout, planes.buffer, row, token, token)
    assert planes.layout is not None
    first = planes.layout.capacity
    planes.make_room(3, first + 1, None, CPU, torch.float32)
    assert planes.layout.capacity >= 2 * first
    planes.select([2, 0, 0])
    planes.select([0, 0, 1, 2])
    for row, old in enumerate((2, 2, 0, 0)):
        assert tokens_in(planes, row, 5) == [[float(t + 1000 * old) for t in range(5)]] * 4
    assert planes.bytes_at([5, 5, 5, 1]) == 16 * 4 * (sum(KEYS) + sum(VALUES))


def test_room_is_no_more_than_generation_will_reach() -> None:
    planes = store()
    assert planes.make_room(1, 100, 130, CPU, torch.float32).capacity == 192  # whole tiles
    assert store().make_room(1, 100, 10**6, CPU, torch.float32).capacity == 256
    # A second turn outgrows what the first one reached.
    assert planes.make_room(1, 193, 130, CPU, torch.float32).capacity >= 384
    assert store(window=7).make_room(1, 100, None, CPU, torch.float32).capacity == 7


def test_a_static_store_takes_its_room_at_once_and_no_more() -> None:
    planes = store(capacity=24)
    assert planes.make_room(2, 3, None, CPU, torch.float32).capacity == 24
    assert planes.bytes_at([3, 2]) == 5 * 4 * (sum(KEYS) + sum(VALUES))
    with pytest.raises(UsageError, match="room for 24 tokens, not for 25"):
        planes.make_room(2, 25, None, CPU, torch.float32)
    buffer = planes.buffer
    planes.clear()
    assert planes.make_room(2, 3, None, CPU, torch.float32)
    assert planes.buffer is buffer


def test_counts_follow_padding_selection_and_rolling_back() -> None:
    state = KernelState()
    assert state.continues([0, 4, 9], 0)
    state.begin([0, 4, 9], 0, 6)
    metadata = state.on(CPU)
    assert metadata.hidden is not None
    assert metadata.hidden.tolist() == [0, 4, 6]
    assert metadata.after.tolist() == [6, 2, 0]
    assert metadata.padding().squeeze(-1).sum(1).tolist() == [0, 4, 6]
    assert metadata.lengths(None).tolist() == [6, 2, 1]
    assert metadata.lengths(4).tolist() == [4, 2, 1]
    state.end()
    # The third row begins where the mask says, the others where they did.
    assert state.continues([0, 4, 8], 6)
    assert not state.continues([0, 5, 8], 6)
    state.begin([0, 0, 8], 6, 3)
    assert state.on(CPU).start.tolist() == [6, 2, 0]
    assert state.on(CPU).after.tolist() == [9, 5, 1]
    assert state.on(CPU).slots(4).tolist() == [2, 2, 0]
    state.end()
    assert state.seen(9) == [9, 5, 1]
    state.select([2, 0])
    state.crop(7)
    state.begin([0, 0], 7, 1)
    # A row that has lost all its tokens begins anew.
    assert state.on(CPU).start.tolist() == [0, 7]
    assert state.on(CPU).after.tolist() == [1, 8]


def test_layers_of_equal_widths_share_a_step_until_they_grow() -> None:
    state = KernelState()
    layout = RaggedLayout(KEYS, VALUES, 2, 1, 64)
    step = state.step(layout, CPU, None)
    assert state.step(RaggedLayout(KEYS, VALUES, 2, 1, 64), CPU, None) is step
    assert state.step(layout, CPU, 8) is not step
    assert state.step(RaggedLayout(KEYS, VALUES, 2, 1, 128), CPU, None).layout.capacity == 128
