"""A bench result with figures like those of a GPU, every one of them known."""

import copy
from typing import Any

from kvprof.records.result import build_result
from kvprof.views.bench import report
from kvprof.views.page import render_text
from tests.records.sample import ENVIRONMENT

SWEEP: dict[str, Any] = {"seqs": (102_400, 4096, 32_768)}
LIMIT = 4.54  # TB/s
ARITHMETIC = 7.5e14  # flop/s
KEYS = [48, 32, 80, 96, 64, 48, 112, 80]
VALUES = [64, 48, 32, 64, 96, 80, 32, 48]
FULL_BYTES = 8 * 2 * 128 * 2  # of a token, one layer
# Method: bytes kept of the uncompressed, bits' worth of FLOP saved, share of the bandwidth reached.
METHODS = {
    "full": (1.0, 1.0, 0.981),
    "fp8": (0.5, 1.0, 0.962),
    "fdc": (0.5, 0.5, 0.941),
    "kq": (0.5, 0.5, 0.953),
    "palu": (0.5, 0.5, 0.312),
    "tale": (0.158, 0.775, 0.702),
    "fdc-4bit": (0.141, 0.5, 0.688),
}
CUT = ("fdc", "kq")  # whose work is told how it was cut
BASELINES = {"cudnn": 0.986, "flash": 0.944, "kvprof": 0.981}


def row(method: str, phase: str, batch: int, seq: int) -> Any:
    kept, flop, share = METHODS[method]
    share *= min(1.0, 0.8 + 0.05 * batch) * seq / (seq + 2000)
    cache = FULL_BYTES * seq * batch * kept
    seconds = cache / (LIMIT * share * 1e12)
    full = FULL_BYTES * seq * batch / (LIMIT * share_of_best(batch, seq) * 1e12)
    flops = 4 * 32 * 128 * seq * batch * flop
    if phase == "prefill":
        flops *= seq / 2
        seconds = flops / (6.0e14 * (0.9 if flop < 1 else 1.0))
        full = 4 * 32 * 128 * seq * batch * seq / 2 / 6.1e14
    widths = {"keys": KEYS, "values": VALUES}
    if method in ("fp8", "tale"):
        widths = {"keys": [128] * 8, "values": [128 if method != "tale" else 64] * 8}
    if method == "palu":
        widths = {"keys": [256] * 2, "values": [256] * 2}
    return {
        "method": method,
        "phase": phase,
        "batch": batch,
        "seq": seq,
        "dtype": "bfloat16",
        "schedule": "equal" if method in CUT else None,
        "ranks": widths if method != "full" else None,
        "rate": 1 - kept,
        "seconds": [seconds * (1 + 0.004 * step) for step in (-2, -1, 0, 1, 2)],
        "seconds_interval": [seconds * 0.996, seconds * 1.004],
        "bytes_moved": int(cache),
        "cache_bytes": int(cache),
        "tb_per_s": cache / seconds / 1e12,
        "bandwidth_share": cache / seconds / 1e12 / LIMIT,
        "flop_per_s": flops / seconds,
        "baseline": "cudnn",
        "baseline_seconds": [full * (1 + 0.002 * step) for step in (2, -1, 0, 1, -2)],
        "speedup": full / seconds,
        "speedup_interval": [0.994 * full / seconds, 1.006 * full / seconds],
        "error": 0.0021 if method != "fp8" else 0.0312,
        "makespan_over_mean": 1.02 if method in CUT else None,
    }


def share_of_best(batch: int, seq: int) -> float:
    return BASELINES["cudnn"] * min(1.0, 0.8 + 0.05 * batch) * seq / (seq + 2000)


def baseline(name: str, phase: str, batch: int, seq: int) -> dict[str, Any]:
    place = {"name": name, "phase": phase, "batch": batch, "seq": seq}
    if name == "flashinfer":
        return place | {"seconds": None, "reason": "FlashInfer is not installed"}
    seconds = FULL_BYTES * seq * batch / (LIMIT * share_of_best(batch, seq) * 1e12)
    if phase == "prefill":
        seconds = 4 * 32 * 128 * seq * batch * seq / 2 / 6.1e14
    seconds *= BASELINES["cudnn"] / BASELINES[name]
    return place | {"seconds": [seconds] * 3, "reason": None}


def bench_result(
    *,
    seqs: tuple[int, ...] = (102_400,),
    batches: tuple[int, ...] = (1, 8),
    phases: tuple[str, ...] = ("decode", "prefill"),
    methods: tuple[str, ...] = tuple(METHODS),
    complete: bool = True,
) -> dict[str, Any]:
    """Return a result of every combination."""
    places = [(p, b, s) for p in phases for b in batches for s in seqs]
    data = {
        "rows": [row(method, *place) for place in places for method in methods],
        "shape": {
            "name": "Llama-3.1-8B",
            "layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "measured": "one layer",
        },
        "ranks": {
            "keys": KEYS,
            "values": VALUES,
            "source": "the reference model's profile, resampled to this shape",
        },
        "bandwidth": {"tb_per_s": LIMIT, "what": "a large reduction, in this run"},
        "compute": {"flop_per_s": ARITHMETIC, "what": "a product of matrices, in this run"},
        "baselines": [
            baseline(name, *place) for place in places for name in (*BASELINES, "flashinfer")
        ],
    }
    environment = copy.deepcopy(ENVIRONMENT) | {
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": 2**37, "compute_capability": "9.0"}]
    }
    return build_result(
        "bench",
        environment=environment,
        inputs={
            "model": "Llama-3.1-8B",
            "seqs": list(seqs),
            "batches": list(batches),
            "rate": 0.5,
            "ranks": None,
            "phases": list(phases),
            "methods": list(methods),
            "dtype": "bfloat16",
            "device": "cuda:0",
            "repeats": 5,
            "seed": 0,
        },
        data=data,
        warnings=[] if complete else ["fdc, decode, batch 8: samples spread by 12 %"],
        complete=complete,
    )


def text_of(result: dict[str, Any], width: int = 120) -> str:
    return render_text(report(result), width)


def flat(result: dict[str, Any], width: int = 120) -> str:
    return " ".join(text_of(result, width).split())
