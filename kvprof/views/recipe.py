"""The report of ``kvprof recipe run``: claimed, measured, interval and verdict in one table."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from kvprof.methods.named import papers_named
from kvprof.views.figure import new_figure
from kvprof.views.numbers import MISSING, axis_number, interval, number
from kvprof.views.page import bullets, framed, heading
from kvprof.views.tables import Column, DataTable

__all__ = [
    "VERDICT_ORDER",
    "Beside",
    "Ratio",
    "answer",
    "beside_figure",
    "check_words",
    "claimed_words",
    "interval_words",
    "limits_of",
    "line_words",
    "lines",
    "listing",
    "measured_words",
    "model_words",
    "paper_notes",
    "published_words",
    "ratios_of",
    "report",
]

# --- A ledger's entries in words: what was claimed, what was measured, which side of it.


_SIGNS = {"at_least": "≥", "at_most": "≤", "above": ">", "below": "<"}


def published_words(one: Mapping[str, Any]) -> str:
    """Write a published number with its unit: ``0.45 removal rate``, ``0.93 to 0.97 …``."""
    if one["value"] is not None:
        return f"{axis_number(one['value'])} {one['unit']}"
    return f"{axis_number(one['low'])} to {axis_number(one['high'])} {one['unit']}"


def limits_of(line: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lower and upper limit of a line with its tolerance; equal where there is one."""
    low, high = line["limit"][0], line["limit"][-1]
    share, fixed = line["tolerance_share"], line["tolerance"]

    def slack(limit: float) -> float:
        return share * abs(limit) if share is not None else fixed or 0.0

    if line["check"] in ("at_least", "above"):
        return (low - slack(low),) * 2
    if line["check"] in ("at_most", "below"):
        return (high + slack(high),) * 2
    return low - slack(low), high + slack(high)


def check_words(line: Mapping[str, Any]) -> str:
    """Write what must hold, the tolerance included: ``≥ 0.98``, ``4.5 to 5.5``."""
    low, high = limits_of(line)
    sign = _SIGNS.get(line["check"])
    return f"{sign} {axis_number(low)}" if sign else f"{axis_number(low)} to {axis_number(high)}"


