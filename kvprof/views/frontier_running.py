"""What each method of a frontier takes to run, and how fast it was measured to be."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.views.figure import draw_reference, label_axes, point_style
from kvprof.views.frontier_data import (
    Method,
    best_point,
    metric_name,
    ranked,
    share_at,
    share_text,
    targets_of,
)
from kvprof.views.numbers import MISSING, count, rate_in_bytes
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import SplitTable, columns

__all__ = ["NEEDS", "draw_speeds", "running_cells", "running_notes", "running_table", "speed_plots"]

_HEIGHT = 10
NEEDS = (
    "Needs: online, projections beside the model's own; folded, weights that a basis is multiplied "
    "into; rebuilt, keys made anew from their latents at every use; restored, a stored prompt "
    "brought back to full width, from which decoding goes on: bytes and rate are those at rest. No "
    "plan fetches from another memory what it stores. Kernel: whether kvprof's kernels run it in "
    "{dtype} on {device}. A "
    "speed-up was measured at the row's own rate, with the shape and the GPU that are named, or "
    "is not there: none is estimated."
)


def running_table(result: Mapping[str, Any]) -> SplitTable | None:
    """Return what running each method takes, its bytes of a long context and its measured speeds.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``; None for one of earlier versions, which does not tell.
    """
    known = [
        (method, point)
        for method in ranked(result)
        if (point := best_point(method)) is not None and "kernel" in point
    ]
    if not known:
        return None
    batches = sorted({one["batch"] for method, _ in known for one in method.get("speeds", ())})
    long = known[0][1]["long_context"]["context"]
    heads = [
        *columns("method", "needs", "kernel"),
        *columns(
            figures=(
                f"rate at {count(long)}",
                "bytes per token",
                "share kept",
                *(f"speed-up at batch {batch}" for batch in batches),
            )
        ),
    ]
    rows = []
    for method, point in known:
        speeds = {one["batch"]: one for one in method.get("speeds", ())}
        rows.append(
            [
                method["label"],
                ", ".join(point["needs"]) or "nothing",
                _kernel(point["kernel"]),
                rate_in_bytes(point["long_context"]["rate"]),
                f"{point['long_context']['bytes_per_token']:,.0f}",
                share_text(share_at(point)["share"]),
                *(
                    f"{speeds[batch]['speedup']:.2f}×" if batch in speeds else MISSING
                    for batch in batches
                ),
            ]
        )
    return SplitTable(heads, rows, (2, 3, len(batches)) if batches else (2, 3))


def speed_plots(result: Mapping[str, Any]) -> list[LinePlot]:
    """Return measured speed against bytes, with the share kept in the legend: a plot per batch.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``; none where no speed but full width's stands beside it.
    """
    found = [one for one in _measured_speeds(result) if one[0]["label"] != "full"]
    if not found:
        return []
    kept = metric_name(targets_of(result)[0]["metric"])
    ends = [1.0, *(_smaller(point) for _, point, _ in found)]
    full = Series("full width", [min(ends), max(ends)], [1.0, 1.0])
    context = found[0][2]["context"]
    plots = []
    for batch in sorted({one["batch"] for _, _, one in found}):
        drawn = [
            Series(
                f"{method['label']} keeps {share_text(share_at(point)['share'])}",
                [_smaller(point)],
                [one["speedup"]],
            )
            for method, point, one in found
            if one["batch"] == batch
        ]
        plots.append(
            LinePlot(
                [full, *drawn],
                f"Speed against bytes at {count(context)} tokens, batch {batch}, and the share of "
                f"{kept} kept",
                "times fewer bytes than full width",
                "times faster than the best full-width kernel",
                height=_HEIGHT,
            )
        )
    return plots


def _measured_speeds(
    result: Mapping[str, Any],
) -> list[tuple[Method, Mapping[str, Any], Mapping[str, Any]]]:
    """Return method, best point and speed of all speeds that stand beside a frontier."""
    return [
        (method, point, one)
        for method in ranked(result)
        if (point := best_point(method)) is not None
        for one in method.get("speeds", ())
    ]


def _smaller(point: Mapping[str, Any]) -> float:
    """Return how many times fewer bytes a point stores of a long context."""
    return 1.0 / (1.0 - float(point["long_context"]["rate"]))


def _kernel(kernel: Mapping[str, Any]) -> str:
    if kernel["reason"] is None:
        return "yes"
    return f"{kernel['layers']} of {kernel['of']} layers" if kernel["layers"] else "no"


def running_cells(method: Method, point: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a CSV row says of running a point; speeds stand in that of the largest rate."""
    if "kernel" not in point:
        return {}
    long = point["long_context"]
    found = {
        "needs": ";".join(point["needs"]),
        "kernel": point["kernel"]["reason"] is None,
        "long_context": long["context"],
        "long_rate": long["rate"],
        "long_bytes_per_token": long["bytes_per_token"],
    }
    if point["rate"] == method["max_rate"]:
        found |= {f"speedup_batch_{one['batch']}": one["speedup"] for one in method["speeds"]}
    return found


