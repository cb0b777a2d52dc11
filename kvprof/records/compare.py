"""Results held against each other: what differs, by how much, and with what interval."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvprof.analysis.stats import log_ratio_interval, median_ends, median_ratio_ends
from kvprof.errors import UsageError
from kvprof.records.figures import Figure, figures_of

__all__ = ["Noise", "compare", "environment_differences", "noise_between", "ratio_interval"]

Figures = Mapping[tuple[Any, str], Figure]

#: Share of the controls' drift by which a method may have missed it.
_MISSED = 0.5
#: Differences of the environment that say nothing about a measurement.
_NOT_SHOWN = ("kvprof.git.dirty",)


def compare(
    results: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    fail_over: float | None = None,
) -> dict[str, Any]:
    """Return the `data` of a comparison with the first result.

    A headline figure fails where the whole interval of its change lies beyond `fail_over`; without
    an interval only where it is exact.
    """
    kinds = list(dict.fromkeys(result["kind"] for result in results))
    if len(kinds) > 1:
        listed = ", ".join(
            f"{name} is {result['kind']}" for name, result in zip(names, results, strict=True)
        )
        raise UsageError(f"compare requires results of one kind: {listed}")
    found = [_by_key(figures_of(result)) for result in results]
    noises = [noise_between(found[0], own) for own in found[1:]]
    if not any(found):
        raise UsageError(f"results of kind {kinds[0]} cannot be compared")
    rows: list[dict[str, Any]] = []
    unmatched: list[dict[str, Any]] = []
    for named in dict.fromkeys(named for own in found for named in own):
        figures = [own.get(named) for own in found]
        key, name = dict(named[0]), named[1]
        if figures[0] is None or all(figure is None for figure in figures[1:]):
            held = [which for which, one in zip(names, figures, strict=True) if one is not None]
            unmatched.append({"key": key, "figure": name, "in": held})
            continue
        rows.append(_row(key, name, figures, noises, fail_over))
    if not rows:
        raise UsageError(
            f"{' and '.join(names)} have no {kinds[0]} figure in common (their methods, lengths or "
            "cases differ)"
        )
    environments = [result["environment"] for result in results]
    return {
        "kind": kinds[0],
        "runs": [
            {
                "name": name,
                "created": result["created"],
                "complete": result["complete"],
                "kvprof_version": result["kvprof_version"],
            }
            for name, result in zip(names, results, strict=True)
        ],
        "noise": [None if noise is None else noise._asdict() for noise in noises],
        "rows": rows,
        "unmatched": unmatched,
        "environment": environment_differences(environments),
        "inputs": environment_differences([result["inputs"] for result in results]),
        "fail_over": fail_over,
        "failed": sum(change["failed"] for row in rows for change in row["changes"] if change),
    }


def _by_key(figures: Sequence[Figure]) -> Figures:
    found: dict[tuple[Any, str], Figure] = {}
    for figure in figures:
        key, again = figure.key, 1
        # Rows that nothing tells apart are matched by their order.
        while (key, figure.name) in found:
            again += 1
            key = (*figure.key, ("row", again))
        found[key, figure.name] = figure
    return found


def _row(
    key: dict[str, Any],
    name: str,
    figures: Sequence[Figure | None],
    noises: Sequence["Noise | None"],
    fail_over: float | None,
) -> dict[str, Any]:
    base = figures[0]
    assert base is not None
    return {
        "key": key,
        "figure": name,
        "better": base.better,
        "headline": base.headline,
        "values": [None if figure is None else figure.value for figure in figures],
        "changes": [
            None if figure is None else _change(base, figure, noise, fail_over)
            for figure, noise in zip(figures[1:], noises, strict=True)
        ],
    }


def _change(
    base: Figure, other: Figure, noise: "Noise | None", fail_over: float | None
) -> dict[str, Any]:
    # What no float holds, of a figure next to nothing, is told by no ratio.
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            interval = ratio_interval(base, other, noise)
            share = float(np.divide(other.value, base.value)) - 1 if base.value > 0 else None
    except (ArithmeticError, ValueError):
        interval = share = None
    verdict = _verdict(base, other)
    certain = True if base.exact and other.exact else None
    if interval is not None:
        certain = not interval[0] <= 0 <= interval[1]
    gated = fail_over is not None and base.headline and (interval is not None or base.exact)
    return {
        "difference": other.value - base.value,
        "share": share,
        "share_interval": None if interval is None else list(interval),
        "verdict": verdict,
        "certain": certain,
        "gated": gated,
        "failed": gated
        and verdict == "worse"
        and _exceeds(base, share, interval, fail_over or 0.0),
    }


def _exceeds(
    base: Figure, share: float | None, interval: tuple[float, float] | None, limit: float
) -> bool:
    if interval is not None:
        low, high = interval
        return low > limit if base.better == "lower" else -high > limit
    return share is None or abs(share) > limit


def _verdict(base: Figure, other: Figure) -> str:
    if other.value == base.value:
        return "same"
    if base.better is None:
        return "changed"
    return "better" if (other.value < base.value) == (base.better == "lower") else "worse"


class Noise(NamedTuple):
    """How far what no method changes differs between two runs: the machine, not the methods."""

    controls: int  # how many such figures
    drift: float  # the median of their changes: 0.1 for a tenth slower
    spread: float  # by how much, relatively, another of them differs from that at most

    @property
    def margin(self) -> float:
        """What a figure may differ by for no reason of its own, as a logarithm.

        As far as any control, and by half the drift: a machine that gives its memory's time to
        others slows one kernel down more than another.
        """
        return math.log1p(self.spread) + _MISSED * abs(math.log1p(self.drift))


def noise_between(base: Figures, other: Figures) -> Noise | None:
    """Return how far two runs differ in what no method changes; None where nothing tells."""
    changes: list[tuple[float, float]] = []
    for named, figure in base.items():
        again = other.get(named)
        if again is None:
            continue
        if figure.beside and again.beside:
            changes += _control(figure.beside, again.beside)
        if figure.control and again.control:
            ours, theirs = (one.samples or [one.value] for one in (figure, again))
            # Of a rate, slower is less.
            changes += (
                _control(ours, theirs) if figure.better == "lower" else _control(theirs, ours)
            )
    if not changes:
        return None
    drift = median(change for change, _ in changes)
    # What a control's own samples explain is in the interval of each figure as well.
    spread = max(0.0, *(abs(change - drift) - half for change, half in changes))
    return Noise(len(changes), math.expm1(drift), math.expm1(spread))


def _control(before: Sequence[float], after: Sequence[float]) -> list[tuple[float, float]]:
    """Return the logarithm of the ratio of two medians, and half the width of its interval."""
    if min(*before, *after) <= 0:
        return []
    change = math.log(median(after) / median(before))
    return [(change, math.hypot(*(_half_width(samples) for samples in (before, after))))]


def _half_width(samples: Sequence[float]) -> float:
    """Return half of what the ends of a median's logarithm lie apart; 0 of one sample."""
    low, high = median_ends([math.log(value) for value in samples]) or (0.0, 0.0)
    return (high - low) / 2


