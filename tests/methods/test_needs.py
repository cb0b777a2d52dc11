"""What running a plan takes, against what `kvprof plan` says of folds and online steps."""

import pytest

from kvprof.methods.family import plan_at, plan_for_rate
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
        ("kq", 0.3, ["online", "folded"]),  # keys after RoPE; values into W_V and W_O
        ("palu", 0.3, ["folded", "rebuilt"]),
        ("strawman", 0.3, ["online", "rebuilt"]),
    ],
)
def test_needs_are_those_of_the_plan(method: str, rate: float | None, needs: list[str]) -> None:
    options = {} if rate is None else FINE
    family = plan_family(method, inputs("Llama"), **options)
    if rate is None:
        plan = plan_at(family, family.settings[0])
    else:
        plan = plan_for_rate(family, rate, 100, itemsize=4)
    assert runtime_needs(plan) == needs
    told = plan_report(plan, 100, itemsize=4)
    assert ("folded" in needs) == bool(told["folded"])
    assert ("rebuilt" in needs) == any("rebuilt" in step for step in told["online"])
    beside = {step for step in told["online"] if "rebuilt" not in step or "SVD" in step}
    assert ("online" in needs) == bool(beside)
