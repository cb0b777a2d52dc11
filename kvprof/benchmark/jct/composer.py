"""Compose requests from measured points of one layer, measuring missing points on the way.

A forward pass is the sum of its layers and its once-per-pass work. Prefill is measured at the
prompt's length or extrapolated; decode sums all steps (`kvprof.analysis.jct`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvprof.analysis.jct import between, beyond, integral, interpolated, ladder, step_weights
from kvprof.benchmark.jct.layer import PartSeconds
from kvprof.benchmark.jct.layer_bench import LayerBench, LayerTimes
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.limits import shortage
from kvprof.benchmark.machine import free_bytes
from kvprof.benchmark.methods import Method
from kvprof.errors import LackingError

__all__ = [
    "ComposedRequest",
    "Composer",
    "RequestLengths",
    "around",
    "below",
    "decode_rungs",
    "prefill_rungs",
]

# --- Which lengths one layer is measured at, so that every request of a run can be composed.


_LEAST = 512  # tokens of a prompt below which nothing is learned about a longer one
_SHARE = 0.4  # of the free memory that a prompt's hidden states may take
#: Seconds that one layer's prefill may take.
_SECONDS = {"cuda": 1.0, "cpu": 1.5}
_REACHED = 0.5  # share of a plain product's rate that a layer reaches


@dataclass(frozen=True)
class RequestLengths:
    """A prompt and how much is written after it."""

    input_len: int  # tokens; prefill gives the first that is written, decode the others
    output_len: int

    @property
    def first(self) -> int:
        """Tokens in the cache during the first decoding step."""
        return self.input_len + 1

    @property
    def last(self) -> int:
        """Tokens in the cache during the last decoding step; below `first` where there is none."""
        return self.input_len + self.output_len - 1

    @property
    def stored(self) -> int:
        """Tokens in the cache at the end: the last one that is written goes into none."""
        return self.input_len + self.output_len - 1


def decode_rungs(
    requests: Iterable[RequestLengths],
    sampled: Iterable[RequestLengths] = (),
    window: int | None = None,
) -> list[int]:
    """Return contexts at which a decoding step is measured; none where nothing is decoded."""
    ends = [end for one in requests if one.last >= one.first for end in (one.first, one.last)]
    between = [end for one in sampled if one.last >= one.first for end in (one.first, one.last)]
    ends += [min(between), max(between)] if between else []
    if window is not None:
        ends = [min(end, window) for end in ends]
    return ladder(ends) if ends else []


def below(rungs: Sequence[int], tokens: int) -> int:
    """Return the longest rung of at most so many tokens, or the first of them."""
    return max((rung for rung in rungs if rung <= tokens), default=rungs[0])


def around(rungs: Sequence[int], tokens: int) -> list[int]:
    """Return the rungs between which a length lies: one where it is a rung or lies outside."""
    above = min((rung for rung in rungs if rung >= tokens), default=rungs[-1])
    return sorted({below(rungs, tokens), above})


def layer_flops(model: ModelShape, batch: int, tokens: int) -> float:
    """Return about how many flops one layer's uncompressed prefill takes."""
    shape, dense = model.attention, model.dense
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp = (3 if dense.gated else 2) * dense.intermediate_size * max(1, dense.experts_per_token)
    per_token = 2 * shape.hidden_size * (2 * queries + 2 * keys + mlp)
    # Two products, each token with all before it.
    return batch * tokens * (per_token + 2 * queries * tokens)


