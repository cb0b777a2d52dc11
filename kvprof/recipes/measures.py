"""Numbers from the results of cells: a figure, a value under a path, or two measures together."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean, median
from typing import Any

from kvprof.analysis.stats import LEAST_SEQUENCES, binomial_interval, normal_interval
from kvprof.recipes.recipe import Measure
from kvprof.records.cases import MOST_UNATTRIBUTED
from kvprof.records.figures import Figure, figures_of
from kvprof.records.load_names import baseline_of

__all__ = [
    "Found",
    "Measured",
    "find",
    "implied_interval",
    "implied_value",
    "last_name",
    "matching",
    "measure_all",
    "parse_path",
    "row_of",
    "why_unsure",
]

# --- Paths into the data of a result: ``rows[method=kq].relative_accuracy``.


Step = tuple[str, Any]

_PIECE = re.compile(r"\.?([^.\[\]]+)|\[([^\[\]]*)\]")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")


@dataclass(frozen=True)
class Found:
    """A value at the end of a path."""

    value: Any
    interval: tuple[float, float] | None = None  # that stands beside it
    row: Mapping[str, Any] | None = None  # which holds both


def parse_path(text: str) -> list[Step]:
    """Read a path: names, ``[n]``, ``[key=value, key=value]``, ``["name"]``, ``[*]``."""
    steps: list[Step] = []
    place = 0
    while place < len(text):
        match = _PIECE.match(text, place)
        if match is None:
            raise ValueError(
                f"{text!r} is not a path; write names and brackets, such as rows[method=kq].rate"
            )
        place = match.end()
        if match[1] is not None:
            steps.append(("name", match[1].strip()))
        else:
            steps.append(_bracket(match[2].strip(), text))
    if not steps:
        raise ValueError(
            "the path is empty; write names and brackets, such as rows[method=kq].rate"
        )
    return steps


def _bracket(inside: str, text: str) -> Step:
    if inside == "*":
        return ("all", None)
    if re.fullmatch(r"-?[0-9]+", inside):
        return ("index", int(inside))
    if quoted := _QUOTED.fullmatch(inside):
        return ("name", quoted[1] if quoted[1] is not None else quoted[2])
    pieces = inside.split(",")
    # A value may hold a comma; then it stands alone.
    if not all("=" in piece for piece in pieces):
        pieces = [inside]
    conditions = [piece.partition("=") for piece in pieces]
    if not all(key.strip() and equals for key, equals, _ in conditions):
        raise ValueError(f"{text!r}: [{inside}] is neither a number, nor key=value, nor *")
    return ("where", [(key.strip(), value.strip()) for key, _, value in conditions])


def find(data: Any, text: str) -> list[Found]:
    """Return every value that a path leads to; empty where there is none."""
    found = [Found(data)]
    for kind, what in parse_path(text):
        found = [inner for outer in found for inner in _step(outer.value, kind, what)]
    return found


def last_name(text: str) -> str | None:
    """Return the name that a path ends in; None where it ends in a place of a list."""
    kind, what = parse_path(text)[-1]
    return what if kind == "name" else None


def _step(value: Any, kind: str, what: Any) -> list[Found]:
    if kind == "name":
        if not isinstance(value, Mapping) or what not in value:
            return []
        return [Found(value[what], _interval(value.get(f"{what}_interval")), value)]
    entries = list(value.values()) if isinstance(value, Mapping) and kind == "all" else value
    if kind == "where" and isinstance(value, Mapping):
        entries = [value]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return []
    if kind == "all":
        return [Found(one) for one in entries]
    if kind == "index":
        return [Found(entries[what])] if -len(entries) <= what < len(entries) else []
    return [
        Found(one)
        for one in entries
        if isinstance(one, Mapping) and all(matches(one.get(key), said) for key, said in what)
    ]


def matches(value: Any, said: Any) -> bool:
    """Tell whether a value of a result is the one that a recipe writes: 0.3 is 0.30."""
    if value is None or isinstance(value, bool):
        return str(value).lower() == str(said).lower() or (value is None and said in ("null", ""))
    if isinstance(value, int | float):
        try:
            return float(said) == value
        except (TypeError, ValueError):
            return False
    return str(value) == str(said)


def _interval(value: Any) -> tuple[float, float] | None:
    if isinstance(value, list) and len(value) == 2 and None not in value:
        return (value[0], value[1])
    return None


# --- How far a number of a result can be trusted: its interval, and what forbids a verdict.


Row = Mapping[str, Any]


def row_of(result: Row, figure: Figure) -> Row | None:
    """Return the row of a result that a figure is of, where it says more of the figure."""
    key, data = dict(figure.key), result["data"]
    match result["kind"]:
        case "jct":
            return key
        case "bench":
            rows = data["rows"]
            return next((r for r in rows if all(r.get(k) == v for k, v in key.items())), None)
        case "eval":
            row: Row = next(one for one in data["evaluations"] if one["method"] == key["method"])
            return row["tasks"][key["task"]] if figure.name == "task_accuracy" else row
    return None


def implied_value(value: Any, row: Row | None, name: str | None) -> Any:
    """Return a value, or what its absence means: no rate that meets a target is a rate of 0."""
    if value is not None or row is None or not row.get("points"):
        return value
    # Without intervals no rate is known to hold.
    known = name == "max_rate" or (name == "sure_rate" and row["max_rate_interval"] is not None)
    return 0.0 if known else None


def implied_interval(result: Row, row: Row | None, name: str | None) -> tuple[float, float] | None:
    """Return the 95 % interval of a number that has none beside it, from what its row says."""
    if row is None:
        return None
    if name in ("accuracy", "baseline", "task_accuracy") and row.get("items"):
        share = row["baseline" if name == "baseline" else "accuracy"]
        return binomial_interval(share, row["items"])
    if name == "value" and "stderr" in row:
        if row["value"] in (0, 1) and row["items"]:  # where a standard error sees no spread
            return binomial_interval(row["value"], row["items"])
        if row["stderr"] is not None:
            return normal_interval(row["value"], row["stderr"])
    if name == "max_rate" and row.get("points"):
        # A sample without intervals (one sequence) leaves every rate open.
        low, high = row.get("max_rate_interval") or (None, None)
        return low or 0.0, 1.0 if high is None else high
    return None


def why_unsure(result: Row, row: Row | None, name: str | None = None) -> str | None:
    """Return why a number decides nothing, or None where it may."""
    few = row is not None and row.get("sequences", LEAST_SEQUENCES) < LEAST_SEQUENCES
    if few and f"{name}_interval" in (row or ()):
        return f"{LEAST_SEQUENCES} sequences or more give an interval"
    if result["kind"] == "load":
        return _why_unsure_of_load(result, row)
    if result["kind"] == "frontier" and not result.get("complete", True):
        return "the frontier was interrupted, and its largest rates are those so far"
    if result["kind"] != "jct" or row is None or "case" not in row:
        return None
    case = next((one for one in result["data"]["cases"] if one["case"] == row["case"]), None)
    share = case["unattributed_share"] if case is not None else None
    if case is None or share is None:
        return None
    # Older records do not say by how much the parts of a phase exceed it.
    excess = case.get("excess_share")
    excess = max(0.0, -share) if excess is None else excess
    if max(share, excess) <= MOST_UNATTRIBUTED:
        return None
    limit = f"{100 * MOST_UNATTRIBUTED:g} % at most"
    if excess > MOST_UNATTRIBUTED:
        return f"{row['case']}: {100 * excess:.1f} % more than its time is in parts ({limit})"
    return f"{row['case']}: {100 * share:.1f} % of its time has no part ({limit})"


def _why_unsure_of_load(result: Row, row: Row | None) -> str | None:
    if not result.get("complete", True):
        return "the load was interrupted, and its largest rates are those so far"
    if row is None or "largest_rate" not in row:
        return None
    data = result["data"]
    wanted = baseline_of(row["method"], data["baseline"])
    base = next((one for one in data["methods"] if one["method"] == wanted), None)
    for one in (base, row):
        if one is not None and None in one["largest_rate_interval"]:
            where = "below" if one["largest_rate_interval"][0] is None else "above"
            return f"{one['method']}: no tested rate is clearly {where} its largest rate"
    return None


_OVER: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min, "max": max, "mean": fmean, "median": median, "sum": math.fsum,
}  # fmt: skip
_SHOWN = 6


@dataclass(frozen=True)
class Measured:
    """A measure's number, or why there is none."""

    value: float | None
    #: 95 %, where the results have one. Of two measures or several matches it is made of their
    #: ends, which is never too narrow.
    interval: tuple[float, float] | None = None
    missing: str | None = None  # why there is no number
    doubt: str | None = None  # why the number decides nothing


