"""Times of one layer and its parts at one length, each piece of work measured once in a run."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from kvprof.analysis.bases import eigenbasis
from kvprof.benchmark.case import Place
from kvprof.benchmark.cases import palu_case, sinks_of
from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.jct.composition import Times
from kvprof.benchmark.jct.dense import DenseParts
from kvprof.benchmark.jct.full import FullAttention, full_attended
from kvprof.benchmark.jct.levels import levels_attended
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.ragged import ragged_attended, store_latents
from kvprof.benchmark.jct.units import Attended, Runs, Unit
from kvprof.benchmark.machine import Machine
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.rows import TOLERANCE
from kvprof.benchmark.timing import Pool, Sampler, interleaved, median_interval, sampler, spread
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct.step import reconstruct_step, stored_step

__all__ = [
    "Bench",
    "Point",
    "latents_attended",
    "layer_sampler",
    "strawman_attended",
    "unit_sampler",
]

# --- Times of a layer's calls, together and alone, and of calls that wait for the host.


class _Waiting:
    """A clock around a call and all that it left running on the device."""

    note: str | None = None

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._next = 0
        for run in runs:  # compiles, and fills the libraries' plans
            self._first = run()

    def output(self) -> Tensor:
        return self._first

    def sample(self) -> float:
        run = self._runs[self._next % len(self._runs)]
        self._next += 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start


class _Sum:
    """Several calls timed one after the other."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = samplers
        self.note = next((one.note for one in samplers if one.note is not None), None)

    def output(self) -> Tensor:
        return self._samplers[-1].output()

    def sample(self) -> float:
        return sum(one.sample() for one in self._samplers)


def unit_sampler(unit: Unit, device: torch.device, pool: Pool = None) -> Sampler:
    """Return what times a unit where it runs; graphs with one pool share their memory."""
    if unit.timed is not None:
        return unit.timed
    if unit.waits and device.type == "cuda":
        return _Waiting(unit.runs)
    place = torch.device("cpu") if unit.on_host else device
    return sampler(unit.runs, place, settle=False, pool=pool)


def layer_sampler(units: Sequence[Unit], device: torch.device, pool: Pool = None) -> Sampler:
    """Return what times a whole layer: its calls one after the other, in one graph on a GPU.

    Calls that wait for the host stand beside the graph of all others. Graphs with one pool share
    their memory.
    """
    apart = [unit for unit in units if unit.waits and device.type == "cuda"]
    others = [unit for unit in units if unit not in apart]
    together = sampler(_sequence(others), device, settle=False, pool=pool)
    if not apart:
        return together
    return _Sum([together, *(_Waiting(unit.runs) for unit in apart)])


def _sequence(units: Sequence[Unit]) -> list[Callable[[], Tensor]]:
    """Return a layer's calls one after the other, on each copy of their inputs in turn."""
    count = max(len(unit.runs) for unit in units)

    def layer(number: int) -> Callable[[], Tensor]:
        calls = [unit.runs[number % len(unit.runs)] for unit in units]

        def run() -> Tensor:
            for call in calls[:-1]:
                call()
            return calls[-1]()

        return run

    return [layer(number) for number in range(count)]


# --- Keys that are rebuilt: Palu's latents from before RoPE, FDC without post-RoPE, the
# strawman.


def latents_attended(
    name: str, place: Place, widths: Widths, full: FullAttention, window: int | None
) -> Attended:
    """Return attention over latents from before RoPE (Palu §3.1.2).

    Decode rebuilds keys inside its kernel: what that costs is the kernel's time without the same
    kernel's over latents as they lie. Prefill rebuilds K and V and attends at full width.
    """
    shape = place.shape
    heads = shape.num_kv_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, heads * shape.group, place.batch, place.seq)
    stored = store_latents(place, layout)
    queries = shape.num_heads * shape.head_dim
    projections = (queries, sum(widths.keys), sum(widths.values))
    if place.phase == "prefill":
        attention, error, labels = full.unit(place, window)
        return Attended(
            [stored, _rebuilt(place, widths, heads), attention],
            projections,
            queries,
            "query",
            error,
            {**labels, "prefill": "rebuilds K and V, attends at full width, keeps its own W_O"},
        )
    case = palu_case(name, place, widths)
    stored_runs, schedule = _without_rebuild(place, layout, heads)
    key = ("reconstruct", layout)
    own = Unit("decompress", case.runs, key, aside=("attention", stored_runs))
    cut = Unit("schedule", [schedule], ("reconstruct schedule", layout), per_pass=True)
    return Attended(
        [stored, own, cut],
        projections,
        layout.output_offsets[-1],
        "query",
        lambda: case.error(case.runs[0]()),
        {"by_difference": "decompress", "merge": "counted in attention"},
    )


