"""Results held against each other: what differs, by how much, and how surely."""

import math
import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from kvprof.errors import UsageError
from kvprof.records.figures import Figure, figures_of

__all__ = ["compare", "environment_differences", "ratio_interval"]

_RESAMPLES = 1000
_ENDS = (0.025, 0.975)
#: Differences of the environment that say nothing about a measurement.
_UNTOLD = ("kvprof.git.dirty",)


def compare(
    results: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    fail_over: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the `data` of a comparison; the first result is what the others are held against.

    Parameters
    ----------
    results : sequence of mapping
        Two or more of one kind.
    names : sequence of str
        What to call each.
    fail_over : float, optional
        The share by which a headline figure may get worse. It fails where it got worse by more and,
        where an interval of the change is known, that interval excludes no change.
    seed : int
        Of the bootstrap.

    Returns
    -------
    dict
        As ``schema/compare.json`` says.

    Raises
    ------
    UsageError
        When the kinds differ, or there is nothing to hold against each other.
    """
    kinds = list(dict.fromkeys(result["kind"] for result in results))
    if len(kinds) > 1:
        listed = ", ".join(
            f"{name} is {result['kind']}" for name, result in zip(names, results, strict=True)
        )
        raise UsageError(f"only results of one kind can be compared: {listed}")
    found = [_by_key(figures_of(result)) for result in results]
    if not any(found):
        raise UsageError(f"a result of kind {kinds[0]} holds nothing that could be compared")
    rows: list[dict[str, Any]] = []
    unmatched: list[dict[str, Any]] = []
    for place in dict.fromkeys(place for own in found for place in own):
        figures = [own.get(place) for own in found]
        key, name = dict(place[0]), place[1]
        if figures[0] is None or all(figure is None for figure in figures[1:]):
            held = [which for which, one in zip(names, figures, strict=True) if one is not None]
            unmatched.append({"key": key, "figure": name, "in": held})
            continue
        rows.append(_row(key, name, figures, fail_over, seed))
    if not rows:
        raise UsageError(
            f"{' and '.join(names)} have no {kinds[0]} figure in common (their methods, lengths or "
            "cases differ)"
        )
    environments = [result["environment"] for result in results]
    return {
        "kind": kinds[0],
        "runs": [
            {"name": name, "created": result["created"], "complete": result["complete"],
             "kvprof_version": result["kvprof_version"]}
            for name, result in zip(names, results, strict=True)
        ],
        "rows": rows,
        "unmatched": unmatched,
        "environment": environment_differences(environments),
        "inputs": environment_differences([result["inputs"] for result in results]),
        "fail_over": fail_over,
        "failed": sum(change["failed"] for row in rows for change in row["changes"] if change),
    }  # fmt: skip


def _by_key(figures: Sequence[Figure]) -> dict[tuple[Any, str], Figure]:
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
    fail_over: float | None,
    seed: int,
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
            None if figure is None else _change(base, figure, fail_over, seed)
            for figure in figures[1:]
        ],
    }


def _change(base: Figure, other: Figure, fail_over: float | None, seed: int) -> dict[str, Any]:
    interval = ratio_interval(base, other, seed)
    share = other.value / base.value - 1 if base.value > 0 else None
    verdict = _verdict(base, other)
    certain = None if interval is None else not interval[0] <= 0 <= interval[1]
    failed = (
        fail_over is not None
        and base.headline
        and verdict == "worse"
        and certain is not False
        and (share is None or abs(share) > fail_over)
    )
    return {
        "difference": other.value - base.value,
        "share": share,
        "share_interval": None if interval is None else list(interval),
        "verdict": verdict,
        "certain": certain,
        "failed": failed,
    }


def _verdict(base: Figure, other: Figure) -> str:
    if other.value == base.value:
        return "same"
    if base.better is None:
        return "changed"
    return "better" if (other.value < base.value) == (base.better == "lower") else "worse"


def ratio_interval(base: Figure, other: Figure, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % interval of `other` over `base`, less one; None where nothing tells it.

    From samples by a bootstrap of both medians; otherwise from the two intervals, whose
    distances to their figures add in squares on a logarithmic scale (Zou and Donner's MOVER), as
    they do where the two runs are independent.

    Parameters
    ----------
    base, other : Figure
    seed : int
        Of the bootstrap.
    """
    if base.samples and other.samples and min(*base.samples, *other.samples) > 0:
        chance = random.Random(seed)
        ratios = sorted(
            median(chance.choices(other.samples, k=len(other.samples)))
            / median(chance.choices(base.samples, k=len(base.samples)))
            for _ in range(_RESAMPLES)
        )
        low, high = (ratios[round(end * (_RESAMPLES - 1))] - 1 for end in _ENDS)
        return low, high
    ours, theirs = _logs(base), _logs(other)
    if ours is None or theirs is None:
        return None
    (a, a_low, a_high), (b, b_low, b_high) = ours, theirs
    down = math.hypot(b - b_low, a_high - a)
    up = math.hypot(b_high - b, a - a_low)
    return math.expm1(b - a - down), math.expm1(b - a + up)


def _logs(figure: Figure) -> tuple[float, float, float] | None:
    if figure.interval is None or min(figure.value, *figure.interval) <= 0:
        return None
    low, high = figure.interval
    return math.log(figure.value), math.log(low), math.log(high)


def environment_differences(environments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is not the same everywhere: the path of each entry, and its values.

    Parameters
    ----------
    environments : sequence of mapping
        The environments, or the inputs, of results.
    """
    flat = [dict(_leaves(environment)) for environment in environments]
    return [
        {"path": path, "values": [one.get(path) for one in flat]}
        for path in dict.fromkeys(path for one in flat for path in one)
        if path not in _UNTOLD and any(one.get(path) != flat[0].get(path) for one in flat)
    ]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        entries = [(f"{path}.{key}" if path else str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        entries = [(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for name, entry in entries for leaf in _leaves(entry, name)]
