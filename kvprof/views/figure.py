"""Figures for papers: curves with bands and layer × head maps through matplotlib, as SVG or PNG.

matplotlib is the optional extra ``plot``, so it is imported where it is used; no global state of
it (pyplot, backends, rcParams) is touched.
"""

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvprof.errors import LackingError, UsageError
from kvprof.printable import printable
from kvprof.report.blocks import HeatMap, Series, colours_of
from kvprof.views.plot import DECADES, log2_ticks

__all__ = [
    "FORMATS",
    "draw_curves",
    "draw_map",
    "draw_reference",
    "figure_bytes",
    "label_axes",
    "new_figure",
    "no_matplotlib",
    "outer_legend",
    "panel_figure",
    "plain_counts",
    "titled",
]

FORMATS = ("svg", "png")

# Okabe and Ito's palette: told apart by colour-blind readers; line styles repeat it for print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", "-.", ":")
_MARKERS = "o^sDvPX*"
_LONGEST = 300  # characters of one text
_REFERENCE = "#555555"  # of what curves are held against
_FEW = 24  # points up to which each one gets a marker
_ANNOTATED = (16, 16)  # largest map whose cells carry their figure


def no_matplotlib(what: str) -> LackingError:
    """Say how to get what a figure is drawn with."""
    from kvprof.requirements import extra_command

    return LackingError(f"{what} requires matplotlib: {extra_command('plot')}")


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure that draws without a display."""
    try:
        found = None if "matplotlib" in sys.modules else find_spec("matplotlib")
        # Its own matplotlibrc lies there, and is read before any other.
        with chdir(Path(str(found.origin)).parent / "mpl-data") if found else nullcontext():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
    except ImportError as missing:
        raise no_matplotlib("a figure") from missing
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panel_figure(
    draws: Sequence[Callable[[Any], None]],
    panel: tuple[float, float],
    *,
    columns: int,
    margin: tuple[float, float] = (0.0, 0.0),
    title: str = "",
) -> Any:
    """Return a figure of panels of one size, line by line."""
    columns = min(columns, max(1, len(draws)))
    lines = max(1, -(-len(draws) // columns))
    figure = new_figure(panel[0] * columns + margin[0], panel[1] * lines + margin[1])
    every = list(figure.subplots(lines, columns, squeeze=False).flat)
    for draw, axes in zip(draws, every, strict=False):
        draw(axes)
    for axes in every[len(draws) :]:
        axes.remove()
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def titled(result: Mapping[str, Any], title: str) -> str:
    """Return the title of a result's figure, which says where the run stopped before its end."""
    return title if result["complete"] else f"{title} (incomplete)"


def outer_legend(figure: Any, handles: Mapping[str, Any], columns: int) -> None:
    """Put one legend of all panels below them; `handles` are what was drawn, by its label."""
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(columns, len(handles)),
            fontsize="small",
            frameon=False,
        )


def figure_bytes(figure: Any, fmt: str, *, dpi: int = 200) -> bytes:
    """Return a figure as a file's content; the same figure gives the same bytes."""
    if fmt not in FORMATS:
        raise UsageError(f"figure format {fmt!r} is unknown; choose from {', '.join(FORMATS)}")
    import matplotlib

    # A date, and element ids salted at random, would make two runs differ.
    metadata = {"Date": None, "Creator": "kvprof"} if fmt == "svg" else {"Software": "kvprof"}
    out = io.BytesIO()
    _take_literally(figure)
    with (
        matplotlib.rc_context(
            {
                "svg.hashsalt": "kvprof",
                "svg.fonttype": "path",
                # A figure without a layout engine would get the user's own.
                "figure.autolayout": False,
                "figure.constrained_layout.use": False,
            }
        ),
        _laid_out(figure, fmt, dpi),
    ):
        figure.savefig(out, format=fmt, metadata=metadata, dpi=dpi)
    return out.getvalue()


@contextmanager
def _laid_out(figure: Any, fmt: str, dpi: int) -> Iterator[None]:
    """Lay a figure out as it will be drawn, which ``savefig`` would draw twice for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    engine, canvas, own = figure.get_layout_engine(), figure.canvas, figure.dpi
    if engine is None:
        yield
        return
    if fmt == "svg":
        FigureCanvasSVG(figure)
        figure.dpi = 72  # as matplotlib writes it
    else:
        FigureCanvasAgg(figure)
        figure.dpi = dpi
    try:
        if figure.axes:
            engine.execute(figure)
    finally:
        figure.dpi = own
        figure.set_canvas(canvas)
    figure.set_layout_engine(None)
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def _take_literally(figure: Any) -> None:
    """Let no text of a figure be a formula: names hold dollar signs, and anything else.

    Only a logarithmic axis writes formulas of its own, which hold nothing but powers of ten.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogFormatter

    formulas = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            written = axis.get_major_formatter()
            if isinstance(written, LogFormatter):
                ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
                formulas |= {id(text) for tick in ticks for text in (tick.label1, tick.label2)}
            elif isinstance(written, FuncFormatter):  # what names at ticks become, too
                written.func = _shortened(written.func)
    for text in figure.findobj(Text):
        if id(text) not in formulas:
            text.set_parse_math(False)
            text.set_text(_short(text.get_text()))


