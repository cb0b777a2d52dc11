"""The figure of a stability result: each measure against the number of tokens, pair by pair."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvprof.views.figure import draw_curves, outer_legend, panel_figure, titled
from kvprof.views.plot import Series
from kvprof.views.stability_data import Curve, cost_rank, curves_of, error_key

__all__ = ["figure", "series", "spans_decades"]

_PANEL = (3.0, 2.7)  # inches
_MEASURES = 4  # of a pair, side by side
_NOTHING = 1e-9
_ROUNDING = 1e-6
_DECADES = 20.0


def series(curves: Sequence[Curve], figure: str, scale: float = 1.0) -> list[Series]:
    """Return one curve per target of a figure at the rank of the cost, with its spread.

    Parameters
    ----------
    curves : sequence of Curve
        Of one pair.
    figure : str
        Key of a curve's row.
    scale : float
        What values are multiplied by; 100 writes a share in per cent.
    """
    drawn = []
    for curve in curves:
        rows = [curve.at_cost_rank(tokens) for tokens in curve.counts]
        ends = [row.get("spread", {}).get(figure) or (None, None) for row in rows]
        drawn.append(
            Series(
                curve.label,
                curve.counts,
                [_scaled(row[figure], scale) for row in rows],
                [_scaled(low, scale) for low, _ in ends],
                [_scaled(high, scale) for _, high in ends],
            )
        )
    return drawn


def spans_decades(drawn: Sequence[Series]) -> bool:
    """Return whether curves lie so far apart that a linear axis would press one to its edge.

    A zero (a dataset against itself) or what rounding makes of it has no place on a log axis.
    """
    known = [value for one in drawn for value in one.y if value is not None]
    return bool(known) and min(known) > _ROUNDING and max(known) > _DECADES * min(known)


def _scaled(value: float | None, scale: float) -> float | None:
    if value is None:
        return None
    # A dataset against itself: what rounding leaves is no curve.
    return 0.0 if abs(value) < _NOTHING else value * scale


def figure(result: Mapping[str, Any]) -> Any:
    """Return four panels per pair, with bands that hold 95 % of the heads and seeds.

    The papers' ratio after sign alignment (FDC Fig. 14, ZACK Fig. 18), the subspace distance, the
    extra lost energy and the extra error of scores or outputs, at the given rank nearest half the
    width.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    pairs = curves_of(result)
    draws: list[Callable[[Any], None]] = []
    for pair, curves in pairs.items():
        error = error_key(pair)
        rank = cost_rank(result, pair)
        at = "" if rank is None else f", rank {rank}"
        measures = (
            ("ratio_sign_aligned", f"{pair}: ratio δ/ε", "ratio, signs aligned", 1.0),
            ("subspace_distance", f"{pair}: subspaces{at}", "subspace distance", 1.0),
            ("extra_energy_loss", f"{pair}: lost energy{at}", "extra lost energy (%)", 100.0),
            (error, f"{pair}: {error.split('_')[1]}s{at}", f"{error.replace('_', ' ')} (%)", 100.0),
        )
        draws += [
            partial(
                draw_curves,
                series=(drawn := series(curves, key, scale)),
                title=title,
                x_label="tokens",
                y_label=y_label,
                log_x=True,
                log_y=spans_decades(drawn),
            )
            for key, title, y_label, scale in measures
        ]
    drawing = panel_figure(
        draws or [lambda axes: None] * _MEASURES,  # nothing compared: empty panels say so
        _PANEL,
        columns=_MEASURES,
        margin=(0.0, 0.7),
        title=_title(result),
    )
    # One legend for all: eight of them would hide the curves.
    handles: dict[str, Any] = {}
    for axes in drawing.axes:
        drawn_here, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn_here, strict=True))
        if axes.get_legend() is not None:
            axes.get_legend().remove()
    outer_legend(drawing, handles, _MEASURES)
    return drawing


def _title(result: Mapping[str, Any]) -> str:
    inputs = result["inputs"]
    model = inputs["model"] or f"model {inputs['fingerprint']}"
    return titled(result, f"{model}: the basis from {inputs['source']} against each dataset's own")
