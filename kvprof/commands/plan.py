"""``kvprof plan``: what a method would store, fold and run, and what fits into a memory."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof.commands import completion
from kvprof.commands.options import (
    AllocationOption,
    CalibrateOption,
    CalibrateTokensOption,
    ContextOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
    GridOption,
    MethodOption,
    MethodOptionsOption,
    MinimumOption,
    ModelArgument,
    RateOption,
    RemovalOption,
    RevisionOption,
    TrustOption,
    check_choice,
    method_options,
)
from kvprof.commands.output import ForceOption, JsonOption, OutOption, Outputs
from kvprof.errors import UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.methods.named import check_names, names_in
from kvprof.sizes import parse_bytes, parse_share


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
    gguf: GgufOption = None,
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
        "gguf": gguf,
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
        _check_one(files, save)
        check_choice(plan_file=files[0] if files else None, **given)
    else:
        _refuse(
            "cannot be had with --fit, which plans several methods; run kvprof plan without it",
            {"--removal": removal, "--describe": describe, "--compare": compare, "--save": save},
        )
        if method is not None and methods is not None:
            raise UsageError("--method and --methods both name what --fit is for; keep one")
        if rate is not None and not 0 <= rate < 1:
            raise UsageError(f"--rate {rate:g} is not between 0 and 1 (1 would store nothing)")
        check_names(names_in(methods or method or ""))
        sizes = _fit_sizes(fit, reserve or "10%")

    # Everything from here on needs torch.
    from kvprof.commands.plan_run import fit_data, model_inputs, one_plan
    from kvprof.commands.steps import load_for_command, resolve_context

    if fit is None:
        one_plan(
            model,
            files[0] if files else None,
            given,
            how,
            outputs,
            context=context,
            describe=describe,
            compare=compare,
            save=save,
        )
        return
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
        outputs.end(
            "plan",
            inputs={
                **model_inputs(loaded),
                "fit": fit,
                "reserve": reserve or "10%",
                "context": at,
                "rate": rate,
                "calibrate": calibrate,
                "options": options,
            },
            data={"plan": None, "comparison": None, "fit": data},
            complete=complete,
        )


def _refuse(why: str, given: dict[str, Any]) -> None:
    # By identity: a removal rate of 0 was given all the same.
    if said := [
        name
        for name, value in given.items()
        if value is not None and value is not False and value != []
    ]:
        raise UsageError(f"{' and '.join(said)} {why}")


def _check_one(files: list[Path], save: Path | None) -> None:
    if len(files) > 1:
        raise UsageError("--plan names several plans; --fit takes them all, --compare a second one")
    if save is not None and files:
        raise UsageError(f"--save {save}: the plan of --plan is saved already; leave one out")


def _fit_sizes(memory: str, reserve: str) -> tuple[int, int]:
    """Read ``--fit`` and ``--reserve``, in bytes.

    Parameters
    ----------
    memory : str
        ``80GB``; a GB is 1,024³ bytes, as GPUs are sold.
    reserve : str
        The same, or a share of the memory: ``10%``.

    Raises
    ------
    UsageError
        For what is no size, and a reserve that leaves nothing.
    """
    total = parse_bytes(memory, what="--fit")
    if total < 1:
        raise UsageError(f"--fit {memory} holds nothing; give a memory such as 80GB")
    if reserve.strip().endswith("%"):
        kept = int(total * parse_share(reserve, what="--reserve"))
    else:
        kept = parse_bytes(reserve, what="--reserve")
    if kept < 0:
        raise UsageError(f"--reserve {reserve} is less than nothing")
    if kept >= total:
        raise UsageError(f"--reserve {reserve} leaves nothing of --fit {memory}")
    return total, kept
