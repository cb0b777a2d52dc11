"""One method of a frontier as a result holds it: its points, and the rates read off them."""

from collections.abc import Sequence
from typing import Any

from kvprof.evaluation.rate_search import MeasuredRate
from kvprof.evaluation.requests import MethodRequest
from kvprof.evaluation.targets import least_loss, max_rate, max_rate_interval, share_interval_of
from kvprof.methods.accounting import compression_ratio

__all__ = ["TARGETS", "frontier_row"]

#: Targets for which ``max_rates`` is read off the points that were tested.
TARGETS = (0.999, 0.99, 0.98, 0.95)


def frontier_row(
    request: MethodRequest,
    tested: Sequence[MeasuredRate],
    reason: str | None,
    metric: str,
    target: float,
) -> dict[str, Any]:
    """Return one method of a frontier, as the schema documents it.

    Parameters
    ----------
    request : MethodRequest
    tested : sequence of MeasuredRate
        In any order.
    reason : str or None
        Why there are no points, or fewer than there should be.
    metric : str
        See `kvprof.evaluation.targets.share_of`.
    target : float
        Share that has to be kept.
    """
    points = [
        {
            **entry.evaluation,
            "method": request.method,
            "rate": entry.rate,
            "rate_asked": entry.rate_asked,
            "compression_ratio": compression_ratio(entry.rate),
            "share": entry.share,
            "share_interval": share_interval_of(entry.evaluation, metric),
            "least_loss": least_loss(entry.evaluation, metric),
        }
        for entry in sorted(tested, key=lambda entry: entry.rate)
    ]
    found = max_rate(points, target)
    if found is None and reason is None:
        least = points[0]
        kept = "nothing" if least["share"] is None else f"{least['share']:.4f}"
        reason = (
            f"no tested rate keeps {target:g} of the baseline's {metric}; the lowest, "
            f"{least['rate']:.3f}, keeps {kept}"
        )
    interval = max_rate_interval(points, target)
    return {
        "label": request.label,
        "method": request.method,
        "options": dict(request.options),
        "max_rate": found,
        "max_rate_interval": None if interval is None else list(interval),
        "max_rates": {f"{one:g}": max_rate(points, one) for one in TARGETS},
        "reason": reason,
        "points": points,
    }
