"""``kvprof stability``: whether the rotation is the model's own, and what a wrong one costs."""

from typing import Annotated, Any

import typer

from kvprof import console
from kvprof.commands.options import (
    BatchSizeOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
    ModelArgument,
    RevisionOption,
    TrustOption,
    parse_removals,
    read_counts,
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
from kvprof.errors import ClaimNotMetError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.sizes import parse_count
from kvprof.sources.grammar import Source, SourceKind, parse_source

_PAIRS = "qk,vo"


def stability(
    model: ModelArgument = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Token counts of the sweep; k is 1,024.")
    ] = "1k,2k,4k,8k,16k",
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
    pairs: Annotated[str, typer.Option("--pairs", help="Among qk, vo, k, v.")] = _PAIRS,
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
    gguf: GgufOption = None,
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
    """Compare the rotation from offline tokens with the one that real data would give.

    Examples
    --------
    kvprof stability
    kvprof stability --tokens 1k,4k,16k --against prose --against my-chats.jsonl --seeds 3
    kvprof stability --seq-len 512 --against-seq-len 2k
    """
    outputs = Outputs(json=json, csv=csv, out=out, svg=svg, png=png, force=force)
    outputs.check(read=[model, source, against])
    counts = read_counts(tokens, what="--tokens")
    offline = parse_source(source, what="--source")
    if offline.tokens is not None:
        raise UsageError(
            f"--source {source}: the counts of a sweep come from --tokens; write --source random"
        )
    datasets = _targets(against or ["prose", "code", "tasks"])
    given_ranks = read_counts(ranks, what="--ranks") if ranks else None
    rates = [] if removal == "none" else parse_removals(removal, what="--removal")
    lengths = (
        parse_count(seq_len, what="--seq-len") if seq_len else None,
        parse_count(against_seq_len, what="--against-seq-len") if against_seq_len else None,
    )
    if offline.kind is not SourceKind.MOMENTS and len(counts) < 2:
        raise UsageError(
            f"--tokens {tokens}: one count is no sweep; give two or more, such as 1k,2k,4k,8k"
        )

    # Everything from here on needs torch.
    with loading():
        from kvprof.analysis.stability import FACTOR_PAIRS
        from kvprof.analysis.stability_data import stability_data
        from kvprof.commands.loading import defined_pairs, load_for_command, spectra_only
        from kvprof.commands.stability_run import make_plan, rank_choices, run_passes, study_inputs
        from kvprof.models.load import OpenedModel
        from kvprof.moments.stability_passes import StudyPlan

    chosen_pairs = tuple(dict.fromkeys(pair.strip() for pair in pairs.split(",")))
    for pair in chosen_pairs:
        if pair not in FACTOR_PAIRS:
            raise UsageError(
                f"--pairs: {pair!r} is no pair to compare; choose from {', '.join(FACTOR_PAIRS)}"
            )

    def planned(opened: OpenedModel | None) -> StudyPlan:
        most = parse_count(against_tokens, what="--against-tokens") if against_tokens else None
        against = most or max(counts)
        return make_plan(opened, offline, datasets, chosen_pairs, counts, against, seeds, lengths)

    loaded = None
    left_out: list[str] = []
    if model is not None or any(s.kind is not SourceKind.MOMENTS for s in (offline, *datasets)):
        loaded = load_for_command(
            model,
            device=device,
            dtype=dtype,
            revision=revision,
            gguf=gguf,
            trust_remote_code=trust_remote_code,
            before=planned,
        )
        chosen_pairs = defined_pairs(loaded, chosen_pairs, asked=pairs != _PAIRS, warnings=left_out)
        left_out += spectra_only(loaded)
    plan = planned(loaded)
    with graceful_interrupt() as stop:
        runs, fingerprint, complete = run_passes(loaded, plan, batch_size, stop)
        if not runs.get("source") or not runs.get("target"):
            end_without_result(
                "interrupted before the source and a dataset could be compared; there is no result"
            )
        choices = rank_choices(given_ranks, rates, runs["source"][0], chosen_pairs)

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
            warnings.insert(
                0, "interrupted: the passes that were done are judged, the rest is missing"
            )
        outputs.end(
            "stability",
            inputs=study_inputs(loaded, plan, runs, choices, batch_size, fingerprint),
            data=data,
            warnings=[*left_out, *warnings],
            complete=complete,
            problem=_unmet(data["claims"]) if fail_on_claim and complete else None,
        )


def _unmet(claims: list[dict[str, Any]]) -> ClaimNotMetError | None:
    """Return what is wrong when a claim does not hold, and when there was none to hold."""
    failed = [claim for claim in claims if claim["holds"] is False]
    if failed:
        return ClaimNotMetError(
            f"{len(failed)} of {len(claims)} claims do not hold, first: "
            f"{failed[0]['paper']} against {failed[0]['target']}: "
            f"{failed[0]['measured']:.3g}, threshold {failed[0]['threshold']:.3g}"
        )
    if not any(claim["holds"] for claim in claims):
        return ClaimNotMetError(
            "--fail-on-claim: no claim of the papers could be judged with these tokens and pairs"
        )
    return None


def _targets(names: list[str]) -> list[Source]:
    """Return the datasets, each once, with names that tell them apart."""
    targets = [parse_source(name, what="--against") for name in dict.fromkeys(names)]
    for target in targets:
        if target.tokens is not None:
            raise UsageError(
                f"--against {target.describe()}: the count of a dataset comes from "
                "--against-tokens; write --against random"
            )
    titles = [target.name for target in targets]
    for title in titles:
        if titles.count(title) > 1:
            raise UsageError(
                f"--against: two datasets are called {title!r}; rename one of the files"
            )
    return targets
