"""``kvprof stability``: whether the rotation is the model's own, and what a wrong one costs."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvprof import console
from kvprof.commands.options import ModelOptions, parse_removals, read_counts
from kvprof.commands.output import FigureOptions, Outcome, end_without_result, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, written
from kvprof.errors import ClaimNotMetError, UsageError
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.loading import loading
from kvprof.sizes import format_count, parse_count
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, Source, SourceKind, parse_source

if TYPE_CHECKING:
    from kvprof.analysis.stability import Run
    from kvprof.analysis.stability_study import RankChoice
    from kvprof.models.load import LoadedModel, OpenedModel
    from kvprof.moments.stability_passes import StudyPlan


def _rates(text: str, *, what: str) -> list[float]:
    return [] if text == "none" else parse_removals(text, what=what)


def _pairs(text: str, *, what: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pair.strip() for pair in text.split(",")))


def _is_a_sweep(request: "StabilityRequest") -> str | None:
    if len(request.tokens) > 1 or request.offline.kind is SourceKind.MOMENTS:
        return None
    return "--tokens: give two counts or more, such as 1k,2k,4k,8k"


class StabilityRequest(ModelOptions, FigureOptions):
    """Compare a rotation calibrated offline with the one that real data gives.

    Examples
    --------
    kvprof stability
    kvprof stability --tokens 1k,4k,16k --against prose --against my-chats.jsonl --seeds 3
    kvprof stability --seq-len 512 --against-seq-len 2k
    """

    tokens: Annotated[
        list[int],
        typer.Option("--tokens", help="Token counts to calibrate on; k is 1,024."),
        Parsed(read_counts),
        Mark.FREE,
    ] = written("1k,2k,4k,8k,16k")
    source: Annotated[
        str,
        typer.Option(
            "--source", help="Calibration data: random, prose, code, tasks, calibration, or a file."
        ),
        Mark.READS,
    ] = "random"
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            help="Dataset to compare with; repeatable.  [default: prose, code and tasks]",
        ),
        Mark.READS,
    ] = None
    against_tokens: Annotated[
        int | None,
        typer.Option(
            "--against-tokens", help="Tokens per dataset.  [default: largest of --tokens]"
        ),
        Parsed(parse_count),
        Mark.FREE,
    ] = None
    pairs: Annotated[
        tuple[str, ...],
        typer.Option("--pairs", help="Matrices: qk, vo, k, v."),
        Parsed(_pairs),
        Mark.FREE,
    ] = written("qk,vo")
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of seeds of random tokens."), Mark.FREE
    ] = 3
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            help="Tokens per source sequence.  [default: smallest of --tokens, 2k and the context]",
        ),
        Parsed(parse_count),
        Mark.FREE,
    ] = None
    against_seq_len: Annotated[
        int | None,
        typer.Option(
            "--against-seq-len", help="Tokens per dataset sequence.  [default: --seq-len]"
        ),
        Parsed(parse_count),
        Mark.FREE,
    ] = None
    ranks: Annotated[
        list[int] | None,
        typer.Option("--ranks", help="Ranks to test.  [default: a quarter and half of head_dim]"),
        Parsed(read_counts),
        Mark.FREE,
    ] = None
    removal: Annotated[
        list[float],
        typer.Option("--removal", help="Removal rates to test too, or none."),
        Parsed(_rates),
        Mark.FREE,
        Input(),
    ] = written("0.05,0.1")
    fail_on_claim: Annotated[
        bool,
        typer.Option("--fail-on-claim", help="Exit 4 when a paper's claim does not hold."),
        Mark.FREE,
    ] = False

    rules: ClassVar[tuple[Rule, ...]] = (_is_a_sweep,)

    @property
    def offline(self) -> Source:
        """The source whose basis is tested."""
        found = parse_source(self.source, what="--source")
        if found.tokens is not None:
            raise UsageError(
                f"--source {self.source}: the counts come from --tokens; write --source random"
            )
        return found

    @property
    def datasets(self) -> tuple[Source, ...]:
        """The datasets, each once, with names that tell them apart."""
        named = dict.fromkeys(self.against or ("prose", "code", "tasks"))
        found = tuple(parse_source(name, what="--against") for name in named)
        for one in found:
            if one.tokens is not None:
                raise UsageError(
                    f"--against {one.describe()}: the count comes from --against-tokens; write "
                    "--against random"
                )
            if sum(other.name == one.name for other in found) > 1:
                raise UsageError(
                    f"--against: two datasets are called {one.name!r}; rename one of the files"
                )
        return found


@measuring(StabilityRequest)
def stability(request: StabilityRequest) -> Outcome:
    """Measure how far a basis holds that a request asks for."""
    offline, datasets = request.offline, request.datasets

    # Everything from here on needs torch.
    with loading():
        from kvprof.analysis.stability import FACTOR_PAIRS
        from kvprof.analysis.stability_data import stability_data
        from kvprof.commands.loading import defined_pairs, load_for_command, spectra_only

    pairs = request.pairs
    if unknown := [pair for pair in pairs if pair not in FACTOR_PAIRS]:
        raise UsageError(f"--pairs: {unknown[0]!r} is not among {', '.join(FACTOR_PAIRS)}")

    def planned(opened: "OpenedModel | None") -> "StudyPlan":
        return _study(request, offline, datasets, pairs, opened)

    loaded = None
    left_out: list[str] = []
    every = (offline, *datasets)
    if request.model is not None or any(one.kind is not SourceKind.MOMENTS for one in every):
        loaded = load_for_command(request.model, **request.how, before=planned)
        asked = request.has("pairs")
        pairs = defined_pairs(loaded, pairs, asked=asked, warnings=left_out)
        left_out += spectra_only(loaded)
    plan = planned(loaded)
    with graceful_interrupt() as stop:
        runs, fingerprint, complete = _run_passes(loaded, plan, request.batch_size, stop)
        if not runs.get("source") or not runs.get("target"):
            end_without_result(
                "interrupted before the source and a dataset could be compared; no result"
            )
        choices = _rank_choices(request, runs["source"][0], pairs)
        with console.status("comparing the rotations"):
            data, warnings = stability_data(
                runs["source"],
                runs.get("noise", []),
                runs["target"],
                runs.get("target_short", []),
                pairs,
                choices,
                random_source=runs["source"][0].random_tokens,
            )
    if not complete:
        warnings.insert(0, "interrupted: only finished passes are compared")
    return Outcome(
        inputs={
            **request.inputs(),
            **_resolved(loaded, plan, runs),
            "fingerprint": fingerprint,
            "ranks": [choice.rank for choice in choices if choice.rank is not None],
            "batch_size": request.batch_size or "by sequence length",
        },
        data=data,
        warnings=[*left_out, *warnings],
        complete=complete,
        problem=_unmet(data["claims"]) if request.fail_on_claim and complete else None,
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
            "--fail-on-claim: no published claim can be tested with these tokens and pairs"
        )
    return None


def _study(
    request: StabilityRequest,
    offline: Source,
    datasets: tuple[Source, ...],
    pairs: tuple[str, ...],
    loaded: "OpenedModel | None",
) -> "StudyPlan":
    """Resolve the lengths and check, before anything is run, that every source is long enough."""
    from kvprof.moments.collect import CollectOptions, count_tokens
    from kvprof.moments.files import load_moments
    from kvprof.moments.stability_passes import StudyPlan, plan_passes

    longest = loaded.context_length if loaded is not None else DEFAULT_SEQ_LEN
    length = request.seq_len or min(DEFAULT_SEQ_LEN, longest, request.tokens[0])
    if offline.kind is SourceKind.MOMENTS:
        length = int(load_moments(offline.paths[0]).info.get("seq_len", length))
    else:
        for count in request.tokens:
            if count % length:
                raise UsageError(
                    f"--tokens: {format_count(count)} is not a multiple of --seq-len "
                    f"{format_count(length)}"
                )
    plan = StudyPlan(
        source=offline,
        targets=datasets,
        pairs=pairs,
        counts=tuple(request.tokens),
        target_tokens=request.against_tokens or max(request.tokens),
        seeds=tuple(range(request.seeds)),
        seq_len=length,
        target_seq_len=request.against_seq_len or length,
    )
    for item in plan_passes(plan):
        if loaded is not None and item.source.kind is not SourceKind.MOMENTS:
            options = CollectOptions(tokens=item.tokens, seq_len=item.seq_len)
            count_tokens(loaded, item.source, options)
    return plan


def _run_passes(
    loaded: "LoadedModel | None", plan: "StudyPlan", batch_size: int | None, stop: Stop
) -> "tuple[dict[str, list[Run]], str, bool]":
    """Run every pass; return the runs by role, the model's fingerprint, whether all were run.

    Without a model only the passes over saved moments are run.
    """
    from kvprof.moments.collect import suitable_batch_size
    from kvprof.moments.stability_passes import plan_passes, run_pass

    passes = plan_passes(plan)
    if loaded is None:
        passes = [item for item in passes if item.source.kind is SourceKind.MOMENTS]
    fingerprint = loaded.fingerprint if loaded is not None else None
    runs: dict[str, list[Run]] = {}
    total = sum(item.tokens for item in passes if item.source.kind is not SourceKind.MOMENTS)
    with console.track(f"{len(passes)} passes", total) as progress:
        for number, item in enumerate(passes, 1):
            progress.describe(f"pass {number} of {len(passes)}: {item.source.name}")
            suitable = suitable_batch_size(loaded.device, item.seq_len) if loaded else 1
            run, fingerprint = run_pass(
                loaded,
                item,
                plan.pairs,
                batch_size=batch_size or suitable,
                fingerprint=fingerprint,
                advance=progress.advance,
                should_stop=stop,
            )
            if run.snapshots:
                runs.setdefault(item.role, []).append(run)
            done = number == len(passes) and item.tokens in run.snapshots
            if stop() and not done:
                return runs, fingerprint, False
    assert fingerprint is not None
    return runs, fingerprint, True


def _rank_choices(
    request: StabilityRequest, run: "Run", pairs: tuple[str, ...]
) -> "list[RankChoice]":
    """Return the ranks and removal rates to test; refuse a rank that keeps all of a head."""
    from kvprof.analysis.stability_study import RankChoice

    width = max(gram.shape[-1] for pair in pairs for gram in run.largest(pair).gram)
    for rank in request.ranks or ():
        if rank >= width:
            raise UsageError(
                f"--ranks: {rank} is not below head_dim, {width}; every basis is lossless there"
            )
    given = request.ranks or [max(1, width // 4), max(1, width // 2)]
    rates = [RankChoice(removal_rate=rate) for rate in request.removal]
    return [*(RankChoice(rank=rank) for rank in given), *rates]


def _resolved(
    loaded: "LoadedModel | None", plan: "StudyPlan", runs: "dict[str, list[Run]]"
) -> dict[str, Any]:
    from kvprof.analysis.pairs import VALUE_WEIGHT_TOKENS

    source, target = runs["source"][0], runs["target"][0]
    return {
        "model": loaded.spec if loaded is not None else None,
        **(loaded.origin if loaded is not None else {"revision": None}),
        "dtype": str(loaded.dtype).removeprefix("torch.") if loaded is not None else None,
        "device": str(loaded.device) if loaded is not None else None,
        "source": plan.source.name,
        "targets": [one.name for one in plan.targets],
        "pairs": list(plan.pairs),
        "tokens": list(plan.counts),
        "target_tokens": plan.target_tokens,
        "seeds": [run.seed for run in runs["source"]],
        "target_seeds": [run.seed for run in runs["target"]],
        "noise_seeds": [run.seed for run in runs.get("noise", ())],
        "seq_len": source.seq_len,
        "target_seq_len": target.seq_len,
        "positions": f"0-{source.seq_len - 1}",
        "target_positions": f"0-{target.seq_len - 1}",
        "value_weight_tokens": VALUE_WEIGHT_TOKENS,
    }
