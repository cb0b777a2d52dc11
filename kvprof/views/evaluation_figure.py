"""The figure of an evaluation: the share of its accuracy that each method keeps, by its rate."""

from collections.abc import Mapping
from typing import Any

from kvprof.views.figure import new_figure, point_style

__all__ = ["figure"]


def figure(result: Mapping[str, Any]) -> Any:
    """Return a point per method and rate, with its interval; what has no figure is left out.

    Parameters
    ----------
    result : mapping
        Of ``kvprof eval``.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    methods: dict[str, list[tuple[float, float, list[float]]]] = {}
    for row in result["data"]["evaluations"]:
        kept = row["relative_accuracy"]
        if kept is not None:
            ends = row["relative_accuracy_interval"] or [kept, kept]
            methods.setdefault(row["method"], []).append((row["rate"], kept, ends))
    drawing = new_figure(6.4, 4.0)
    axes = drawing.subplots()
    for index, (method, points) in enumerate(methods.items()):
        rates, kept, intervals = zip(*sorted(points), strict=True)
        # An interval's end may lie on the figure itself, and rounding puts it beyond.
        below = [max(0.0, one - low) for one, (low, _) in zip(kept, intervals, strict=True)]
        above = [max(0.0, high - one) for one, (_, high) in zip(kept, intervals, strict=True)]
        axes.errorbar(
            rates, kept, yerr=[below, above], capsize=3, linestyle="none", label=method,
            **point_style(index),
        )  # fmt: skip
    axes.axhline(1.0, color="#555555", linewidth=0.8, linestyle=":")
    unfinished = "" if result["complete"] else " (incomplete)"
    axes.set_title(f"{result['inputs'].get('model', '')}{unfinished}", fontsize="medium",
                   parse_math=False)  # fmt: skip
    axes.set_xlabel("KV compression rate (bytes, everything counted)")
    axes.set_ylabel("kept of the uncompressed model's accuracy")
    axes.grid(visible=True, linewidth=0.3, alpha=0.6)
    if methods:
        legend = axes.legend(fontsize="small", frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return drawing
