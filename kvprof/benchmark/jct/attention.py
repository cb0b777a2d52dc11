"""A layer's attention, uncompressed and over ragged widths, as timed calls.

Uncompressed attention runs on the fastest kernel of this machine. Other storage is in
`kvprof.benchmark.jct.stored`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from kvprof.benchmark.baselines import baseline_builders, uncompressed_inputs
from kvprof.benchmark.case import Case, Lack, Workload
from kvprof.benchmark.cases import sinks_of
from kvprof.benchmark.jct.layer import AttentionCalls, PartCall
from kvprof.benchmark.machine import free_bytes
from kvprof.benchmark.methods import Method
from kvprof.benchmark.plans import full_widths
from kvprof.benchmark.rows import TOLERANCE
from kvprof.benchmark.timing import interleaved, sampler
from kvprof.errors import LackingError, UsageError
from kvprof.kernels.decode.cuts import Item, configs, pieces_for, tile_height
from kvprof.kernels.decode.step import DecodeStep, decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.launch import prefill_step
from kvprof.kernels.prefill.paths import measured_path
from kvprof.kernels.prefill.step import prefill
from kvprof.kernels.project.bases import BasisSet, basis_set
from kvprof.kernels.project.step import project_step, store_values
from kvprof.kernels.split_kv import Schedule, launch_combine
from kvprof.kernels.tables import Part

__all__ = [
    "FullAttention",
    "compress_call",
    "full_attention",
    "ragged_attention",
    "ragged_prefill",
    "store_latents",
]

# --- Uncompressed: the best kernel that this machine has.


_NEAR = 4.0  # lengths within this factor are tried with each other's fastest kernels only
_BEST = 3
_SAMPLES = 3


@dataclass(eq=False)
class FullAttention:
    """Finds the fastest uncompressed kernel, once for lengths that are near each other."""

    seconds: float  # to spend on one kernel's samples
    should_stop: Callable[[], bool] = lambda: False
    _tried: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)

    def call(
        self, workload: Workload, window: int | None = None
    ) -> tuple[PartCall, dict[str, str]]:
        """Return the fastest kernel's call, and its name as a label."""
        where = (workload.phase, workload.batch, workload.seq)
        if window is not None and workload.phase == "prefill" and window < workload.seq:
            widths = full_widths(workload.shape)
            layout = RaggedLayout(
                widths.keys, widths.values, workload.shape.group, workload.batch, workload.seq
            )
            calls = ragged_prefill(workload, layout, window)
            return calls[-1], {"prefill attention": "kvprof's own kernel, with its window"}
        case = self._fastest(workload)
        call = PartCall("attention", case.runs, ("full", *where))
        label = {f"{workload.phase} attention": case.name}
        if case.note is not None:
            label["attention"] = case.note
        return call, label

    def _fastest(self, workload: Workload) -> Case:
        inputs = uncompressed_inputs(workload)
        builders = baseline_builders(workload, free_bytes(workload.device))
        names = self._known(workload, list(builders))
        found: list[tuple[float, Case]] = []
        reasons: list[str] = []
        for name in names:
            try:
                case = builders[name](inputs)
                timed = sampler(case.runs, workload.device)
                if len(names) > 1 or name not in self._tried.get(_key(workload), []):
                    error = case.error(timed.output())
                    if error > TOLERANCE[workload.dtype]:
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
                f"no uncompressed kernel runs {workload.name}: {'; '.join(reasons)[:300]}"
            )
        found.sort(key=lambda pair: pair[0])
        self._tried[_key(workload)] = [case.name for _, case in found]
        return found[0][1]

    def _known(self, workload: Workload, names: list[str]) -> list[str]:
        """Return the kernels worth trying: the fastest at a length near by, or all."""
        for (phase, batch, seq), order in self._tried.items():
            near = max(seq, workload.seq) <= _NEAR * min(seq, workload.seq)
            if (phase, batch) == (workload.phase, workload.batch) and near:
                return [name for name in order[:_BEST] if name in names] or names
        return names


def _key(workload: Workload) -> tuple[str, int, int]:
    return (workload.phase, workload.batch, workload.seq)


def store_call(workload: Workload) -> PartCall:
    """Return the store of new uncompressed K and V; it counts as attention."""
    shape, source = workload.shape, workload.generator(11)
    new = [
        workload.random(
            source, workload.batch, shape.num_kv_heads, workload.queries, shape.head_dim
        )
        for _ in range(2)
    ]
    room = [torch.empty_like(states) for states in new]
    at = torch.arange(workload.queries, device=workload.device)

    def run() -> Tensor:
        for kept, states in zip(room, new, strict=True):
            kept.index_copy_(2, at, states)
        return room[0]

    return PartCall(
        "attention", [run], ("store full", workload.phase, workload.batch, workload.queries)
    )


