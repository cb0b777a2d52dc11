"""Where tokens lie as a sequence grows: every token once, without gaps, at its level."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.methods.storage import Levels
from kvprof.methods.tokens import level_ends
from kvprof.runtime.backends.stages import NOWHERE, Stages

shares = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.9]).map(lambda p: (1 - p, p))
stages = st.one_of(
    st.builds(Stages, st.builds(Levels, st.integers(0, 6)), st.just(True), st.integers(0, 9)),
    st.builds(Stages, st.builds(Levels, st.integers(0, 6), shares), st.booleans(), st.just(0)),
)


@settings(max_examples=40)
@given(stages, st.integers(1, 150))
def test_steps_lead_where_the_tables_say(own: Stages, tokens: int) -> None:
    """A dictionary per segment, filled by the steps' moves alone."""
    held: list[dict[int, int]] = [{} for _ in range(own.segments)]
    rooms = own.rooms(tokens)
    for token in range(tokens):
        step = own.step(torch.tensor([token], dtype=torch.int32), None, tokens)
        held[0][int(step.newest)] = token
        lengths = [int(length) for length in step.lengths]
        assert all(length <= room for length, room in zip(lengths, rooms, strict=True))
        seen = [held[n][slot] for n, length in enumerate(lengths) for slot in range(length)]
        assert sorted(seen) == list(range(token + 1))
        for before, source, after, target in step.moves:
            assert (int(source) == NOWHERE) == (int(target) == NOWHERE)
            if int(source) != NOWHERE:
                held[after][int(target)] = held[before][int(source)]
        segments, slots = own.slots_of(0, token + 1, token + 1)
        found = [held[n][slot] for n, slot in zip(segments, slots, strict=True)]
        assert found == list(range(token + 1))
        counts = own.counts(token + 1)
        assert counts == [list(segments).count(n) for n in range(own.segments)]


@given(shares, st.integers(0, 6), st.booleans(), st.integers(0, 400))
def test_the_lowest_level_is_the_plans(
    own: tuple[float, float], sink: int, quantised: bool, tokens: int
) -> None:
    levels = Levels(sink, own)
    last = Stages(levels, quantised, 0).counts(tokens)[-1]
    assert last == level_ends(levels, max(0, tokens - sink))[0]


@pytest.mark.parametrize("window", [0, 3])
def test_padding_is_stored_nowhere(window: int) -> None:
    own = Stages(Levels(1), True, window)
    start, hidden = torch.tensor([0, 7]).int(), torch.tensor([1, 0]).int()
    step = own.step(start, hidden, 20)
    assert step.newest.tolist()[0] == NOWHERE
    assert all(int(slots[0]) == NOWHERE for move in step.moves for slots in (move[1], move[3]))
    assert step.lengths[:, 1].sum() == 8
