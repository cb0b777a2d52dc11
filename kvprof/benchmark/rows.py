"""A row of the result from a case and its samples, and what makes its figures doubtful."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from kvprof.analysis.stats import median_ends, median_ratio_ends
from kvprof.benchmark.case import Case
from kvprof.benchmark.machine import Machine
from kvprof.benchmark.timing import spread

__all__ = ["TOLERANCE", "Found", "SampleWarnings", "Timed", "add_row"]

#: Relative Frobenius error beyond which a result is wrong, and its time means nothing.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_SPREAD = {"cuda": 0.05, "cpu": 0.15}
_DRIFT = 0.05
_OVER = 1.02  # times the measured bandwidth; what a measurement may be off


@dataclass
class Found:
    """What a run has measured so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # as in the result's data
    baselines: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    stopped: str | None = None  # why the run ended before its end

    def warn(self, text: str) -> None:
        """Add a warning once."""
        if text not in self.warnings:
            self.warnings.append(text)


@dataclass
class SampleWarnings:
    """What is wrong with the samples of several rows, so that it is said once."""

    #: Row to spread, to number of samples, and to the baseline's change beside it.
    wide: dict[str, float] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)

    def compare(self, row: str, beside: float, first: float) -> None:
        """Note how far the baseline's time beside a row is from the one it had at first."""
        if abs(beside / first - 1) > _DRIFT:
            self.drift[row] = beside / first - 1

    def texts(self, where: str, repeats: int, baseline: str | None) -> list[str]:
        """Return a warning of each kind that there is."""
        found = []
        if self.wide:
            found.append(
                f"{where}: samples vary by up to {max(self.wide.values()):.0%} "
                f"({', '.join(self.wide)}); another program may be running"
            )
        if self.short:
            found.append(
                f"{where}: {min(self.short.values())} samples instead of {repeats} "
                f"({', '.join(self.short)}), to save time"
            )
        if self.drift:
            most = max(self.drift.values(), key=abs)
            found.append(
                f"{where}: {baseline} drifted by up to {most:+.0%} during the run "
                f"({', '.join(self.drift)}); speed-ups use paired samples"
            )
        return found


@dataclass(frozen=True, eq=False)
class Timed:
    """A case and its samples."""

    name: str  # of the method
    case: Case
    stored_bytes: int  # of the method's plan, by the account: of the layer, all sequences
    rate: float  # of the plan, as it serves (`kvprof.methods.accounting.rate`)
    seconds: list[float]
    error: float  # against float64
    #: Samples of the fastest uncompressed kernel, taken in turn; None where none ran.
    beside: list[float] | None = None
    baseline: str | None = None  # its name


def add_row(
    timed: Timed, machine: Machine, repeats: int, found: Found, unsteady: SampleWarnings
) -> None:
    """Add a row with all that follows from its samples, and note what makes it doubtful."""
    case, seconds, middle = timed.case, timed.seconds, median(timed.seconds)
    workload = case.workload
    moved, limit = case.bytes_moved / middle / 1e12, machine.tb_per_s
    right = timed.error <= TOLERANCE[workload.dtype]
    found.rows.append(
        {
            "method": timed.name,
            "phase": workload.phase,
            "batch": workload.batch,
            "seq": workload.seq,
            "dtype": str(workload.dtype).removeprefix("torch."),
            "schedule": case.schedule,
            "ranks": case.ranks or _whole(case),
            "rate": timed.rate,
            "seconds": seconds,
            "seconds_interval": median_ends(seconds),
            "bytes_moved": case.bytes_moved,
            "cache_bytes": timed.stored_bytes,
            "buffer_bytes": case.buffer_bytes,
            "tb_per_s": moved,
            "bandwidth_share": moved / limit if limit else None,
            "flop_per_s": case.flops / middle,
            "baseline": timed.baseline,
            "baseline_seconds": timed.beside,
            "speedup": median(timed.beside) / middle if timed.beside and right else None,
            "speedup_interval": median_ratio_ends(timed.beside, seconds, paired=True)
            if timed.beside and right
            else None,
            "error": timed.error if timed.error != float("inf") else None,
            "makespan_over_mean": case.makespan_over_mean,
        }
    )
    what = f"{timed.name}, {workload.name}"
    if not right:
        found.warn(f"{what}: wrong result (error {timed.error:.2g} vs float64), so no speed-up")
    if (wide := spread(seconds)) > _SPREAD[workload.device.type]:
        unsteady.wide[timed.name] = wide
    if len(seconds) < repeats:
        unsteady.short[timed.name] = len(seconds)
    if limit and moved > _OVER * limit and workload.phase == "decode":
        found.warn(
            f"{what}: {moved:.3g} TB/s exceeds the measured memory bandwidth ({limit:.3g}); "
            "inputs may come from a cache"
        )


def _whole(case: Case) -> dict[str, list[int]]:
    shape = case.workload.shape
    return {side: [shape.head_dim] * shape.num_kv_heads for side in ("keys", "values")}