def full_attention(workload: Workload, full: FullAttention, window: int | None) -> AttentionCalls:
    """Return uncompressed attention and the store that feeds it."""
    shape = workload.shape
    call, labels = full.call(workload, window)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return AttentionCalls(
        [store_call(workload), call],
        (queries, keys, keys),
        queries,
        "both",
        {**labels, "store": "storing K and V in the cache counts as attention"},
    )


# --- Low ranks after RoPE: FDC, ``kq``, uniform widths, latents without RoPE.


def ragged_attention(method: Method, workload: Workload, window: int | None) -> AttentionCalls:
    """Return projection, attention and what cuts its work."""
    shape, widths = workload.shape, method.kept
    group = shape.num_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, group, workload.batch, workload.seq)
    labels, turned = {}, "both"
    if method.folded:
        # Folded into W_Q and W_K: the projections make latents (ZACK §4.3, Palu eq. 7).
        stored = store_latents(workload, layout)
        turned = "none"
        projections = (layout.query_offsets[-1], sum(widths.keys), sum(widths.values))
    else:
        stored = compress_call(workload, layout)
        queries = shape.num_heads * shape.head_dim
        projections = (queries, shape.num_kv_heads * shape.head_dim, sum(widths.values))
    if workload.phase == "decode":
        calls = _decode(workload, layout, method.balanced)
        if workload.device.type == "cuda":
            labels["by_difference"] = "attention"
            labels["merge"] = (
                "timed alone on partial results of the same sizes; attention is its launch "
                "without it"
            )
        else:
            labels["merge"] = "counted in attention"
    else:
        calls = ragged_prefill(workload, layout, window, method.balanced)
    return AttentionCalls([stored, *calls], projections, layout.output_offsets[-1], turned, labels)


def random_bases(workload: Workload, widths: Sequence[int], salt: int) -> BasisSet:
    """Return orthonormal bases ``[d, width]`` of every KV head."""
    source = torch.Generator().manual_seed(1000 * workload.seed + salt)
    depth = workload.shape.head_dim
    bases = [
        torch.linalg.qr(torch.randn(depth, depth, generator=source)).Q[:, :width]
        for width in widths
    ]
    return basis_set(bases, dtype=workload.dtype, device=workload.device)


def compress_call(workload: Workload, layout: RaggedLayout) -> PartCall:
    """Return the projection of Q and K and the store of K and V (FDC §5.1)."""
    shape, source = workload.shape, workload.generator(31)
    # Where in the cache new tokens lie changes nothing: their own buffer is enough.
    own = RaggedLayout(
        layout.key_widths, layout.value_widths, layout.group, workload.batch, workload.queries
    )
    where = (workload.batch, workload.queries)
    query = workload.random(source, *where, shape.num_heads, shape.head_dim)
    keys = workload.random(source, *where, shape.num_kv_heads, shape.head_dim)
    values = workload.random(source, *where, sum(layout.value_widths))
    bases = random_bases(workload, layout.key_widths, 32)
    buffer = torch.empty(own.elements, dtype=workload.dtype, device=workload.device)
    start = torch.zeros(workload.batch, dtype=torch.int32, device=workload.device)

    def run() -> Tensor:
        return project_step(query, keys, values, bases, own, buffer, start)

    whole = {*layout.key_widths, *layout.value_widths} == {shape.head_dim}
    return PartCall(
        "attention" if whole else "compress",
        [run],
        ("compress", layout.key_widths, layout.value_widths, *where),
    )


def store_latents(workload: Workload, layout: RaggedLayout) -> PartCall:
    """Return the store of latents that the projections have made."""
    source = workload.generator(33)
    own = RaggedLayout(
        layout.key_widths, layout.value_widths, layout.group, workload.batch, workload.queries
    )
    where = (workload.batch, workload.queries)
    keys = workload.random(source, *where, sum(layout.key_widths))
    values = workload.random(source, *where, sum(layout.value_widths))
    buffer = torch.empty(own.elements, dtype=workload.dtype, device=workload.device)
    start = torch.zeros(workload.batch, dtype=torch.int32, device=workload.device)
    planes = [plane for head in range(own.heads) for plane in own.planes(buffer, head)[0]]
    columns = torch.split(keys, [plane.shape[-1] for plane in planes], dim=-1)

    def run() -> Tensor:
        for plane, latents in zip(planes, columns, strict=True):
            plane.copy_(latents)
        store_values(values, own, buffer, start)
        return buffer

    key = ("store", layout.key_widths, layout.value_widths, *where)
    return PartCall("compress", [run], key)


