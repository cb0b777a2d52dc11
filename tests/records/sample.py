"""A small, valid result of each kind."""

from datetime import UTC, datetime
from typing import Any

from kvprof.records.result import build_result

CREATED = datetime(2026, 7, 4, 12, 0, tzinfo=UTC)
"""So that two results of the same facts are equal in whatever second they are made."""

ENVIRONMENT: dict[str, Any] = {
    "kvprof": {"version": "0.1.0", "git": None},
    "python": "3.12.1",
    "platform": "Linux",
    "cpu": {"model": "some CPU", "cores": None, "threads": 2},
    "memory_bytes": 2**34,
    "packages": {"torch": "2.13.0", "triton": None},
    "gpus": [],
}


def spectrum_result(**changes: Any) -> dict[str, Any]:
    """Two layers that differ in heads and in width."""
    values = [[[3.0, 1.0, 0.5], [2.0, 1.5, 0.0]], [[4.0, 1.0]]]
    ranks = [[2, 1], [1]]
    pair = {
        "singular_values": values,
        "mean": [3.0, 1.1666666666666667, 0.25],
        "cv_of_max": 0.27,
        "effective_rank": [[1.9, 1.7], [1.2]],
        "energy_kept": values,
    }
    removal = {
        "removal_rate": 0.05,
        "dim_rate": 0.25,
        "dim_rate_rounded": 0.0,
        "grid": 16,
        "dim_rate_without_first": 0.2,
        "ranks_qk": ranks,
        "ranks_vo": ranks,
        "rounded_ranks_qk": ranks,
        "rounded_ranks_vo": ranks,
    }
    first = {f"energy_share_{key}": 0.1 for key in "qkv"} | {"token_share": 0.001}
    data = {"pairs": {"qk": pair, "vo": pair}, "removal": [removal], "first_position": first}
    inputs = {
        **{"fingerprint": "f0", "tokens": 8192, "layers": 2, "num_heads": 4, "num_kv_heads": 2},
        **{"head_dim": 3, "pairs": ["qk", "vo"], "seed": 0},
    }
    settings: dict[str, Any] = {"environment": ENVIRONMENT, "inputs": inputs, "data": data}
    return build_result("spectrum", **{"created": CREATED} | settings | changes)


def stability_result() -> dict[str, Any]:
    curve = {
        "pair": "qk",
        "source": "random",
        "target": "prose",
        "tokens": 1024,
        "seq_len_source": 512,
        "seq_len_target": 512,
        "seed": 0,
        "layer": 1,
        "kv_head": 0,
        "rank": 32,
        "removal_rate": None,
        "ratio": 1.3,
        "ratio_sign_aligned": 0.2,
        "ratio_cluster_aligned": None,
        "subspace_distance": 0.1,
        "principal_angle": 0.3,
        "extra_energy_loss": 0.01,
        "extra_score_error": 0.02,
        "extra_output_error": None,
    }
    average = curve | {"seed": None, "layer": None, "kv_head": None, "rank": 31.5}
    average |= {"heads_and_seeds": 2, "spread": {"ratio": [1.1, 1.4]}}
    claim = {
        "claim": "8K tokens are enough",
        "paper": "FDC §6.7",
        "pair": "qk",
        "target": "prose",
        "tokens": 8192,
        "threshold": 0.05,
        "measured": 0.04,
        "interval": [0.03, 0.05],
        "cost": 0.002,
        "holds": True,
        "verdict": "holds",
    }
    unknown = ("tokens", "measured", "interval", "cost", "holds")
    data = {
        "curves": [curve, average],
        "claims": [claim, claim | dict.fromkeys(unknown) | {"verdict": "not judged"}],
        "recommendation": {"tokens": 8192, "stopped_falling": True, "pairs": {}},
        "clusters": [{"pair": "qk", "target": "prose", "tokens": 1024, "sizes": {"1": 60}}],
        "lengths": [
            {
                "pair": "qk",
                "target": "prose",
                "tokens": 1024,
                "seq_len_source": 512,
                "seq_len_target": 2048,
                "cost_same_length": 0.01,
                "cost": 0.04,
            }
        ],
        "unrelated_ratio": {"unaligned": 1.41, "sign_aligned": 1.17},
        "negligible_cost": 0.01,
        "half_ranks": {"qk": 32},
    }
    inputs = {
        **{"model": None, "fingerprint": "f0", "source": "calibration", "targets": ["prose"]},
        **{"seeds": [0], "seq_len": 512, "target_seq_len": 512, "target_tokens": 1024},
        **{"ranks": [32], "removal": []},
    }
    return build_result(
        "stability", environment=ENVIRONMENT, inputs=inputs, data=data, created=CREATED
    )


def benchmark_result(**inputs: Any) -> dict[str, Any]:
    named = {"benchmark": "some_program"} | inputs
    data = {"rows": [{"tokens": 1024, "total_s": 0.5}]}
    return build_result(
        "benchmark", environment=ENVIRONMENT, inputs=named, data=data, created=CREATED
    )
