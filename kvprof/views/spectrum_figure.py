"""The figure of a spectrum result: mean curves with bands over heads, and the map of ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvprof.views.figure import draw_curves, draw_map, new_figure
from kvprof.views.plot import Series
from kvprof.views.spectrum_data import (
    chosen_removal,
    flat,
    heads_of,
    normalised_mean,
    rate_text,
)

__all__ = ["figure"]

_BAND = (2.5, 97.5)  # per cent of the heads


def figure(result: Mapping[str, Any], *, removal_rate: float | None = None) -> Any:
    """Return the curves (FDC Fig. 3, ZACK Fig. 5, 10) beside maps of the ranks of qk and vo.

    Mean, and the band that holds 95 % of the heads, are divided by the mean's first value.

    Parameters
    ----------
    result : mapping
        Of ``kvprof spectrum``.
    removal_rate : float or None
        Whose ranks are shown; by default the one whose ``dim_rate`` is nearest 0.5.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    UsageError
        When `removal_rate` is not in the result.
    """
    chosen = chosen_removal(result, removal_rate)
    layers = 0 if chosen is None else len(chosen["ranks_qk"])
    # One row of a map needs 0.09 inches to be seen.
    drawing = new_figure(5.0 if chosen is None else 10.5, max(3.6, 0.09 * layers + 1.0))
    columns = 1 if chosen is None else 3
    axes = np.atleast_1d(
        drawing.subplots(1, columns, width_ratios=[2.0, 1.0, 1.0][:columns], squeeze=True)
    )
    draw_curves(
        axes[0],
        [_curve(name, pair) for name, pair in result["data"]["pairs"].items()],
        title=_title(result),
        x_label="dimension",
        y_label="singular value relative to the mean's first",
        log_y=True,
    )
    if chosen is not None:
        every = flat(chosen["ranks_qk"]) + flat(chosen["ranks_vo"])
        at = rate_text(chosen["removal_rate"])
        for where, pair in ((axes[1], "qk"), (axes[2], "vo")):
            image = draw_map(
                where,
                chosen[f"ranks_{pair}"],
                title=f"rank of {pair} at {at} removed",
                low=min(every),
                high=max(every),
            )
        drawing.colorbar(image, ax=list(axes[1:]), label="rank")
    return drawing


def _title(result: Mapping[str, Any]) -> str:
    inputs = result["inputs"]
    unfinished = "" if result["complete"] else " (incomplete)"
    source = inputs.get("source_description") or f"{inputs['tokens']:,} tokens, {inputs['source']}"
    return f"{inputs['model']}, {source}{unfinished}"


def _curve(name: str, pair: Mapping[str, Any]) -> Series:
    mean = normalised_mean(pair)
    heads = heads_of(pair, "singular_values")
    columns = range(1, len(mean) + 1)
    if not mean:
        return Series(name, columns, mean)
    stacked = np.full((len(heads), len(mean)), np.nan)
    for row, values in zip(stacked, heads, strict=True):
        row[: len(values)] = np.asarray(values, dtype=np.float64) / pair["mean"][0]
    low, high = np.nanpercentile(stacked, _BAND, axis=0)
    return Series(name, columns, mean, low.tolist(), high.tolist())
