"""What a shape serves: percentiles over a trace's requests, and what fits into memory."""

from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any

import torch

from kvprof.analysis.jct import ladder, percentiles
from kvprof.benchmark.jct.composer import ComposedRequest, Composer, RequestLengths
from kvprof.benchmark.jct.layer_bench import LayerBench
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.limits import shortage
from kvprof.benchmark.machine import free_bytes
from kvprof.benchmark.methods import Method
from kvprof.benchmark.shapes import layout_of
from kvprof.methods import accounting
from kvprof.methods.accounting import bytes_at
from kvprof.methods.fit import largest_batch, largest_context
from kvprof.records.cases import Account
from kvprof.records.parts import OVERHEADS
from kvprof.serving.load.traces import Trace

__all__ = [
    "WARNED_ERROR",
    "capacity",
    "summary",
    "trace_warnings",
    "weight_bytes",
]

# --- TTFT, TBT, latency and overheads over a trace's requests (FDC §6.5, §6.8).


#: Of decode: an integration error that is worth a warning.
WARNED_ERROR = 0.02


def summary(trace: Trace, seed: int, found: dict[str, list[ComposedRequest]]) -> dict[str, Any]:
    """Return ``data.requests``.

    Parameters
    ----------
    trace : Trace
    seed : int
        Of the lengths.
    found : dict
        The composed requests of each method; all of the same lengths.

    Returns
    -------
    dict
        The trace, the distribution, and per method the mean and percentiles over requests of TTFT,
        of each request's mean TBT, of JCT, of JCT per output token (normalised latency), and of the
        share of JCT of each part that compression brings.
    """
    figures: dict[str, list[dict[str, Any]]] = {
        "ttft": [],
        "tbt": [],
        "jct": [],
        "normalised_latency": [],
        "overheads": [],
    }
    for method, requests in found.items():
        decoded = [one for one in requests if one.request.output_len > 1]
        for name, values in (
            ("ttft", [one.prefill_seconds for one in requests]),
            ("tbt", [one.decode_seconds / (one.request.output_len - 1) for one in decoded]),
            ("jct", [one.jct for one in requests]),
            ("normalised_latency", [one.jct / one.request.output_len for one in requests]),
        ):
            if values:
                figures[name].append({"method": method, **_seconds(values)})
        figures["overheads"] += [
            {
                "method": method,
                "part": part,
                **{f"{key}_share": value for key, value in percentiles(shares).items()},
            }
            for part, shares in _shares(requests).items()
        ]
    first = next(iter(found.values()))
    return {
        "trace": trace.name,
        "source": trace.source,
        "lengths": {side: trace.described()[side] for side in ("input", "output")},
        "distribution": "truncated exponential with the published mean, stratified; inputs and "
        "outputs independent",
        "seed": seed,
        "count": len(first),
        "mean_input_len": sum(one.request.input_len for one in first) / len(first),
        "mean_output_len": sum(one.request.output_len for one in first) / len(first),
        **figures,
    }


def trace_warnings(method: str, requests: Sequence[ComposedRequest]) -> list[str]:
    """Return what a reader of a method's percentiles must know of its requests.

    Parameters
    ----------
    method : str
    requests : sequence of ComposedRequest
    """
    found = []
    if predicted := [one for one in requests if one.predicted_from is not None]:
        found.append(
            f"{method}: prefill of {len(predicted)} of {len(requests)} requests is predicted from "
            f"prompts of up to {predicted[0].predicted_from:,} tokens"
        )
    off = [one.error / one.decode_seconds for one in requests if one.error and one.decode_seconds]
    if off and max(off) > WARNED_ERROR:
        found.append(
            f"{method}: decode may be off by up to {max(off):.1%} in one of {len(requests)} "
            "requests: times between the contexts that were measured do not lie on a line"
        )
    if astray := sum(not _account(one).adds_up() for one in requests):
        found.append(
            f"{method}: the parts of {astray} of {len(requests)} requests do not add up to their "
            "time: no shares are told of these"
        )
    return found


def _account(one: ComposedRequest) -> Account:
    account = Account(walls={"prefill": one.prefill_seconds, "decode": one.decode_seconds})
    for phase, parts in (("prefill", one.prefill), ("decode", one.decode)):
        for part, seconds in parts.items():
            account.add_part(phase, part, seconds)
    return account


def _seconds(values: Sequence[float]) -> dict[str, float]:
    return {f"{key}_seconds": value for key, value in percentiles(values).items()}


