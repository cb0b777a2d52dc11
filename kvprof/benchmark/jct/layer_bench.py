"""Times of one layer and its parts at one length, each piece of work measured once in a run."""

import json
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import torch

from kvprof.analysis.jct import interpolated
from kvprof.analysis.stats import median_ends
from kvprof.benchmark.case import Workload
from kvprof.benchmark.jct.attention import FullAttention, full_attention, ragged_attention
from kvprof.benchmark.jct.layer import (
    AttentionCalls,
    DenseParts,
    PartCall,
    PartSeconds,
    call_sampler,
    layer_sampler,
)
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.stored import latent_attention, segments_attention, strawman_attention
from kvprof.benchmark.machine import Machine
from kvprof.benchmark.methods import Method
from kvprof.benchmark.timing import Sampler, interleaved, sampler, spread
from kvprof.child import Leash, child_environment, child_python
from kvprof.errors import FailedError

__all__ = ["AllReduce", "LayerBench", "LayerTimes", "measure_all_reduce"]

# --- What summing hidden states over the GPUs of tensor parallelism costs.


_LEAST, _MOST = 2**12, 2**30  # bytes
_ALL_REDUCE_SECONDS = 300
# One process per GPU: NCCL, then medians of a graph's replays as elsewhere.
_PROGRAM = """
from kvprof.child import die_with_parent
die_with_parent()
import gc, json, os, sys, statistics, torch, torch.distributed as dist
rank, world, sizes = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=world,
                        init_method="tcp://127.0.0.1:" + sys.argv[4],
                        device_id=torch.device("cuda", rank))
found = []
gc.disable()  # what it frees would end a capture
for size in sizes:
    data = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 8
    # NCCL's own threads ask for events meanwhile, which only this mode lets them.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            dist.all_reduce(data)
    samples = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record(); graph.replay(); end.record(); end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / calls)
    found.append(statistics.median(samples[2:]))
    del graph, data
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class AllReduce:
    """Measured times by size."""

    sizes: list[int] = field(default_factory=list)  # bytes on each GPU, ascending
    seconds: list[float] = field(default_factory=list)

    def __call__(self, nbytes: int) -> float:
        """Return the seconds of summing so many bytes over all GPUs."""
        if nbytes >= self.sizes[-1]:
            return self.seconds[-1] * nbytes / self.sizes[-1]  # bandwidth is all that counts there
        return interpolated(self.sizes, self.seconds, max(nbytes, self.sizes[0]))


def measure_all_reduce(
    tp: int,
    *,
    count: Callable[[], int] = torch.cuda.device_count,
    program: Sequence[str] = tuple(child_python("-c", _PROGRAM)),
) -> AllReduce | None:
    """Measure NCCL's all-reduce over `tp` GPUs; None where there are not as many."""
    if count() < tp:
        return None
    sizes = [size for power in range(12, 31, 2) if _LEAST <= (size := 2**power) <= _MOST]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    leashes = [Leash() for _ in range(tp)]
    running = [
        leashes[rank].start(
            [*program, str(rank), str(tp), json.dumps(sizes), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for rank in range(tp)
    ]
    try:
        said = [one.communicate(timeout=_ALL_REDUCE_SECONDS) for one in running]
    except subprocess.TimeoutExpired:
        raise FailedError(
            f"all-reduce over {tp} GPUs did not finish within {_ALL_REDUCE_SECONDS} s"
        ) from None
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
        for leash in leashes:
            leash.close()
    if any(one.returncode for one in running):
        words = next(err for one, (_, err) in zip(running, said, strict=True) if one.returncode)
        last = [line for line in words.splitlines() if line.strip()][-1:]
        raise FailedError(f"all-reduce over {tp} GPUs failed: {(last or ['no message'])[0][:200]}")
    return AllReduce(sizes, json.loads(said[0][0].splitlines()[-1]))


# --- One layer and its parts at one length.


_SAMPLES = {"cuda": 20, "cpu": 15}
_POWER_SECONDS, _TELEMETRY_SECONDS = 0.7, 0.3
_SECONDS = {"cuda": 2.0, "cpu": 1.0}
_SPREAD = {"cuda": 0.05, "cpu": 0.2}


@dataclass(frozen=True)
class LayerTimes:
    """One layer at one length."""

    tokens: int  # in the cache during a decoding step; of the prompt
    parts: dict[str, float]  # seconds of each part of one layer
    passes: dict[str, float]  # seconds of what a forward pass does once, by part
    #: Seconds of the whole layer: all its calls in one CUDA graph (beside it those that wait for
    #: the host), or one after the other on a CPU.
    layer: float
    labels: dict[str, str]
    #: What the device took while the layer was repeated, where that was asked for and it tells.
    watts: float | None = None
    #: The 95 % interval of the layer's median, relative to it.
    ends: tuple[float, float] | None = None


@dataclass(eq=False)
class LayerBench:
    """Measures points of one model's shape, and remembers what it has measured."""

    model: ModelShape
    machine: Machine
    dtype: torch.dtype
    seed: int = 0
    repeats: int | None = None  # samples of each time; None takes 20 on a GPU and 15 on a CPU
    #: Seconds of summing so many bytes over all GPUs; None where it is not measured.
    all_reduce: Callable[[int], float] | None = None
    #: Whether to end; what is said of the figures; that one more point is done.
    should_stop: Callable[[], bool] = lambda: False
    warn: Callable[[str], None] = lambda _: None
    advance: Callable[[str], None] = lambda _: None
    #: Seconds since the start of the run; joules between two such times, None where nothing tells.
    clock: Callable[[], float] = time.monotonic
    energy: Callable[[float, float], float | None] | None = None

    def __post_init__(self) -> None:
        kind = self.machine.device.type
        self._budget = _SECONDS[kind]
        self._repeats = self.repeats or _SAMPLES[kind]
        self._dense = DenseParts(self.model)
        self._full = FullAttention(self._budget, self.should_stop)
        self._known: dict[tuple[object, ...], dict[str, float]] = {}
        self._apart: set[tuple[object, ...]] = set()  # calls that no graph holds
        self.spreads: dict[str, dict[str, float]] = {}
        self._points: dict[tuple[object, ...], LayerTimes] = {}

    def workload(self, phase: str, batch: int, tokens: int) -> Workload:
        """Return where a point stands."""
        machine = self.machine
        return Workload(
            self.model.attention,
            phase,
            batch,
            tokens,
            self.dtype,
            machine.device,
            machine.device_cache_bytes,
            self.seed,
        )

    def point(
        self,
        method: Method,
        workload: Workload,
        window: int | None = None,
        *,
        powered: bool = False,
    ) -> LayerTimes:
        """Measure a layer and its parts at one length, once."""
        key = (method.name, method.widths, workload.phase, workload.batch, workload.seq, window)
        if key not in self._points:
            try:
                self._points[key] = self._measured(method, workload, window, powered=powered)
            finally:
                if workload.device.type == "cuda":
                    with suppress(RuntimeError):  # a GPU that was lost
                        torch.cuda.empty_cache()
            self.advance(f"{method.name}, {workload.name}")
        return self._points[key]

    def _measured(
        self,
        method: Method,
        workload: Workload,
        window: int | None,
        *,
        powered: bool,
    ) -> LayerTimes:
        attention = self._attention(method, workload, window)
        calls = [
            *self._dense.before(workload, attention),
            *(call for call in attention.calls if not call.per_pass),
            *self._dense.after(workload, attention),
        ]
        once = [*self._dense.around(workload), *(call for call in attention.calls if call.per_pass)]
        layer, ends, watts = self._timed(method, workload, calls, once, powered=powered)
        parts, passes = _added([*calls, *once], self._known)
        labels = dict(attention.labels)
        if self.all_reduce is not None:
            # After the output projection and after the MLP: the hidden state of every token.
            sent = (
                workload.batch
                * workload.queries
                * workload.shape.hidden_size
                * workload.dtype.itemsize
            )
            parts["communication"] = 2 * self.all_reduce(sent)
            layer += parts["communication"]
        return LayerTimes(workload.seq, parts, passes, layer, labels, watts, ends)

    def _attention(self, method: Method, workload: Workload, window: int | None) -> AttentionCalls:
        if method.form == "full":
            return full_attention(workload, self._full, window)
        if method.form == "segments":
            return segments_attention(method, workload, self._full, window)
        if method.form == "strawman":
            return strawman_attention(workload, method.kept, self._full, window)
        if method.form == "latents":
            return latent_attention(method.name, workload, method.kept, self._full, window)
        return ragged_attention(method, workload, window)

    def _timed(
        self,
        method: Method,
        workload: Workload,
        calls: list[PartCall],
        once: list[PartCall],
        *,
        powered: bool,
    ) -> tuple[float, tuple[float, float] | None, float | None]:
        """Measure missing points alternately with the layer; return seconds, interval and watts."""
        new = {call.key: call for call in (*calls, *once) if call.key not in self._known}
        # A long prompt's parts, each with memory of its own, would not fit beside one another.
        pool = torch.cuda.graph_pool_handle() if workload.device.type == "cuda" else None
        whole = layer_sampler(calls, workload.device, pool)
        samplers = [whole]
        names: list[tuple[tuple[object, ...], bool]] = []
        for call in new.values():
            samplers.append(call_sampler(call, workload.device, pool))
            names.append((call.key, False))
            if call.contained is not None:
                samplers.append(
                    sampler(call.contained[1], workload.device, settle=False, pool=pool)
                )
                names.append((call.key, True))

        found = interleaved(
            samplers,
            self._repeats,
            seconds=self._budget * len(samplers) ** 0.5,
            should_stop=self.should_stop,
        )
        for one in samplers:
            if one.note is not None:
                self.warn(f"{method.name}, {workload.name}: {one.note}")
        for (key, _), one in zip(names, samplers[1:], strict=True):
            if one.note is not None:
                self._apart.add(key)
        middles = [median(samples) for samples in found]
        self.spreads.setdefault(method.name, {})[workload.name] = spread(found[0])
        self._known |= _by_call(new, names, middles[1:])
        watts = self._watts(whole) if powered else None
        if whole.note is not None and self._apart.isdisjoint(call.key for call in calls):
            # Launched one by one a layer takes as long as the host needs, its parts in graphs not.
            self.warn(f"{method.name}, {workload.name}: the layer's time is the sum of its parts")
            return sum(sum(self._known[call.key].values()) for call in calls), None, watts
        ends = median_ends(found[0])
        relative = (ends[0] / middles[0], ends[1] / middles[0]) if ends and middles[0] else None
        return middles[0], relative, watts

    def spread_warnings(self) -> list[str]:
        """Say of every method once how far the samples of whole layers lay apart."""
        allowed = _SPREAD[self.machine.device.type]
        found = []
        for name, spreads in self.spreads.items():
            wide = [value for value in spreads.values() if value > allowed]
            if wide:
                found.append(
                    f"{name}: layer samples vary by up to {max(wide):.0%} ({len(wide)} of "
                    f"{len(spreads)} points); another program may be running"
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


def _by_call(
    calls: Mapping[tuple[object, ...], PartCall],
    names: Sequence[tuple[tuple[object, ...], bool]],
    seconds: Sequence[float],
) -> dict[tuple[object, ...], PartSeconds]:
    """Return the parts of calls by key; `names` says which time is a call's, or contained in it."""
    found: dict[tuple[object, ...], PartSeconds] = {}
    for (key, contained), taken in zip(names, seconds, strict=True):
        call = calls[key]
        if not contained:
            found[key] = {call.part: taken}
            continue
        assert call.contained is not None
        own = found[key]
        own[call.part] -= taken
        own[call.contained[0]] = own.get(call.contained[0], 0.0) + taken
    return found


def _added(
    calls: Sequence[PartCall], known: Mapping[tuple[object, ...], PartSeconds]
) -> tuple[PartSeconds, PartSeconds]:
    """Return the parts of a layer, and those of what a pass does once."""
    parts: PartSeconds = {}
    passes: PartSeconds = {}
    for call in calls:
        held = passes if call.per_pass else parts
        for part, seconds in known[call.key].items():
            held[part] = held.get(part, 0.0) + seconds
    return parts, passes
