"""The forms of the kernels for single tokens that are compiled for every architecture."""

from kvprof.kernels.pointwise.kernel import gate_rows, normalise_rows, rotate_heads
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS"]

#: Llama-3.1-8B's sizes.
VARIANTS = (
    Variant(
        "pointwise norm bf16",
        normalise_rows,
        {**dict.fromkeys(("states", "weight", "output"), "*bf16"), "eps": "fp32"},
        {"WIDTH": 4096, "BLOCK": 4096},
        8,
    ),
    Variant(
        "pointwise rotation bf16",
        rotate_heads,
        dict.fromkeys(("query", "keys", "query_out", "keys_out", "cos", "sin"), "*bf16"),
        {"QUERY_HEADS": 32, "KEY_HEADS": 8, "HALF": 64, "BLOCK": 64},
        1,
    ),
    Variant(
        "pointwise gate bf16",
        gate_rows,
        dict.fromkeys(("gate", "up", "output"), "*bf16"),
        {"BLOCK": 1024},
        4,
    ),
)
