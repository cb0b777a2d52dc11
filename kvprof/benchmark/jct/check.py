"""``--check``: a real run of random-weight layers against a composed run of the same case."""

from collections.abc import Callable, Sequence
from typing import Any

from kvprof.benchmark.jct.composition import Composition
from kvprof.errors import UsageError
from kvprof.records.events import CaseFinished

__all__ = ["CHECKED", "NEAR", "check_methods", "differences"]

#: What both ways run on the same kernels.
CHECKED = ("full", "fdc", "kq", "uniform")
#: How far the two may be apart without a warning.
NEAR = 0.05


def check_methods(methods: Sequence[str]) -> None:
    """Refuse methods whose real run does not use the kernels that a composed run times.

    Raises
    ------
    UsageError
    """
    if other := [name for name in methods if name not in CHECKED]:
        raise UsageError(
            f"--check: a real run of {other[0]} does not use the kernels that a composed run "
            f"times; compare {', '.join(CHECKED)}"
        )


def differences(
    case: str, method: str, real: CaseFinished, composed: Composition,
    warn: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of ``data.check`` for one case, and warn where the two are far apart.

    Parameters
    ----------
    case, method : str
    real : CaseFinished
        Its uninstrumented times count.
    composed : Composition
    warn : callable
    """
    rows: list[dict[str, Any]] = []
    for phase, measured, made in (
        ("prefill", real.prefill_seconds, composed.prefill_seconds),
        ("decode", real.decode_seconds, composed.decode_seconds),
        ("both", real.prefill_seconds + real.decode_seconds, composed.jct),
    ):
        if measured <= 0:
            continue
        rows.append(
            {
                "method": method, "phase": phase, "real_seconds": measured,
                "composed_seconds": made, "difference": made / measured - 1,
            }
        )  # fmt: skip
    if rows and abs(rows[-1]["difference"]) > NEAR:
        warn(
            f"{case}: the composed run is {rows[-1]['difference']:+.1%} off the real one, more "
            f"than {NEAR:.0%}"
        )
    return rows
