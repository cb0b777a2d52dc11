"""A chart of a report as a figure for a paper, drawn by matplotlib."""

import textwrap
from typing import Any

from kvprof.report.blocks import Bars, Chart, Curves, HeatMap, Ratios, Ready
from kvprof.views.figure import draw_curves, draw_map, new_figure, outer_legend, plain_counts

__all__ = ["drawn"]

_NAMES = 9  # that a figure has room for beside its curves
_TITLE, _NAME = 66, 30  # letters in a line of a title, and of a name in half the legend's width
_LEAST_HEIGHT, _ROW = 2.4, 0.09  # inches; a row of a map needs that much to be seen


def drawn(chart: Chart, title: str = "") -> Any:
    """Return a chart as matplotlib's figure."""
    title = "\n".join(textwrap.fill(line, _TITLE) for line in title.splitlines())
    match chart:
        case Curves():
            figure = new_figure(5.0, 3.4)
            axes = figure.subplots()
            draw_curves(
                axes,
                chart.series,
                title=title,
                x_label=chart.x_label,
                y_label=chart.y_label,
                log_x=chart.log_x,
                log_y=chart.log_y,
            )
            if _counts(chart):
                plain_counts(axes)
            if len(chart.series) > _NAMES:  # which would hide the curves
                axes.get_legend().remove()
                handles, names = axes.get_legend_handles_labels()
                columns = 2 if max(map(len, names)) <= _NAME else 1
                outer_legend(figure, dict(zip(names, handles, strict=True)), columns)
                figure.set_figheight(3.4 + 0.2 * len(names) / columns)
        case HeatMap():
            figure = new_figure(5.0, max(_LEAST_HEIGHT, _ROW * len(chart.values) + 1.0))
            image = draw_map(figure.subplots(), chart, title=title)
            figure.colorbar(image, ax=figure.axes)
        case Bars(bars):
            from kvprof.views.jct_figure import bars_figure

            figure = bars_figure(bars)
        case Ratios(beside):
            from kvprof.views.recipe import beside_figure

            figure = beside_figure(beside)
        case Ready(make):
            figure = make()
    return figure


def _counts(chart: Curves) -> bool:
    """Tell whether a linear x axis counts something, of which there are no halves."""
    every = [x for one in chart.series for x in one.x]
    return not chart.log_x and bool(every) and all(float(x).is_integer() for x in every)
