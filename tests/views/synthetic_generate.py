"""A small result of ``kvprof generate``, without a model."""

from datetime import UTC, datetime
from typing import Any

from kvprof.records.result import build_result

LONG = "The pages of a process are found through tables that the kernel keeps. " * 9


def generate_result(diff: bool = True, **changes: Any) -> dict[str, Any]:
    """Three tokens, the last of which is another; `changes` of the difference."""
    found = {
        **{"text": LONG, "tokens": [1, 2, 4], "ended": "length", "position": 2},
        **{"common_text": LONG, "compressed_rest": "goes left " * 30},
        **{"full_rest": "goes right " * 25, "kl": [0.001, 0.002, 0.25]},
        "compressed_token": _token(3, " left", 0.5, 0.25),
        "full_token": _token(4, " right", 0.125, 0.625),
        "length": {
            **{"tokens": 3, "full_tokens": 3, "ratio": 1.0, "ends": False, "full_ends": False}
        },
    }
    cache = {
        **{"tokens": 9, "measured_bytes": 2048, "account_bytes": 2048, "full_bytes": 4096},
        **{"rate": 0.5, "notes": []},
    }
    return build_result(
        "generate",
        environment={},
        inputs={
            **{"model": "reference", "fingerprint": "ab12cd34ef56", "dtype": "bfloat16"},
            **{"device": "cpu", "method": "kq", "gguf": None},
        },
        data={
            **{"prompt": "Say", "prompt_tokens": 7, "text": LONG, "tokens": [1, 2, 3]},
            **{"ended": "length", "cache": cache, "decoding": None},
            "difference": {**found, **changes} if diff else None,
        },
        created=datetime(2026, 1, 1, tzinfo=UTC),
    )


def _token(which: int, text: str, own: float, full: float) -> dict[str, Any]:
    return {
        **{"id": which, "text": text},
        **{"compressed_probability": own, "full_probability": full},
    }
