"""Advice as `kvprof advise` gives it, of a made-up model."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kvprof.methods.advice import GPUS, PLANS, Question, advised
from kvprof.methods.engine_cache import CacheLayer
from kvprof.results.advise import best_of
from tests.results.made import made


def advise_result(
    *,
    window: int = 0,
    latent: bool = False,
    weights: int = 16_000_000_000,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the result of 32 layers: of full attention, half with windows, or with latents."""
    full = CacheLayer("latent", 1, 576) if latent else CacheLayer("full", 8, 128)
    other = CacheLayer("window", 8, 128, window) if window else full
    question = Question(
        model="made-up-8b",
        config={"model_type": "llama"},
        layers=[full, other] * 16,
        weights=weights,
        read_weights=weights,
        gpu=GPUS["h100-80gb"],
        context=32_768,
        users=1,
    )
    plans = [advised(plan, question) for plan in PLANS]
    best = best_of(plans[:3], 0.99)
    return made(
        "advise",
        {
            **{"plans": [one.model_dump() for one in plans], "best": best and best.plan},
            **{"weights_bytes": weights, "available_bytes": question.available},
            **{"layer_kinds": Counter(one.kind for one in question.layers)},
        },
        inputs={
            **{"model": "made-up-8b", "model_type": "llama", "fingerprint": None},
            **{"weights_from": "--weights", "gpu": "h100-80gb", "context": 32_768, "users": 1},
            **{"gpu_memory_bytes": 80 << 30, "gpu_bytes_per_second": 3.35e12, "keep": 0.99},
        },
        warnings=warnings,
        created=datetime(2026, 11, 29, tzinfo=UTC),
    )
