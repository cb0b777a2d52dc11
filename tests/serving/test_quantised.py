"""Prompts that begin in a step go together: as one by one, and to the same bytes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprof.kernels.dispatch import interpreted
from kvprof.serving import quantised
from kvprof.serving.captured_step import captured_step
from kvprof.serving.pages import Codes
from tests.serving.batches import Batch, FilledModel

PAGE, COLUMNS = 64, 3
#: The interpreter is slow.
LONGEST = 70 if interpreted() else 150


@st.composite
def batches(draw: Any) -> Batch:
    """Draw sequences that decode, then prompts and chunks in any order."""
    decodes = draw(st.integers(0, 3))
    others = draw(st.lists(st.tuples(st.integers(1, LONGEST), st.booleans()), max_size=5))
    new = [1] * decodes + [count for count, _ in others]
    past = [draw(st.integers(1, LONGEST - 1)) for _ in range(decodes)]
    for count, continued in others:
        most = LONGEST - count
        past.append(draw(st.integers(1, most)) if continued and most else 0)
    if not new:
        new, past = [5], [0]
    return Batch(tuple(past), tuple(new), sum(new) + draw(st.integers(0, 5)), len(new))


def alone(step: Any, tokens: int, pages: int) -> Any:
    """Say that no prompt has pages of its own, so that each goes through a chunk's way."""
    order = torch.arange(tokens, device=step.starts.device)
    return quantised._Own(order, step.rows, step.rows, None)


def run_both(made: FilledModel, batch: Batch, close: float = 2e-5) -> None:
    """Store what came before, and run a batch in both forms."""
    made.store_past(batch)
    states, count = made.states(batch.tokens), sum(batch.new)

    def ran() -> tuple[list[Tensor], list[Tensor]]:
        made.refill()
        return made.run(made.step(batch), states), made.stored()

    outputs, pages = ran()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "_own", alone)
        wanted, stored = ran()
    for mine, other in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(mine[:count], other[:count], atol=close, rtol=close)
        assert not mine[count:].any()
    for mine, other in zip(pages, stored, strict=True):
        assert torch.equal(mine, other)


@settings(max_examples=2 if interpreted() else 12)
@given(batches(), st.sampled_from([8, 4]), st.booleans(), st.integers(0, 99))
def test_prompts_together_are_prompts_one_by_one(
    batch: Batch, bits: int, spare: bool, seed: int
) -> None:
    made = FilledModel(
        PAGE,
        COLUMNS,
        len(batch.new),
        codes=Codes(bits, bits, 16),
        # With as many tokens as there may be in a step some prompts find no page of their own.
        most=max(batch.tokens, *batch.past) + 999 * spare,
        seed=seed,
    )
    run_both(made, batch)


def test_each_prompt_has_pages_of_its_own_and_no_token_is_stored_twice() -> None:
    """Tokens of others lie side by side before them; those without room go the other way."""
    made = FilledModel(PAGE, COLUMNS, 5, codes=Codes(4, 4, 16), most=200)
    batch = Batch((9, 30, 0, 0, 0), (1, 3, 65, 2, 2), 77, 5)
    step = made.step(batch)
    own = quantised._own(step, batch.tokens, 7)
    assert (own.first, own.stop) == (2, 5)
    assert own.table is not None
    assert own.table[:, :2].tolist() == [[2, 3], [4, 5], [5, 6]]
    begins = [0, 1, 2, 3, *range(128, 193), 256, 257, 320, 321]
    assert own.slots.tolist() == begins + [-1] * 4
    crowded = quantised._own(made.step(batch), batch.tokens, 5)
    assert (crowded.first, crowded.stop) == (2, 4)
    assert len(set(crowded.slots[:73].tolist())) == 73
    assert int(crowded.slots.max()) < 5 * 64
    nobody = made.step(Batch((9, 30), (1, 3), 4, 2))
    assert quantised._own(nobody, 4, 7).slots.tolist() == [0, 1, 2, 3]


def test_a_prompt_is_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a chunk behind what came before."""
    made = FilledModel(PAGE, COLUMNS, 4, codes=Codes(4, 4, 16), most=200)
    seen: list[int] = []
    project = quantised.project_step

    def watched(query: Tensor, *given: Any, **more: Any) -> Tensor:
        seen.append(query.shape[1])
        return project(query, *given, **more)

    monkeypatch.setattr(quantised, "project_step", watched)
    batch = Batch((9, 30, 0, 0), (1, 3, 65, 20), 89, 4)
    made.run(made.step(batch), made.states(89))
    assert seen == [89] * len(made.model.layers)


def test_what_came_before_a_chunk_is_the_same_in_one_piece_and_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = FilledModel(PAGE, COLUMNS, 2, codes=Codes(8, 4, 16), most=200)
    batch = Batch((150, 129), (7, 20), 30, 2)
    made.store_past(batch)
    states, whole = made.states(30), []
    for piece in (4096, 11):
        monkeypatch.setattr(quantised, "_PIECE", piece)
        made.refill()
        whole.append(made.run(made.step(batch), states))
    for mine, other in zip(*whole, strict=True):
        assert torch.equal(mine, other)


@settings(max_examples=2 if interpreted() else 4)
@given(st.integers(2, LONGEST), st.sampled_from([8, 4, "fp8"]), st.booleans(), st.data())
def test_no_border_of_a_chunk_changes_an_answer(
    tokens: int, bits: Any, fixed: bool, data: Any
) -> None:
    """In one step, in chunks beside one that decodes, and token by token, in graphs or not."""
    made = FilledModel(
        PAGE, COLUMNS, 2, codes=Codes(bits, bits, 16), most=LONGEST + 1, captured=(LONGEST + 1, 2)
    )
    prompt, other = made.states(tokens), made.states(1)
    borders = data.draw(st.sets(st.integers(1, tokens - 1), max_size=4))

    def ran(cuts: list[int], *, graphs: bool = False) -> list[Tensor]:
        made.refill()
        found: list[list[Tensor]] = [[] for _ in prompt]
        for start, stop in pairwise(cuts):
            batch = Batch((0, start), (1, stop - start), 1 + stop - start, 2)
            states = [
                [torch.cat([first, own[start:stop]]) for first, own in zip(*layer, strict=True)]
                for layer in zip(other, prompt, strict=True)
            ]
            own, step = made.numbers(batch), made.step(batch)
            if graphs:
                given = own.slots, own.table, own.starts, own.lengths
                step = captured_step(made.model.alike, *given)
            for kept, output in zip(found, made.run(step, states), strict=True):
                kept.append(output[1:])
        return [torch.cat(kept) for kept in found]

    whole = ran([0, tokens])
    for cuts in ([0, *sorted(borders), tokens], list(range(tokens + 1))):
        for mine, wanted in zip(ran(cuts, graphs=fixed), whole, strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
