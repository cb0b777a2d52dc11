r"""Draw what rows of several frontiers save, how fast they are and what they keep, in one figure.

    python tools/running_figure.py docs/findings/running-*.json --to docs/images/running.svg

A line of panels per model, a line in them per method, by falling bytes: how many times fewer bytes
it stores of a long context at its largest rate, how many times faster attention over it was
measured to be, and which share of the accuracy it keeps, with its interval. The colour says what
the row was calibrated on. Where no speed was measured that is written, with whether a kernel runs
the row; a row of which no tested rate keeps the targets stands hollow at its lowest rate. One of
which all tokens were exact where it was scored, since its window is longer, has no share.
"""

import argparse
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvprof.records.files import read_result, write_bytes_atomic
from kvprof.views.figure import figure_bytes, new_figure, outer_legend, point_style
from kvprof.views.frontier_data import targets_of
from kvprof.views.numbers import count

_PANELS = ("times fewer bytes", "times faster than full width", "share of accuracy")
_LINE = 0.24  # inches
_FREE = ""
_GREY = "#777777"


def rows_of(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return rows by model, then by method, the one of the fewest bytes first.

    Parameters
    ----------
    results : sequence of mapping
        Of ``kvprof frontier``. A row that two of them have alike is one.

    Returns
    -------
    dict
        Each row has ``data`` (what it was calibrated on), ``smaller``, ``share``, ``interval``,
        ``speeds`` (speed-up by batch), ``kernel``, ``kept`` (whether it keeps the targets) and
        ``exact`` (whether nothing was compressed at the context that was scored).
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        inputs = result["inputs"]
        for method in result["data"]["methods"]:
            points = [one for one in method["points"] if "long_context" in one]
            if not points:
                continue
            best = [one for one in points if one["rate"] == method["max_rate"]]
            point = best[0] if best else min(points, key=itemgetter("rate"))
            seen = inputs["calibration"].get(method["label"])
            row = {
                "data": seen["source"].split(":")[0] if seen else _FREE,
                "smaller": 1.0 / (1.0 - point["long_context"]["rate"]),
                "share": point["relative_accuracy"],
                "interval": point["relative_accuracy_interval"],
                "speeds": {one["batch"]: one["speedup"] for one in method.get("speeds", ())},
                "kernel": point["kernel"]["reason"] is None,
                "kept": bool(best),
                "exact": point["rate"] <= 0.0 < point["long_context"]["rate"],
            }
            own = found.setdefault(inputs["model"], {}).setdefault(method["label"], [])
            if row not in own:
                own.append(row)
    return {
        model: dict(sorted(own.items(), key=lambda one: -max(x["smaller"] for x in one[1])))
        for model, own in sorted(found.items())
    }


def running_figure(results: Sequence[Mapping[str, Any]]) -> Any:
    """Return the figure of all rows.

    Parameters
    ----------
    results : sequence of mapping
        As `rows_of` takes them, all with the same first target.
    """
    found = rows_of(results)
    kinds = sorted({row["data"] for own in found.values() for rows in own.values() for row in rows})
    heights = [len(own) + 2 for own in found.values()]
    figure = new_figure(11.0, _LINE * sum(heights) + 0.6)
    every = figure.subplots(len(found), 3, squeeze=False, height_ratios=heights)
    handles: dict[str, Any] = {}
    for (model, own), panels in zip(found.items(), every, strict=True):
        for panel, name in zip(panels, _PANELS, strict=True):
            panel.set_title(name, fontsize="small")
            panel.set_yticks(range(len(own)), [])
            panel.set_ylim(len(own) - 0.5, -0.5)
            panel.grid(visible=True, linewidth=0.3, alpha=0.6)
            panel.tick_params(labelsize="x-small")
        panels[0].set_yticks(range(len(own)), list(own), fontsize="x-small")
        panels[0].set_ylabel(model)
        panels[0].set_xscale("log", base=2)
        panels[0].xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        panels[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        panels[1].axvline(1.0, color=_GREY, linewidth=0.8, linestyle=":")
        target = targets_of(results[0])[0]["target"]
        panels[2].axvline(target, color=_GREY, linewidth=0.8, linestyle=":")
        for line, rows in enumerate(own.values()):
            for index, row in enumerate(rows):
                y = line + 0.3 * (index - (len(rows) - 1) / 2)
                handles |= _drawn(panels, y, row, kinds)
            if not any(row["speeds"] for row in rows):
                words = "no kernel"
                if any(row["kernel"] for row in rows):
                    # Only rows that keep the targets have a speed, timed or not.
                    kept = any(row["kept"] for row in rows)
                    words = "not timed at its rate" if kept else "keeps no target"
                panels[1].annotate(
                    words,
                    (1.0, line),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize="xx-small",
                    color=_GREY,
                )
            if all(row["exact"] for row in rows):
                panels[2].annotate(
                    "all exact where it was scored",
                    (target, line),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize="xx-small",
                    color=_GREY,
                )
    handles |= {
        "no rate keeps the targets": every[0, 0].plot(
            [], [], color=_GREY, marker="o", markerfacecolor="white", linestyle="none"
        )[0]
    }
    outer_legend(figure, dict(sorted(handles.items())), 6)
    context = next(
        point["long_context"]["context"]
        for result in results
        for method in result["data"]["methods"]
        for point in method["points"]
        if "long_context" in point
    )
    where = dict.fromkeys(
        f"{one['shape']} on {one['device']}"
        for result in results
        for method in result["data"]["methods"]
        for one in method.get("speeds", ())
    )
    told = f"; speeds of one layer of {' and '.join(where)}" if where else ""
    figure.suptitle(f"Each method's largest rate; bytes at {count(context)} tokens{told}")
    return figure


def _drawn(
    panels: Sequence[Any], y: float, row: Mapping[str, Any], kinds: Sequence[str]
) -> dict[str, Any]:
    style = point_style(kinds.index(row["data"])) | {"marker": "o", "linestyle": "none"}
    if not row["kept"]:
        style["markerfacecolor"] = "white"
    handles = {}
    (mark,) = panels[0].plot([row["smaller"]], [y], **style)
    if row["kept"]:
        handles[f"calibrated on {row['data']}" if row["data"] != _FREE else "not calibrated"] = mark
    for place, (batch, speed) in enumerate(sorted(row["speeds"].items())):
        shape = {**style, "marker": "o^s"[place % 3]}
        panels[1].plot([speed], [y], **shape)
        handles[f"batch {batch}"] = panels[1].plot(
            [], [], color=_GREY, marker=shape["marker"], linestyle="none"
        )[0]
    if row["share"] is not None and not row["exact"]:
        panels[2].plot([row["share"]], [y], **style)
        if row["interval"] is not None:
            panels[2].plot(row["interval"], [y, y], color=style["color"], linewidth=1)
    return handles


def main() -> None:
    """Draw the records named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    figure = running_figure([read_result(path) for path in arguments.results])
    fmt = arguments.to.suffix.removeprefix(".")
    write_bytes_atomic(arguments.to, figure_bytes(figure, fmt), force=True)


if __name__ == "__main__":
    main()
