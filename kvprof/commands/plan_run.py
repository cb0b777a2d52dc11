"""The run of ``kvprof plan`` for one plan: made or read, saved, and told what it stores."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvprof import console
from kvprof.commands.output import Outputs
from kvprof.commands.steps import (
    calibration_interrupts,
    check_plan_file,
    load_to_compress,
    make_plan,
    method_calibrator,
    plan_of,
    resolve_context,
)
from kvprof.dtypes import DTYPE_BYTES, long_name
from kvprof.errors import KvprofError, UsageError
from kvprof.evaluation.centre_pairs import ON_CPU, ON_GPU, fewest_pairs
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.methods.family import PlanFamily
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import comparison, plan_report
from kvprof.models.load import LoadedModel
from kvprof.moments.calibrator import Calibrator
from kvprof.moments.uncalibrated import Laid
from kvprof.runtime.backends.route import kernel_facts
from kvprof.serving.refusals import check_method, check_servable
from kvprof.views.plan import report

__all__ = ["RoundedPlan", "model_inputs", "one_plan", "refuse_loading", "rounded_plan"]

# --- A plan beside what was requested before its ranks were rounded up to the grid.


# Fisher and budget hand out steps of the grid; the others ask for a rank and round it up.
_ROUNDED_UP = ("removal", "uniform", "tail")


@dataclass(frozen=True)
class RoundedPlan:
    """A plan and its request.

    Attributes
    ----------
    plan : Plan
    fine : Plan or None
        The same setting with ranks of any size; None where nothing was rounded up.
    knob : str or None
        What the setting is called.
    """

    plan: Plan
    fine: Plan | None
    knob: str | None


def rounded_plan(
    loaded: LoadedModel,
    *,
    method: str,
    rate: float | None,
    removal: float | None,
    calibrate: str | None,
    calibrate_tokens: str | None,
    options: dict[str, Any],
    context: int,
    stop: Stop,
) -> RoundedPlan:
    """Make a plan, and once more without a grid from the same calibration.

    Parameters and errors are those of `kvprof.commands.steps.make_plan`.
    """
    calibrator = method_calibrator(loaded, calibrate, calibrate_tokens, seq_len=None, stop=stop)
    with calibration_interrupts():
        family = calibrator.family(method, **options)
        with console.status(f"planning {method}"):
            plan = plan_of(loaded, family, rate, removal, context)
        if plan.made.get("centre") is True:

            def again(pairs: int) -> Plan:
                narrow = calibrator.family(method, **{**options, "centre": pairs})
                return plan_of(loaded, narrow, rate, removal, context)

            try:
                text = calibrator.text(*(ON_CPU if loaded.device.type == "cpu" else ON_GPU))
            except UsageError as lacking:  # no tokenizer, and random tokens to calibrate on
                plan.made["notes"] = [*plan.made.get("notes", ()), f"all pairs: {lacking}"]
            else:
                plan = fewest_pairs(
                    loaded, plan, again, text, progress=console.track, should_stop=stop
                )
                options = {**options, "centre": plan.made["centre"]}
        with console.status(f"planning {method}"):
            fine = _fine(calibrator, family, plan, options)
    return RoundedPlan(plan, fine, family.knob if fine is not None else None)


def _fine(
    calibrator: Calibrator, family: PlanFamily, plan: Plan, options: dict[str, Any]
) -> Plan | None:
    """Return the plan with the ranks that its knob asks for, or None where it asks for none."""
    made, value = plan.made.get("options", {}), plan.made.get(family.knob)
    if made.get("allocation") not in _ROUNDED_UP or value is None:
        return None
    if made["grid"] == 1 and made["minimum"] == 1 and not made.get("kinds"):
        return plan
    free = {"grid": 1, "minimum": 1, **({"kinds": 0} if "kinds" in made else {})}
    fine = calibrator.family(family.method, **{**options, **free})
    # Only the ranks: what a combination evicts was shared out with the rounded ones.
    return replace(plan, layers=fine.build(value).layers)


def one_plan(
    model: str | None,
    file: Path | None,
    given: dict[str, Any],
    how: dict[str, Any],
    outputs: Outputs,
    *,
    context: str | None,
    describe: bool,
    compare: Path | None,
    save: Path | None,
    servable: bool = False,
) -> None:
    """Make or read a plan, save it, and end the command with what it stores."""
    lost: list[str] = []
    loaded, rounded, other = None, None, None
    if file is not None and model is None:
        refuse_loading(how, f"beside --plan {file.name} alone; name its model")
        made, dtype = _saved(file, how["dtype"])
        inputs: dict[str, Any] = {
            "model": made.made.get("model"),
            "fingerprint": made.fingerprint,
            "dtype": dtype,
        }
        at = resolve_context(context, None, made)
        if compare is not None:
            other = load_plan(compare, fingerprint=made.fingerprint)
    else:

        def laid(one: Laid) -> None:
            if servable and file is None:
                check_method(one, given["method"], **given["options"])

        loaded, at = load_to_compress(
            model,
            {**given, "plan_file": file},
            context,
            before=lambda opened: check_plan_file(opened, compare),
            laid=laid,
            **how,
        )
        inputs = model_inputs(loaded)
        if compare is not None:
            other = load_plan(compare, fingerprint=loaded.fingerprint, layout=loaded.layout)
        with graceful_interrupt() as stop:
            if file is not None:
                made = make_plan(
                    loaded, **given, plan_file=file, context=at, seq_len=None, stop=stop
                )
            else:
                rounded = rounded_plan(loaded, **given, context=at, stop=stop)
                made = rounded.plan

    if servable:
        check_servable(made)
    if save is not None:
        try:
            save_plan(made, save, force=outputs.force)
        except KvprofError as problem:
            lost.append(str(problem))
    told = plan_report(
        made,
        at,
        layout=loaded.layout if loaded is not None else None,
        fine=rounded.fine if rounded is not None else None,
        knob=rounded.knob if rounded is not None else None,
    )
    if loaded is not None:
        told["kernel"] = kernel_facts(made, loaded)
    data = {
        "plan": told,
        "comparison": None,
        "fit": None,
        "transfer": None,
    }
    if compare is not None and other is not None:
        data["comparison"] = {
            "file": compare.name,
            **comparison(made, other, at),
        }
    inputs |= {
        "context": at,
        "plan_file": file,
        "saved": None if lost else save,
        "describe": describe,
    }
    outputs.end(
        "plan",
        inputs=inputs if file is not None else {**inputs, **given},
        data=data,
        warnings=made.made.get("notes", ()),
        lost=lost,
        report=partial(report, describe=describe),
    )


def refuse_loading(how: Mapping[str, Any], where: str) -> None:
    """Refuse options that say how a model is loaded where none is."""
    given = {
        "--device": how["device"] != "auto",
        "--revision": how["revision"] is not None,
        "--gguf": how["gguf"] is not None,
        "--trust-remote-code": how["trust_remote_code"],
    }
    if said := [option for option, there in given.items() if there]:
        raise UsageError(f"{' and '.join(said)} means nothing {where}")


def _saved(path: Path, dtype: str) -> tuple[Plan, str]:
    """Read a plan without its model, and tell in which dtype its bytes are counted."""
    made = load_plan(path)
    name = long_name(str(made.made.get("dtype") if dtype == "auto" else dtype))
    if name is None:
        raise UsageError(
            f"{path.name}: --dtype {dtype} says in no dtype that the cache is counted in; give "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return made, name


def model_inputs(loaded: LoadedModel) -> dict[str, Any]:
    """Return what a result says of the model that was planned for."""
    return {
        "model": loaded.spec,
        **loaded.origin,
        "fingerprint": loaded.fingerprint,
        "architecture": loaded.layout.architecture,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
    }