def claimed_words(entry: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    """Write what the paper says and what must hold for it."""
    found = [one for one in entry["published"] if one["id"] == line["published"]]
    said = f"{published_words(found[0])}; " if found else ""
    return f"{said}{check_words(line)}"


def measured_words(line: Mapping[str, Any]) -> str:
    """Write the number alone."""
    return number(line["measured"], 4)


def interval_words(line: Mapping[str, Any]) -> str:
    """Write the interval alone."""
    if line["interval"] is None:
        return MISSING
    return interval(line["measured"], line["interval"], 4).partition(" ")[2]


def line_words(line: Mapping[str, Any]) -> str:
    """Write whether a line holds, or why that cannot be told."""
    if line["measured"] is None:
        return "not measured"
    if line["holds"] is None:
        said = (
            "inconclusive: limit inside the interval"
            if line["uncertain"]
            else "inconclusive: doubtful"
        )
    else:
        said = "holds" if line["holds"] else "fails"
    return f"{said} (direction)" if line["direction"] else said


def model_words(entry: Mapping[str, Any]) -> str:
    """Write which model a verdict rests on, and on which GPU: ``smollm2, NVIDIA H200``."""
    return f"{entry['model'] or MISSING}, {entry['gpu'] or 'CPU'}"


# --- What was measured beside what was published: a ratio per line of a verdict, all on one
# axis.


_LEAST = 24  # columns of a ratio
_MOST_LABEL = 28
_NEAR = 1.25
_FARTHEST = 1e99  # that a ratio can be drawn at
_LEAST_SPAN = 1.1  # the axis reaches at least from 1 / this to this
_COLOURS = {True: "#0072B2", False: "#D55E00", None: "#555555"}
_SAID = {True: "", False: " fails", None: " inconclusive"}
_MARKS = {True: "o", False: "X", None: "s"}


@dataclass(frozen=True)
class Ratio:
    """A line of a verdict, over its reference."""

    label: str
    #: What was published, 1 or a range around it; the limit where no number is published in the
    #: measure's unit.
    low: float
    high: float
    value: float
    interval: tuple[float, float] | None
    holds: bool | None  # none where that is open
    stated: bool  # whether the reference is a published number rather than the recipe's limit


def _near_enough(ratio: float) -> bool:
    return 1 / _FARTHEST <= ratio <= _FARTHEST


def ratios_of(entry: Mapping[str, Any]) -> list[Ratio]:
    """Return the ratios of an entry; a line with nothing to be held against has none."""
    known = {one["id"]: one for one in entry["published"]}
    found = []
    for line in entry["lines"]:
        if line["measured"] is None:
            continue
        one = known.get(line["published"])
        ends = (line["limit"][0], line["limit"][-1])
        stated = one is not None and _comparable(one, line)
        if one is not None and stated:
            ends = _ends(one)
        middle = sum(ends) / 2
        # What is not positive has no ratio, and what is too far off no place.
        if min(*ends, line["measured"]) <= 0:
            continue
        if not all(_near_enough(one / middle) for one in (*ends, line["measured"])):
            continue
        bounds = line["interval"]
        if bounds is not None and not all(_near_enough(end / middle) for end in bounds):
            bounds = None
        found.append(
            Ratio(
                line["measure"],
                ends[0] / middle,
                ends[1] / middle,
                line["measured"] / middle,
                (bounds[0] / middle, bounds[1] / middle) if bounds is not None else None,
                line["holds"],
                stated,
            )
        )
    return found


def _ends(one: Mapping[str, Any]) -> tuple[float, float]:
    return (one["value"],) * 2 if one["value"] is not None else (one["low"], one["high"])


def _comparable(one: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Tell whether a published number is in the measure's unit: 81.9 per cent is no 1.003.

    It is where the recipe says the same unit of both, or where the limit is about the number.
    """
    if line["unit"] is not None:
        return bool(line["unit"] == one["unit"])
    return any(
        end != 0 and 1 / _NEAR <= limit / end <= _NEAR
        for end in _ends(one)
        for limit in line["limit"]
    )


def _span(ratios: Sequence[Ratio]) -> float:
    """Return how far the axis reaches from 1 to either side, as a factor."""
    values = [v for s in ratios for v in (s.low, s.high, s.value, *(s.interval or ()))]
    return max(_LEAST_SPAN, float(max(max(v, 1 / v) for v in values) ** 1.1))


@dataclass(frozen=True)
class Beside:
    """Rich renderable of ratios."""

    ratios: Sequence[Ratio]
    title: str = "Measured over claimed (1: the paper's figure, or the recipe's limit)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        span = _span(self.ratios)
        label = min(_MOST_LABEL, max(len(one.label) for one in self.ratios))
        width = max(_LEAST, options.max_width - label - 14)
        yield Text(self.title, style="bold", overflow="fold")
        for one in self.ratios:
            line = Text(f"{one.label[:label]:<{label}} ")
            line.append(_drawn(one, span, width, ascii_only=options.ascii_only))
            line.append(f" {number(one.value)}{_SAID[one.holds]}")
            yield line
        ends = f"{number(1 / span)}", f"{number(span)}"
        half = width // 2
        axis = f"{ends[0]:<{half}}1{ends[1]:>{width - half - 1}}"
        yield Text(f"{' ' * (label + 1)}{axis}", style="dim")
        signs = "* measured, o published" if options.ascii_only else "● measured, ◇ published"
        yield Text(f"{signs}, | the recipe's limit", style="dim", overflow="fold")


def _drawn(one: Ratio, span: float, width: int, *, ascii_only: bool) -> str:
    marks = "-=o*" if ascii_only else "·━◇●"
    reference = marks[2] if one.stated else "|"

    def column(value: float) -> int:
        share = (math.log(value) / math.log(span) + 1) / 2
        return min(width - 1, max(0, round(share * (width - 1))))

    cells = [marks[0]] * width
    if one.interval is not None:
        for cell in range(column(one.interval[0]), column(one.interval[1]) + 1):
            cells[cell] = marks[1]
    for end in (one.low, one.high):
        cells[column(end)] = reference
    cells[column(one.value)] = marks[3]
    return "".join(cells)


def beside_figure(beside: Beside) -> Any:
    """Return the ratios as a matplotlib figure."""
    ratios = beside.ratios
    figure = new_figure(6.4, 0.9 + 0.32 * len(ratios))
    axes = figure.subplots()
    for row, one in enumerate(ratios):
        axes.plot([one.low, one.high], [row, row], color="#999999", linewidth=5, alpha=0.5)
        axes.plot(
            [one.low, one.high],
            [row, row],
            "D",
            color="#777777",
            markersize=5,
            fillstyle="none" if one.stated else "left",
        )
        if one.interval is not None:
            axes.plot(one.interval, [row, row], color=_COLOURS[one.holds], linewidth=1.6)
        axes.plot([one.value], [row], _MARKS[one.holds], color=_COLOURS[one.holds], markersize=6)
    span = _span(ratios)
    axes.axvline(1.0, color="#999999", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xlim(1 / span, span)
    ticks = _ticks(span)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.set_yticks(range(len(ratios)), [one.label for one in ratios])
    axes.set_xlabel(
        "measured / claimed (diamond: published, half-filled: limit; cross: fails, square: "
        "inconclusive)"
    )
    axes.grid(visible=True, axis="x", linewidth=0.3, alpha=0.6)
    return figure


def _ticks(span: float) -> list[float]:
    for step in (1.05, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0, 100.0, 1e4):
        count = math.floor(math.log(span) / math.log(step))
        if count <= 3:
            return [float(f"{step**n:.3g}") for n in range(-count, count + 1)]
    return [1.0]


# --- The recipes that there are: a line each, or a table with whole claims.


_TITLES = ("recipe", "of", "profiles", "claim")
_GAP = 2  # columns
_NARROW = 100


def listing(recipes: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return a table of recipes: name, item, profiles, claim."""
    columns = [Column(name, words=True) for name in _TITLES]
    return DataTable(columns, [_row(one) for one in recipes])


def lines(recipes: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """Return a line per recipe, of at most so many columns: what does not fit ends in ``…``."""
    rows = [_TITLES, *(_row(one) for one in recipes)]
    if width < _NARROW:  # what a claim is about says more than at what sizes it can be looked at
        rows = [(*row[:2], "", row[3]) for row in rows]
    # A claim has what the others leave; of an item and its paper the beginning says which it is.
    widest = [max(len(row[index]) for row in rows) for index in range(3)]
    widest[1] = min(widest[1], max(len("FDC, Table 10"), width // 5))
    shown = []
    for index, row in enumerate(rows):
        line = Text(no_wrap=True, style="bold" if not index else "")
        for words, columns in zip(row, widest, strict=False):
            if not columns:
                continue
            cell = Text(words, end="")
            cell.truncate(columns, overflow="ellipsis", pad=True)
            line.append_text(cell).append(" " * _GAP)
        line.append(row[3])
        line.truncate(width, overflow="ellipsis")
        shown.append(line)
    return Group(*shown)


def _row(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    claim = one["claim"] if one["judged"] is None else f"{one['claim']} (not judged)"
    profiles = " ".join(one["profiles"]) or "none"
    return one["name"], f"{one['paper']}, {one['item']}", profiles, " ".join(claim.split())


#: From what holds to what is open.
VERDICT_ORDER = ("reproduced", "trend only", "not reproduced", "not testable here")
_READ = (
    "Claimed: the paper's figure; then what must hold here, tolerance included.",
    "Inconclusive: the limit is inside the 95 % interval.",
    "Trend only: the paper's direction holds; its figure fails or is inconclusive.",
)


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    entries = result["data"]["entries"]

    def names(found: Sequence[Mapping[str, Any]], key: str) -> RenderableType:
        return bullets([f"{e['recipe']} ({model_words(e)}): {e[key]}" for e in found])

    parts: list[RenderableType] = [Text(), _table(entries)]
    for title, verdict, key in (
        ("Not reproduced", VERDICT_ORDER[2], "claim"),
        ("Trend only", VERDICT_ORDER[1], "direction"),
    ):
        if found := [entry for entry in entries if entry["verdict"] == verdict]:
            parts += [heading(title), names(found, key)]
    if found := [entry for entry in entries if entry["reasons"]]:
        why = [f"{entry['recipe']}: {'; '.join(entry['reasons'])}" for entry in found]
        parts += [heading("Not testable, or only in part"), bullets(why)]
    if found := [entry for entry in entries if entry["stand_in"] and entry["lines"]]:
        parts += [heading("Stand-ins for the paper's setting"), names(found, "stand_in")]
    if found := list(paper_notes(entries)):
        parts += [heading("Differences from the papers' settings")]
        parts.append(bullets(found))
    return framed(
        result,
        parts,
        answer=answer(result["data"]),
        notes=_READ,
        repeated=False,
        width=width,
        colour=colour,
    )


def paper_notes(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what differs from each paper's own setting that these entries ran, each once."""
    commands = [cell["command"] for e in entries if e["lines"] for cell in e["cells"]]
    for name, differs in papers_named(commands).items():
        yield f"{name}: {' '.join(differs) or 'no known difference.'}"


def answer(data: Mapping[str, Any]) -> str:
    """Return the counts in a sentence."""
    entries, counts = data["entries"], data["counts"]
    said = [f"{counts[one]} {one}" for one in VERDICT_ORDER if counts.get(one)]
    names = {entry["recipe"] for entry in entries}
    of = f"{len(names)} {'recipe' if len(names) == 1 else 'recipes'}"
    if len(names) < len(entries):  # under several profiles, or on several machines
        of += f", {len(entries)} verdicts"
    return f"{of}: {', '.join(said) or 'no runs'}."


def _table(entries: Sequence[Mapping[str, Any]]) -> DataTable:
    columns = [
        Column("recipe, measure", words=True),
        Column("claimed", words=True),
        Column("measured"),
        Column("95 % interval"),
        Column("verdict", words=True),
    ]
    rows = [row for entry in entries for row in _rows(entry)]
    # A column without a single entry costs room that the others need.
    if all(row[3] in ("", MISSING) for row in rows):
        columns.pop(3)
        rows = [(*row[:3], row[4]) for row in rows]
    return DataTable(columns, rows)


def _rows(entry: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    of = f"{entry['item']} of {entry['paper']}, {model_words(entry)}"
    yield (entry["recipe"], of, "", "", entry["verdict"].upper())
    for line in entry["lines"]:
        yield (
            f"· {line['measure']}",
            claimed_words(entry, line),
            measured_words(line),
            interval_words(line),
            line_words(line),
        )
