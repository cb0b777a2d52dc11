"""What running a plan takes, against what `kvprof plan` says of folds and online steps."""

import pytest

from kvprof.evaluation.requests import option_names
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.named import method_entries, options_in
from kvprof.methods.needs import runtime_needs
from kvprof.methods.plan_report import plan_report
from kvprof.methods.registry import plan_family
from tests.methods.models import FINE, inputs


@pytest.mark.parametrize(
    ("method", "rate", "needs"),
    [
        ("full", None, []),
        ("fp8", None, []),
        ("kivi", None, []),
        ("per-token:bits=k8v4", None, []),
        ("hadamard-int4", None, ["online"]),  # K and Q turned after RoPE, V as it is
        ("hadamard-int4:values=hadamard,centre=false", None, ["online", "folded"]),
        ("turboquant", None, ["online", "folded"]),
        ("oscar", None, ["online", "folded"]),
        ("kq-k8v4", 0.7, ["online", "folded"]),
        ("kq-wf:sink=0,window=0,allocation=output", 0.7, ["online", "folded"]),
        ("kq", 0.3, ["online", "folded"]),  # keys after RoPE; values into W_V and W_O
        ("palu", 0.3, ["folded", "rebuilt"]),
        ("strawman", 0.3, ["online", "rebuilt"]),
        ("kvtc:window=8", 0.8, ["restored"]),
        ("xkv:block=1,bases=calibration", 0.5, ["online", "rebuilt"]),
    ],
)
def test_needs_are_those_of_the_plan(method: str, rate: float | None, needs: list[str]) -> None:
    ((_, name, written),) = method_entries(method)
    own = options_in(written)
    fine = {} if rate is None else {one: FINE[one] for one in FINE if one in option_names(name)}
    family = plan_family(name, inputs("Llama"), **own, **fine)
    plan = plan_at(family, family.settings[0]) if rate is None else plan_for_rate(family, rate, 100)
    assert runtime_needs(plan) == needs
    told = plan_report(plan, 100)
    assert ("folded" in needs) == bool(told["folded"])
    assert ("rebuilt" in needs) == any("rebuilt" in step for step in told["online"])
    beside = {step for step in told["online"] if "rebuilt" not in step or "SVD" in step}
    beside -= {"K rotated at every use"}  # as the model itself does, once
    assert ("online" in needs) == bool(beside)
