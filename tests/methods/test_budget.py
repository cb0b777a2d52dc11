"""``budget``: what is handed out is the least of all that there is, and one plan holds it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprof.errors import KvprofError, UsageError
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.decode import decoded_logits
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.evaluation.sensitivity import Sensitivity
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.budget import heads_in, in_one_plan, offer_of, parts_of_layers
from kvprof.methods.family import MethodInputs, plan_at, plan_for_rate
from kvprof.methods.kq import kq
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import compare_plans
from kvprof.methods.registry import calibration_needs, plan_family
from kvprof.methods.settings import FULL, Part, settings_of
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.records.result import build_result
from kvprof.runtime.compressed import compressed
from tests.methods.models import deep_inputs as inputs
from tests.methods.models import deep_model as model
from tests.models.tiny import token_ids
from tests.records.hostile import mutations
from tests.records.sample import ENVIRONMENT
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_generation import error, generated, model_of

CONTEXT = 90


def result_of(arch: str = "Llama", **asked: Any) -> dict[str, Any]:
    """Return a result whose cells cost what nobody measured, more the fewer bits there are."""
    own = inputs(arch)
    told = {
        "model": arch,
        "fingerprint": own.fingerprint,
        "dtype": "float32",
        "by": "layer",
        "layers": [*range(len(own.layout.layers))],
        "bits": ["fp8", "8", "4", "2"],
        "quantiser": "per-token",
        "ranks": [],
        "context": CONTEXT,
        **asked,
    }
    parts = parts_of_layers(own.layout, told["layers"], by_head=told["by"] == "head")
    random = np.random.default_rng(3)
    specs = [(f"{b} bits" if b != "fp8" else b, 8 if b == "fp8" else int(b)) for b in told["bits"]]
    cells = []
    for part in parts:
        worst = float(random.lognormal(0.0, 1.5))
        for name, bits, rank in [
            *((name, bits, None) for name, bits in specs),
            *((f"rank {rank}", None, rank) for rank in told["ranks"]),
        ]:
            kl = worst * 4.0**-bits if bits else worst * float(random.lognormal(-6.0, 4.0))
            cells.append(
                {
                    **{"layer": part.layer, "side": part.side, "kv_head": part.kv_head},
                    **{"setting": name, "bits": bits, "rank": rank, "exact_first": 0},
                    **{"bytes_per_token": 1.0, "kl": kl, "kl_interval": None, "kl_p999": kl},
                    **{"kl_worst": kl, "accuracy": 0.5, "baseline_accuracy": 0.5},
                    **{"relative_accuracy": 1.0, "relative_accuracy_interval": None},
                    "decoded_tokens": 9,
                }
            )
    data = {
        **{"model_layers": len(own.layout.layers), "heads": [2] * len(told["layers"])},
        **{"baseline_accuracy": 0.5, "noise": 0.0, "cells": cells, "sides": [], "layers": []},
        **{"needed": [], "first_tokens": [], "budgets": [], "flags": []},
    }
    return build_result("sensitivity", environment=ENVIRONMENT, inputs=told, data=data)


def kept(result: dict[str, Any], folder: Path) -> str:
    path = folder / "cells.json"
    path.write_text(json.dumps(result))
    return str(path)


def cost(plan: Plan, result: dict[str, Any]) -> float:
    """Return what the cells say that a plan costs, read from the plan itself."""
    cells = {
        (row["layer"], row["side"], row["kv_head"], row["setting"]): row["kl"]
        for row in result["data"]["cells"]
    }
    total = 0.0
    for index, layer in enumerate(plan.layers):
        for side in ("keys", "values"):
            quantiser = getattr(plan.quantiser, side) if plan.quantiser else None
            for group in getattr(layer, side).groups:
                runs = () if layer.left_out else group.runs(quantiser, 0)
                name = f"rank {group.rank}" if group.down is not None else FULL
                if runs:
                    cast = plan.quantiser is not None and plan.quantiser.kind == "fp8"
                    name = "fp8" if cast else f"{runs[0][1]} bits"
                head = group.first if result["inputs"]["by"] == "head" else None
                if name != FULL and (head is not None or group.first == 0):
                    total += cells[index, side, head, name]
    return total


def test_no_other_allocation_of_as_many_bytes_costs_less(tmp_path: Path) -> None:
    """All there are: 3 numbers of bits, or FP8, or neither, for keys and values of 3 layers."""
    result = result_of()
    family = plan_family("budget", inputs("Llama"), cells=kept(result, tmp_path))
    own = inputs("Llama")
    choices = settings_of(own, "per-token", ["fp8", "8", "4", "2"], [], 0, None)
    offer = offer_of(own, result["inputs"], choices, result["data"]["cells"])
    sizes = offer.sizes(CONTEXT)
    every = []
    for chosen in itertools.chain(
        itertools.product((None, *choices[1:]), repeat=len(offer.parts)),
        itertools.product((None, choices[0]), repeat=len(offer.parts)),
    ):
        size = spent = 0.0
        for part, one in zip(offer.parts, chosen, strict=True):
            size += sizes[part, FULL if one is None else one.spec.name]
            spent += 0.0 if one is None else offer.cells[part, one.spec.name]
        every.append((size * CONTEXT, spent))
    kinds = set()
    for wanted in (0.0, 0.2, 0.4, 0.55, 0.6, 0.7, 0.74):
        plan = plan_for_rate(family, wanted, CONTEXT)
        stored = bytes_at(plan, CONTEXT, itemsize=2).total
        assert rate(plan, CONTEXT) >= wanted - 1e-9
        assert plan.made["predicted_kl"] == pytest.approx(cost(plan, result))
        least = min(spent for size, spent in every if size <= stored * (1 + 1e-12))
        assert cost(plan, result) == pytest.approx(least)
        kinds.add(plan.quantiser.kind if plan.quantiser else None)
    assert kinds == {None, "affine", "fp8"}
    with pytest.raises(
        UsageError, match=r"budget reaches rates from 0\.000 to 0\.\d+ at 90 tokens"
    ):
        plan_for_rate(family, 0.99, CONTEXT)


@pytest.mark.parametrize("by", ["head", "layer"])
@pytest.mark.parametrize("quantiser", ["per-token", "kivi", "kvquant"])
def test_sizes_of_parts_are_the_bytes_of_the_plan(by: str, quantiser: str, tmp_path: Path) -> None:
    asked = {"by": by, "quantiser": quantiser, "bits": ["8", "4", "2"], "ranks": [10]}
    result = result_of(**asked)
    own, tokens = inputs("Llama"), 400
    family = plan_family("budget", own, cells=kept(result, tmp_path))
    choices = settings_of(own, quantiser, asked["bits"], [10], 0, kq(own, grid=1, minimum=1))
    offer = offer_of(own, result["inputs"], choices, result["data"]["cells"])
    sizes = offer.sizes(tokens)
    seen = set()
    for wanted in (0.2, 0.4, 0.49):
        found = offer.at_rate(wanted, tokens)
        names = {p: FULL if one is None else one.spec.name for p, one in found.chosen.items()}
        seen |= {*names.values()}
        size = sum(sizes[part, name] for part, name in names.items())
        assert bytes_at(found.plan, tokens, itemsize=2).total == pytest.approx(size * tokens)
        assert compare_plans(found.plan, plan_for_rate(family, wanted, tokens)) == {}
    assert {FULL, "rank 10"} < seen


@pytest.mark.parametrize(
    ("quantiser", "tokens"), [("per-token", 40), ("kvquant", 200), ("kivi", 230)]
)
def test_decoding_through_the_plan_costs_what_was_measured(
    quantiser: str, tokens: int, tmp_path: Path
) -> None:
    """Bits, ranks and full width side by side, by head; and the file gives it again."""
    loaded, own = model("Llama"), inputs("Llama")
    sample = TextSample("x", token_ids(2, tokens, seed=4), "d")
    measuring = Sensitivity(loaded, [sample], None)
    bits = ["4", "2"]
    choices = settings_of(own, quantiser, bits, [8], 0, kq(own, grid=1, minimum=1))
    result = result_of(by="head", quantiser=quantiser, bits=bits, ranks=[8])
    offer = offer_of(own, result["inputs"], choices, result["data"]["cells"])
    turn = itertools.cycle([choices[0], None, choices[1], choices[2], choices[0]])
    chosen = dict(zip(offer.parts, turn, strict=False))
    plan = offer._plan(chosen, 0.0)
    assert plan.quantiser is not None
    save_plan(plan, tmp_path / "p")
    again = load_plan(tmp_path / "p", fingerprint=loaded.fingerprint, layout=loaded.layout)
    assert compare_plans(plan, again) == {}
    wanted = measuring.measure(measuring.assignment(chosen))
    evaluator = Evaluator(loaded, [sample], [], EvaluationSettings())
    found = evaluator.evaluate(again)
    assert found["kl"]["mean"] == pytest.approx(wanted["kl"], rel=2e-3)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=0.02)
    assert found["kl"]["mean"] > 1e-4
    assert found["measured_bytes"] == found["accounted_bytes"]
    with compressed(loaded, again) as session, torch.inference_mode():
        decoded = torch.stack(list(decoded_logits(loaded, sample.ids, session.new_cache())), 1)
    passes = measuring._passes.logits(sample.ids, measuring.assignment(chosen))
    # Another order of sums may turn a code or two, and what follows from them.
    assert float((decoded - passes).abs().mean()) < 5e-4


@pytest.mark.parametrize("folds", [(True, True), (False, False)])
def test_kernels_run_ranks_beside_full_width(folds: tuple[bool, bool]) -> None:
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
    result = result_of(bits=["fp8"], ranks=[12])
    family = plan_family("budget", own, cells=kept(result, tmp_path))
    plan = plan_for_rate(family, 0.3, CONTEXT)
    assert plan.quantiser is not None
    assert plan.quantiser.kind == "fp8"
    assert rate(plan, CONTEXT) >= 0.3
    groups = [group for layer in plan.layers for group in layer.keys.groups]
    assert {group.quantised for group in groups} == {True, False} or any(
        layer.left_out for layer in plan.layers
    )
    save_plan(plan, tmp_path / "p")
    assert compare_plans(plan, load_plan(tmp_path / "p")) == {}


def test_layers_without_a_part_stay_as_they_are(tmp_path: Path) -> None:
    own = inputs("Llama")
    result = result_of(layers=[0, 2])
    family = plan_family("budget", own, cells=kept(result, tmp_path))
    plan = plan_for_rate(family, 0.5, CONTEXT)
    assert [layer.left_out for layer in plan.layers] == [False, True, False]
    assert rate(plan, CONTEXT) >= 0.5
    skipped = plan_family("budget", own, cells=kept(result, tmp_path), skip=(0,))
    plan = plan_at(skipped, skipped.bounds[1])
    assert [layer.left_out for layer in plan.layers] == [True, True, False]
    # All parts stored alike are what the quantiser alone stores.
    every = plan_family("budget", own, cells=kept(result_of(), tmp_path))
    alone = plan_at(plan_family("per-token", own), 2.0)
    assert compare_plans(plan_at(every, every.bounds[1]), replace(alone, method="budget")) == {}


def test_an_evictor_comes_on_top_and_a_quantiser_does_not(tmp_path: Path) -> None:
    cells = kept(result_of(by="head"), tmp_path)
    plan = plan_for_rate(plan_family("budget+h2o", inputs("Llama"), cells=cells), 0.85, CONTEXT)
    assert plan.eviction is not None
    assert rate(plan, CONTEXT) >= 0.85
    with compressed(model("Llama"), plan) as session, torch.inference_mode():
        cache = session.new_cache()
        model("Llama").model(token_ids(2, 40), past_key_values=cache)
    assert cache.nbytes == bytes_at(plan, 40, itemsize=4, batch=2).total
    twice = plan_family("budget-4bit", inputs("Llama"), cells=cells)
    with pytest.raises(UsageError, match="is quantised already"):
        plan_for_rate(twice, 0.8, CONTEXT)


def test_bases_are_calibrated_as_they_were_or_it_is_said(tmp_path: Path) -> None:
    own = inputs("Llama")
    info = {"source": "random", "tokens": 512, "seq_len": 64, "seed": 0}
    result = result_of(ranks=[8], calibration=info)
    cells = kept(result, tmp_path)
    needs = calibration_needs("budget", cells=cells)
    assert needs is not None
    assert needs.source == "random"
    plan = plan_at(plan_family("budget", own, cells=cells), 0.5)
    assert plan.made["calibration"]["tokens"] == 512
    result["inputs"]["calibration"] = {**info, "seq_len": 2048}
    (tmp_path / "other").mkdir()
    plan = plan_at(plan_family("budget", own, cells=kept(result, tmp_path / "other")), 0.5)
    (note,) = plan.made["notes"]
    assert "sequences of 64; what ranks cost was measured with" in note
    assert calibration_needs("budget", cells=kept(result_of(), tmp_path)) is None
    told = uncalibrated_family(model("Llama"), "budget", cells=cells)
    assert told is not None
    assert told.bounds == plan_family("budget", own, cells=cells).bounds


def test_what_cannot_be_handed_out_is_refused_in_one_line(tmp_path: Path) -> None:
    own = inputs("Llama")

    def refused(said: str, result: dict[str, Any] | None, given_to: MethodInputs = own) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            plan_family(
                "budget", given_to, **({} if result is None else {"cells": kept(result, tmp_path)})
            )
        assert "\n" not in str(caught.value)

    refused("what kvprof sensitivity measured: option cells", None)
    refused("the cells are those of Llama .*not of the model given", result_of(), inputs("Qwen3"))
    interrupted = result_of()
    interrupted["data"]["cells"].pop()
    refused("no cell of layer 2's values at 2 bits: it was interrupted", interrupted)
    by_head = result_of(by="head")
    by_head["data"]["cells"].pop(0)
    by_head["data"]["cells"].pop(0)
    refused("layer 0's keys, KV head 0 at fp8", by_head)
    refused("rank 16 keeps all of heads of 16", result_of(ranks=[16]))
    refused("no 3 bits|quanto", result_of(bits=["3"], quantiser="quanto"))
    older = result_of()
    del older["inputs"]["context"]
    refused("cells.json: .*'context' is a required property", older)
    many = result_of()
    many["inputs"]["layers"] = [0, 1, 2, 7]
    refused("the model has no layer 7", many)
    spectrum = {**result_of(), "kind": "doctor"}
    (tmp_path / "other.json").write_text(json.dumps(spectrum))
    with pytest.raises(KvprofError):
        plan_family("budget", own, cells=str(tmp_path / "other.json"))
    with pytest.raises(UsageError, match="there is no such file"):
        plan_family("budget", own, cells=str(tmp_path / "missing.json"))


_WHOLE = result_of(layers=[0])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stored=mutations(_WHOLE), wanted=st.sampled_from([0.0, 0.1, 0.2]))
def test_a_forged_result_is_a_plan_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, stored: dict[str, Any], wanted: float
) -> None:
    cells = kept(stored, tmp_path_factory.mktemp("forged"))
    try:
        calibration_needs("budget", cells=cells)
        family = plan_family("budget", inputs("Llama"), cells=cells)
        plan = plan_for_rate(family, wanted, CONTEXT)
    except KvprofError as problem:
        told = str(problem)
    else:
        told = ""
        assert rate(plan, CONTEXT) >= wanted - 1e-9
        save_plan(plan, tmp_path_factory.mktemp("forged") / "p")
    assert "\n" not in told


def test_heads_of_a_part_are_those_of_its_layer() -> None:
    layout = inputs("Llama").layout
    assert [head.kv_head for head in heads_in(layout, Part(1, "keys"))] == [0, 1]
    assert [head.kv_head for head in heads_in(layout, Part(1, "keys", 1))] == [1]
