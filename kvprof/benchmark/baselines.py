"""Every uncompressed attention kernel on this machine, as baselines of compressed ones.

torch's SDPA in all its back ends and forms of grouped queries, FlashInfer where installed, and
kvprof's own kernels. A kernel that cannot run is listed with its reason.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvprof.benchmark.case import Case, Lack, Sample, Workload, sampled_heads, sampled_positions
from kvprof.benchmark.cases import ragged_case
from kvprof.benchmark.plans import full_widths
from kvprof.sizes import format_bytes

__all__ = ["UncompressedInputs", "baseline_builders", "flashinfer_case", "uncompressed_inputs"]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
# On a CPU torch has these two.
_CPU_BACKENDS = ("flash", "math")
#: What a form may allocate beside K and V, as a share of what is free.
_EXTRA_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class UncompressedInputs:
    """Uncompressed inputs that all of torch's forms share."""

    workload: Workload
    query: Tensor  # `[batch, heads, queries, d]`
    #: K and V, `[batch, KV heads, tokens, d]`, as often as the cache makes it necessary.
    copies: list[tuple[Tensor, Tensor]]


def uncompressed_inputs(workload: Workload) -> UncompressedInputs:
    """Make random uncompressed queries, keys and values."""
    shape, source = workload.shape, workload.generator()
    size = (workload.batch, shape.num_kv_heads, workload.seq, shape.head_dim)
    return UncompressedInputs(
        workload,
        workload.random(source, workload.batch, shape.num_heads, workload.queries, shape.head_dim),
        [
            (workload.random(source, *size), workload.random(source, *size))
            for _ in range(workload.copies(workload.full_bytes))
        ],
    )


def baseline_builders(
    workload: Workload, free: int
) -> dict[str, Callable[[UncompressedInputs], Case]]:
    """Return what can be tried here, by name; a builder raises `Lack` where it cannot run."""
    gpu = workload.device.type == "cuda"
    # First: what is much slower than one that was timed before it is given up after few samples.
    found: dict[str, Callable[[UncompressedInputs], Case]] = {"kvprof": _own_uncompressed}
    grouped = workload.shape.group > 1
    has_rows = grouped and workload.phase == "decode"
    for name in _BACKENDS if gpu else _CPU_BACKENDS:
        # Left grouped, math repeats K and V in every call; as rows it is the same without that.
        if name != "math" or not has_rows:
            found[f"sdpa-{name}"] = _form(name, "grouped", free)
        if grouped:
            if has_rows:
                found[f"sdpa-{name}-rows"] = _form(name, "rows", free)
            if name != "math":
                found[f"sdpa-{name}-expanded"] = _form(name, "expanded", free)
    if gpu:
        found["flashinfer"] = flashinfer_case
    return found


def _own_uncompressed(inputs: UncompressedInputs) -> Case:
    """Return kvprof's own uncompressed kernel, as one of the baselines."""
    return ragged_case("kvprof", inputs.workload, full_widths(inputs.workload.shape))


