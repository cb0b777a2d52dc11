"""Spectrum results that look like a real run's, of any shape, without a model."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprof.analysis.rank_allocation import removal_ranks, round_up
from kvprof.analysis.spectrum import _pair_data, removal
from tests.results.made import made

Layers = list[Tensor]  # [kv_head, dim]


def spectrum_result(
    *,
    heads: Sequence[int] = (4,) * 6,
    widths: Sequence[int] | None = None,
    pairs: Sequence[str] = ("qk", "vo", "k", "v"),
    rates: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2),
    grid: int = 16,
    labels: Sequence[str] = (),
    group: int | None = None,
    **envelope: Any,
) -> dict[str, Any]:
    """Heads per layer, and width per layer (default 128).

    With `group` the result has bases per query head, that many query heads for each KV head.
    """
    widths = widths or [128] * len(heads)
    rng = np.random.default_rng(0)
    spectra = {pair: _values(pair, heads, widths, rng) for pair in pairs}
    rows = []
    if "qk" in spectra and "vo" in spectra:
        rows = [asdict(removal(spectra["qk"], spectra["vo"], rate, grid=grid)) for rate in rates]
    own = None
    if group is not None:
        rng = np.random.default_rng(7)
        values = _values("q", [count * group for count in heads], widths, rng)
        own = {
            **{"group": [group] * len(heads), "qk": _pair_data(values)},
            "removal": [_per_query_head(values, spectra["qk"], rate, grid) for rate in rates],
        }
    first = {f"energy_share_{key}": 0.01 for key in "qkv"} | {"token_share": 1 / 2048}
    return made(
        "spectrum",
        {
            **{"pairs": {pair: _pair_data(layers) for pair, layers in spectra.items()}},
            **{"removal": rows, "first_position": first, "per_query_head": own},
        },
        inputs={
            **{"source": "random:8192", "source_description": "8,192 random tokens, seed 0"},
            **{"tokens": 8192, "positions": "0–2047", "seed": 0, "value_weight_tokens": 8192},
            **{"layers": len(heads), "num_heads": 2 * max(heads), "num_kv_heads": max(heads)},
            **{"head_dim": max(widths), "pairs": pairs, "labels": labels},
            "default_tokens_source": "8k is the papers' figure (FDC §6.7), not one measured here.",
        },
        **envelope,
    )


def _values(
    name: str, heads: Sequence[int], widths: Sequence[int], rng: np.random.Generator
) -> Layers:
    decay = {"qk": 0.12, "k": 0.10, "q": 0.08}.get(name, 0.03)
    values = []
    for count, width in zip(heads, widths, strict=True):
        layer = []
        for _ in range(count):
            steps = np.arange(width) * decay * 128 / width * rng.uniform(0.6, 1.6)
            head = np.exp(-steps) + 0.02 * rng.uniform(0.5, 1.5) * np.exp(-steps / 8)
            head = np.sort(head * rng.uniform(0.9, 1.1, width))[::-1] * rng.lognormal(3, 0.45)
            if name == "v":
                head[width - width // 10 :] = 0.0  # noise of the Gram matrix comes as zeros
            layer.append(head)
        values.append(torch.from_numpy(np.stack(layer)))
    return values


def _per_query_head(own: Layers, grouped: Layers, rate: float, grid: int) -> dict[str, Any]:
    def ranks(layers: Layers, multiple: int) -> list[list[int]]:
        return [
            [round_up(rank, multiple, x.shape[-1]) for rank in removal_ranks(x, rate).tolist()]
            for x in layers
        ]

    row = {"removal_rate": rate, "grid": grid, "full_dims": sum(x.numel() for x in grouped)}
    row |= {"ranks": ranks(own, 1), "rounded_ranks": ranks(own, grid)}
    for key, layers in (("stored_dims", own), ("grouped_dims", grouped)):
        row[key] = sum(map(sum, ranks(layers, 1)))
        row[f"{key}_rounded"] = sum(map(sum, ranks(layers, grid)))
    return row