def matching(pattern: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that a pattern means: the very one, or those that ``*`` stands for."""
    every = list(ids)
    return [pattern] if pattern in every else [one for one in every if fnmatchcase(one, pattern)]


def measure_all(
    measures: Sequence[Measure],
    results: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
) -> dict[str, Measured]:
    """Return every measure of a recipe."""
    found: dict[str, Measured] = {}
    for one in measures:
        if one.divide is not None:
            found[one.id] = _combine(found, one.divide, _quotient)
        elif one.subtract is not None:
            found[one.id] = _combine(found, one.subtract, _difference)
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
    unsure: list[str] = []
    name = one.figure if one.data is None else last_name(one.data)
    for cell in cells:
        own = _in_result(one, results[cell])
        found += own
        unsure += [
            f"{cell}: {doubt}"
            for entry in own
            if (doubt := why_unsure(results[cell], entry.row, name)) is not None
        ]
    doubt = unsure[0] if unsure else None
    wanted = one.data if one.data is not None else _figure_text(one)
    if not found:
        return _missing(f"{', '.join(cells)}: no {wanted}{_available_hint(one, results[cells[0]])}")
    if any(entry.value is None for entry in found):
        why = f"{wanted} has no value" if doubt is None else f"no {wanted}: {doubt}"
        return _missing(f"{', '.join(cells)}: {why}")
    if wrong := [entry.value for entry in found if not isinstance(entry.value, int | float)]:
        kind = "a list; add [*] and over" if isinstance(wrong[0], list) else "not a number"
        return _missing(f"{', '.join(cells)}: {wanted} is {kind}")
    if one.over is None:
        if len(found) > 1:
            return _missing(
                f"{', '.join(cells)}: {len(found)} numbers match {wanted}; add over: min, max, "
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
    return all(name in key and matches(key[name], said) for name, said in where.items())


def _figure_text(one: Measure) -> str:
    where = ", ".join(f"{key} {value}" for key, value in one.where.items())
    return f"figure {one.figure}" + (f" of {where}" if where else "")


def _available_hint(one: Measure, result: Mapping[str, Any]) -> str:
    """Return what there is instead of a figure that is not found."""
    if one.data is not None:
        return f"; its data has {', '.join(list(result['data'])[:_SHOWN])}"
    figures = figures_of(result)
    same = [figure for figure in figures if figure.name == one.figure]
    if not same:
        return f"; it has {', '.join(list(dict.fromkeys(f.name for f in figures))[:_SHOWN])}"
    keys = [", ".join(f"{name} {value}" for name, value in figure.key) for figure in same]
    return f"; it is there of {'; '.join(keys[:_SHOWN])}"


def _combine(
    found: Mapping[str, Measured],
    pair: tuple[str | float, str | float],
    make: Callable[[Measured, Measured], Measured],
) -> Measured:
    # A number is what it is.
    first, second = (
        found[one] if isinstance(one, str) else Measured(float(one), (one, one)) for one in pair
    )
    for one in (first, second):
        if one.missing is not None:
            return one
    if make is _quotient and second.value == 0:
        return _missing(f"{pair[1]} is 0, and {pair[0]} cannot be divided by it")
    together = make(first, second)
    if together.interval is not None and not all(map(math.isfinite, together.interval)):
        together = replace(together, interval=None)
    if together.value is not None and not math.isfinite(together.value):
        return _missing(f"what {pair[0]} and {pair[1]} make is larger than any number")
    return replace(together, doubt=first.doubt or second.doubt)


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