def _shares(requests: Sequence[ComposedRequest]) -> dict[str, list[float]]:
    adding_up = [one for one in requests if _account(one).adds_up()]
    return {
        part: [
            (one.prefill.get(part, 0.0) + one.decode.get(part, 0.0)) / one.jct for one in adding_up
        ]
        for part in OVERHEADS
        if any(part in one.prefill or part in one.decode for one in adding_up)
    }


# --- Capacity, and throughput against batch at equal memory (TALE Fig. 5, 6).


_MOST_BATCH = {"cuda": 512, "cpu": 16}
#: Of what is free; a pass's own states need the rest.
_SHARE = 0.95
_TRIED_ON_A_CPU = 2**30


def weight_bytes(method: Method, model: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of one GPU's weights, with what a method folds into them or runs beside."""
    shape = model.attention
    full = shape.num_kv_heads * shape.head_dim
    own = model.weight_values(full, full, shape.num_heads * shape.head_dim) * dtype.itemsize
    plan = method.plan
    return own + accounting.weight_bytes(plan, layout_of(shape), itemsize=dtype.itemsize).total


def capacity(bench: LayerBench, methods: list[Method], context: int, batch: int) -> dict[str, Any]:
    """Return ``data.capacity``.

    Parameters
    ----------
    bench : LayerBench
    methods : list of Method
    context : int
        Tokens per sequence at which throughput is measured.
    batch : int
        At which the largest context is sought.

    Returns
    -------
    dict
        Per method: bytes of weights and of a token, the largest context that fits beside the
        weights (None where the cache stops growing before it is full; ``tried`` says whether as
        many bytes were really allocated), the largest batch at `context`; and throughput of
        decoding at batches up to it.
    """
    bench.release()  # a model's weights are counted, and these are in the way
    memory = free_bytes(bench.machine.device)
    itemsize = bench.dtype.itemsize
    rows: list[dict[str, Any]] = []
    throughput: list[dict[str, Any]] = []
    for method in methods:
        plan = method.plan
        weights = weight_bytes(method, bench.model, bench.dtype)
        room = int(_SHARE * memory) - weights
        most_context = largest_context(plan, room // batch, itemsize=itemsize)
        most_batch = largest_batch(plan, room, context, itemsize=itemsize)
        tried = None
        if most_context:
            stored = bytes_at(plan, most_context, itemsize=itemsize, batch=batch).total
            tried = _tried(bench, weights + stored)
        rows.append(
            {
                "method": method.name,
                "weights_bytes": weights,
                "token_bytes": bytes_at(plan, 2 * context, itemsize=itemsize).total / (2 * context),
                "largest_context": most_context,
                "tried": tried,
                "largest_batch": most_batch,
            }
        )
        throughput += _throughput(bench, method, context, most_batch)
    return {
        "memory_bytes": memory,
        "batch": batch,
        "context": context,
        "methods": rows,
        "throughput": throughput,
    }


def _throughput(bench: LayerBench, method: Method, context: int, most: int) -> list[dict[str, Any]]:
    """Measure decoding steps at growing batches, all layers in the same memory."""
    kind = bench.machine.device.type
    if most < 1:
        return []
    found = []
    capped = min(most, _MOST_BATCH[kind])
    for batch in ladder({1, capped}, ratio=4):
        workload = bench.workload("decode", batch, context)
        if shortage(workload, free_bytes(workload.device)) is not None:
            bench.warn(
                f"{method.name}: batch {batch} at {context:,} tokens is not timed: "
                "one layer and its reference do not fit beside each other"
            )
            break
        one = RequestLengths(max(1, context - 1), 2)  # one step, at this context
        composer = Composer(bench, method, batch, [one], inf, powered=False)
        _, steps, _ = composer.decode(one)
        seconds = steps[0][1]
        found.append(
            {
                "method": method.name,
                "batch": batch,
                "step_seconds": seconds,
                "tokens_per_s": batch / seconds,
                "fills_memory": batch == most,
            }
        )
    return found


def _tried(bench: LayerBench, nbytes: int) -> bool | None:
    """Allocate as many bytes at once; None where that would say nothing.

    A CPU hands out memory that it does not have: there only what can be filled quickly is tried.
    """
    device = bench.machine.device
    if device.type == "cpu" and nbytes > _TRIED_ON_A_CPU:
        return None
    block = None
    try:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            block.fill_(1)
    except (torch.OutOfMemoryError, RuntimeError):
        return False
    finally:
        del block
        if device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
    return True
