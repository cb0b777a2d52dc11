"""On the kernels too, no border of a pass changes what a plan that reads by age answers."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprof.methods.plan import Plan
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Levels, Quantiser, SideQuantiser
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_columns import by_column
from tests.runtime.test_kernel_generation import half, model_of

# One layer, whose codes no query decides. Soft-cap, learned sinks, no RoPE.
ARCHITECTURES = ("Llama", "Gemma2", "GptOss", "GPT2")
LONGEST = 40


def quantiser(kind: str, bits: tuple[int, int], group: int | None, window: int) -> Quantiser:
    if kind == "affine":
        keys, values = (per_token((own,), group=group).keys for own in bits)
        return replace(per_token((bits[0],), group=group), keys=keys, values=values, window=window)
    return Quantiser("fp8", SideQuantiser((8,)), SideQuantiser((8,)), window=window)


@st.composite
def plans(draw: Any) -> tuple[LoadedModel, Plan]:
    """Draw a model and a plan: whose tokens stay as they are, and how others are stored."""
    arch = draw(st.sampled_from(ARCHITECTURES))
    kind = draw(st.sampled_from(["affine", "fp8", "columns"]))
    bits = draw(st.tuples(*[st.sampled_from([8, 4, 2])] * 2))
    window, sink = draw(st.integers(0, 9)), draw(st.integers(0, 4))
    # Within a sliding window the kernels quantise nothing.
    window = max(window, int(arch in ("Gemma2", "GptOss")))
    model = model_of(arch, 1 if arch in ("Llama", "GPT2") else 2)
    if kind == "columns":
        plan = by_column(model=model, window=window)
        return model, replace(plan, levels=Levels(sink))
    own = quantiser(kind, bits, draw(st.sampled_from([None, 16])), window)
    ranks = draw(st.sampled_from([half, lambda *_: (32,)]))
    plan = make_plan(model, ranks=ranks, quantiser=own, levels=Levels(sink))
    assert plan.by_age
    return model, plan


def logits(model: LoadedModel, plan: Plan, cuts: list[int], kernels: str = "on") -> Tensor:
    """Run rows that begin at tokens 0 and 3 in pieces."""
    ids, mask = token_ids(2, cuts[-1]), torch.ones(2, cuts[-1], dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    with compressed(model, plan, kernels) as session, torch.inference_mode():
        cache = session.new_cache()
        for start, stop in pairwise(cuts):
            more = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            output = model.model(ids[:, start:stop], past_key_values=cache, **more)
            found.append(output.logits)
    return torch.cat(found, 1)[mask.bool()]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@settings(max_examples=12)
@given(plans(), st.integers(5, LONGEST), st.data())
def test_no_border_of_a_pass_changes_an_answer(
    made: tuple[LoadedModel, Plan], tokens: int, data: Any
) -> None:
    """In one pass, in pieces and token by token."""
    model, plan = made
    borders = data.draw(st.sets(st.integers(1, tokens - 1), max_size=4))
    whole = logits(model, plan, [0, tokens])
    exact = logits(model, replace(plan, prefill_uncompressed=True), [0, tokens])
    # Sums of another order may round one value to the next code; a token read wrongly moves more.
    limit = max(1e-4, 0.2 * error(exact, whole))
    for cuts in ([0, *sorted(borders), tokens], list(range(tokens + 1))):
        assert error(logits(model, plan, cuts), whole) < limit


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_read_uncompressed_is_no_more_than_the_plan_says(arch: str) -> None:
    """A plan whose passes read their own tokens as they are answers something else."""
    model = model_of(arch, 1 if arch in ("Llama", "GPT2") else 2)
    plan = make_plan(model, quantiser=quantiser("affine", (2, 2), 16, 5), levels=Levels(2))
    whole = logits(model, plan, [0, LONGEST])
    exact = logits(model, replace(plan, prefill_uncompressed=True), [0, LONGEST])
    assert error(whole[:8], exact[:8]) < 1e-5  # two sinks, five newest tokens, and its own
    assert error(whole, exact) > 1e-2
    assert error(logits(model, plan, [0, LONGEST], "off"), whole) < 0.5 * error(exact, whole)