# Of the bytes: rates at two contexts further apart than this are said to be.
_APART = 0.05


def running_notes(result: Mapping[str, Any]) -> list[str]:
    """Say where speeds were measured, of which rows there are none, and what shares do not tell."""
    speeds = [one for method in result["data"]["methods"] for one in method.get("speeds", ())]
    by_record: dict[str, list[str]] = {}
    warned: dict[str, None] = {}
    for one in speeds:
        where = "shipped with kvprof" if one["origin"] == "shipped" else "--speeds"
        text = (
            f"attention of one layer of {one['shape']}'s shape in {one['dtype']} on "
            f"{one['device']}, against {one['baseline']} ({one['source']}, {where}, "
            f"{one['created'][:10]})"
        )
        by_record.setdefault(text, []).append(one["method"])
        warned |= {f"{one['source']} warned: {said}.": None for said in one.get("warnings", ())}
    lines = [
        f"Speed-up of {', '.join(dict.fromkeys(labels))}: decoding at the same rate over the same "
        f"context, {text}."
        for text, labels in by_record.items()
    ]
    lines += warned
    lacking: dict[str, list[str]] = {}
    for method in ranked(result):
        if best_point(method) is not None and method.get("speed_reason") is not None:
            lacking.setdefault(method["speed_reason"], []).append(method["label"])
    # Windows and sinks that stay exact are most of a short context and nothing of a long one.
    apart = [
        f"{method['label']} ({rate_in_bytes(point['rate'])} and "
        f"{rate_in_bytes(point['long_context']['rate'])})"
        for method in ranked(result)
        if (point := best_point(method)) is not None
        and "long_context" in point
        and abs(point["long_context"]["rate"] - point["rate"]) > _APART
    ]
    if apart:
        lines.append(
            f"The share kept was measured at {result['data']['context']:,} tokens, where these "
            f"save another rate than over the long context: {', '.join(apart)}. What they keep "
            "there was not measured."
        )
    return [
        *lines,
        *(f"No speed of {', '.join(labels)}: {reason}." for reason, labels in lacking.items()),
    ]