def _decode(workload: Workload, layout: RaggedLayout, balanced: bool) -> list[PartCall]:
    shape, source = workload.shape, workload.generator(1)
    copies = workload.copies(layout.elements * workload.dtype.itemsize)
    buffers = [workload.random(source, layout.elements) for _ in range(copies)]
    query = workload.random(source, workload.batch, layout.query_offsets[-1])
    sinks = sinks_of(workload, layout.heads, layout.group)
    step = decode_step(layout, workload.device)
    lengths = torch.full((workload.batch,), workload.seq, dtype=torch.int32, device=workload.device)
    cut = step.cut(lengths) if balanced else _equal_split(step, workload)

    def run(buffer: Tensor) -> Tensor:
        return step.run(query, buffer, cut, shape.scaling, softcap=shape.softcap, sinks=sinks)

    def schedule() -> Tensor:
        return step.cut(lengths).lengths

    key = (layout, balanced)
    contained = None
    if workload.device.type == "cuda":
        contained = ("merge", [_merge(step, workload, cut, sinks)])
    calls = [
        PartCall(
            "attention",
            [_bound(run, buffer) for buffer in buffers],
            ("ragged", *key),
            contained=contained,
        ),
    ]
    if balanced:
        # Layers of the same widths share it, as in the runtime.
        calls.insert(0, PartCall("schedule", [schedule], ("schedule", *key), per_pass=True))
    return calls


def _bound(run: Callable[[Tensor], Tensor], buffer: Tensor) -> Callable[[], Tensor]:
    return lambda: run(buffer)


def _equal_split(step: DecodeStep, workload: Workload) -> Schedule:
    """Cut every head into as many pieces whatever its width: what a kernel for equal heads does."""
    layout, tile = step.layout, step.tuning.tile
    tasks = workload.batch * layout.heads
    lengths = [workload.seq] * workload.batch
    pieces = max(1, pieces_for(layout, lengths, step.tuning, step.multiprocessors) // tasks)
    items: list[Item] = []
    parts: list[Part] = []
    pairs = configs(layout)
    for row in range(workload.batch):
        for head, pair in enumerate(zip(layout.key_widths, layout.value_widths, strict=True)):
            height = tile_height(*pair, tile)
            tiles = max(1, -(-workload.seq // height))
            count = min(tiles, pieces)
            parts.append(Part(len(items), count))
            bounds = [min(workload.seq, tiles * n // count * height) for n in range(count + 1)]
            kind = pairs.index(pair)
            items += [Item(row, head, low, high, kind) for low, high in pairwise(bounds)]

    def whole(numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=workload.device)

    scheduled = [whole(items), whole(parts)]
    return Schedule(whole(lengths), None, scheduled)


def _merge(
    step: DecodeStep, workload: Workload, cut: Schedule, sinks: Tensor | None
) -> Callable[[], Tensor]:
    """Return the launch that joins partial results, alone, on partial results of the same sizes."""
    layout = step.layout
    items, parts = cut.scheduled
    widest = max(layout.value_widths)
    partial = torch.randn(len(items), layout.group, widest, device=workload.device)
    logs = torch.randn(len(items), layout.group, device=workload.device)
    output = torch.empty(
        workload.batch, layout.output_offsets[-1], dtype=workload.dtype, device=workload.device
    )

    def run() -> Tensor:
        launch_combine(partial, logs, parts, output, step.heads, layout.heads, sinks=sinks)
        return output

    return run


def ragged_prefill(
    workload: Workload, layout: RaggedLayout, window: int | None, balanced: bool = True
) -> list[PartCall]:
    """Return a prompt's attention over ragged widths, and what cuts its work."""
    shape, source = workload.shape, workload.generator(2)
    buffer = workload.random(source, layout.elements)
    query = workload.random(source, workload.batch, workload.queries, layout.query_offsets[-1])
    sinks = sinks_of(workload, layout.heads, layout.group)
    lengths = torch.full((workload.batch,), workload.seq, dtype=torch.int32, device=workload.device)
    schedule = "equal" if balanced else "plain"
    # A library's calls would ignore how the work is cut.
    path = "auto" if balanced else "triton"

    def run() -> Tensor:
        return prefill(
            query,
            buffer,
            layout,
            lengths,
            shape.scaling,
            softcap=shape.softcap,
            sinks=sinks,
            window=window or 0,
            schedule=schedule,
            path=path,
            host_lengths=[workload.seq] * workload.batch,
        )

    key = (layout, balanced, window)
    calls = [PartCall("attention", [run], ("ragged prefill", *key))]
    if workload.device.type == "cuda" and not _all_by_library(
        workload, layout, schedule, path, window
    ):

        def cut() -> Tensor:
            # Not the remembered one: a prompt of a new length has to be cut.
            made = prefill_step.__wrapped__(
                layout,
                workload.queries,
                workload.device,
                schedule=schedule,
                window=window or 0,
                element_size=workload.dtype.itemsize,
            )
            return torch.tensor(len(made.blocks.costs))

        calls.insert(0, PartCall("schedule", [cut], ("cut", *key), per_pass=True, on_host=True))
    return calls


def _all_by_library(
    workload: Workload, layout: RaggedLayout, schedule: str, path: str, window: int | None
) -> bool:
    """Whether torch's own kernels were measured to be the faster for every head: nothing is cut."""
    shape = workload.shape
    if path != "auto" or window is not None or shape.sinks or shape.softcap:
        return False
    choice = measured_path(layout, workload.seq, workload.dtype, workload.device, schedule=schedule)
    return all(path == "library" for path in choice.paths)
