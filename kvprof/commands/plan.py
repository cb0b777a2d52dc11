"""``kvprof plan``: what a method would store, fold and run, what fits, and what moving takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    check_rate,
    joined,
    method_options,
    one_method,
    read_counts,
)
from kvprof.commands.output import ForceOption, JsonOption, OutOption, Outputs
from kvprof.errors import UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.links import parse_links
from kvprof.methods.named import check_names, method_entries
from kvprof.sizes import parse_bytes, parse_count, parse_share
from kvprof.sources.grammar import DEFAULT_SEQ_LEN

if TYPE_CHECKING:
    from kvprof.models.load import OpenedModel


def plan(
    model: ModelArgument = None,
    method: MethodOption = None,
    rate: RateOption = None,
    removal: RemovalOption = None,
    fit: Annotated[
        str | None,
        typer.Option("--fit", metavar="SIZE", help="80GB: which context and batch fit, by method."),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option("--reserve", help="Of --fit: for activations, 10% (the default) or a size."),
    ] = None,
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer",
            help="What moving a context's cache takes, by method.",
        ),
    ] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SHAPE|PATH",
            help="Of --transfer: instead of MODEL, a shape as bench --model takes it; no weights "
            "are needed.",
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="Of --transfer: pcie5x16, nvlink4, 100Gbit/s, or a measured one, rdma=46.2GB/s; "
            "repeatable.",
        ),
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option(
            "--seq",
            metavar="LIST",
            help="Of --transfer: contexts in tokens, 4k,32k.",
        ),
    ] = None,
    plan_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan",
            help="A saved plan, instead of --method; repeatable with --fit and --transfer.",
        ),
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
    servable: Annotated[
        bool,
        typer.Option("--servable", help="Refuse, before calibrating, what serve cannot serve."),
    ] = False,
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
    """Show what a method stores, folds and runs, what fits (--fit), or what moves (--transfer).

    Examples
    --------
    kvprof plan --method kq --rate 0.3 --describe
    kvprof plan --method fdc --rate 0.5 --save fdc.plan
    kvprof plan meta-llama/Llama-3.1-8B --fit 80GB
    kvprof plan --transfer --shape Llama-3.1-8B --rate 50% --link pcie5x16 --link 100Gbit/s
    """
    outputs = Outputs(json=json, out=out, force=force)
    outputs.check({"--save": save}, read=[model, plan_files, calibrate, compare])
    files = plan_files or []
    options = method_options(allocation, grid, minimum, option)
    several = " and ".join(["--fit"] * (fit is not None) + ["--transfer"] * transfer)
    named = joined(method)
    how: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "revision": revision,
        "gguf": gguf,
        "trust_remote_code": trust_remote_code,
        "compressed": True,
    }
    given: dict[str, Any] = {
        "method": named if several else one_method(method),
        "rate": rate,
        "removal": removal,
        "calibrate": calibrate,
        "calibrate_tokens": calibrate_tokens,
        "options": options,
    }
    _refuse(
        "means nothing without --transfer",
        {"--shape": shape, "--link": link, "--seq": seq} if not transfer else {},
    )
    _refuse("means nothing without --fit", {"--reserve": reserve} if fit is None else {})
    sizes = None if fit is None else _fit_sizes(fit, reserve or "10%")
    if not several:
        _check_one(files, save)
        check_choice(plan_file=files[0] if files else None, **given)
    else:
        _refuse(
            f"cannot be had with {several}, which plans several methods; run kvprof plan without "
            "it",
            {
                "--removal": removal,
                "--describe": describe,
                "--compare": compare,
                "--save": save,
                "--servable": servable,
            },
        )
        check_rate(rate)
        if named is not None:
            check_names(name for _, name, _ in method_entries(named))
    if shape is not None and model is not None:
        raise UsageError(f"{model} and --shape {shape} both say what is planned for; keep one")
    links = parse_links(link or ())
    contexts = read_counts(seq, what="--seq") if seq is not None else None

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.loading import load_for_command
        from kvprof.commands.plan_run import one_plan
        from kvprof.commands.plan_several_run import (
            choose_plans,
            fit_data,
            fit_memory,
            planned_model,
            planned_shape,
            read_requests,
            transfer_data,
        )
        from kvprof.commands.steps import check_plan_file, evaluation_context

    if not several:
        one_plan(
            model,
            files[0] if files else None,
            given,
            how,
            outputs,
            context=context,
            describe=describe,
            compare=compare,
            servable=servable,
            save=save,
        )
        return
    requests = read_requests(named, rate, files, calibrate, calibrate_tokens, options)
    at = None if context is None else parse_count(context, what="--context")
    if shape is not None:
        planned = planned_shape(shape, how)
    else:

        def before(opened: "OpenedModel") -> None:
            for file in files:
                check_plan_file(opened, file)

        planned = planned_model(load_for_command(model, **how, before=before))
    memory = None if sizes is None else fit_memory(planned, sizes)
    own = DEFAULT_SEQ_LEN if planned.context_length is None else planned.context_length
    at = evaluation_context(own) if at is None else at
    with graceful_interrupt() as stop:
        choices = choose_plans(
            planned,
            requests,
            rate=rate,
            plan_files=files,
            calibrate=calibrate,
            calibrate_tokens=calibrate_tokens,
            context=at,
            moving=transfer,
            stop=stop,
        )
        outputs.end(
            "plan",
            inputs={
                **planned.inputs(),
                "fit": fit,
                "reserve": None if fit is None else reserve or "10%",
                "links": [one.name for one in links] if transfer else None,
                "seq": contexts,
                "context": at,
                "rate": rate,
                "calibrate": calibrate,
                "options": options,
            },
            data={
                "plan": None,
                "comparison": None,
                "fit": None if memory is None else fit_data(planned, memory, choices),
                "transfer": transfer_data(planned, choices, links, contexts) if transfer else None,
            },
            warnings=choices.warnings,
            complete=choices.complete,
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
        raise UsageError(
            "--plan names several plans; --fit and --transfer take them all, --compare a second one"
        )
    if save is not None and files:
        raise UsageError(f"--save {save}: the plan of --plan is saved already; leave one out")


def _fit_sizes(memory: str, reserve: str) -> tuple[int, int]:
    """Read ``--fit`` and ``--reserve``, in bytes."""
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
