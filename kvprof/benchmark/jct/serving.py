"""What a shape serves: percentiles over a trace's requests, and the bytes of its weights."""

from collections.abc import Sequence
from typing import Any

import torch

from kvprof.analysis.jct import percentiles
from kvprof.benchmark.jct.composer import ComposedRequest
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.methods import Method
from kvprof.benchmark.shapes import layout_of
from kvprof.methods import accounting
from kvprof.records.cases import Account
from kvprof.records.parts import OVERHEADS
from kvprof.serving.load.traces import Trace

__all__ = [
    "WARNED_ERROR",
    "summary",
    "trace_warnings",
    "weight_bytes",
]

# --- TTFT, TPOT, latency and overheads over a trace's requests (FDC §6.5, §6.8).


#: Of decode: an integration error that is worth a warning.
WARNED_ERROR = 0.02


def summary(trace: Trace, seed: int, found: dict[str, list[ComposedRequest]]) -> dict[str, Any]:
    """Return ``data.requests``."""
    figures: dict[str, list[dict[str, Any]]] = {
        "ttft": [],
        "tpot": [],
        "jct": [],
        "normalised_latency": [],
        "overheads": [],
    }
    for method, requests in found.items():
        decoded = [one for one in requests if one.request.output_len > 1]
        for name, values in (
            ("ttft", [one.prefill_seconds for one in requests]),
            ("tpot", [one.decode_seconds / (one.request.output_len - 1) for one in decoded]),
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
    """Return what a reader of a method's percentiles must know of its requests."""
    found = []
    if predicted := [one for one in requests if one.predicted_from is not None]:
        found.append(
            f"{method}: prefill of {len(predicted)} of {len(requests)} requests is extrapolated "
            f"from prompts of up to {predicted[0].predicted_from:,} tokens"
        )
    off = [one.error / one.decode_seconds for one in requests if one.error and one.decode_seconds]
    if off and max(off) > WARNED_ERROR:
        found.append(
            f"{method}: decode may be off by up to {max(off):.1%} in one of {len(requests)} "
            "requests: times between measured contexts are not linear"
        )
    if astray := sum(not _account(one).adds_up() for one in requests):
        found.append(
            f"{method}: the parts of {astray} of {len(requests)} requests do not sum to their "
            "time; their shares are omitted"
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


def weight_bytes(method: Method, model: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of one GPU's weights, with what a method folds into them or runs beside."""
    shape = model.attention
    full = shape.num_kv_heads * shape.head_dim
    own = model.weight_values(full, full, shape.num_heads * shape.head_dim) * dtype.itemsize
    plan = method.plan
    return own + accounting.weight_bytes(plan, layout_of(shape), itemsize=dtype.itemsize).total
