"""The form of a step that a graph holds gives what the form for one batch gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.kernels.dispatch import interpreted
from kvprof.serving.captured_step import captured_step, most_own_pages
from kvprof.serving.pages import Codes
from tests.serving.batches import Batch, FilledModel

#: Tokens of a sequence at most. The interpreter is slow.
LONGEST = 96 if interpreted() else 192


@st.composite
def batches(draw: Any) -> Batch:
    """Draw sequences that decode, then any others, some of one token, and padding of both kinds."""
    decodes = draw(st.integers(0, 4))
    several = draw(st.lists(st.integers(1, 40), max_size=3))
    new = [1] * decodes + several
    new = new or [1]
    past = [draw(st.integers(0, LONGEST - one)) for one in new]
    tokens, rows = sum(new) + draw(st.integers(0, 9)), len(new) + draw(st.integers(0, 9))
    return Batch(tuple(past), tuple(new), tokens, rows)


def agree(made: FilledModel, batch: Batch, close: float = 1e-5) -> None:
    """Hold the fixed form against the other: outputs, zeros for padding, and what is stored."""
    states, count = made.states(batch.tokens), sum(batch.new)
    # Without padding, whose products with the bases would change how those of others are rounded.
    own_states = [[one[:count] for one in own] for own in states]
    wanted = made.run(made.step(replace(batch, tokens=count)), own_states)
    stored = made.stored()
    made.refill()
    own = made.numbers(batch)
    step = captured_step(made.model.alike, own.slots, own.table, own.starts, own.lengths)
    found = made.run(step, states)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[:count], other[:count], atol=close, rtol=close)
        assert not mine[count:].any()
    for mine, other in zip(made.stored(), stored, strict=True):
        assert torch.equal(mine, other)


@settings(max_examples=3 if interpreted() else 25)
@given(batches(), st.sampled_from([16, 64]), st.integers(0, 99))
def test_the_fixed_form_gives_what_the_eager_form_gives(batch: Batch, page: int, seed: int) -> None:
    made = FilledModel(page, -(-LONGEST // page), len(batch.new), seed=seed)
    agree(made, batch)


def quantised(
    batch: Batch, bits: int, *, columns: int = -(-LONGEST // 64), **how: Any
) -> FilledModel:
    """Return a model whose quantised pages hold what came before a batch."""
    made = FilledModel(
        64,
        columns,
        len(batch.new),
        codes=Codes(bits, bits, 16),
        most=max(batch.tokens, *batch.past),
        captured=(batch.tokens, batch.rows),
        **how,
    )
    made.store_past(batch)
    return made


@pytest.mark.skipif(interpreted(), reason="the interpreter takes minutes for so many tokens")
@pytest.mark.parametrize("bits", [None, 4])
def test_a_step_of_many_tokens_too(bits: int | None) -> None:
    """More than vLLM's own graphs hold, of sequences that decode and prompts short and long."""
    new = (1,) * 20 + (300, 17, 128, 1, 250)
    batch = Batch(tuple(range(25)), new, 768, 64)
    if bits is None:
        agree(FilledModel(64, 6, len(new)), batch)
    else:
        agree(quantised(batch, bits, columns=6), batch, 2e-5)


@settings(max_examples=2 if interpreted() else 12)
@given(batches(), st.sampled_from([8, 4]), st.integers(0, 99))
def test_over_quantised_pages_too(batch: Batch, bits: int, seed: int) -> None:
    agree(quantised(batch, bits, seed=seed), batch, 2e-5)


