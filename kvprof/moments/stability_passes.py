"""The forward passes of a stability study: one per source and seed, snapshots on the way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvprof.analysis.moments import Moments
from kvprof.analysis.stability import Run, pair_factors
from kvprof.models.load import LoadedModel
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.moments.files import load_moments
from kvprof.sources.grammar import Source, SourceKind

__all__ = ["Pass", "StudyPlan", "plan_passes", "run_pass"]


@dataclass(frozen=True)
class StudyPlan:
    """What is compared with what."""

    source: Source
    targets: tuple[Source, ...]
    pairs: tuple[str, ...]
    counts: tuple[int, ...]
    target_tokens: int
    seeds: tuple[int, ...]
    seq_len: int
    target_seq_len: int

    @property
    def lengths_differ(self) -> bool:
        """Whether the two lengths differ by more than a factor of two."""
        short, long = sorted((self.seq_len, self.target_seq_len))
        return long > 2 * short


@dataclass(frozen=True)
class Pass:
    """One forward pass over one source."""

    role: str
    source: Source
    seed: int
    seq_len: int
    tokens: int
    snapshots: tuple[int, ...]


def plan_passes(plan: StudyPlan) -> list[Pass]:
    """Return a study's passes, ordered so that an interrupted study can still be judged."""
    random = Source(SourceKind.RANDOM, "random")
    seeds = plan.seeds if plan.source.kind is SourceKind.RANDOM else plan.seeds[:1]
    sweep = (plan.seq_len, plan.counts[-1], plan.counts)
    sources = [Pass("source", plan.source, seed, *sweep) for seed in seeds]
    noise: list[Pass] = []
    if plan.source.kind is not SourceKind.RANDOM:
        noise = [Pass("noise", random, seed, *sweep) for seed in (0, 1)]
    elif len(seeds) == 1:
        noise = [Pass("noise", random, seeds[0] + 1, *sweep)]
    targets = []
    # A random target takes a seed that no random source uses.
    fresh = max(plan.seeds) + 2
    for target in plan.targets:
        tokens = plan.target_tokens
        targets.append(Pass("target", target, fresh, plan.target_seq_len, tokens, (tokens,)))
        if plan.lengths_differ and target.kind is not SourceKind.MOMENTS:
            targets.append(Pass("target_short", target, fresh, plan.seq_len, tokens, (tokens,)))
    return [targets[0], sources[0], *targets[1:], *sources[1:], *noise]


def run_pass(
    loaded: LoadedModel | None,
    item: Pass,
    pairs: Sequence[str],
    *,
    batch_size: int,
    fingerprint: str | None = None,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Run, str]:
    """Run the model over one source, or read its saved moments."""
    snapshots = {}
    last: Moments | None = None
    seq_len = item.seq_len
    warnings = []
    saved = item.source.kind is SourceKind.MOMENTS
    for moments in _moments(loaded, item, batch_size, fingerprint, advance, should_stop):
        last = moments
        if saved:
            seq_len = int(moments.info.get("seq_len", seq_len))
            warnings = _saved_warnings(item.source.name, moments)
        if moments.complete or saved:
            snapshots[moments.tokens] = {pair: pair_factors(moments, pair) for pair in pairs}
    assert last is not None  # the iterator yields at least once or raises
    is_random = item.source.kind is SourceKind.RANDOM
    run = Run(
        item.source.name,
        item.seed if is_random else None,
        seq_len,
        snapshots,
        random_tokens=is_random or last.info.get("source") == "random",
        warnings=warnings,
    )
    return run, last.fingerprint


def _saved_warnings(name: str, moments: Moments) -> list[str]:
    """Return what makes saved moments differ from a pass that would be run now."""
    warnings = []
    if not moments.complete:
        warnings.append(f"{name}: from a run that was interrupted at {moments.tokens:,} tokens")
    if skipped := moments.info.get("skip_first"):
        warnings.append(f"{name}: excludes the first {skipped} positions of each sequence")
    return warnings


def _moments(
    loaded: LoadedModel | None,
    item: Pass,
    batch_size: int,
    fingerprint: str | None,
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> Iterator[Moments]:
    if item.source.kind is SourceKind.MOMENTS:
        yield load_moments(item.source.paths[0], fingerprint=fingerprint)
        return
    assert loaded is not None
    options = CollectOptions(
        tokens=item.tokens, seq_len=item.seq_len, batch_size=batch_size, seed=item.seed
    )
    yield from collect_moments(
        loaded,
        item.source,
        options,
        snapshots=item.snapshots,
        advance=advance,
        should_stop=should_stop,
    )
