"""Attention at full width in one layer: the best kernel that this machine has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from kvprof.benchmark.baselines import baseline_builders, full_width
from kvprof.benchmark.case import Case, Lack, Place
from kvprof.benchmark.jct.ablations import parse_variant
from kvprof.benchmark.jct.ragged import ragged_prefill
from kvprof.benchmark.jct.units import Attended, Unit
from kvprof.benchmark.machine import free_bytes
from kvprof.benchmark.ranks import full_widths
from kvprof.benchmark.rows import TOLERANCE
from kvprof.benchmark.timing import interleaved, sampler
from kvprof.errors import LackingError, UsageError
from kvprof.kernels.planes import RaggedLayout

__all__ = ["FullAttention", "full_attended", "store_unit"]

_NEAR = 4.0  # lengths within this factor are tried with each other's fastest kernels only
_BEST = 3
_SAMPLES = 3


@dataclass(eq=False)
class FullAttention:
    """Finds the fastest full-width kernel, once for lengths that are near each other.

    Attributes
    ----------
    seconds : float
        To spend on one kernel's samples.
    should_stop : callable
    named : dict
        From (phase, batch, tokens) to the kernel that was chosen there.
    """

    seconds: float
    should_stop: Callable[[], bool] = lambda: False
    named: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _tried: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)

    def unit(
        self, place: Place, window: int | None = None
    ) -> tuple[Unit, Callable[[], float], dict[str, str]]:
        """Return the fastest kernel's call, its error against float64, and its name as a label.

        Raises
        ------
        LackingError
            When no kernel can run.
        """
        where = (place.phase, place.batch, place.seq)
        if window is not None and place.phase == "prefill" and window < place.seq:
            widths = full_widths(place.shape)
            layout = RaggedLayout(
                widths.keys, widths.values, place.shape.group, place.batch, place.seq
            )
            units, error = ragged_prefill(parse_variant("uniform"), place, layout, window)
            self.named[where] = "kvprof"
            return units[-1], error, {"prefill attention": "kvprof's own kernel, with its window"}
        case = self._fastest(place)
        self.named[where] = case.name
        unit = Unit("attention", case.runs, ("full", *where))
        label = {f"{place.phase} attention": case.name}
        if case.note is not None:
            label["attention"] = case.note
        return unit, lambda: case.error(case.runs[0]()), label

    def _fastest(self, place: Place) -> Case:
        inputs = full_width(place)
        builders = baseline_builders(place, free_bytes(place.device))
        names = self._known(place, list(builders))
        found: list[tuple[float, Case]] = []
        reasons: list[str] = []
        for name in names:
            try:
                case = builders[name](inputs)
                timed = sampler(case.runs, place.device)
                if len(names) > 1 or name not in self._tried.get(_key(place), []):
                    error = case.error(timed.output())
                    if error > TOLERANCE[place.dtype]:
                        raise Lack(f"its result is wrong (error {error:.1g})")
                (seconds,) = interleaved(
                    [timed], _SAMPLES, seconds=self.seconds, should_stop=self.should_stop
                )
            except (Lack, UsageError, MemoryError) as why:
                reasons.append(f"{name}: {why}")
            except torch.OutOfMemoryError:
                reasons.append(f"{name}: it needs more memory than is free")
                torch.cuda.empty_cache()
            else:
                found.append((median(seconds), case))
        if not found:
            raise LackingError(
                f"no full-width kernel runs {place.name}: {'; '.join(reasons)[:300]}"
            )
        found.sort(key=lambda pair: pair[0])
        self._tried[_key(place)] = [case.name for _, case in found]
        return found[0][1]

    def _known(self, place: Place, names: list[str]) -> list[str]:
        """Return the kernels worth trying: the fastest at a length near by, or all."""
        for (phase, batch, seq), order in self._tried.items():
            near = max(seq, place.seq) <= _NEAR * min(seq, place.seq)
            if (phase, batch) == (place.phase, place.batch) and near:
                return [name for name in order[:_BEST] if name in names] or names
        return names


def _key(place: Place) -> tuple[str, int, int]:
    return (place.phase, place.batch, place.seq)


def store_unit(place: Place) -> Unit:
    """Return the store of new K and V at full width; it counts as attention."""
    shape, source = place.shape, place.generator(11)
    new = [
        place.random(source, place.batch, shape.num_kv_heads, place.queries, shape.head_dim)
        for _ in range(2)
    ]
    room = [torch.empty_like(states) for states in new]
    at = torch.arange(place.queries, device=place.device)

    def run() -> Tensor:
        for kept, states in zip(room, new, strict=True):
            kept.index_copy_(2, at, states)
        return room[0]

    return Unit("attention", [run], ("store full", place.phase, place.batch, place.queries))


def full_attended(place: Place, full: FullAttention, window: int | None) -> Attended:
    """Return full-width attention and the store that feeds it."""
    shape = place.shape
    unit, error, labels = full.unit(place, window)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return Attended(
        [store_unit(place), unit],
        (queries, keys, keys),
        queries,
        "both",
        error,
        {**labels, "store": "K and V going into the cache count as attention"},
    )