def _shortened(write: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    return lambda value, position: _short(write(value, position))


def _short(text: str) -> str:
    """Return a text that can be drawn, of a length that leaves room for the figure."""
    clean = printable(text)
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}…"


def draw_curves(
    axes: Any,
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw curves, each with its band where it has one."""
    colours = colours_of(series, _COLOURS, _REFERENCE)
    for index, (one, colour) in enumerate(zip(series, colours, strict=True)):
        y = _drawable(one.y, log=log_y)
        if one.reference:
            axes.plot(list(one.x), y, color=colour, linestyle=":", label=one.label)
            continue
        axes.plot(
            list(one.x),
            y,
            color=colour,
            linestyle=_LINES[index % len(_LINES)],
            marker=_MARKERS[index % len(_MARKERS)] if len(y) <= _FEW else None,
            markersize=4,
            linewidth=1.3,
            # matplotlib leaves out of a legend what begins with an underscore.
            label=f" {one.label}" if one.label.startswith("_") else one.label,
        )
        if one.low is not None and one.high is not None:
            low, high = _drawable(one.low, log=log_y), _drawable(one.high, log=log_y)
            if len(one.x) == 1:  # a band has no width
                axes.vlines(list(one.x), low, high, color=colour, linewidth=1.3)
            else:
                axes.fill_between(list(one.x), low, high, color=colour, alpha=0.15, linewidth=0)
    if log_y:
        axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log", base=2)
        every = [float(x) for one in series for x in one.x if x > 0]
        if every:
            ticks = log2_ticks(every, at_most=8).ticks
            axes.set_xticks([2.0**position for position, _ in ticks], [text for _, text in ticks])
            axes.set_xticks([], minor=True)
    label_axes(axes, title, x_label, y_label, legend=bool(series))


def label_axes(axes: Any, title: str, x_label: str, y_label: str, *, legend: bool) -> None:
    """Write what a plot and its axes are called, with a faint grid and, if wanted, a legend."""
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, linewidth=0.3, alpha=0.6)
    if legend:
        axes.legend(fontsize="small", frameon=False)


def plain_counts(axes: Any) -> None:
    """Write a linear x axis in whole numbers, a few and in full."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_reference(axes: Any, y: float, label: str = "") -> None:
    """Draw a dotted line across the axes at `y`, with a word at its right end."""
    axes.axhline(y, color=_REFERENCE, linewidth=0.8, linestyle=":")
    if label:
        axes.text(
            1.0,
            y,
            f"{label} ",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize="small",
            color=_REFERENCE,
        )


def _drawable(values: Sequence[float | None], *, log: bool) -> Any:
    array = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
    if log:
        array[~(array > 0)] = np.nan
    return array


def draw_map(axes: Any, chart: HeatMap, *, title: str) -> Any:
    """Draw a layer × head map; returns the image, for a colour bar."""
    from matplotlib.colors import LogNorm

    heads = max((len(row) for row in chart.values), default=0)
    grid = np.full((len(chart.values), max(1, heads)), np.nan)
    for layer, row in enumerate(chart.values):
        grid[layer, : len(row)] = [np.nan if v is None else v for v in row]
    scale: dict[str, Any] = {"vmin": chart.low, "vmax": chart.high}
    if chart.log and (known := grid[grid > 0]).size:
        high = max(chart.high or 0.0, known.max())
        low = max(known.min(), high / 10**DECADES)
        scale = {"norm": LogNorm(low, high, clip=True)}
    shown = np.ma.masked_invalid(grid)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", **scale)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(chart.columns)
    axes.set_ylabel("layer")
    for axis, names in ((axes.xaxis, chart.names), (axes.yaxis, chart.layers)):
        axis.get_major_locator().set_params(integer=True)
        if 0 < len(names) <= _ANNOTATED[0]:
            axis.set_ticks(range(len(names)), names)
    if grid.shape[0] <= _ANNOTATED[0] and grid.shape[1] <= _ANNOTATED[1]:
        for (layer, head), value in np.ndenumerate(grid):
            if np.isfinite(value):
                # White on the dark half of viridis, black on its light half.
                text = "white" if image.norm(value) < 0.6 else "black"
                axes.text(
                    head, layer, f"{value:.3g}", ha="center", va="center", color=text, fontsize=7
                )
    return image
