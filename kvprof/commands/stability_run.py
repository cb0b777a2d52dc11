"""The plan and the passes of ``kvprof stability``: checked before, shown while they run."""

from typing import TYPE_CHECKING

from kvprof import console
from kvprof.errors import UsageError
from kvprof.interrupt import Stop
from kvprof.sizes import format_count
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, Source, SourceKind

if TYPE_CHECKING:
    from kvprof.analysis.stability import Run
    from kvprof.models.load import LoadedModel
    from kvprof.moments.stability_passes import StudyPlan

__all__ = ["make_plan", "run_passes"]


def make_plan(
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
    from kvprof.moments.collect import CollectOptions, count_tokens
    from kvprof.moments.files import load_moments
    from kvprof.moments.stability_passes import StudyPlan, plan_passes

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
    loaded: "LoadedModel | None", plan: "StudyPlan", batch_size: int | None, stop: Stop
) -> "tuple[dict[str, list[Run]], str, bool]":
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
