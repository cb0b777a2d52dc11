"""``kvprof frontier``: how far each method goes before the model notices."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvprof.commands.options import (
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
    MinimumOption,
    ModelArgument,
    RevisionOption,
    SeqLenOption,
    SequencesOption,
    TaskItemsOption,
    TaskLengthsOption,
    TasksOption,
    TextOption,
    TrustOption,
    joined,
    method_option,
    method_options,
)
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    PngOption,
    SvgOption,
    end_without_result,
)
from kvprof.errors import UsageError
from kvprof.evaluation.targets import parse_targets
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import COMPARED, check_names, method_entries


def frontier(
    model: ModelArgument = None,
    method: Annotated[
        list[str] | None,
        method_option(
            "Joined by commas; kq:allocation=budget,grid=32 gives one options of its own. "
            f"full and fp8 are always there. Default {COMPARED}."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="[METRIC=]SHARE",
            help="Share of the baseline's metric to keep; repeatable: 0.99 and needle=0.95 have "
            "to hold together. Default 0.99.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="Of a --target that names none: accuracy (the default), perplexity, tasks (mean), "
            "or a task's name.",
        ),
    ] = None,
    points: Annotated[
        int, typer.Option("--points", min=1, max=1000, help="Evaluations per method, at most.")
    ] = 6,
    text: TextOption = None,
    sequences: SequencesOption = None,
    seq_len: SeqLenOption = None,
    tasks: TasksOption = "all",
    task_items: TaskItemsOption = None,
    task_lengths: TaskLengthsOption = None,
    decode: DecodeOption = False,
    calibrate: CalibrateOption = None,
    calibrate_tokens: CalibrateTokensOption = None,
    calibrate_seq_len: CalibrateSeqLenOption = None,
    allocation: AllocationOption = None,
    grid: GridOption = None,
    minimum: MinimumOption = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Where evaluations are kept. Default KVPROF_CACHE, or yours."),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure everything, and keep nothing for later.")
    ] = False,
    batch_size: BatchSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
    csv: CsvOption = None,
    svg: SvgOption = None,
    png: PngOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Find the largest compression of each method that keeps a share of the model's quality.

    Examples
    --------
    kvprof frontier
    kvprof frontier --methods fdc,kq,kq-4bit --target 0.99 --svg frontier.svg
    kvprof frontier --methods kq,kq-4bit --target 0.99 --target needle=0.95
    """
    outputs = Outputs(json=json, csv=csv, out=out, svg=svg, png=png, force=force)
    outputs.check(read=[model, calibrate, text])
    methods = joined(method) or COMPARED
    targets = parse_targets(target or (), metric)
    if cache is not None and no_cache:
        raise UsageError("--cache and --no-cache contradict each other; keep one")
    common = method_options(allocation, grid, minimum, None)
    check_names(name for _, name, _ in method_entries(methods))

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.frontier_run import check_frontier, run_frontier
        from kvprof.commands.steps import calibration_options, load_sample
        from kvprof.evaluation.evaluation_cache import cache_folder
        from kvprof.evaluation.evaluator import EvaluationSettings
        from kvprof.evaluation.frontier import FrontierOptions
        from kvprof.evaluation.requests import parse_methods
        from kvprof.methods.registry import calibration_needs

    requests = parse_methods(methods, common, lambda own: method_options(None, None, None, own))
    needs = [calibration_needs(request.method, **request.options) for request in requests]
    if (calibrate or calibrate_tokens or calibrate_seq_len) and not any(needs):
        raise UsageError(
            "nothing is calibrated; leave out --calibrate, --calibrate-tokens and "
            "--calibrate-seq-len"
        )
    calibration_options(calibrate, calibrate_tokens, seq_len=None, own_seq_len=calibrate_seq_len)
    options = FrontierOptions(targets, points)
    sample = load_sample(
        {
            "model": model,
            "device": device,
            "dtype": dtype,
            "revision": revision,
            "gguf": gguf,
            "trust_remote_code": trust_remote_code,
        },
        text=text,
        sequences=sequences,
        seq_len=seq_len,
        tasks=tasks,
        task_items=task_items,
        task_lengths=task_lengths,
        settings=EvaluationSettings(decode=decode, batch_size=batch_size),
        laid=partial(check_frontier, requests, options),
        halves=True,
    )
    loaded = sample.evaluator.loaded
    described = sample.inputs()
    calibration = calibration_options(
        calibrate,
        calibrate_tokens,
        seq_len=described["seq_len"],
        own_seq_len=calibrate_seq_len,
    )
    with graceful_interrupt() as stop:
        run = run_frontier(
            sample.evaluator,
            sample.sources,
            requests,
            calibration,
            options,
            None if no_cache else cache_folder(cache),
            stop,
        )
        if run is None:
            end_without_result("interrupted before anything could be compared; there is no result")
        outputs.end(
            "frontier",
            inputs={
                "model": loaded.spec,
                **loaded.origin,
                "fingerprint": loaded.fingerprint,
                "device": str(loaded.device),
                "methods": methods,
                "metric": targets[0].metric,
                "target": targets[0].share,
                "targets": {one.metric: one.share for one in targets},
                "points": points,
                **common,
                **described,
                "calibrate": calibrate,
                "calibration": run.calibration,
                "seed": calibration.seed,
                "evaluations_found": run.found,
                "evaluations_measured": run.measured,
            },
            data=run.data,
            warnings=[*sample.warnings, *run.warnings],
            complete=run.complete,
            lost=run.unkept,
        )