def prefill_rungs(
    model: ModelShape,
    batch: int,
    lengths: Sequence[int],
    *,
    rate: float,
    free: int,
    itemsize: int,
    kind: str,
    sampled: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Return the prompt lengths to measure, and the longest that fits in time and memory."""
    longest = max((*lengths, *sampled))

    def fits(tokens: int) -> bool:
        width = 3 * model.dense.intermediate_size * max(1, model.dense.experts_per_token)
        width += 12 * model.attention.num_heads * model.attention.head_dim
        seconds = layer_flops(model, batch, tokens) / (rate * _REACHED)
        return seconds <= _SECONDS[kind] and batch * tokens * width * itemsize <= _SHARE * free

    most = longest
    while most > _LEAST and not fits(most):
        most = max(_LEAST, 1 << (most - 1).bit_length() - 1)
    rungs = {length for length in lengths if length <= most}
    if between := [length for length in sampled if length <= most]:
        rungs |= set(ladder({min(between), max(between)}))
    if most < longest:
        rungs |= {most, max(1, most // 2), max(1, most // 4)}
    return sorted(rungs), most


# --- Requests, put together.


#: Context, seconds of the pass, and passes that it stands for.
ComposedStep = tuple[int, float, float]


@dataclass(frozen=True)
class ComposedRequest:
    """A request, put together."""

    request: RequestLengths
    prefill: dict[str, float]  # seconds by part
    decode: dict[str, float]
    prefill_seconds: float  # of whole layers and what a pass does once
    decode_seconds: float
    steps: list[ComposedStep]  # context, seconds of the pass, and passes that it stands for
    error: float | None  # of `decode_seconds`, because steps between rungs were not measured
    predicted_from: int | None  # the longest prompt that was measured, where this one was not
    #: Power while whole layers ran, times the seconds of each phase.
    energy_joules: float | None = None
    #: 95 % intervals of the seconds of the two phases.
    prefill_interval: tuple[float, float] | None = None
    decode_interval: tuple[float, float] | None = None

    @property
    def jct(self) -> float:
        """Seconds of the request."""
        return self.prefill_seconds + self.decode_seconds


#: The part of a prompt that grows with pairs of tokens; all others grow by the token.
_BENT = "attention"


@dataclass(eq=False)
class Composer:
    """Composes requests of one method at one batch size, measuring what they need on the way."""

    bench: LayerBench
    method: Method
    batch: int
    #: That will be asked for: their lengths decide where is measured.
    requests: Sequence[RequestLengths]
    rate: float  # of a matrix product, in flop/s
    #: Many more, which are put together from points between which they lie.
    sampled: Sequence[RequestLengths] = ()
    _prefill_rungs: list[int] = field(init=False)
    _longest: int = field(init=False)
    _decode_rungs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        bench = self.bench
        free = free_bytes(bench.machine.device)
        self._decode_rungs = decode_rungs(self.requests, self.sampled)
        self._prefill_rungs, self._longest = prefill_rungs(
            bench.model,
            self.batch,
            sorted({one.input_len for one in self.requests}),
            rate=self.rate,
            free=free,
            itemsize=bench.dtype.itemsize,
            kind=bench.machine.device.type,
            sampled=[one.input_len for one in self.sampled],
        )
        if self._decode_rungs:
            why = shortage(bench.workload("decode", self.batch, self._decode_rungs[-1]), free)
            if why is not None:
                raise LackingError(why)

    @property
    def points(self) -> int:
        """How many points will be measured, for a progress bar."""
        count = 0
        for _, window in self._kinds():
            decode = (
                decode_rungs(self.requests, self.sampled, window) if window else self._decode_rungs
            )
            count += len(decode) + len(self._prefill_rungs)
        return count

    def _kinds(self) -> list[tuple[int, int | None]]:
        """Return layers and their window; full attention first."""
        shape = self.bench.model.attention
        full = shape.full_layers
        kinds: list[tuple[int, int | None]] = [(full, None)] if full else []
        if full < shape.layers:
            kinds.append((shape.layers - full, shape.sliding_window))
        return kinds

    def _point(self, phase: str, tokens: int, window: int | None) -> LayerTimes:
        workload = self.bench.workload(phase, self.batch, tokens)
        hidden = window if phase == "prefill" and window and window < tokens else None
        # Only where a case's energy is read from: it takes as long as all other samples together.
        powered = any((phase, tokens, window) in self._powered(one) for one in self.requests)
        return self.bench.point(self.method, workload, hidden, powered=powered)

    @property
    def longest(self) -> int:
        """The longest prompt that is measured; longer ones are predicted."""
        return self._longest

    def points_of(self, request: RequestLengths) -> list[LayerTimes]:
        """Measure a request's prompt and its last step."""
        _, window = self._kinds()[0]
        found = [self._point("prefill", below(self._prefill_rungs, request.input_len), window)]
        if self._decode_rungs:
            last = below(self._decode_rungs, request.last)
            found.append(self._point("decode", min(last, window or last), window))
        return found

    def prefill(
        self, tokens: int, tell: Callable[[dict[str, float], float], None] | None = None
    ) -> tuple[dict[str, float], float]:
        """Return a prompt's parts and its whole time."""
        parts: dict[str, float] = {}
        groups, whole = self._forward(
            [(count, *self._prefill_layer(tokens, window)) for count, window in self._kinds()]
        )
        for some, count in groups:
            for part, seconds in some.items():
                parts[part] = parts.get(part, 0.0) + count * seconds
            if tell is not None:
                tell(some, count)
        return parts, whole

    @staticmethod
    def _forward(
        kinds: list[tuple[int, PartSeconds, PartSeconds, float]],
    ) -> tuple[list[tuple[PartSeconds, float]], float]:
        """Return the parts of a forward pass with their counts, and its seconds."""
        once = dict(kinds[0][2])
        for _, _, passes, _ in kinds[1:]:
            if "schedule" in passes:
                once["schedule"] = once.get("schedule", 0.0) + passes["schedule"]
        groups: list[tuple[PartSeconds, float]] = [
            (own, float(count)) for count, own, _, _ in kinds
        ]
        whole = sum(count * layer for count, _, _, layer in kinds) + sum(once.values())
        return [*groups, (once, 1.0)], whole

    def _prefill_layer(
        self, tokens: int, window: int | None
    ) -> tuple[PartSeconds, PartSeconds, float]:
        """Return a layer's parts, the pass's own parts, and the whole layer."""
        if tokens <= self._longest and tokens in self._prefill_rungs:
            point = self._point("prefill", tokens, window)
            return point.parts, point.passes, point.layer
        rungs = self._prefill_rungs
        points = [self._point("prefill", rung, window) for rung in rungs]
        if tokens <= rungs[-1]:

            def at(values: list[float], part: str) -> float:
                # A parabola overshoots where a time is not smooth, as those are that wait for the
                # host; what costs by the token lies on straight lines anyway.
                path = between if part == _BENT else interpolated
                return path(rungs, values, tokens)

            parts = _combine_points(points, lambda point: point.parts, at)
            passes = _combine_points(points, lambda point: point.passes, at)
            bent = between(
                rungs, [point.layer - _straight(point.parts) for point in points], tokens
            )
            return parts, passes, _straight(parts) + bent
        kept = [(r, p) for r, p in zip(rungs, points, strict=True) if r >= self._longest // 4]
        lengths, last = [rung for rung, _ in kept], kept[-1][1]
        chosen = [point for _, point in kept]

        def predict(values: list[float], part: str) -> float:
            degree = 2 if part == _BENT and window is None else 1
            if values[-1] <= 0.0:  # the longest prompt takes a way without this part
                return 0.0
            there = [pair for pair in zip(lengths, values, strict=True) if pair[1] > 0.0]
            if len(there) < 2:
                return values[-1] * tokens / lengths[-1]
            known, seconds = zip(*there, strict=True)
            return beyond(known, seconds, tokens, degree=degree)

        parts = _combine_points(chosen, lambda point: point.parts, predict)
        # What the parts do not explain of the longest layer grows with its tokens.
        rest = (last.layer - sum(last.parts.values())) * tokens / lengths[-1]
        passes = _combine_points(chosen, lambda point: point.passes, predict)
        return parts, passes, sum(parts.values()) + rest

    def decode(
        self,
        request: RequestLengths,
        tell: Callable[[int, float, dict[str, float], float], None] | None = None,
        finished: Callable[[int, float, float], None] | None = None,
    ) -> tuple[dict[str, float], list[ComposedStep], float | None]:
        """Return the parts of all decoding steps, the steps that stand for them, and the error."""
        first, last = request.first, request.last
        if last < first:
            return {}, [], None
        # Layers with a window stop growing there.
        bends = [window for _, window in self._kinds() if window is not None]
        inner = [context for context in (*self._decode_rungs, *bends) if first < context < last]
        nodes = sorted({first, last, *inner})
        weights = step_weights(nodes, first, last)
        parts: dict[str, float] = {}
        steps: list[ComposedStep] = []
        for context, weight in zip(nodes, weights, strict=True):
            groups, whole = self._forward(
                [(count, *self._decode_layer(context, window)) for count, window in self._kinds()]
            )
            for some, count in groups:
                for part, seconds in some.items():
                    parts[part] = parts.get(part, 0.0) + float(weight) * count * seconds
                if tell is not None:
                    tell(context, float(weight), some, count)
            steps.append((context, whole, float(weight)))
            if finished is not None:
                finished(*steps[-1])
        error = integral(nodes, [seconds for _, seconds, _ in steps], first, last).error
        return parts, steps, error

    def _decode_layer(
        self, context: int, window: int | None
    ) -> tuple[PartSeconds, PartSeconds, float]:
        rungs = self._decode_rungs
        if window is not None:
            rungs, context = decode_rungs(self.requests, self.sampled, window), min(context, window)
        if context in rungs:
            point = self._point("decode", context, window)
            return point.parts, point.passes, point.layer
        near = around(rungs, context)
        points = [self._point("decode", rung, window) for rung in near]

        def at(values: list[float], _: str = "") -> float:
            return interpolated(near, values, context)

        return (
            _combine_points(points, lambda point: point.parts, at),
            _combine_points(points, lambda point: point.passes, at),
            at([point.layer for point in points]),
        )

    def compose(self, request: RequestLengths) -> ComposedRequest:
        """Put one request together."""
        prefill, seconds = self.prefill(request.input_len)
        decode, steps, error = self.decode(request)
        return self.composition(request, prefill, seconds, decode, steps, error)

    def composition(
        self,
        request: RequestLengths,
        prefill: dict[str, float],
        seconds: float,
        decode: dict[str, float],
        steps: list[ComposedStep],
        error: float | None,
    ) -> ComposedRequest:
        """Return a request of which both phases are known."""
        decoded = sum(seconds * weight for _, seconds, weight in steps)
        return ComposedRequest(
            request,
            prefill,
            decode,
            seconds,
            decoded,
            steps,
            error,
            self._longest if request.input_len > self._longest else None,
            self._energy(request, seconds, decoded),
            self._interval("prefill", [(request.input_len, seconds, 1.0)]),
            self._interval("decode", steps),
        )

    def _interval(self, phase: str, passes: Sequence[ComposedStep]) -> tuple[float, float] | None:
        """Return the interval of some passes' seconds; ends add up, as noise is correlated."""
        low = high = 0.0
        for tokens, seconds, weight in passes:
            ends = [
                point.ends
                for _, window in self._kinds()
                for point in self._bracketing_points(phase, tokens, window)
            ]
            known = [pair for pair in ends if pair is not None]
            if len(known) < len(ends):
                return None
            low += weight * seconds * min(first for first, _ in known)
            high += weight * seconds * max(last for _, last in known)
        return low, high

    def _bracketing_points(self, phase: str, tokens: int, window: int | None) -> list[LayerTimes]:
        """Return the points between which a length lies, which have been measured."""
        rungs = self._prefill_rungs
        if phase == "decode":
            rungs = self._decode_rungs
            if window is not None:
                rungs = decode_rungs(self.requests, self.sampled, window)
                tokens = min(tokens, window)
        return [self._point(phase, rung, window) for rung in around(rungs, tokens)]

    def _powered(self, request: RequestLengths) -> list[tuple[str, int, int | None]]:
        """Return the points whose power gives a request's energy: prefill and decode."""
        _, window = self._kinds()[0]
        prompt = below(self._prefill_rungs, request.input_len)
        found: list[tuple[str, int, int | None]] = [("prefill", prompt, window)]
        if self._decode_rungs:
            last = self._decode_rungs[-1]
            found.append(("decode", min(last, window or last), window))
        return found

    def watts(self, request: RequestLengths) -> list[float | None]:
        """Return what the device takes in prefill, and in decode where anything is decoded."""
        return [self._point(*workload).watts for workload in self._powered(request)]

    def _energy(self, request: RequestLengths, prefill: float, decode: float) -> float | None:
        watts = self.watts(request)
        phases = [prefill, decode] if decode else [prefill]
        known = [power for power in watts[: len(phases)] if power is not None]
        if len(known) < len(phases):
            return None
        return sum(power * seconds for power, seconds in zip(known, phases, strict=True))


def _straight(parts: PartSeconds) -> float:
    return sum(seconds for part, seconds in parts.items() if part != _BENT)


def _combine_points(
    points: Sequence[LayerTimes],
    of: Callable[[LayerTimes], dict[str, float]],
    combine: Callable[[list[float], str], float],
) -> dict[str, float]:
    """Combine a figure of several points, part by part; missing parts count as 0."""
    found = [of(point) for point in points]
    parts = dict.fromkeys(part for one in found for part in one)
    return {part: combine([one.get(part, 0.0) for one in found], part) for part in parts}
