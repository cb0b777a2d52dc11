"""FlashInfer at full width, where it is installed: its decode through its own paged wrapper."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvprof.benchmark.baselines import FullWidth, full_samples
from kvprof.benchmark.case import Case, Lack, Place, Sample

__all__ = ["flashinfer_case"]

_PAGE = 16
_WORKSPACE = 256 * 2**20


def flashinfer_case(inputs: FullWidth) -> Case:
    """Return FlashInfer's attention.

    Decoding runs through the wrapper that is made for it (not through the prefill kernel, which is
    several times slower at one query), on pages of 16 tokens, planned beforehand.

    Raises
    ------
    Lack
        When FlashInfer is not installed, or refuses.
    """
    try:
        library = import_module("flashinfer")
    except ImportError as problem:
        raise Lack("FlashInfer is not installed") from problem
    place = inputs.place
    try:
        if place.phase == "prefill":
            return _prefill(library, inputs)
        return _decode(library, place, len(inputs.copies))
    except torch.OutOfMemoryError as problem:
        raise Lack("it needs more memory than is free") from problem
    except (RuntimeError, ValueError, TypeError, AttributeError) as problem:
        raise Lack(f"FlashInfer refuses: {' '.join(str(problem).split())[:160]}") from problem


def _decode(library: Any, place: Place, copies: int) -> Case:
    shape, source = place.shape, place.generator(2)
    pages = -(-place.seq // _PAGE)
    size = (place.batch * pages, 2, shape.num_kv_heads, _PAGE, shape.head_dim)
    caches = [place.random(source, *size) for _ in range(copies)]
    query = place.random(source, place.batch, shape.num_heads, shape.head_dim)

    def whole(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=place.device)

    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE, dtype=torch.uint8, device=place.device), "HND",
        use_tensor_cores=shape.group > 1,
    )  # fmt: skip
    wrapper.plan(
        whole([row * pages for row in range(place.batch + 1)]),
        torch.arange(place.batch * pages, dtype=torch.int32, device=place.device),
        whole([(place.seq - 1) % _PAGE + 1] * place.batch),
        shape.num_heads, shape.num_kv_heads, shape.head_dim, _PAGE,
        q_data_type=place.dtype, kv_data_type=place.dtype, sm_scale=shape.scaling,
        logits_soft_cap=shape.softcap or None,
    )  # fmt: skip

    def run(cache: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found: Tensor = wrapper.run(query, cache)
            return found

        return call

    def samples(output: Tensor) -> Iterator[Sample]:
        # [batch · pages, heads, page, d] back to [batch, heads, tokens, d].
        cache = caches[0].view(place.batch, pages, *size[1:])
        keys, values = (
            cache[:, :, side].transpose(1, 2).flatten(2, 3)[:, :, : place.seq] for side in (0, 1)
        )
        shared = FullWidth(place, query.unsqueeze(2), [(keys, values)])
        return full_samples(shared, output)

    runs = [run(cache) for cache in caches]
    runs[0]()
    return Case(
        "flashinfer", place, runs,
        bytes_moved=2 * query.nbytes + place.full_bytes, cache_bytes=place.full_bytes,
        flops=place.attention_flops(*(shape.num_heads * shape.head_dim,) * 2),
        samples=samples, scaling=shape.scaling, softcap=shape.softcap,
        note="FlashInfer knows no sinks here: it is timed without, which favours it"
        if shape.sinks else None,
    )  # fmt: skip


def _prefill(library: Any, inputs: FullWidth) -> Case:
    place = inputs.place
    shape = place.shape
    if place.batch > 1:
        raise Lack("its prefill is measured at batch 1 only")
    query = inputs.query[0].transpose(0, 1).contiguous()  # [tokens, heads, d]

    def run(keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found: Tensor = library.single_prefill_with_kv_cache(
                query, keys[0], values[0], causal=True, kv_layout="HND", sm_scale=shape.scaling,
                logits_soft_cap=shape.softcap or None,
            )  # fmt: skip
            return found

        return call

    runs = [run(keys, values) for keys, values in inputs.copies]
    runs[0]()
    return Case(
        "flashinfer", place, runs,
        bytes_moved=2 * query.nbytes + place.full_bytes, cache_bytes=place.full_bytes,
        flops=place.attention_flops(*(shape.num_heads * shape.head_dim,) * 2),
        samples=lambda output: full_samples(inputs, output.transpose(0, 1)),
        scaling=shape.scaling, softcap=shape.softcap,
        note="FlashInfer knows no sinks here: it is timed without, which favours it"
        if shape.sinks else None,
    )  # fmt: skip
