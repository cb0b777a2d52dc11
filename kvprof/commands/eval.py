"""``kvprof eval``: what a compressed cache costs in accuracy."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof.analysis.stats import RESAMPLES, SEED
from kvprof.commands.options import (
    DATA,
    AllocationOption,
    BatchSizeOption,
    CalibrateOption,
    CalibrateSeqLenOption,
    CalibrateTokensOption,
    DecodeOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
    GridOption,
    MethodOption,
    MethodOptionsOption,
    MinimumOption,
    ModelArgument,
    PlanFileOption,
    RateOption,
    RemovalOption,
    RevisionOption,
    SeqLenOption,
    SequencesOption,
    TaskItemsOption,
    TaskLengthsOption,
    TasksOption,
    TextOption,
    TrustOption,
    check_choice,
    method_options,
)
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    end_without_result,
)
from kvprof.errors import UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import check_names, listed

if TYPE_CHECKING:
    from kvprof.commands.eval_run import PlanRequest
    from kvprof.commands.steps import Sample
    from kvprof.evaluation.data import TextSample
    from kvprof.evaluation.harness import HarnessSettings
    from kvprof.models.load import LoadedModel
    from kvprof.moments.uncalibrated import Laid


def eval(
    model: ModelArgument = None,
    method: MethodOption = None,
    rate: RateOption = None,
    removal: RemovalOption = None,
    plan: PlanFileOption = None,
    calibrate: CalibrateOption = None,
    calibrate_tokens: CalibrateTokensOption = None,
    calibrate_seq_len: CalibrateSeqLenOption = None,
    allocation: AllocationOption = None,
    grid: GridOption = None,
    minimum: MinimumOption = None,
    option: MethodOptionsOption = None,
    text: TextOption = None,
    sequences: SequencesOption = None,
    seq_len: SeqLenOption = None,
    tasks: TasksOption = "all",
    task_items: TaskItemsOption = None,
    task_lengths: TaskLengthsOption = None,
    decode: DecodeOption = False,
    harness: Annotated[
        str | None,
        typer.Option(
            "--harness",
            rich_help_panel=DATA,
            help="Tasks of lm-evaluation-harness (needs the extra harness).",
        ),
    ] = None,
    harness_limit: Annotated[
        int | None,
        typer.Option(
            "--harness-limit", rich_help_panel=DATA, min=1, help="Questions of each of its tasks."
        ),
    ] = None,
    harness_include: Annotated[
        Path | None,
        typer.Option(
            "--harness-include", rich_help_panel=DATA, help="Folder with task files of your own."
        ),
    ] = None,
    batch_size: BatchSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
    csv: CsvOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Evaluate compressed caches: accuracy, perplexity, divergence and tasks.

    Examples
    --------
    kvprof eval --method kq,fdc,palu --rate 0.3
    kvprof eval --method kq-4bit --rate 0.75 --text prose --text code
    kvprof eval --method engine-formats
    kvprof eval --plan kq.plan --csv eval.csv
    """
    outputs = Outputs(json=json, csv=csv, out=out, force=force)
    outputs.check(read=[model, plan, calibrate, text])
    methods = _split(method)
    options = method_options(allocation, grid, minimum, option)
    check_names(methods)
    check_choice(
        methods[0] if methods else None,
        plan,
        rate=rate,
        removal=removal,
        calibrate=calibrate,
        calibrate_tokens=calibrate_tokens,
        options=options,
        calibrate_seq_len=calibrate_seq_len,
    )

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.eval_run import (
            PlanRequest,
            check_rates,
            check_request,
            fitting_request,
            harness_settings,
            make_plans,
            run_evaluations,
        )
        from kvprof.commands.steps import load_sample
        from kvprof.evaluation.decode import mean_context
        from kvprof.evaluation.evaluator import EvaluationSettings

    request = check_request(
        PlanRequest(
            methods,
            rate,
            removal,
            plan,
            calibrate,
            calibrate_tokens,
            options,
            calibrate_seq_len,
        )
    )
    chosen = harness_settings(harness, harness_limit, harness_include, batch_size)
    unfit: list[str] = []

    def laid(one: "Laid", samples: "list[TextSample]", _: object) -> None:
        nonlocal request, unfit
        request, unfit = fitting_request(one, request)
        check_rates(one, request, mean_context(samples[0].ids.shape[1]))

    sample = load_sample(
        {
            "model": model,
            "device": device,
            "dtype": dtype,
            "revision": revision,
            "gguf": gguf,
            "trust_remote_code": trust_remote_code,
        },
        plan_file=plan,
        text=text,
        sequences=sequences,
        seq_len=seq_len,
        tasks=tasks,
        task_items=task_items,
        task_lengths=task_lengths,
        settings=EvaluationSettings(decode=decode, batch_size=batch_size),
        laid=laid,
    )
    loaded = sample.evaluator.loaded
    with graceful_interrupt() as stop:
        plans = make_plans(loaded, request, sample, stop)
        if stop():
            end_without_result("interrupted before anything was evaluated; there is no result")
        run = run_evaluations(loaded, sample, plans, chosen, stop)
        outputs.end(
            "eval",
            inputs=_inputs(loaded, request, sample, chosen),
            data=run.data,
            warnings=[
                *unfit,
                *sample.warnings,
                *dict.fromkeys(note for one in plans for note in one.made.get("notes", ())),
                *run.warnings,
            ],
            complete=run.complete,
            problem=run.failure,
        )


def _split(given: list[str] | None) -> tuple[str, ...]:
    """Read ``--method kq --method fdc,palu``.

    Raises
    ------
    UsageError
        When one is named twice.
    """
    names = [name for entry in given or [] for name in listed(entry)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--method: {twice[0]} is named twice")
    return tuple(names)


def _inputs(
    loaded: "LoadedModel",
    request: "PlanRequest",
    sample: "Sample",
    harness: "HarnessSettings | None",
) -> dict[str, Any]:
    """Return every resolved input, so that a reader can repeat the run."""
    evaluator = sample.evaluator
    return {
        "model": loaded.spec,
        "architecture": loaded.layout.architecture,
        **loaded.origin,
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "methods": list(request.methods),
        "rate": request.rate,
        "removal": request.removal,
        "plan": request.plan_file.name if request.plan_file is not None else None,
        "calibrate": request.calibrate,
        "calibrate_tokens": request.calibrate_tokens,
        "calibrate_seq_len": request.calibrate_seq_len,
        "options": request.options,
        **sample.inputs(),
        "context": evaluator.context,
        "batch_size": evaluator.workload.batch_size,
        "resamples": RESAMPLES,
        "seed": SEED,
        "digest": evaluator.digest,
        "harness": list(harness.tasks) if harness is not None else None,
    }
