"""Numbers from the results of cells: a figure, a value in the data, or two measures together."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean, median
from typing import Any

from kvprof.records.figures import figures_of
from kvprof.reproduction.data_path import Found, alike, find, last_name
from kvprof.reproduction.recipe import Measure
from kvprof.reproduction.trust import doubt_about, implied_interval, implied_value, row_of

__all__ = ["Measured", "matching", "measure_all"]

_OVER: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min, "max": max, "mean": fmean, "median": median, "sum": math.fsum,
}  # fmt: skip
_SHOWN = 6


@dataclass(frozen=True)
class Measured:
    """A measure's number, or why there is none.

    Attributes
    ----------
    value : float or None
    interval : (float, float) or None
        95 %, where the results have one. Of two measures or several matches it is made of their
        ends, which is never too narrow.
    missing : str or None
        Why there is no number.
    doubt : str or None
        Why the number decides nothing.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    missing: str | None = None
    doubt: str | None = None


def matching(pattern: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that a pattern means: the very one, or those that ``*`` stands for."""
    every = list(ids)
    return [pattern] if pattern in every else [one for one in every if fnmatchcase(one, pattern)]


def measure_all(
    measures: Sequence[Measure],
    results: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
) -> dict[str, Measured]:
    """Return every measure of a recipe.

    Parameters
    ----------
    measures : sequence of Measure
        Those that others refer to stand above them.
    results : mapping
        By the cell's id.
    failures : mapping
        Why a cell has no result, by its id.
    """
    found: dict[str, Measured] = {}
    for one in measures:
        if one.divide is not None:
            found[one.id] = _together(found, one.divide, _quotient)
        elif one.subtract is not None:
            found[one.id] = _together(found, one.subtract, _difference)
        else:
            found[one.id] = _from_cells(one, results, failures)
    return found


def _from_cells(
    one: Measure, results: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> Measured:
    assert one.cell is not None
    cells = matching(one.cell, [*results, *failures])
    if broken := [cell for cell in cells if cell in failures]:
        return _missing(failures[broken[0]])
    if not cells:
        return _missing(f"no cell {one.cell} was run")
    found: list[Found] = []
    doubts: list[str] = []
    for cell in cells:
        own = _in_result(one, results[cell])
        found += own
        doubts += [
            f"{cell}: {doubt}"
            for entry in own
            if (doubt := doubt_about(results[cell], entry.row)) is not None
        ]
    doubt = doubts[0] if doubts else None
    wanted = one.data if one.data is not None else _said(one)
    if not found:
        return _missing(f"{', '.join(cells)}: no {wanted}{_there(one, results[cells[0]])}")
    if any(entry.value is None for entry in found):
        why = f"{wanted} was not measured" if doubt is None else f"no {wanted}: {doubt}"
        return _missing(f"{', '.join(cells)}: {why}")
    if wrong := [entry.value for entry in found if not isinstance(entry.value, int | float)]:
        kind = "a list; add [*] and over" if isinstance(wrong[0], list) else "no number"
        return _missing(f"{', '.join(cells)}: {wanted} is {kind}")
    if one.over is None:
        if len(found) > 1:
            return _missing(
                f"{', '.join(cells)}: {len(found)} numbers match {wanted}; say over: min, max, "
                "mean, median or sum"
            )
        return Measured(float(found[0].value), found[0].interval, doubt=doubt)
    # Each of these grows with every entry, so that the ends of all make the ends of the whole.
    over = _OVER[one.over]
    ends = [entry.interval for entry in found]
    known = [pair for pair in ends if pair is not None]
    interval = None
    if len(known) == len(ends):
        interval = (float(over([low for low, _ in known])), float(over([up for _, up in known])))
    value = float(over([float(entry.value) for entry in found]))
    return Measured(value, interval, doubt=doubt)


def _in_result(one: Measure, result: Mapping[str, Any]) -> list[Found]:
    if one.data is not None:
        found = find(result["data"], one.data)
    else:
        found = [
            Found(figure.value, figure.interval, row_of(result, figure))
            for figure in figures_of(result)
            if figure.name == one.figure and _is_of(dict(figure.key), one.where)
        ]
    name = one.figure if one.data is None else last_name(one.data)
    return [
        replace(
            entry,
            value=implied_value(entry.value, entry.row, name),
            interval=entry.interval or implied_interval(result, entry.row, name),
        )
        for entry in found
    ]


def _is_of(key: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    return all(name in key and alike(key[name], said) for name, said in where.items())


def _said(one: Measure) -> str:
    where = ", ".join(f"{key} {value}" for key, value in one.where.items())
    return f"figure {one.figure}" + (f" of {where}" if where else "")


def _there(one: Measure, result: Mapping[str, Any]) -> str:
    """Return what there is instead of a figure that is not found."""
    if one.data is not None:
        return f"; its data has {', '.join(list(result['data'])[:_SHOWN])}"
    figures = figures_of(result)
    same = [figure for figure in figures if figure.name == one.figure]
    if not same:
        return f"; it has {', '.join(list(dict.fromkeys(f.name for f in figures))[:_SHOWN])}"
    keys = [", ".join(f"{name} {value}" for name, value in figure.key) for figure in same]
    return f"; it is there of {'; '.join(keys[:_SHOWN])}"


def _together(
    found: Mapping[str, Measured],
    pair: tuple[str, str],
    make: Callable[[Measured, Measured], Measured],
) -> Measured:
    first, second = (found[one] for one in pair)
    for one in (first, second):
        if one.missing is not None:
            return one
    if make is _quotient and second.value == 0:
        return _missing(f"{pair[1]} is 0, and {pair[0]} cannot be divided by it")
    return replace(make(first, second), doubt=first.doubt or second.doubt)


def _quotient(first: Measured, second: Measured) -> Measured:
    assert first.value is not None
    assert second.value is not None
    interval = None
    a, b = first.interval, second.interval
    if a is not None and b is not None and not b[0] <= 0 <= b[1]:
        ends = [upper / lower for upper in a for lower in b]
        interval = (min(ends), max(ends))
    return Measured(first.value / second.value, interval)


def _difference(first: Measured, second: Measured) -> Measured:
    assert first.value is not None
    assert second.value is not None
    a, b = first.interval, second.interval
    interval = None if a is None or b is None else (a[0] - b[1], a[1] - b[0])
    return Measured(first.value - second.value, interval)


def _missing(why: str) -> Measured:
    return Measured(None, None, why)
