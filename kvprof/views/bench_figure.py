"""The figure of a bench result: time against context by phase and batch, and the roofline."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from kvprof.views.bench_data import (
    Group,
    context_curves,
    groups,
    roofline_points,
    roofline_unit,
    roofs,
    scaled,
)
from kvprof.views.figure import draw_curves, panel_figure, titled

__all__ = ["figure", "sweeps"]

_PANEL = (4.6, 3.5)  # inches
_ROW = 2  # panels side by side


def sweeps(result: Mapping[str, Any]) -> list[list[Group]]:
    """Return the groups of each phase and batch that was run at several contexts.

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.
    """
    by_place = groupby(groups(result), key=lambda group: (group.phase, group.batch))
    members = [[group for group in found if group.rows] for _, found in by_place]
    return [found for found in members if len(found) > 1]


def figure(result: Mapping[str, Any]) -> Any:
    """Return the roofline, after panels of time against context where there are several.

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    swept = sweeps(result)
    return panel_figure(
        [
            *(partial(_draw_times, members=members) for members in swept),
            partial(_draw_roofline, result=result),
        ],
        _PANEL,
        columns=_ROW,
        margin=(0.0 if swept else 1.2, 0.0),
        title=titled(result, result["data"]["shape"]["name"]),
    )


def _draw_times(axes: Any, members: Sequence[Group]) -> None:
    draw_curves(
        axes,
        context_curves(members),
        title=f"{members[0].phase}, batch {members[0].batch}",
        x_label="context (tokens)",
        y_label="time (ms)",
        log_x=True,
        log_y=True,
    )


def _draw_roofline(axes: Any, result: Mapping[str, Any]) -> None:
    points = roofline_points(result)
    factor, unit = roofline_unit(points)
    draw_curves(
        axes,
        [scaled(one, factor) for one in points],
        title="roofline",
        x_label="arithmetic intensity (FLOP per byte moved)",
        y_label=f"reached ({unit})",
        log_x=True,
        log_y=True,
    )
    axes.margins(y=0.12)  # room for the words on a roof
    for roof in roofs(points, result["data"]):
        high = [y * factor for y in roof.y if y is not None]
        axes.plot(roof.x, high, color="#555555", linewidth=0.9, linestyle=":")
        axes.annotate(
            f"{roof.label} ",
            (roof.x[-1], high[-1]),
            fontsize="small",
            color="#555555",
            ha="right",
            va="bottom",
        )
