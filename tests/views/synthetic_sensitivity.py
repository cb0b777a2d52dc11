"""A small result of ``kvprof sensitivity``, without a model."""

from typing import Any

from kvprof.evaluation.sensitivity import answers
from kvprof.methods.settings import Part
from tests.results.made import made


def sensitivity_result(heads: tuple[int | None, ...] = (None,)) -> dict[str, Any]:
    """Two layers at 4 and 2 bits, the latter with the first token uncompressed too."""
    parts = [
        Part(layer, side, head) for layer in (0, 1) for side in ("keys", "values") for head in heads
    ]
    cells = [
        {
            **{"layer": part.layer, "side": part.side, "kv_head": part.kv_head, "rank": None},
            **{"setting": f"{bits} bits", "bits": bits, "exact_first": first},
            **{"bytes_per_token": bits * 40.0, **measured(kl * (1 + part.layer))},
        }
        for bits, first, kl in ((4, 0, 0.001), (2, 0, 0.02), (2, 1, 0.015))
        for part in parts
    ]
    allocation = {"rate": 0.7, "bytes_per_token": 600.0, "predicted_kl": 0.006}
    choices = [
        {"layer": p.layer, "side": p.side, "kv_head": p.kv_head, "setting": "4 bits"} for p in parts
    ]
    data = {
        **{"model_layers": 2, "heads": [2, 2], "baseline_accuracy": 0.5, "noise": 1e-12},
        **{"cells": cells, **answers(cells, parts, 0.01)},
        "budgets": [
            {
                **{"like": "4 bits", **allocation, "measured": measured(0.007)},
                **{"uniform": {**allocation, "measured": measured(0.008)}, "choices": choices},
            }
        ],
        "flags": [
            {
                **{"program": "vLLM", "flags": "--kv-cache-dtype fp8", "says": "all in FP8"},
                **{"unsaid": "queries", "measured": measured(0.001)},
            }
        ],
    }
    asked = {"limit": 0.01, "text": ["prose"], "sequences": 8, "seq_len": 64}
    return made("sensitivity", data, inputs={**asked, "quantiser": "per-token"})


def measured(kl: float) -> dict[str, Any]:
    return {
        **{"kl": kl, "kl_interval": [kl / 2, 2 * kl], "kl_p999": 5 * kl, "kl_worst": 9 * kl},
        **{"relative_accuracy": 0.98, "decoded_tokens": 256},
    }
