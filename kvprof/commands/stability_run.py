"""The plan and the passes of ``kvprof stability``: checked before, shown while they run."""

from typing import Any

from kvprof import console
from kvprof.analysis.pairs import VALUE_WEIGHT_TOKENS
from kvprof.analysis.stability import Run
from kvprof.analysis.stability_study import RankChoice
from kvprof.errors import UsageError
from kvprof.interrupt import Stop
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.moments.collect import CollectOptions, count_tokens, suitable_batch_size
from kvprof.moments.files import load_moments
from kvprof.moments.stability_passes import StudyPlan, plan_passes, run_pass
from kvprof.sizes import format_count
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, Source, SourceKind

__all__ = ["make_plan", "rank_choices", "run_passes", "study_inputs"]


def make_plan(
    loaded: OpenedModel | None,
    offline: Source,
    datasets: list[Source],
    pairs: tuple[str, ...],
    counts: list[int],
    target_tokens: int,
    seeds: int,
    lengths: tuple[int | None, int | None],
) -> StudyPlan:
    """Resolve the lengths and check, before anything is run, that every source is long enough."""
    longest = loaded.context_length if loaded is not None else DEFAULT_SEQ_LEN
    source_length = lengths[0] or min(DEFAULT_SEQ_LEN, longest, counts[0])
    saved = offline.kind is SourceKind.MOMENTS
    if saved:
        source_length = int(load_moments(offline.paths[0]).info.get("seq_len", source_length))
    for count in counts:
        if count % source_length and not saved:
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


def run_passes(
    loaded: LoadedModel | None, plan: StudyPlan, batch_size: int | None, stop: Stop
) -> tuple[dict[str, list[Run]], str, bool]:
    """Run every pass of a study.

    Parameters
    ----------
    loaded : LoadedModel or None
        None when every source is a file of moments; the passes that need a model are left out.
    plan : StudyPlan
        From `make_plan`.
    batch_size : int or None
        Sequences per forward pass; None picks what suits the length of each pass.
    stop : Stop
        Asked after each batch.

    Returns
    -------
    runs : dict of str to list of Run
        By role.
    fingerprint : str
        Of the model.
    complete : bool
        False when the user interrupted; the runs that were done are returned.
    """
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


def rank_choices(
    ranks: list[int] | None, rates: list[float], run: Run, pairs: tuple[str, ...]
) -> list[RankChoice]:
    """Return the ranks and removal rates to look at.

    Raises
    ------
    UsageError
        For a rank that keeps all of a head.
    """
    width = max(gram.shape[-1] for pair in pairs for gram in run.largest(pair).gram)
    for rank in ranks or []:
        if rank >= width:
            raise UsageError(
                f"--ranks: {rank} keeps all of heads of {width}; every basis is exact there"
            )
    given = ranks or [max(1, width // 4), max(1, width // 2)]
    return [
        *(RankChoice(rank=rank) for rank in given),
        *(RankChoice(removal_rate=rate) for rate in rates),
    ]


def study_inputs(
    loaded: LoadedModel | None,
    plan: StudyPlan,
    runs: dict[str, list[Run]],
    choices: list[RankChoice],
    batch_size: int | None,
    fingerprint: str,
) -> dict[str, Any]:
    """Return every resolved input, so that a reader can repeat the run."""
    return {
        "model": loaded.spec if loaded is not None else None,
        "fingerprint": fingerprint,
        **(loaded.origin if loaded is not None else {"revision": None}),
        "dtype": str(loaded.dtype).removeprefix("torch.") if loaded is not None else None,
        "device": str(loaded.device) if loaded is not None else None,
        "source": plan.source.name,
        "targets": [target.name for target in plan.targets],
        "pairs": list(plan.pairs),
        "tokens": list(plan.counts),
        "target_tokens": plan.target_tokens,
        "seeds": [run.seed for run in runs["source"]],
        "seq_len": runs["source"][0].seq_len,
        "positions": f"0-{runs['source'][0].seq_len - 1}",
        "target_positions": f"0-{runs['target'][0].seq_len - 1}",
        "target_seq_len": runs["target"][0].seq_len,
        "ranks": [choice.rank for choice in choices if choice.rank is not None],
        "removal": [c.removal_rate for c in choices if c.removal_rate is not None],
        "batch_size": batch_size or "by sequence length",
        "value_weight_tokens": VALUE_WEIGHT_TOKENS,
        "target_seeds": [run.seed for run in runs["target"]],
        "noise_seeds": [run.seed for run in runs.get("noise", [])],
    }