def _without_rebuild(
    place: Place, layout: RaggedLayout, heads: int
) -> tuple[list[Callable[[], Tensor]], Callable[[], Tensor]]:
    """Return the same kernel over latents as they lie, on as many copies; and what cuts a step."""
    shape, source = place.shape, place.generator(41)
    up = [
        place.random(source, heads * shape.head_dim, width) / width**0.5
        for width in layout.key_widths
    ]
    copies = place.copies(layout.elements * place.dtype.itemsize)
    buffers = [place.random(source, layout.elements) for _ in range(copies)]
    query = place.random(source, place.batch, layout.query_offsets[-1])
    sinks = sinks_of(place, layout.heads, layout.group)
    rebuilding = reconstruct_step(layout, up, shape.head_dim, heads, place.device)
    step = stored_step(rebuilding)
    lengths = torch.full((place.batch,), place.seq, dtype=torch.int32, device=place.device)
    cut = rebuilding.cut(lengths)

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, None, None, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    return [run(buffer) for buffer in buffers], lambda: rebuilding.cut(lengths).lengths


def _rebuilt(place: Place, widths: Widths, heads: int) -> Unit:
    """Return a prompt's K and V from its latents, and RoPE on K."""
    shape, source = place.shape, place.generator(42)
    where = (place.batch, place.queries)

    def matrices(sides: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                place.random(source, *where, width),
                place.random(source, width, heads * shape.head_dim) / width**0.5,
            )
            for width in sides
        ]

    keys, values = matrices(widths.keys), matrices(widths.values)
    cos, sin = (place.random(source, 1, 1, place.queries, shape.head_dim) for _ in range(2))

    def run() -> Tensor:
        made = torch.cat([latent @ up for latent, up in keys], dim=-1)
        made = made.view(*where, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
        turned: Tensor = made * cos + rotate_half(made) * sin
        torch.cat([latent @ up for latent, up in values], dim=-1)
        return turned

    return Unit("decompress", [run], ("rebuild", widths.keys, widths.values, *where))


def strawman_attended(
    place: Place, widths: Widths, full: FullAttention, window: int | None
) -> Attended:
    """Return ZACK §3.2's strawman: bases per request, K and V rebuilt whole at every step.

    The basis is found as the runtime finds it: eigenvectors of ``KᵀK`` and ``VᵀV`` in float64, the
    right singular vectors that the paper's SVD gives; the host decomposes the matrices.
    """
    shape, source = place.shape, place.generator(43)
    rank, width, heads = widths.keys[0], shape.head_dim, shape.num_kv_heads
    new = place.random(source, 2, place.batch, heads, place.queries, width)
    bases = torch.linalg.qr(
        torch.randn(2, place.batch, heads, width, width, generator=torch.Generator().manual_seed(0))
    ).Q.to(place.device, place.dtype)
    kept = bases[..., :rank].contiguous()
    where = (place.batch, place.queries, rank)

    def compress() -> Tensor:
        made: Tensor = new @ kept
        return made

    compressed = Unit("compress", [compress], ("strawman compress", *where))
    attention, error, labels = full.unit(place, window)
    full_columns = shape.num_kv_heads * width
    queries = shape.num_heads * width
    units: list[Unit]
    if place.phase == "prefill":

        def basis() -> Tensor:
            states = new.double()
            found: Tensor = eigenbasis(states.mT @ states)[1]
            return found

        online = Unit("basis", [basis], ("basis", *where), waits=True)
        units = [attention, online, compressed]
        labels = {
            **labels,
            "basis": "eigenvectors of KᵀK and VᵀV per sequence and head, decomposed by the host; "
            "timed beside the layer's other calls",
        }
    else:
        latents = [
            place.random(source, 2, place.batch, heads, place.seq, rank)
            for _ in range(place.copies(place.full_bytes * rank // width))
        ]

        def decompress(stored: Tensor) -> Callable[[], Tensor]:
            return lambda: stored @ kept.mT

        rebuilt = Unit(
            "decompress",
            [decompress(stored) for stored in latents],
            ("strawman decompress", place.seq, *where),
        )
        units = [compressed, rebuilt, attention]
    return Attended(units, (queries, full_columns, full_columns), queries, "both", error, labels)


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
            self.model.attention,
            phase,
            batch,
            tokens,
            self.dtype,
            machine.device,
            machine.cache_bytes,
            self.seed,
        )

    def release(self) -> None:
        """Let the weights go; what is measured stays known."""
        self._dense = DenseParts(self.model)
        if self.machine.is_gpu:
            torch.cuda.empty_cache()

    def point(
        self,
        variant: Variant,
        widths: Widths | None,
        place: Place,
        window: int | None = None,
        *,
        powered: bool = False,
    ) -> Point:
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
        self,
        variant: Variant,
        widths: Widths | None,
        place: Place,
        window: int | None,
        *,
        powered: bool,
    ) -> Point:
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
        self,
        variant: Variant,
        place: Place,
        units: list[Unit],
        once: list[Unit],
        *,
        powered: bool,
    ) -> tuple[float, tuple[float, float] | None, float | None]:
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
            samplers,
            self._repeats,
            seconds=self._budget * len(samplers) ** 0.5,
            should_stop=self.should_stop,
            first=look,
        )
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
    units: Mapping[tuple[object, ...], Unit],
    names: Sequence[tuple[tuple[object, ...], bool]],
    seconds: Sequence[float],
) -> dict[tuple[object, ...], Times]:
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
