"""The figure of a frontier: the share of the baseline that each method keeps, against its rate."""

from collections.abc import Mapping
from typing import Any

from kvprof.views.figure import draw_curves, new_figure
from kvprof.views.frontier_data import curves, lowest_drawn, metric_name

__all__ = ["figure"]


def figure(result: Mapping[str, Any]) -> Any:
    """Return the curves with their intervals as bands, the target as a line.

    The axis ends where ten times what the target gives away is lost; curves run out of it.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    data = result["data"]
    drawing = new_figure(6.4, 4.2)
    axes = drawing.subplots()
    unfinished = "" if result["complete"] else " (incomplete)"
    draw_curves(
        axes,
        curves(result),
        title=f"{result['inputs']['model']} at {data['context']:,} tokens{unfinished}",
        x_label="KV compression rate (bytes, everything counted)",
        y_label=f"share of the baseline's {metric_name(data['metric'])}",
    )
    axes.axhline(data["target"], color="#555555", linewidth=0.8, linestyle=":")
    axes.text(
        1.0, data["target"], f"{data['target']:g} ", transform=axes.get_yaxis_transform(),
        ha="right", va="bottom", fontsize="small", color="#555555",
    )  # fmt: skip
    floor = lowest_drawn(result)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, floor), min(high, max(1.0 + (1.0 - floor) / 4, data["target"])))
    return drawing