def _form(backend: str, form: str, free: int) -> Callable[[UncompressedInputs], Case]:
    """Return a torch back end's case: ``grouped`` (enable_gqa), ``rows`` or ``expanded``."""

    def build(inputs: UncompressedInputs) -> Case:
        workload = inputs.workload
        shape = workload.shape
        copies = inputs.copies
        _check_memory(workload, backend, form, free)
        query = inputs.query
        if form == "rows":
            query = query.view(workload.batch, shape.num_kv_heads, shape.group, shape.head_dim)
        elif form == "expanded":
            copies = [
                (k.repeat_interleave(shape.group, 1), v.repeat_interleave(shape.group, 1))
                for k, v in copies
            ]
        grouped = form == "grouped" and shape.group > 1
        causal = workload.phase == "prefill"

        def run(keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
            def call() -> Tensor:
                with sdpa_kernel(_BACKENDS[backend]):
                    return sdpa(
                        query,
                        keys,
                        values,
                        is_causal=causal,
                        scale=shape.scaling,
                        enable_gqa=grouped,
                    )

            return call

        runs = [run(keys, values) for keys, values in copies]
        _try(runs[0])
        cache = sum(tensor.nbytes for tensor in copies[0])
        return Case(
            f"sdpa-{backend}" + ("" if form == "grouped" else f"-{form}"),
            workload,
            runs,
            bytes_moved=2 * query.nbytes + cache,
            buffer_bytes=cache,
            flops=workload.attention_flops(*(shape.num_heads * shape.head_dim,) * 2),
            samples=lambda output: full_samples(inputs, output),
            scaling=shape.scaling,
            note=_without(workload),
        )

    return build


def _check_memory(workload: Workload, backend: str, form: str, free: int) -> None:
    shape = workload.shape
    extra = 0
    if form == "expanded" or (backend == "math" and form == "grouped"):
        extra = workload.full_bytes * shape.group
    if backend == "math":  # the scores, in float32
        extra += 8 * workload.batch * shape.num_heads * workload.queries * workload.seq
    if extra > _EXTRA_SHARE * free:
        raise Lack(
            f"it needs {format_bytes(extra)} in addition to K and V, too much of the "
            f"{format_bytes(free)} free"
        )


def _without(workload: Workload) -> str | None:
    if workload.shape.sinks or workload.shape.softcap:
        lacking = "sinks" if workload.shape.sinks else "soft-cap"
        return f"torch's SDPA does not support {lacking}: timed without, which favours it"
    return None


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Collect what torch says about a back end that refuses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said: list[str] = []
        yield said
    said += [" ".join(str(entry.message).split()) for entry in caught]


def _try(run: Callable[[], Tensor]) -> None:
    """Run once; a back end that refuses says why."""
    problem: RuntimeError | None = None
    with _reasons() as said:
        try:
            run()
        except torch.OutOfMemoryError as error:
            raise Lack("it needs more memory than is free") from error
        except RuntimeError as error:
            problem = error
    if problem is not None:
        known = [line for line in said if "kernel not used because" not in line]
        words = (known or [" ".join(str(problem).split())])[0]
        raise Lack(words.split(" (Triggered internally")[0][:200])


def full_samples(inputs: UncompressedInputs, output: Tensor) -> Iterator[Sample]:
    """Return what is checked of an uncompressed output, whose values lie in its queries' order."""
    workload = inputs.workload
    shape = workload.shape
    keys, values = inputs.copies[0]
    found = output.reshape(
        workload.batch, shape.num_kv_heads, shape.group, workload.queries, shape.head_dim
    )
    query = inputs.query.view(found.shape)
    positions = sampled_positions(workload).to(workload.device)
    for row, head in sampled_heads(workload.batch, shape.num_kv_heads):
        yield Sample(
            query[row, head][:, positions].transpose(0, 1),
            keys[row, head],
            values[row, head],
            found[row, head][:, positions].transpose(0, 1),
            positions + 1 if workload.phase == "prefill" else None,
        )


# --- FlashInfer, uncompressed, where it is installed: its decode through its own paged wrapper.


_PAGE = 16
_WORKSPACE = 256 * 2**20


def flashinfer_case(inputs: UncompressedInputs) -> Case:
    """Return FlashInfer's attention; decode on pages of 16 tokens, planned beforehand."""
    try:
        library = import_module("flashinfer")
    except ImportError as problem:
        raise Lack("FlashInfer is not installed") from problem
    workload = inputs.workload
    try:
        if workload.phase == "prefill":
            return _prefill(library, inputs)
        return _decode(library, workload, len(inputs.copies))
    except torch.OutOfMemoryError as problem:
        raise Lack("it needs more memory than is free") from problem
    except (RuntimeError, ValueError, TypeError, AttributeError) as problem:
        raise Lack(f"FlashInfer refuses: {' '.join(str(problem).split())[:160]}") from problem


def _decode(library: Any, workload: Workload, copies: int) -> Case:
    shape, source = workload.shape, workload.generator(2)
    pages = -(-workload.seq // _PAGE)
    size = (workload.batch * pages, 2, shape.num_kv_heads, _PAGE, shape.head_dim)
    caches = [workload.random(source, *size) for _ in range(copies)]
    query = workload.random(source, workload.batch, shape.num_heads, shape.head_dim)

    def whole(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=workload.device)

    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE, dtype=torch.uint8, device=workload.device),
        "HND",
        use_tensor_cores=shape.group > 1,
    )
    wrapper.plan(
        whole([row * pages for row in range(workload.batch + 1)]),
        torch.arange(workload.batch * pages, dtype=torch.int32, device=workload.device),
        whole([(workload.seq - 1) % _PAGE + 1] * workload.batch),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        _PAGE,
        q_data_type=workload.dtype,
        kv_data_type=workload.dtype,
        sm_scale=shape.scaling,
        logits_soft_cap=shape.softcap or None,
    )

    def run(cache: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found: Tensor = wrapper.run(query, cache)
            return found

        return call

    def samples(output: Tensor) -> Iterator[Sample]:
        # [batch · pages, heads, page, d] back to [batch, heads, tokens, d].
        cache = caches[0].view(workload.batch, pages, *size[1:])
        keys, values = (
            cache[:, :, side].transpose(1, 2).flatten(2, 3)[:, :, : workload.seq] for side in (0, 1)
        )
        shared = UncompressedInputs(workload, query.unsqueeze(2), [(keys, values)])
        return full_samples(shared, output)

    runs = [run(cache) for cache in caches]
    return _flashinfer(workload, query, runs, caches[0].nbytes, samples)


def _prefill(library: Any, inputs: UncompressedInputs) -> Case:
    workload = inputs.workload
    shape = workload.shape
    if workload.batch > 1:
        raise Lack("its prefill is measured at batch 1 only")
    query = inputs.query[0].transpose(0, 1).contiguous()  # [tokens, heads, d]

    def run(keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found: Tensor = library.single_prefill_with_kv_cache(
                query,
                keys[0],
                values[0],
                causal=True,
                kv_layout="HND",
                sm_scale=shape.scaling,
                logits_soft_cap=shape.softcap or None,
            )
            return found

        return call

    return _flashinfer(
        workload,
        query,
        [run(keys, values) for keys, values in inputs.copies],
        sum(tensor.nbytes for tensor in inputs.copies[0]),
        lambda output: full_samples(inputs, output.transpose(0, 1)),
    )


def _flashinfer(
    workload: Workload,
    query: Tensor,
    runs: list[Callable[[], Tensor]],
    buffer_bytes: int,
    samples: Callable[[Tensor], Iterator[Sample]],
) -> Case:
    """Return the case of calls of FlashInfer, of which the first is tried."""
    shape = workload.shape
    runs[0]()
    return Case(
        "flashinfer",
        workload,
        runs,
        bytes_moved=2 * query.nbytes + workload.full_bytes,
        buffer_bytes=buffer_bytes,
        flops=workload.attention_flops(*(shape.num_heads * shape.head_dim,) * 2),
        samples=samples,
        scaling=shape.scaling,
        softcap=shape.softcap,
        note="FlashInfer does not support sinks here: timed without, which favours it"
        if shape.sinks
        else None,
    )
