"""``kvprof stability``: whether the rotation is the model's own, and what a wrong one costs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.commands.options import (
    BatchSizeOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    RevisionOption,
    TrustOption,
    default_batch_size,
    load_for_command,
    parse_rates,
)
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    PngOption,
    SvgOption,
)
from kvprof.environment import collect_environment
from kvprof.errors import ClaimNotMetError, ExitCode, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.records.result import build_result
from kvprof.sizes import format_count, parse_count, parse_counts
from kvprof.sources.defaults import DEFAULT_SEQ_LEN
from kvprof.sources.grammar import Source, SourceKind, parse_source

if TYPE_CHECKING:
    from kvprof.analysis.stability_passes import StudyPlan
    from kvprof.analysis.stability_runs import Run
    from kvprof.analysis.stability_study import RankChoice
    from kvprof.models.load import LoadedModel


def stability(
    model: ModelArgument = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Token counts of the sweep; k is 1,024.")
    ] = "1k,2k,4k,8k,16k,32k",
    source: Annotated[
        str,
        typer.Option(
            "--source", help="Offline side: random, prose, code, tasks, calibration, or a file."
        ),
    ] = "random",
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="Dataset side, repeatable. Default: prose, code and tasks."),
    ] = None,
    against_tokens: Annotated[
        str | None,
        typer.Option(
            "--against-tokens", help="Tokens of each dataset. Default: the largest count."
        ),
    ] = None,
    pairs: Annotated[str, typer.Option("--pairs", help="Among qk, vo, k, v.")] = "qk,vo",
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="How many seeds of random tokens.")
    ] = 3,
    seq_len: Annotated[
        str | None,
        typer.Option(
            "--seq-len", help="Of the source. Default: the smallest count, 2k, or the context."
        ),
    ] = None,
    against_seq_len: Annotated[
        str | None,
        typer.Option("--against-seq-len", help="Of the datasets. Default: the source's."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", help="Ranks to look at. Default: a quarter and half the width."),
    ] = None,
    removal: Annotated[
        str,
        typer.Option("--removal", help="Removal rates whose ranks to look at as well; or none."),
    ] = "0.05,0.1",
    batch_size: BatchSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    fail_on_claim: Annotated[
        bool, typer.Option("--fail-on-claim", help="Exit 4 when a paper's claim does not hold.")
    ] = False,
    json: JsonOption = None,
    csv: CsvOption = None,
    svg: SvgOption = None,
    png: PngOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Compare the rotation from offline tokens with the one that real data would give."""
    outputs = Outputs(json=json, csv=csv, out=out, svg=svg, png=png, force=force)
    outputs.check()
    counts = parse_counts(tokens, what="--tokens")
    offline = parse_source(source, what="--source")
    if offline.tokens is not None:
        raise UsageError(
            f"--source {source}: the counts of a sweep come from --tokens; write --source random"
        )
    datasets = _targets(against or ["prose", "code", "tasks"], offline)
    given_ranks = parse_counts(ranks, what="--ranks") if ranks else None
    rates = [] if removal == "none" else parse_rates(removal, what="--removal")
    lengths = (
        parse_count(seq_len, what="--seq-len") if seq_len else None,
        parse_count(against_seq_len, what="--against-seq-len") if against_seq_len else None,
    )
    if offline.kind is not SourceKind.MOMENTS and len(counts) < 2:
        raise UsageError(
            f"--tokens {tokens}: one count is no sweep; give two or more, such as 1k,2k,4k,8k"
        )
    from kvprof.analysis.factors import FACTOR_PAIRS

    chosen_pairs = tuple(dict.fromkeys(pair.strip() for pair in pairs.split(",")))
    for pair in chosen_pairs:
        if pair not in FACTOR_PAIRS:
            raise UsageError(
                f"--pairs: {pair!r} is no pair to compare; choose from {', '.join(FACTOR_PAIRS)}"
            )
    loaded = None
    if model is not None or any(s.kind is not SourceKind.MOMENTS for s in (offline, *datasets)):
        loaded = load_for_command(
            model,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    plan = _plan(
        loaded,
        offline,
        datasets,
        chosen_pairs,
        counts,
        parse_count(against_tokens, what="--against-tokens") if against_tokens else max(counts),
        seeds,
        lengths,
    )
    batch = batch_size or (default_batch_size(loaded, plan.seq_len) if loaded else 1)
    runs, fingerprint, complete = _run_passes(loaded, plan, batch)
    if not runs.get("source") or not runs.get("target"):
        # Interrupted before there was anything to compare: nothing to keep.
        raise KeyboardInterrupt
    choices = _choices(given_ranks, rates, runs["source"][0], chosen_pairs)

    from kvprof.analysis.stability_data import stability_data

    with console.status("comparing the rotations"):
        data, warnings = stability_data(
            runs["source"],
            runs.get("noise", []),
            runs["target"],
            runs.get("target_short", []),
            chosen_pairs,
            choices,
            random_source=runs["source"][0].random_tokens,
        )
    if not complete:
        warnings.insert(0, "interrupted: the passes that were done are judged, the rest is missing")
    result = build_result(
        "stability",
        environment=collect_environment(),
        inputs=_inputs(loaded, plan, runs, choices, batch, fingerprint),
        data=data,
        warnings=warnings,
        complete=complete,
    )
    _show(result, outputs)
    if not complete:
        raise typer.Exit(ExitCode.INTERRUPTED)
    failed = [claim for claim in data["claims"] if claim["holds"] is False]
    if fail_on_claim and failed:
        raise ClaimNotMetError(
            f"{len(failed)} of {len(data['claims'])} claims do not hold, first: "
            f"{failed[0]['paper']} against {failed[0]['target']}: "
            f"{failed[0]['measured']:.3g}, threshold {failed[0]['threshold']:.3g}"
        )


def _targets(names: list[str], offline: Source) -> list[Source]:
    """Return the datasets, each once and not the source itself by name."""
    targets = [parse_source(name, what="--against") for name in dict.fromkeys(names)]
    titles = [target.name for target in targets]
    for title in titles:
        if titles.count(title) > 1:
            raise UsageError(
                f"--against: two datasets are called {title!r}; rename one of the files"
            )
    return targets


def _plan(
    loaded: "LoadedModel | None",
    offline: Source,
    datasets: list[Source],
    pairs: tuple[str, ...],
    counts: list[int],
    target_tokens: int,
    seeds: int,
    lengths: tuple[int | None, int | None],
) -> "StudyPlan":
    """Resolve the lengths and check, before anything is run, that every source is long enough."""
    from kvprof.analysis.collect import CollectOptions, count_tokens
    from kvprof.analysis.stability_passes import StudyPlan, plan_passes

    longest = loaded.context_length if loaded is not None else DEFAULT_SEQ_LEN
    source_length = lengths[0] or min(DEFAULT_SEQ_LEN, longest, counts[0])
    for count in counts:
        if count % source_length:
            raise UsageError(
                f"--tokens: {format_count(count)} is no multiple of the sequence length "
                f"{format_count(source_length)}; a sweep keeps every sequence equally long "
                "(change --tokens or --seq-len)"
            )
    plan = StudyPlan(
        source=offline,
        targets=tuple(datasets),
        pairs=pairs,
        counts=tuple(counts),
        target_tokens=target_tokens,
        seeds=tuple(range(seeds)),
        seq_len=source_length,
        target_seq_len=lengths[1] or source_length,
    )
    if loaded is not None:
        for item in plan_passes(plan):
            if item.source.kind is not SourceKind.MOMENTS:
                options = CollectOptions(tokens=item.tokens, seq_len=item.seq_len)
                count_tokens(loaded, item.source, options)
    return plan


def _run_passes(
    loaded: "LoadedModel | None", plan: "StudyPlan", batch_size: int
) -> "tuple[dict[str, list[Run]], str, bool]":
    """Run every pass; on Ctrl-C return what is done and False."""
    from kvprof.analysis.stability_passes import plan_passes, run_pass

    passes = plan_passes(plan)
    if loaded is None:
        passes = [item for item in passes if item.source.kind is SourceKind.MOMENTS]
    fingerprint = loaded.fingerprint if loaded is not None else None
    runs: dict[str, list[Run]] = {}
    total = sum(item.tokens for item in passes if item.source.kind is not SourceKind.MOMENTS)
    with (
        graceful_interrupt() as stop,
        console.track(f"{len(passes)} passes", total) as progress,
    ):
        for number, item in enumerate(passes, 1):
            progress.describe(f"pass {number} of {len(passes)}: {item.source.name}")
            run, fingerprint = run_pass(
                loaded,
                item,
                plan.pairs,
                batch_size=batch_size,
                fingerprint=fingerprint,
                advance=progress.advance,
                should_stop=stop,
            )
            if run.snapshots:
                runs.setdefault(item.role, []).append(run)
            done = number == len(passes) and bool(run.snapshots) and item.tokens in run.snapshots
            if stop() and not done:
                return runs, fingerprint, False
    assert fingerprint is not None
    return runs, fingerprint, True


def _choices(
    ranks: list[int] | None, rates: list[float], run: "Run", pairs: tuple[str, ...]
) -> "list[RankChoice]":
    from kvprof.analysis.stability_study import RankChoice

    width = max(gram.shape[-1] for pair in pairs for gram in run.largest(pair).gram)
    for rank in ranks or []:
        if rank > width:
            raise UsageError(f"--ranks: {rank} is over the width of the heads, {width}")
    given = ranks or [max(1, width // 4), max(1, width // 2)]
    return [
        *(RankChoice(rank=rank) for rank in given),
        *(RankChoice(removal_rate=rate) for rate in rates),
    ]


def _inputs(
    loaded: "LoadedModel | None",
    plan: "StudyPlan",
    runs: "dict[str, list[Run]]",
    choices: "list[RankChoice]",
    batch_size: int,
    fingerprint: str,
) -> dict[str, Any]:
    return {
        "model": loaded.spec if loaded is not None else None,
        "fingerprint": fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch.") if loaded is not None else None,
        "device": str(loaded.device) if loaded is not None else None,
        "source": plan.source.name,
        "targets": [target.name for target in plan.targets],
        "pairs": list(plan.pairs),
        "tokens": list(plan.counts),
        "target_tokens": plan.target_tokens,
        "seeds": [run.seed for run in runs["source"]],
        "seq_len": runs["source"][0].seq_len,
        "target_seq_len": runs["target"][0].seq_len,
        "ranks": [choice.rank for choice in choices if choice.rank is not None],
        "removal": [c.removal_rate for c in choices if c.removal_rate is not None],
        "batch_size": batch_size,
    }


def _show(result: dict[str, Any], outputs: Outputs) -> None:
    from kvprof.views import stability as view

    outputs.write(result, csv_text=lambda: view.to_csv(result), figure=lambda: view.figure(result))
    if outputs.report_to_stdout:
        terminal = console.report_console()
        terminal.print(view.report(result, terminal.width, colour=not terminal.no_color))
