"""How evenly a schedule loads the multiprocessors: by the cost model, and as their clocks say."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvprof.benchmark.case import Workload
from kvprof.benchmark.plans import Widths
from kvprof.kernels.decode.cuts import SCHEDULES as DECODE_SCHEDULES
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.launch import prefill_step
from kvprof.kernels.prefill.schedules import SCHEDULES as PREFILL_SCHEDULES

__all__ = [
    "ASSUMED_MULTIPROCESSORS",
    "Loads",
    "entry",
    "kernel_schedules",
    "loads",
    "predicted",
    "traced",
]

#: Of an H200: what a prediction without a GPU is for.
ASSUMED_MULTIPROCESSORS = 132


class Loads(NamedTuple):
    """What the multiprocessors' clocks said.

    Attributes
    ----------
    evenness : float
        Makespan over mean.
    timelines : list
        ``[multiprocessor, start, stop]`` per piece of work, in seconds from the first start.
    """

    evenness: float
    timelines: list[list[float]]


def kernel_schedules(phase: str) -> tuple[str, ...]:
    """Return how the ragged kernel of a phase can cut its work."""
    return DECODE_SCHEDULES if phase == "decode" else PREFILL_SCHEDULES


def predicted(
    workload: Workload, widths: Widths, schedule: str, multiprocessors: int | None
) -> float:
    """Return makespan over mean by the kernel's own cost model.

    Parameters
    ----------
    workload : Workload
    widths : Widths
    schedule : str
    multiprocessors : int or None
        None assumes `ASSUMED_MULTIPROCESSORS`.
    """
    count = multiprocessors or ASSUMED_MULTIPROCESSORS
    layout = RaggedLayout(
        widths.keys, widths.values, workload.shape.group, workload.batch, workload.seq
    )
    if workload.phase == "decode":
        step = decode_step(layout, "cpu", schedule=schedule, multiprocessors=count)
        return step.predicted_makespan_over_mean([workload.seq] * workload.batch)
    cut = prefill_step(
        layout, workload.seq, torch.device("cpu"), schedule=schedule, multiprocessors=count
    )
    return cut.blocks.makespan_over_mean


def traced(run: Callable[[], Any], multiprocessors: int) -> Loads:
    """Run with the clocks read around every piece of work; see `loads`."""
    run()  # compiles
    found = run()
    return loads(
        found.begin.tolist(), found.end.tolist(), found.multiprocessor.tolist(), multiprocessors
    )


def loads(begin: list[int], end: list[int], where: list[int], multiprocessors: int) -> Loads:
    """Return how evenly traced pieces of work load the multiprocessors.

    A multiprocessor's time ends with its last piece and begins with the first of all: pieces run
    side by side on it, so their times must not be added up.

    Parameters
    ----------
    begin, end : list of int
        Of every piece, in nanoseconds of the GPU's clock.
    where : list of int
        Its multiprocessor.
    multiprocessors : int
        Of the GPU; one without work counts as 0.
    """
    first = min(begin)
    timelines = [
        [float(sm), (start - first) / 1e9, (stop - first) / 1e9]
        for sm, start, stop in zip(where, begin, end, strict=True)
    ]
    ends: dict[float, float] = {}
    for sm, _, stop in timelines:
        ends[sm] = max(stop, ends.get(sm, 0.0))
    mean = sum(ends.values()) / multiprocessors
    return Loads(max(ends.values()) / mean if mean > 0 else 1.0, timelines)


def entry(
    workload: Workload, schedule: str, expected: float | None, measured: Loads | None
) -> dict[str, Any]:
    """Return one of ``data.schedules``."""
    return {
        "schedule": schedule,
        "phase": workload.phase,
        "batch": workload.batch,
        "seq": workload.seq,
        "predicted": expected,
        "measured": measured.evenness if measured else None,
        "strips": measured.timelines if measured else None,
    }
