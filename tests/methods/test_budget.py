"""``budget``: what is handed out is the least of all that there is, and one plan holds it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprof.errors import UsageError
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.decode import decoded_logits, last_states, prefill_length, state_logits
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.evaluation.sensitivity import Sensitivity
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.budget import (
    CandidateSet,
    candidates_of,
    heads_in,
    in_one_plan,
    parts_of_layers,
)
from kvprof.methods.family import MethodInputs, plan_at
from kvprof.methods.fdc import kq
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import compare_plans
from kvprof.methods.registry import plan_family
from kvprof.methods.settings import FULL, Part, settings_of
from kvprof.runtime.compressed import compressed
from tests.methods.models import deep_inputs as inputs
from tests.methods.models import deep_model as model
from tests.models.tiny import token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_generation import error, generated, model_of

CONTEXT = 90
BITS = ("fp8", "8", "4", "2")


def offered(
    own: MethodInputs,
    *,
    by: str = "layer",
    layers: Sequence[int] = (0, 1, 2),
    bits: Sequence[str] = BITS,
    quantiser: str = "per-token",
    ranks: Sequence[int] = (),
) -> CandidateSet:
    """Return cells that cost what nobody measured, more the fewer bits there are."""
    bases = kq(replace(own, skip=frozenset()), grid=1, minimum=1) if ranks else None
    choices = settings_of(own, quantiser, bits, ranks, 0, bases)
    random = np.random.default_rng(3)
    cells = []
    for part in parts_of_layers(own.layout, layers, by_head=by == "head"):
        worst = float(random.lognormal(0.0, 1.5))
        for one in choices:
            few = 8 if one.spec.name == "fp8" else one.spec.bits
            kl = worst * (4.0**-few if few else float(random.lognormal(-6.0, 4.0)))
            where = {"layer": part.layer, "side": part.side, "kv_head": part.kv_head}
            cells.append({**where, "setting": one.spec.name, "exact_first": 0, "kl": kl})
    asked = {"by": by, "layers": [*layers], "quantiser": quantiser, "ranks": [*ranks]}
    return candidates_of(own, asked, choices, cells)


def cost(plan: Plan, candidates: CandidateSet) -> float:
    """Return what the cells say that a plan costs, read from the plan itself."""
    total = 0.0
    for index, layer in enumerate(plan.layers):
        for side in ("keys", "values"):
            quantiser = getattr(plan.quantiser, side) if plan.quantiser else None
            group = getattr(layer, side).groups[0]
            if not layer.left_out and (runs := group.runs(quantiser, 0)):
                cast = plan.quantiser is not None and plan.quantiser.kind == "fp8"
                total += candidates.costs[
                    Part(index, side), "fp8" if cast else f"{runs[0][1]} bits"
                ]
    return total


def test_no_other_allocation_of_as_many_bytes_costs_less() -> None:
    """All there are: 3 numbers of bits, or FP8, or neither, for keys and values of 3 layers."""
    candidates = offered(inputs("Llama"))
    choices, sizes = candidates.settings, candidates.sizes(CONTEXT)
    every = []
    for chosen in itertools.chain(
        itertools.product((None, *choices[1:]), repeat=len(candidates.parts)),
        itertools.product((None, choices[0]), repeat=len(candidates.parts)),
    ):
        size = spent = 0.0
        for part, one in zip(candidates.parts, chosen, strict=True):
            size += sizes[part, FULL if one is None else one.spec.name]
            spent += 0.0 if one is None else candidates.costs[part, one.spec.name]
        every.append((size * CONTEXT, spent))
    kinds = set()
    for wanted in (0.0, 0.2, 0.4, 0.55, 0.6, 0.7, 0.74):
        plan = candidates.at_rate(wanted, CONTEXT).plan
        stored = bytes_at(plan, CONTEXT, itemsize=2).total
        assert rate(plan, CONTEXT) >= wanted - 1e-9
        assert plan.made["predicted_kl"] == pytest.approx(cost(plan, candidates))
        least = min(spent for size, spent in every if size <= stored * (1 + 1e-12))
        assert cost(plan, candidates) == pytest.approx(least)
        kinds.add(plan.quantiser.kind if plan.quantiser else None)
    assert kinds == {None, "affine", "fp8"}
    with pytest.raises(
        UsageError, match=r"budget reaches rates from 0\.000 to 0\.\d+ at 90 tokens"
    ):
        candidates.at_rate(0.99, CONTEXT)


@pytest.mark.parametrize("by", ["head", "layer"])
@pytest.mark.parametrize("quantiser", ["per-token", "kivi", "kvquant"])
def test_sizes_of_parts_are_the_bytes_of_the_plan(by: str, quantiser: str) -> None:
    tokens = 400
    candidates = offered(
        inputs("Llama"), by=by, quantiser=quantiser, bits=["8", "4", "2"], ranks=[10]
    )
    sizes = candidates.sizes(tokens)
    seen = set()
    for wanted in (0.2, 0.4, 0.49):
        found = candidates.at_rate(wanted, tokens)
        names = {p: FULL if one is None else one.spec.name for p, one in found.chosen.items()}
        seen |= {*names.values()}
        size = sum(sizes[part, name] for part, name in names.items())
        assert bytes_at(found.plan, tokens, itemsize=2).total == pytest.approx(size * tokens)
    assert {FULL, "rank 10"} < seen


@pytest.mark.parametrize(
    ("quantiser", "tokens"), [("per-token", 40), ("kvquant", 200), ("kivi", 230)]
)
def test_decoding_through_the_plan_costs_what_was_measured(
    quantiser: str, tokens: int, tmp_path: Path
) -> None:
    """Bits, ranks and no compression side by side, by head; and the file gives it again."""
    loaded, own = model("Llama"), inputs("Llama")
    sample = TextSample("x", token_ids(2, tokens, seed=4))
    measuring = Sensitivity(loaded, [sample], None)
    candidates = offered(own, by="head", quantiser=quantiser, bits=["4", "2"], ranks=[8])
    choices = candidates.settings
    turn = itertools.cycle([choices[0], None, choices[1], choices[2], choices[0]])
    chosen = dict(zip(candidates.parts, turn, strict=False))
    plan = candidates._plan(chosen, 0.0)
    assert plan.quantiser is not None
    save_plan(plan, tmp_path / "p")
    again = load_plan(tmp_path / "p", fingerprint=loaded.fingerprint, layout=loaded.layout)
    assert compare_plans(plan, again) == {}
    wanted = measuring.measure(chosen)
    evaluator = Evaluator(loaded, [sample], [], EvaluationSettings(decode=True))
    found = evaluator.evaluate(again)
    assert found["kl"]["mean"] == pytest.approx(wanted["kl"], rel=2e-3)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=0.02)
    assert found["kl"]["mean"] > 1e-4
    assert found["measured_bytes"] == found["accounted_bytes"]
    with compressed(loaded, again) as session, torch.inference_mode():
        decoded = torch.stack(list(decoded_logits(loaded, sample.ids, session.new_cache())), 1)
    with compressed(loaded, plan, prompt=prefill_length(tokens)):
        passes = torch.stack(list(state_logits(loaded, last_states(loaded, sample.ids))), 1)
    # Another order of sums may turn a code or two, and what follows from them.
    assert float((decoded - passes).abs().mean()) < 5e-4


@pytest.mark.parametrize("folds", [(True, True), (False, False)])
def test_kernels_run_ranks_beside_full(folds: tuple[bool, bool]) -> None:
    """In a plan without a quantiser heads of a layer may be unlike."""
    loaded = model_of("Llama")
    plan = make_plan(loaded, ranks=lambda *_: (16,), fold_values=folds)
    whole = HeadGroup(0, 1, 32, (32,))
    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=(whole, *layer.keys.groups[1:])),
            values=replace(layer.values, groups=(whole, *layer.values.groups[1:])),
        )
        for layer in plan.layers
    ]
    plan = replace(plan, layers=tuple(layers))
    found, wanted = (generated(loaded, plan, kernels) for kernels in ("on", "off"))
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-5
    assert found.nbytes == wanted.nbytes


def test_one_plan_holds_no_two_arithmetics(tmp_path: Path) -> None:
    own = inputs("Llama")
    every = settings_of(own, "per-token", ["fp8", "8", "2"], [], 1, None)
    sets = [[one.spec.name for one in held] for held in in_one_plan(every)]
    assert sets == [["8 bits", "2 bits"], ["fp8"]]
    plan = offered(own, bits=["fp8"], ranks=[12]).at_rate(0.3, CONTEXT).plan
    assert plan.quantiser is not None
    assert plan.quantiser.kind == "fp8"
    assert rate(plan, CONTEXT) >= 0.3
    groups = [group for layer in plan.layers for group in layer.keys.groups]
    assert {group.quantised for group in groups} == {True, False} or any(
        layer.left_out for layer in plan.layers
    )
    save_plan(plan, tmp_path / "p")
    assert compare_plans(plan, load_plan(tmp_path / "p")) == {}


def test_layers_without_a_part_stay_as_they_are() -> None:
    own = inputs("Llama")
    plan = offered(own, layers=[0, 2]).at_rate(0.5, CONTEXT).plan
    assert [layer.left_out for layer in plan.layers] == [False, True, False]
    assert rate(plan, CONTEXT) >= 0.5
    # All parts stored alike are what the quantiser alone stores.
    candidates = offered(own)
    sizes = candidates.sizes(CONTEXT)
    every = candidates.within(sizes, candidates.least(sizes))
    assert every is not None
    alone = plan_at(plan_family("per-token", own, centre=False), 2.0)
    assert compare_plans(every.plan, replace(alone, method="budget")) == {}


def test_heads_of_a_part_are_those_of_its_layer() -> None:
    layout = inputs("Llama").layout
    assert [head.kv_head for head in heads_in(layout, Part(1, "keys"))] == [0, 1]
    assert [head.kv_head for head in heads_in(layout, Part(1, "keys", 1))] == [1]
