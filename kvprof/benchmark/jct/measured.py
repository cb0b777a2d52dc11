"""Times of one layer and its parts at one length, each piece of work measured once in a run."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch

from kvprof.benchmark.case import Place
from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.jct.composition import Times
from kvprof.benchmark.jct.dense import DenseParts
from kvprof.benchmark.jct.full import FullAttention, full_attended
from kvprof.benchmark.jct.latents import latents_attended, strawman_attended
from kvprof.benchmark.jct.levels import levels_attended
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.ragged import ragged_attended
from kvprof.benchmark.jct.samplers import layer_sampler, unit_sampler
from kvprof.benchmark.jct.units import Attended, Unit
from kvprof.benchmark.machine import Machine
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.rows import TOLERANCE
from kvprof.benchmark.timing import Sampler, interleaved, median_interval, sampler, spread

__all__ = ["Bench", "Point"]

_SAMPLES = {"cuda": 20, "cpu": 15}
_POWER_SECONDS, _TELEMETRY_SECONDS = 0.7, 0.3
_SECONDS = {"cuda": 2.0, "cpu": 1.0}
_SPREAD = {"cuda": 0.05, "cpu": 0.2}


@dataclass(frozen=True)
class Point:
    """One layer at one length.

    Attributes
    ----------
    tokens : int
        In the cache during a decoding step; of the prompt.
    parts : dict of float
        Seconds of each part of one layer.
    passes : dict of float
        Seconds of what a forward pass does once, by part.
    layer : float
        Seconds of the whole layer: all its calls in one CUDA graph (beside it those that wait for
        the host), or one after the other on a CPU.
    error : float or None
        Of the attention, against float64.
    labels : dict of str
    watts : float or None
        What the device took while the layer was repeated, where that was asked for and it tells.
    ends : (float, float) or None
        The 95 % interval of the layer's median, relative to it.
    """

    tokens: int
    parts: dict[str, float]
    passes: dict[str, float]
    layer: float
    error: float | None
    labels: dict[str, str]
    watts: float | None = None
    ends: tuple[float, float] | None = None


@dataclass(eq=False)
class Bench:
    """Measures points of one model's shape, and remembers what it has measured.

    Attributes
    ----------
    model : ModelShape
    machine : Machine
    dtype : torch.dtype
    seed : int
    repeats : int or None
        Samples of each time; None takes 20 on a GPU and 15 on a CPU.
    all_reduce : callable or None
        Seconds of summing so many bytes over all GPUs; None where it is not measured.
    should_stop, warn, advance : callable
        Whether to end; what is said of the figures; that one more point is done.
    clock, energy : callable
        Seconds since the start of the run; joules between two such times, None where nothing tells.
    glimpse : callable
        Given where a point stands, and its parts and what a pass does once as the first sample of
        each has them: something to look at while the others are taken.
    """

    model: ModelShape
    machine: Machine
    dtype: torch.dtype
    seed: int = 0
    repeats: int | None = None
    all_reduce: Callable[[int], float] | None = None
    should_stop: Callable[[], bool] = lambda: False
    warn: Callable[[str], None] = lambda _: None
    advance: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    energy: Callable[[float, float], float | None] | None = None
    glimpse: Callable[[Place, Times, Times], None] = lambda *_: None

    def __post_init__(self) -> None:
        kind = self.machine.device.type
        self._budget = _SECONDS[kind]
        self._repeats = self.repeats or _SAMPLES[kind]
        self._dense = DenseParts(self.model)
        self._full = FullAttention(self._budget, self.should_stop)
        self._units: dict[tuple[object, ...], dict[str, float]] = {}
        self._apart: set[tuple[object, ...]] = set()  # units that no graph holds
        self.spreads: dict[str, dict[str, float]] = {}
        self._points: dict[tuple[object, ...], Point] = {}

    def place(self, phase: str, batch: int, tokens: int) -> Place:
        """Return where a point stands."""
        machine = self.machine
        return Place(
            self.model.attention, phase, batch, tokens, self.dtype, machine.device,
            machine.cache_bytes, self.seed,
        )  # fmt: skip

    def release(self) -> None:
        """Let the weights go; what is measured stays known."""
        self._dense = DenseParts(self.model)
        if self.machine.is_gpu:
            torch.cuda.empty_cache()

    def point(
        self, variant: Variant, widths: Widths | None, place: Place, window: int | None = None,
        *, powered: bool = False,
    ) -> Point:  # fmt: skip
        """Measure a layer and its parts at one length, once.

        Parameters
        ----------
        variant : Variant
        widths : Widths or None
        place : Place
        window : int or None
            Of a layer with a sliding window: tokens that a prefill's token sees.
        powered : bool
            Ask for power too: a GPU repeats the layer for most of a second.

        Raises
        ------
        Interrupted
            When the user asked for the end.
        UsageError, LackingError, RuntimeError
            When the method cannot run there.
        """
        key = (variant.name, widths, place.phase, place.batch, place.seq, window)
        if key not in self._points:
            try:
                self._points[key] = self._measured(variant, widths, place, window, powered=powered)
            finally:
                if place.device.type == "cuda":
                    with suppress(RuntimeError):  # a GPU that was lost
                        torch.cuda.empty_cache()
            self.advance(f"{variant.name}, {place.name}")
        return self._points[key]

    def _measured(
        self, variant: Variant, widths: Widths | None, place: Place, window: int | None,
        *, powered: bool,
    ) -> Point:  # fmt: skip
        attended = self._attended(variant, widths, place, window)
        units = [
            *self._dense.before(place, attended),
            *(unit for unit in attended.units if not unit.per_pass),
            *self._dense.after(place, attended),
        ]
        once = [*self._dense.around(place), *(unit for unit in attended.units if unit.per_pass)]
        error = attended.error()
        if error != error:  # no reference for it
            known: float | None = None
        else:
            known = error
            if error > TOLERANCE[place.dtype]:
                self.warn(
                    f"{variant.name}, {place.name}: attention is wrong (error {error:.2g} against "
                    "float64), so its time means nothing"
                )
        layer, ends, watts = self._timed(variant, place, units, once, powered=powered)
        parts, passes = _added([*units, *once], self._units)
        labels = dict(attended.labels)
        if self.all_reduce is not None:
            # After the output projection and after the MLP: the hidden state of every token.
            sent = place.batch * place.queries * place.shape.hidden_size * place.dtype.itemsize
            parts["communication"] = 2 * self.all_reduce(sent)
            layer += parts["communication"]
        return Point(place.seq, parts, passes, layer, known, labels, watts, ends)

    def _attended(
        self, variant: Variant, widths: Widths | None, place: Place, window: int | None
    ) -> Attended:
        family = variant.family_for(place.shape)
        if family == "full":
            return full_attended(place, self._full, window)
        if family == "levels":
            return levels_attended(variant, place, widths, self._full, window)
        assert widths is not None  # every other method has them
        if family == "strawman":
            return strawman_attended(place, widths, self._full, window)
        if family == "latents":
            return latents_attended(variant.name, place, widths, self._full, window)
        return ragged_attended(variant, place, widths, window)

    def _timed(
        self, variant: Variant, place: Place, units: list[Unit], once: list[Unit], *,
        powered: bool,
    ) -> tuple[float, tuple[float, float] | None, float | None]:  # fmt: skip
        """Measure what is not known yet, in turn with the layer.

        Returns its seconds, their interval relative to them, and watts.
        """
        new = {unit.key: unit for unit in (*units, *once) if unit.key not in self._units}
        # A long prompt's parts, each with memory of its own, would not fit beside one another.
        pool = torch.cuda.graph_pool_handle() if place.device.type == "cuda" else None
        whole = layer_sampler(units, place.device, pool)
        samplers = [whole]
        names: list[tuple[tuple[object, ...], bool]] = []
        for unit in new.values():
            samplers.append(unit_sampler(unit, place.device, pool))
            names.append((unit.key, False))
            if unit.aside is not None:
                samplers.append(sampler(unit.aside[1], place.device, settle=False, pool=pool))
                names.append((unit.key, True))

        def look(samples: Sequence[float]) -> None:
            known = self._units | _by_unit(new, names, samples[1:])
            self.glimpse(place, *_added([*units, *once], known))

        found = interleaved(
            samplers, self._repeats, seconds=self._budget * len(samplers) ** 0.5,
            should_stop=self.should_stop, first=look,
        )  # fmt: skip
        for one in samplers:
            if one.note is not None:
                self.warn(f"{variant.name}, {place.name}: {one.note}")
        for (key, _), one in zip(names, samplers[1:], strict=True):
            if one.note is not None:
                self._apart.add(key)
        middles = [median(samples) for samples in found]
        self.spreads.setdefault(variant.name, {})[place.name] = spread(found[0])
        self._units |= _by_unit(new, names, middles[1:])
        watts = self._watts(whole) if powered else None
        if whole.note is not None and self._apart.isdisjoint(unit.key for unit in units):
            # Launched one by one a layer takes as long as the host needs, its parts in graphs not.
            self.warn(f"{variant.name}, {place.name}: the layer is taken as the sum of its parts")
            return sum(sum(self._units[unit.key].values()) for unit in units), None, watts
        ends = median_interval(found[0])
        relative = (ends[0] / middles[0], ends[1] / middles[0]) if ends and middles[0] else None
        return middles[0], relative, watts

    def doubts(self) -> list[str]:
        """Say of every method once how far the samples of whole layers lay apart."""
        allowed = _SPREAD[self.machine.device.type]
        found = []
        for name, spreads in self.spreads.items():
            wide = [value for value in spreads.values() if value > allowed]
            if wide:
                found.append(
                    f"{name}: samples of a layer spread by up to {max(wide):.0%} ({len(wide)} of "
                    f"{len(spreads)} points spread widely); something else may be running"
                )
        return found

    def _watts(self, layer: Sampler) -> float | None:
        """Repeat a layer for a while and return what the device took meanwhile."""
        if self.energy is None or not self.machine.is_gpu:
            return None
        start = self.clock()
        while self.clock() - start < _POWER_SECONDS:
            layer.sample()
        stop = self.clock()
        time.sleep(_TELEMETRY_SECONDS)  # for a sample behind the end
        joules = self.energy(start, stop)
        return None if joules is None else joules / (stop - start)


def _by_unit(
    units: Mapping[tuple[object, ...], Unit], names: Sequence[tuple[tuple[object, ...], bool]],
    seconds: Sequence[float],
) -> dict[tuple[object, ...], Times]:  # fmt: skip
    """Return the parts of units by key; `names` says which time is a unit's, or of its aside."""
    found: dict[tuple[object, ...], Times] = {}
    for (key, aside), taken in zip(names, seconds, strict=True):
        unit = units[key]
        if not aside:
            found[key] = {unit.part: taken}
            continue
        assert unit.aside is not None
        own = found[key]
        own[unit.part] -= taken
        own[unit.aside[0]] = own.get(unit.aside[0], 0.0) + taken
    return found


def _added(units: Sequence[Unit], known: Mapping[tuple[object, ...], Times]) -> tuple[Times, Times]:
    """Return the parts of a layer, and those of what a pass does once."""
    parts: Times = {}
    passes: Times = {}
    for unit in units:
        held = passes if unit.per_pass else parts
        for part, seconds in known[unit.key].items():
            held[part] = held.get(part, 0.0) + seconds
    return parts, passes
