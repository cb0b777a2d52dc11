"""How a decoding step loads the multiprocessors: by the cost model, and by their clocks."""

import heapq

from kvprof.benchmark.case import Place
from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.own_cases import ragged_case
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.schedules import ASSUMED_MULTIPROCESSORS
from kvprof.kernels.decode.cuts import COST_PER_TOKEN, equal_shares, longest_first
from kvprof.kernels.decode.tuning import tuning_for
from kvprof.kernels.planes import RaggedLayout
from kvprof.records.events import Balance

__all__ = ["balances"]


def balances(
    variant: Variant, place: Place, widths: Widths, multiprocessors: int | None, *, case: str,
    time: float,
) -> list[Balance]:  # fmt: skip
    """Return the loads of one decoding step, for the cut that runs and for FDC §5.3's heuristic.

    Parameters
    ----------
    variant : Variant
        Whose heads lie in ragged planes.
    place : Place
        A decoding step.
    widths : Widths
    multiprocessors : int or None
        None (a CPU) assumes an H200's; nothing is measured there.
    case : str
    time : float
        Of the events.
    """
    group = place.shape.num_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, group, place.batch, place.seq)
    count = multiprocessors or ASSUMED_MULTIPROCESSORS
    found = []
    for schedule in ("equal", "lpt") if variant.balanced else ("lpt",):
        measured = _measured(place, widths, schedule, count) if multiprocessors else None
        loads = _predicted(layout, place, schedule, count)
        mean = sum(loads) / count
        found.append(
            Balance(time, case, schedule, "decode", [load / mean for load in loads], measured)
        )
    return found


def _predicted(layout: RaggedLayout, place: Place, schedule: str, count: int) -> list[float]:
    widths = list(zip(layout.key_widths, layout.value_widths, strict=True))
    costs = [sum(pair) + COST_PER_TOKEN for pair in widths]
    lengths = [place.seq] * place.batch
    if schedule == "lpt":
        tasks = [cost * place.seq for _ in lengths for cost in costs]
        return [float(sum(tasks[task] for task in own)) for own in longest_first(tasks, count)]
    tuning = tuning_for(layout, schedule)
    # In order, each to whichever multiprocessor is free first, as the hardware hands them out.
    loads = [(0.0, worker) for worker in range(count)]
    for _, head, start, stop, _ in equal_shares(
        layout, lengths, tuning.pieces * count, tuning.tile
    ).items:
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + costs[head] * (stop - start), worker))
    return [load for load, _ in sorted(loads, key=lambda pair: pair[1])]


def _measured(place: Place, widths: Widths, schedule: str, count: int) -> list[float] | None:
    """Return when each multiprocessor ended its last piece, in seconds from the first start."""
    case = ragged_case("balance", place, widths, schedule=schedule)
    if case.trace is None:
        return None
    case.trace()  # compiles
    found = case.trace()
    first = int(found.begin.min())
    ends = [0.0] * count
    for where, end in zip(found.multiprocessor.tolist(), found.end.tolist(), strict=True):
        ends[where] = max(ends[where], (end - first) / 1e9)
    return ends