def draw_speeds(result: Mapping[str, Any], axes: Any) -> None:
    """Draw what each method gains in speed and in bytes at its largest rate, and what it keeps.

    Rows whose speed was not measured stand below, at what they gain in bytes.
    """
    target = targets_of(result)[0]
    found = _measured_speeds(result)
    lacking = _unmeasured(result)
    batches = sorted({one["batch"] for _, _, one in found})
    known = [(method, point) for method, point, _ in found] + lacking
    shares = [share_at(point)["share"] for _, point in known]
    ends = min([float(target["target"]), *(share for share in shares if share is not None)]), 1.0
    colours = {"vmin": ends[0], "vmax": ends[1], "cmap": "viridis"}
    drawn = None
    for batch in batches:
        own = [(method, point, one) for method, point, one in found if one["batch"] == batch]
        speeds = [one["speedup"] for _, _, one in own]
        smaller = [_smaller(point) for _, point, _ in own]
        drawn = axes.scatter(
            smaller,
            speeds,
            c=[_share(point) for _, point, _ in own],
            marker=point_style(batches.index(batch))["marker"],
            edgecolors="black",
            linewidths=0.5,
            label=f"batch {batch}",
            zorder=3,
            **colours,
        )
        for (method, _, _), x, y in zip(own, smaller, speeds, strict=True):
            axes.annotate(
                method["label"], (x, y), xytext=(4, 4), textcoords="offset points", fontsize="small"
            )
    draw_reference(axes, 1.0, "full width")
    where = dict.fromkeys(f"{one['shape']} on {one['device']}" for _, _, one in found)
    label_axes(
        axes,
        f"decoding {count(found[0][2]['context'])} tokens, {'; '.join(where)}",
        "times fewer bytes than full width",
        "times faster than the best full-width kernel",
        legend=True,
    )
    axes.margins(0.12)
    if lacking:
        _draw_unmeasured(lacking, axes, colours)
    for handle in axes.get_legend().legend_handles:
        handle.set_facecolor("none")  # colour tells the share, and batches have none
    axes.figure.colorbar(
        drawn, ax=axes, label=f"share of the baseline's {metric_name(target['metric'])}"
    )


# Of the panel's height, for rows without a speed; of its width, between two of their names.
_BELOW = 0.42
_BETWEEN = 0.033


def _draw_unmeasured(
    rows: Sequence[tuple[Method, Mapping[str, Any]]], axes: Any, colours: Mapping[str, Any]
) -> None:
    """Put rows without a speed under those that have one: their bytes and shares are known."""
    low, high = axes.get_ylim()
    bottom = low - (high - low) * _BELOW / (1.0 - _BELOW)
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    axes.set_ylim(bottom, high)
    axes.set_yticks(ticks)
    axes.axhspan(bottom, low, color="#f2f2f2", zorder=0)
    placed = sorted(rows, key=lambda row: _smaller(row[1]))
    smaller = [_smaller(point) for _, point in placed]
    left, right = axes.get_xlim()
    left, right = min(left, *smaller), max(right, *smaller)
    room = (right - left) * _BETWEEN
    left, right = left - room, right + room
    axes.set_xlim(left, right)
    level = low - (low - bottom) * 0.1
    axes.scatter(
        smaller,
        [level] * len(placed),
        c=[_share(point) for _, point in placed],
        marker="|",
        s=60,
        zorder=3,
        **colours,
    )
    names = _apart_from_each_other(smaller, room, left + room / 2, right - room / 2)
    for (method, _), x, at in zip(placed, smaller, names, strict=True):
        axes.annotate(
            method["label"].replace(":", ":\n", 1).replace(",", ",\n"),
            (x, level),
            xytext=(at, low - (low - bottom) * 0.22),
            ha="center",
            va="top",
            rotation=90,
            fontsize="x-small",
            linespacing=0.9,
            arrowprops={"arrowstyle": "-", "linewidth": 0.3, "color": "#888888"},
        )
    axes.text(
        0.01,
        low,
        "speed not measured",
        transform=axes.get_yaxis_transform(),
        va="top",
        fontsize="x-small",
        color="#555555",
    )


def _apart_from_each_other(
    wanted: Sequence[float], room: float, left: float, right: float
) -> list[float]:
    """Return places near those wanted, in order, `room` apart where the width allows it."""
    room = min(room, (right - left) / max(1, len(wanted) - 1))
    places: list[float] = []
    for at in wanted:
        places.append(max(at, left, *(one + room for one in places[-1:])))
    limit = right
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - room
    return places


def _share(point: Mapping[str, Any]) -> float:
    share = share_at(point)["share"]
    return float("nan") if share is None else float(share)


def _unmeasured(result: Mapping[str, Any]) -> list[tuple[Method, Mapping[str, Any]]]:
    """Return method and best point of the rows beside which no speed stands."""
    return [
        (method, point)
        for method in ranked(result)
        if (point := best_point(method)) is not None
        and "long_context" in point
        and not method.get("speeds")
    ]
