"""A simulated load held against one that was served: the same arrivals, rate by rate."""

from collections.abc import Mapping
from typing import Any

__all__ = ["NEAR", "SAME", "against", "differing", "differs"]

#: Share of the measured latency within which a simulation is said to meet it.
NEAR = 0.1

#: Inputs that have to be the same, for the same requests to come at the same times.
SAME = ("lengths", "arrivals", "requests", "seconds", "seed")

_DIGEST = "digest"
_FIGURES = ("normalised_latency_seconds", "ttft_seconds", "tbt_seconds")


def differing(simulated: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Return the inputs in which two loads differ, of those that decide what arrives when.

    Parameters
    ----------
    simulated, served : mapping
        ``inputs`` of the results.
    """
    return [name for name in SAME if differs(simulated.get(name), served.get(name))]


def differs(one: Any, other: Any) -> bool:
    """Whether two inputs of loads differ.

    Lengths of a record that has no digest of its file's requests are compared without one.
    """
    known = [each for each in (one, other) if isinstance(each, Mapping)]
    if len(known) == 2 and not all(_DIGEST in each for each in known):
        one, other = ({k: v for k, v in each.items() if k != _DIGEST} for each in known)
    return bool(one != other)


def against(simulated: Mapping[str, Any], served: Mapping[str, Any]) -> dict[str, Any]:
    """Hold a simulated load against one that was served.

    Parameters
    ----------
    simulated, served : mapping
        ``data`` of results of kind ``load``, with the same requests at the same times.

    Returns
    -------
    dict
        ``near`` (`NEAR`); ``rates``: of every method at every rate that both completed, for mean
        normalised latency, TTFT and TBT what was ``simulated`` and ``measured``, in seconds, their
        ``difference`` relative to what was measured, and whether it is ``within`` `NEAR`, or
        within the measured 95 % interval, and in ``grows`` what both say of the queue;
        ``missing``: cases of one alone.
    """
    theirs = {row["case"]: row for row in served["rates"] if row["complete"]}
    own = {row["case"]: row for row in simulated["rates"] if row["complete"]}
    rates = []
    for case, row in own.items():
        if case not in theirs:
            continue
        rates.append(
            {
                "case": case,
                "method": row["method"],
                "rate": row["rate"],
                "grows": [row["grows"], theirs[case]["grows"]],
                **{name: _held(row[name], theirs[case][name]) for name in _FIGURES},
            }
        )
    return {
        "near": NEAR,
        "rates": rates,
        "missing": sorted(own.keys() ^ theirs.keys()),
    }


def _held(simulated: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return two means and how they differ; None where one of them is not known."""
    one, other = simulated["mean"], measured["mean"]
    if one is None or not other:
        return None
    interval = measured["mean_interval"]
    difference = one / other - 1
    inside = interval is not None and interval[0] <= one <= interval[1]
    return {
        "simulated": one,
        "measured": other,
        "measured_interval": interval,
        "difference": difference,
        "within": abs(difference) <= NEAR or inside,
    }
