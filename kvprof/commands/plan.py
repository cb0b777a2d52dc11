"""``kvprof plan``: what a method would store, fold and run, and what fits into a memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof.commands import completion
from kvprof.commands.context import ContextOption, resolve_context
from kvprof.commands.options import (
    AllocationOption,
    CalibrateOption,
    CalibrateTokensOption,
    DeviceOption,
    DtypeOption,
    GridOption,
    MethodOption,
    MethodOptionsOption,
    MinimumOption,
    ModelArgument,
    RateOption,
    RemovalOption,
    RevisionOption,
    TrustOption,
    load_for_command,
    method_options,
)
from kvprof.commands.output import ForceOption, JsonOption, OutOption, Outputs
from kvprof.commands.plan_run import fit_data, fit_sizes, rounded_plan
from kvprof.commands.steps import check_choice, make_plan
from kvprof.environment import collect_environment
from kvprof.errors import KvprofError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.methods.named import check_names, names_in
from kvprof.records.result import build_result

if TYPE_CHECKING:
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def plan(
    model: ModelArgument = None,
    method: MethodOption = None,
    rate: RateOption = None,
    removal: RemovalOption = None,
    fit: Annotated[
        str | None,
        typer.Option("--fit", metavar="SIZE", help="80GB: which context and batch fit, by method."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            autocompletion=completion.methods,
            help="Of --fit. Default fdc,zack,palu,tale,kq.",
        ),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option("--reserve", help="Of --fit: for activations, 10% (the default) or a size."),
    ] = None,
    rates: Annotated[
        list[Path] | None,
        typer.Option("--rates", help="Of --fit: a frontier with rates to take; repeatable."),
    ] = None,
    plan_files: Annotated[
        list[Path] | None,
        typer.Option("--plan", help="A saved plan, instead of --method; repeatable with --fit."),
    ] = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Also in words, with every layer's ranks.")
    ] = False,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="Tell what another saved plan has different.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Keep the plan in this file (safetensors).")
    ] = None,
    context: ContextOption = None,
    calibrate: CalibrateOption = None,
    calibrate_tokens: CalibrateTokensOption = None,
    allocation: AllocationOption = None,
    grid: GridOption = None,
    minimum: MinimumOption = None,
    option: MethodOptionsOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Show what a method stores, folds and runs, or (--fit) what fits into a memory.

    Examples
    --------
    kvprof plan --method kq --rate 0.3 --describe
    kvprof plan --method fdc --rate 0.5 --save fdc.plan
    kvprof plan meta-llama/Llama-3.1-8B --fit 80GB
    """
    outputs = Outputs(json=json, out=out, force=force)
    outputs.check(extra=[save] if save else [])
    files = plan_files or []
    options = method_options(allocation, grid, minimum, option)
    how: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "compressed": True,
    }
    given: dict[str, Any] = {
        "method": method,
        "rate": rate,
        "removal": removal,
        "calibrate": calibrate,
        "calibrate_tokens": calibrate_tokens,
        "options": options,
    }
    if fit is None:
        _refuse(
            "means nothing without --fit",
            {"--methods": methods, "--reserve": reserve, "--rates": rates},
        )
        _one_plan(
            model,
            files,
            given,
            how,
            outputs,
            context=context,
            describe=describe,
            compare=compare,
            save=save,
        )
        return
    _refuse(
        "cannot be had with --fit, which plans several methods; run kvprof plan without it",
        {"--removal": removal, "--describe": describe, "--compare": compare, "--save": save},
    )
    if method is not None and methods is not None:
        raise UsageError("--method and --methods both name what --fit is for; keep one")
    if rate is not None and not 0 <= rate < 1:
        raise UsageError(f"--rate {rate:g} is not between 0 and 1 (1 would store nothing)")
    check_names(names_in(methods or method or ""))
    sizes = fit_sizes(fit, reserve or "10%")
    loaded = load_for_command(model, **how)
    at = resolve_context(context, loaded)
    with graceful_interrupt() as stop:
        data, complete = fit_data(
            loaded,
            sizes,
            methods=method if methods is None else methods,
            rate=rate,
            plan_files=files,
            record_files=rates or [],
            calibrate=calibrate,
            calibrate_tokens=calibrate_tokens,
            options=options,
            context=at,
            stop=stop,
        )
        inputs = {
            **_model_inputs(loaded),
            "fit": fit,
            "reserve": reserve or "10%",
            "context": at,
            "rate": rate,
            "calibrate": calibrate,
            "options": options,
        }
        _finish({"plan": None, "comparison": None, "fit": data}, inputs, outputs, complete=complete)


