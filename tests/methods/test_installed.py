"""Methods of somebody's packages that break: one error names whose it is."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.methods.family import plan_for_rate
from kvprof.methods.registry import calibration_needs, plan_family
from tests.methods.documented import site
from tests.methods.models import inputs

__all__ = ["site"]

MODULE = """
from dataclasses import replace
import torch
from keys_only import keys_only
from kvprof.methods.family import CalibrationNeeds

def with_(inputs, **changes):
    return replace(keys_only(inputs), **changes)

def plans(inputs, change):
    made = keys_only(inputs)
    return replace(made, build=lambda knob: change(made.build(knob)))

def bases(plan, change):
    def of(side):
        groups = tuple(replace(one, down=change(one.down)) if one.down is not None else one
                       for one in side.groups)
        return replace(side, groups=groups)
    return replace(plan, layers=tuple(replace(one, keys=of(one.keys)) for one in plan.layers))

def broken(inputs):
    {body}
{after}
"""


@pytest.fixture
def broken(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a method with a body; takes what follows it too."""
    import sys

    def install(body: str, after: str = "") -> None:
        source = MODULE.replace("{body}", body).replace("{after}", after)
        (site.parent / "somebodys.py").write_text(source)
        (site / "entry_points.txt").write_text("[kvprof.methods]\nbroken = somebodys:broken\n")
        sys.modules.pop("somebodys", None)

    yield install
    sys.modules.pop("somebodys", None)


def planned(wanted: float = 0.25) -> Any:
    return plan_for_rate(plan_family("broken", inputs("Llama")), wanted, 4096)


def test_what_is_whole_is_planned(broken: Any) -> None:
    broken("return keys_only(inputs)")
    assert planned().method == "broken"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('a\\nb')", "failed: ValueError: a b"),
        ("raise AssertionError", "failed: AssertionError"),
        ("raise SystemExit(0)", "failed: SystemExit: 0"),
        ("raise BrokenPipeError(32, 'pipe')", "failed: BrokenPipeError"),
        ("return broken(inputs)", "failed: RecursionError"),
        ("return None", "returned nothing, not a PlanFamily"),
        ("return keys_only(inputs).build(0.5)", "returned an object of type Plan"),
        ("return with_(inputs, build=None)", "build"),
        ("return with_(inputs, build=lambda knob: 1 / 0)", "failed: ZeroDivisionError"),
        ("return with_(inputs, build=lambda knob: 'plan')", "object of type str"),
        ("return with_(inputs, finish=lambda plan: None)", "nothing, not a Plan"),
        ("return with_(inputs, at_rate=lambda *given: None)", "nothing, not a Plan"),
        ("return with_(inputs, at_ranks=5)", "at_ranks"),
        ("return with_(inputs, bounds=None)", "bounds"),
        ("return with_(inputs, bounds=(1.0, 0.0))", "bounds"),
        ("return with_(inputs, bounds=(0.0, float('nan')))", "bounds"),
        ("return with_(inputs, settings=('a',))", "settings"),
        ("return with_(inputs, knob=5)", "knob"),
        ("return with_(inputs, targets=('x',))", "targets"),
        ("return plans(inputs, lambda one: replace(one, layers='abc'))", "failed: AttributeError"),
        ("return plans(inputs, lambda one: replace(one, layers=one.layers[:1]))", "has 1 layers"),
        ("return plans(inputs, lambda one: replace(one, fingerprint='0' * 64))", "not for the mod"),
        ("return plans(inputs, lambda one: replace(one, made=None))", "made: None is not of type"),
        ("return plans(inputs, lambda one: replace(one, made={3: 1}))", "key 3 "),
        ("return plans(inputs, lambda one: replace(one, made={'x': object()}))", "made.x"),
        ("return plans(inputs, lambda one: replace(one, made={'x': float('inf')}))", "made.x"),
        ("return plans(inputs, lambda one: replace(one, made={'dtype': 3}))", "made.dtype|dtype:"),
        ("return plans(inputs, lambda one: bases(one, lambda down: down / 0))", "finite float32"),
        ("return plans(inputs, lambda one: bases(one, lambda down: down.long()))", "finite float"),
    ],
)
def test_what_is_broken_is_an_error_that_names_it(broken: Any, body: str, said: str) -> None:
    broken(body)
    with pytest.raises(FailedError, match=said) as told:
        planned()
    assert re.match(r"method broken \(somebodys:broken\)", str(told.value))
    assert "\n" not in str(told.value)


def test_what_a_method_refuses_itself_and_ctrl_c_pass(broken: Any) -> None:
    broken("from kvprof.errors import UsageError; raise UsageError('not with this model')")
    with pytest.raises(UsageError, match=r"^not with this model$"):
        planned()
    broken("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        planned()


def test_a_rate_that_falls_as_the_knob_grows_is_told(broken: Any) -> None:
    broken("made = keys_only(inputs); return replace(made, build=lambda k: made.build(1 - k))")
    with pytest.raises(FailedError, match=r"broken: .* falls from 0\."):
        planned()


@pytest.mark.parametrize(
    "needs",
    [
        "'random:1k'", "CalibrationNeeds(7)", "CalibrationNeeds('random:1k', joint_heads=-3)",
        "CalibrationNeeds('random:1k', tokens=0)", "CalibrationNeeds('random:1k', pre_rope=None)",
    ],
)  # fmt: skip
def test_needs_that_are_none_are_refused_before_anything_is_run(broken: Any, needs: str) -> None:
    broken("return keys_only(inputs)", f"broken.needs = {needs}")
    with pytest.raises(FailedError, match=r"method broken .*: needs .* CalibrationN"):
        calibration_needs("broken")


def test_what_has_no_signature_is_told(broken: Any) -> None:
    broken("return None", "broken = type('Odd', (), {'__call__': None, '__signature__': 3})()")
    with pytest.raises(FailedError):
        planned()
