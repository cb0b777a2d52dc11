"""What plans store, told without calibrating them: the bytes are those of the calibrated plan."""

import copy
from typing import Any

import pytest
import torch

from kvprof.errors import UsageError
from kvprof.evaluation.requests import option_names
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.low_rank import KNOBS
from kvprof.methods.plan_report import ranks_of
from kvprof.methods.registry import (
    centred_by_default,
    follows_from_rate,
    has_removal_rate,
    method_names,
    plan_family,
)
from kvprof.moments import uncalibrated
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.serving.refusals import refusal
from tests.methods.models import BLOCKS, FINE, inputs, model

CONTEXT = 100


@pytest.mark.parametrize(
    "name", [n for n in method_names() if n not in ("hqq", "quanto", "kvtc", *BLOCKS)]
)
def test_the_bytes_are_those_of_the_calibrated_plan(name: str) -> None:
    options: dict[str, Any] = {key: FINE[key] for key in option_names(name) if key in FINE}
    if name == "kq-wf":
        options["allocation"] = "output"  # these inputs hold nothing that was measured
    if centred_by_default(name):
        options["centre"] = False  # without weights there are no means
    real = plan_family(name, inputs("Llama"), **options)
    found = uncalibrated_family(model("Llama"), name, **options)
    assert found is not None
    assert has_removal_rate(name, **options) == (real.knob == KNOBS["removal"])
    # What a rate out of reach is refused by, before anything is calibrated.
    furthest = [one.build((one.settings or one.bounds)[-1]) for one in (real, found)]
    most = [rate(plan, CONTEXT) for plan in furthest]
    assert most[0] == pytest.approx(most[1], abs=1e-9)
    assert refusal(furthest[0]) == refusal(furthest[1])
    assert (found.method, found.settings) == (real.method, real.settings)
    if real.settings:
        plans = [plan_at(one, real.settings[-1]) for one in (real, found)]
    else:
        wanted = 0.3 if real.at_rate else max(0.3, rate(real.build(0.0), CONTEXT) + 0.05)
        plans = [plan_for_rate(one, wanted, CONTEXT) for one in (real, found)]
    calibrated, told = (bytes_at(plan, CONTEXT, itemsize=2).total for plan in plans)
    # Ranks that are handed out by what is measured come in steps of several heads at times.
    assert told == pytest.approx(calibrated, rel=0.05)
    assert plans[1].quantiser == plans[0].quantiser
    assert (plans[1].lazy, plans[1].levels) == (plans[0].lazy, plans[0].levels)
    # At the very rate that a calibrated plan reached, the bytes are its own, or one column's less.
    if not real.settings and plans[0].quantiser is None and plans[0].eviction is None:
        reached = rate(plans[0], CONTEXT)
        again = plan_for_rate(found, reached, CONTEXT)
        stored = bytes_at(again, CONTEXT, itemsize=2).total
        assert calibrated - CONTEXT * 2 * 2 <= stored <= calibrated


@pytest.mark.parametrize("allocation", ["loss", "budget", "output"])
def test_bits_by_column_are_told_whatever_hands_them_out(allocation: str) -> None:
    """Also where the method's own allocation needs what is not measured here."""
    found = uncalibrated_family(model("Llama"), "kq-wf", allocation=allocation, grid=2, window=4)
    assert found is not None
    plan = plan_for_rate(found, 0.6, CONTEXT)
    assert 0.6 <= rate(plan, CONTEXT) < 0.9


def test_bytes_that_are_measured_are_not_told() -> None:
    assert not follows_from_rate("kvtc")
    assert uncalibrated_family(model("Llama"), "kvtc") is None


def test_ranks_are_spread_evenly_over_the_grid() -> None:
    family = uncalibrated_family(model("Llama"), "kq", grid=4, minimum=4)
    assert family is not None
    ranks = ranks_of(plan_for_rate(family, 0.4, CONTEXT))
    every = {rank for side in ranks.values() for layer in side for rank in layer}
    assert every == {8, 12}  # the neighbours of 60 % of 16


@pytest.mark.parametrize("arch", ["Llama", "Gemma3"])
@pytest.mark.parametrize("name", ["kq", "fdc", "svd-kv"])
def test_layers_that_are_built_alike_are_worked_out_once(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer has what moments of its own would give it."""
    shared = uncalibrated_family(model(arch), name, **FINE)
    together = uncalibrated._stand_ins
    monkeypatch.setattr(uncalibrated, "_stand_ins", lambda *of: [*map(copy.copy, together(*of))])
    alone = uncalibrated_family(model(arch), name, **FINE)
    assert shared is not None
    assert alone is not None
    for removed in (0.0, 0.3, 0.7):
        plans = [plan_at(family, removed) for family in (shared, alone)]
        assert ranks_of(plans[0]) == ranks_of(plans[1])
        for one, other in zip(*(plan.layers for plan in plans), strict=True):
            for side in ("keys", "values"):
                for a, b in zip(
                    getattr(one, side).groups, getattr(other, side).groups, strict=True
                ):
                    assert torch.equal(a.down, b.down)
                    assert torch.equal(a.up, b.up)


def test_what_cannot_be_planned_cannot_be_planned_so_either() -> None:
    for name, options, says in (
        ("kqq", {}, "kqq"),
        ("kq", {"allocation": "nothing"}, "not 'nothing'"),
        ("kq", {"heads": 2}, "no option heads"),
    ):
        with pytest.raises(UsageError, match=says):
            uncalibrated_family(model("Llama"), name, **options)
    assert follows_from_rate("kq-4bit", allocation="budget")