@settings(max_examples=2 if interpreted() else 20)
@given(
    batches(), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([16, 64]), st.integers(0, 99)
)
def test_over_pages_whose_keys_are_rebuilt_too(
    batch: Batch, shared: int, valued: bool, page: int, seed: int
) -> None:
    """Sequences whose pages find no room decode token by token."""
    how = {"shared": shared, "valued": valued, "seed": seed}
    made = FilledModel(page, -(-LONGEST // page), len(batch.new), **how)
    agree(made, batch, 2e-5)


def test_pages_are_rebuilt_while_there_is_room() -> None:
    made = FilledModel(16, 4, 4, shared=2)
    batch = Batch((20, 9, 30, 0), (1, 8, 11, 3), 24, 5)
    own = made.numbers(batch)
    step = captured_step(made.model.alike, own.slots, own.table, own.starts, own.lengths)
    seen = step.rebuilt(4, 16)
    assert seen.pages[:, 0].tolist() == [*made.table[1, :2].tolist(), -1, -1]
    assert seen.pages[:2, 1].tolist() == [0, 16]
    assert seen.lengths.tolist() == [0, 17, 0, 0, 0]
    # The third, three pages long, decodes token by token, and the last, that stands behind it.
    assert seen.seen.tolist() == [21, *[0] * 8, *range(31, 42), 1, 2, 3, 0]
    assert seen.attends.flatten().tolist() == [False, *[True] * 8, *[False] * 15]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("new", [(1, 1, 1), (5, 1, 1), (1, 1, 7, 1)])
def test_what_nobody_asked_for_reaches_no_output(new: tuple[int, ...], bits: int | None) -> None:
    """Pages of nobody, padding's states and stale lengths may be anything, NaN too."""
    batch = Batch((3,) * len(new), new, sum(new) + 4, len(new) + 3)
    made = FilledModel(16, 2, len(new)) if bits is None else quantised(batch, bits)
    states = made.states(batch.tokens)
    wanted = made.run(made.step(batch), states)
    made.refill()
    for layer, own in zip(made.model.layers, states, strict=True):
        layer.attention.kv_cache[0] = float("nan") if bits is None else 255
        for one in own:
            one[sum(new) :] = float("nan")
    own = made.numbers(batch)
    own.lengths[len(new) :] = 7
    if bits is not None:
        made.model.layers[0].steps.scratch.fill_(float("nan"))
    step = captured_step(made.model.alike, own.slots, own.table, own.starts, own.lengths)
    found = made.run(step, states)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[: sum(new)], other[: sum(new)], atol=1e-5, rtol=1e-5)
        assert not mine[sum(new) :].any()


def test_layers_share_what_is_worked_out() -> None:
    """All layers of one head configuration have one cut of each sort, and one set of numbers."""
    made = FilledModel(16, 2, 3)
    batch = Batch((4, 4, 0), (1, 1, 9), 16, 4)
    own = made.numbers(batch)
    step = made.model.captured_step(own.slots, own.table, own.starts, own.lengths)
    made.run(step, made.states(16))
    heights = {layer.steps.rows.heights for layer in made.model.layers}
    cuts = ((own, id(step.lengths)) for own in heights)
    assert set(step._made) == {"numbers", ("decoded", 4), *cuts}
    assert len(heights) == 1
    # Nobody decodes over a prompt's pages, nor attends twice from a token that decodes.
    assert step.decoding(made.model.layers[0].steps.decode).tolist() == [5, 5, 0, 0]
    assert step._numbers.starts.tolist() == [2, 2, 2, 11, 11]


@given(batches())
def test_each_sequence_has_pages_of_its_own_and_a_token_sees_what_was_there(batch: Batch) -> None:
    """Whatever the batch, they find room; no two tokens lie in one place."""
    made = FilledModel(16, -(-LONGEST // 16), len(batch.new))
    own = made.numbers(batch)
    step = made.model.captured_step(own.slots, own.table, own.starts, own.lengths)
    pages, count = most_own_pages(batch.tokens, batch.rows), sum(batch.new)
    placed = step.own(pages)
    slots = placed.slots.tolist()
    assert slots[count:] == [-1] * (batch.tokens - count)
    assert len(set(slots[:count])) == count
    assert max(slots) < pages * 64
    assert min(slots[:count]) >= 0
    seen, token = step._seen().tolist(), 0
    for row, (past, new) in enumerate(zip(batch.past, batch.new, strict=True)):
        decodes = row < batch.decodes
        assert int(placed.lengths[row]) == (0 if decodes else new)
        for at in range(new):
            assert seen[token] == past + decodes
            assert torch.equal(placed.seen[token], own.table[row])
            if not decodes:
                assert slots[token] == int(placed.table[row, at // 64]) * 64 + at % 64
            token += 1
    assert seen[count:] == [0] * (batch.tokens - count)


@pytest.mark.parametrize("captured", [(64, 1), (1, 1), (2, 256), (150, 150)])
def test_a_rehearsal_finds_its_room_whatever_is_captured(captured: tuple[int, int]) -> None:
    made = FilledModel(64, 2, 2, codes=Codes(4, 4, 16), most=200, captured=captured)
    made.model._rehearse(2, 200, 64, (max(captured[0], 32), max(captured[1], 2)))
    assert not any(pages.any() for pages in made.stored())


def test_sequences_whose_pages_find_room_are_rebuilt_together() -> None:
    """Many short prompts fill more pages than their tokens say."""
    made = FilledModel(16, 4, 9, shared=2)
    batch = Batch((0,) * 9, (9,) * 9, 81, 9)
    steps = made.model.layers[0].steps
    assert list(steps._together(made.step(batch))) == [(0, 4), (4, 8), (8, 9)]
    assert made.run(made.step(batch), made.states(81))[0].isfinite().all()


@pytest.mark.parametrize("how", [{}, {"shared": 2}])
def test_a_rehearsal_of_short_sequences(how: dict[str, int]) -> None:
    made = FilledModel(16, 2, 2, **how)
    made.model._rehearse(2, 32, 32, (32, 2))
    for own, filled in zip(made.stored(), made.filled, strict=True):
        assert torch.equal(own, filled)