def _middle(figure: Figure) -> float | None:
    return median(figure.beside) if figure.beside else None


def ratio_interval(
    base: Figure, other: Figure, noise: Noise | None = None
) -> tuple[float, float] | None:
    """Return the 95 % interval of `other` over `base`, less one; None where nothing tells it.

    From samples, those of both medians (a range, of few); otherwise from the two intervals. A time
    is held both as it is and relative to what was taken beside it (without that, to the drift of
    the controls), and the interval holds both: a machine that was slower for one may not have been
    for the other. The margin of the noise widens it.
    """
    if base.samples and other.samples and min(*base.samples, *other.samples) > 0:
        ratio = median_ratio_ends(other.samples, base.samples, paired=False)
        found = [] if ratio is None else [(math.log(ratio[0]), math.log(ratio[1]))]
        if relative := _paired_log_ratio(base, other):
            found.append(relative)
    else:
        ours, theirs = _ends(base), _ends(other)
        found = [] if ours is None or theirs is None else [log_ratio_interval(theirs, ours)]
    if not found:
        return None
    widened = 0.0
    if noise is not None and base.name.endswith("seconds"):
        if len(found) == 1:
            before, after = _middle(base), _middle(other)
            drift = math.log1p(noise.drift)
            if before and after and min(before, after) > 0:
                drift = math.log(after / before)
            found.append((found[0][0] - drift, found[0][1] - drift))
        widened = noise.margin
    low, high = min(low for low, _ in found) - widened, max(high for _, high in found) + widened
    return math.expm1(low), math.expm1(high)


def _paired_log_ratio(base: Figure, other: Figure) -> tuple[float, float] | None:
    """Return the ends of the logarithm of the ratio, each sample over what was beside it."""
    relative = []
    for one in (other, base):
        samples, beside = one.samples or (), one.beside or ()
        if len(samples) != len(beside) or min(beside, default=0) <= 0:
            return None
        relative.append([a / b for a, b in zip(samples, beside, strict=True)])
    ratio = median_ratio_ends(*relative, paired=False)
    return None if ratio is None else (math.log(ratio[0]), math.log(ratio[1]))


def _ends(figure: Figure) -> tuple[float, float, float] | None:
    if figure.interval is None or min(figure.value, *figure.interval) <= 0:
        return None
    return figure.value, *figure.interval


def environment_differences(environments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is not the same everywhere: the path of each entry, and its values."""
    flat = [dict(_leaves(environment)) for environment in environments]
    return [
        {"path": path, "values": [one.get(path) for one in flat]}
        for path in dict.fromkeys(path for one in flat for path in one)
        if path not in _NOT_SHOWN and any(one.get(path) != flat[0].get(path) for one in flat)
    ]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        entries = [(f"{path}.{key}" if path else str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        entries = [(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for name, entry in entries for leaf in _leaves(entry, name)]
