"""A small result of ``kvprof generate``, without a model."""

from typing import Any

from tests.results.made import made

LONG = "The pages of a process are found through tables that the kernel keeps. " * 9


def generate_result(diff: bool = True, **changes: Any) -> dict[str, Any]:
    """Three tokens, the last of which is another; `changes` of the difference."""
    found = {
        **{"position": 2, "common_text": LONG, "kl": [0.001, 0.002, 0.25], "ended": "length"},
        **{"compressed_rest": "goes left " * 30, "full_rest": "goes right " * 25},
        "compressed_token": _token(" left", 0.5, 0.25),
        "full_token": _token(" right", 0.125, 0.625),
        "length": {"tokens": 3, "full_tokens": 3},
    }
    stored = {"tokens": 9, "measured_bytes": 2048, "account_bytes": 2048, "full_bytes": 4096}
    return made(
        "generate",
        {
            **{"prompt_tokens": 7, "text": LONG, "tokens": [1, 2, 3], "ended": "length"},
            **{"cache": stored, "difference": {**found, **changes} if diff else None},
        },
        inputs={"dtype": "bfloat16", "method": "kq"},
    )


def _token(text: str, own: float, full: float) -> dict[str, Any]:
    return {"text": text, "compressed_probability": own, "full_probability": full}