def _refuse(why: str, given: dict[str, Any]) -> None:
    # By identity: a removal rate of 0 was given all the same.
    if said := [
        name
        for name, value in given.items()
        if value is not None and value is not False and value != []
    ]:
        raise UsageError(f"{' and '.join(said)} {why}")


def _one_plan(
    model: str | None,
    files: list[Path],
    given: dict[str, Any],
    how: dict[str, Any],
    outputs: Outputs,
    *,
    context: str | None,
    describe: bool,
    compare: Path | None,
    save: Path | None,
) -> None:
    """Make or read a plan, save it, and tell about it."""
    if len(files) > 1:
        raise UsageError("--plan names several plans; --fit takes them all, --compare a second one")
    if save is not None and files:
        raise UsageError(f"--save {save}: the plan of --plan is saved already; leave one out")
    check_choice(plan_file=files[0] if files else None, **given)
    from kvprof.methods.plan_files import load_plan, save_plan

    lost: list[str] = []
    loaded, rounded, other = None, None, None
    if files and model is None:
        made, dtype = _saved(files[0], how["dtype"])
        inputs: dict[str, Any] = {
            "model": made.made.get("model"),
            "fingerprint": made.fingerprint,
            "dtype": dtype,
        }
        at = resolve_context(context, None, made)
        if compare is not None:
            other = load_plan(compare, fingerprint=made.fingerprint)
    else:
        loaded = load_for_command(model, **how)
        inputs, at = _model_inputs(loaded), resolve_context(context, loaded)
        if compare is not None:  # before the work: no calibration is lost to a file that is damaged
            other = load_plan(compare, fingerprint=loaded.fingerprint, layout=loaded.layout)
        with graceful_interrupt() as stop:
            if files:
                made = make_plan(
                    loaded, **given, plan_file=files[0], context=at, seq_len=None, stop=stop
                )
            else:
                rounded = rounded_plan(loaded, **given, context=at, stop=stop)
                made = rounded.plan

    from kvprof.methods.plan_report import comparison, plan_report

    if save is not None:
        try:
            save_plan(made, save, force=outputs.force)
        except KvprofError as problem:
            lost.append(str(problem))
    itemsize = _DTYPES[inputs["dtype"]]
    data = {
        "plan": plan_report(
            made,
            at,
            itemsize=itemsize,
            layout=loaded.layout if loaded is not None else None,
            fine=rounded.fine if rounded is not None else None,
            knob=rounded.knob if rounded is not None else None,
        ),
        "comparison": None,
        "fit": None,
    }
    if compare is not None and other is not None:
        data["comparison"] = {
            "file": compare.name,
            **comparison(made, other, at, itemsize=itemsize),
        }
    inputs |= {
        "context": at,
        "plan_file": files[0] if files else None,
        "saved": save,
        "describe": describe,
    }
    _finish(
        data,
        {**inputs, **given} if not files else inputs,
        outputs,
        describe=describe,
        warnings=made.made.get("notes", ()),
        lost=lost,
    )


def _saved(path: Path, dtype: str) -> "tuple[Plan, str]":
    """Read a plan without its model, and tell in which dtype its bytes are counted."""
    from kvprof.methods.plan_files import load_plan

    made = load_plan(path)
    name = made.made.get("dtype") if dtype == "auto" else dtype
    name = _LONG.get(str(name), name)
    if name not in _DTYPES:
        raise UsageError(
            f"{path.name}: --dtype {dtype} says in no dtype that the cache is counted in; give "
            f"{', '.join(_DTYPES)}"
        )
    return made, name


def _model_inputs(loaded: "LoadedModel") -> dict[str, Any]:
    return {
        "model": loaded.spec,
        "revision": loaded.revision,
        "fingerprint": loaded.fingerprint,
        "architecture": loaded.layout.architecture,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
    }


def _finish(
    data: dict[str, Any],
    inputs: dict[str, Any],
    outputs: Outputs,
    *,
    describe: bool = False,
    complete: bool = True,
    lost: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> None:
    from kvprof.views import plan as view

    result = build_result(
        "plan",
        environment=collect_environment(),
        inputs=inputs,
        data=data,
        warnings=warnings,
        complete=complete,
    )
    outputs.finish(
        result,
        lambda width, colour: view.report(result, width, colour=colour, describe=describe),
        lost=lost,
        interrupted=not complete,
    )
