"""A model so small that one layer takes microseconds, and a machine that is not measured."""

from pathlib import Path
from typing import Any

import torch

from kvprof.benchmark.jct.layer_bench import LayerBench
from kvprof.benchmark.jct.model_shape import Dense, ModelShape
from kvprof.benchmark.machine import Machine
from kvprof.benchmark.shapes import Rope, Shape
from tests.benchmark.folder import save_config

CPU = Machine(torch.device("cpu"), None, "not measured", 2**20)


def tiny_folder(folder: Path, **changes: Any) -> Path:
    """Write the config of a Llama with 2 layers, 4 query heads and 2 KV heads of 32 dimensions."""
    facts = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 96,
    }
    return save_config(folder, **{**facts, **changes})


def tiny_shape(**changes: Any) -> ModelShape:
    """Return the same shape without a config."""
    facts = {
        "name": "tiny",
        "source": "tests",
        "layers": 2,
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "rope": Rope("default", 10_000.0),
        "context": 4096,
        "scaling": 32**-0.5,
    }
    dense = changes.pop("dense", Dense(128, 96))
    return ModelShape(Shape(**{**facts, **changes}), dense)


def tiny_bench(model: ModelShape | None = None, **options: Any) -> LayerBench:
    """Return what measures it, three samples of everything."""
    return LayerBench(model or tiny_shape(), CPU, torch.float32, repeats=3, **options)


__all__ = ["CPU", "tiny_bench", "tiny_folder", "tiny_shape"]
