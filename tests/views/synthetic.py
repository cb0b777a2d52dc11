"""Spectrum results that look like a real run's, of any shape, without a model."""

from typing import Any

import numpy as np


def spectrum_result(
    *,
    heads: list[int] | None = None,
    widths: list[int] | None = None,
    pairs: tuple[str, ...] = ("qk", "vo", "k", "v"),
    removal: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2),
    grid: int = 16,
    complete: bool = True,
    warnings: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    seed: int = 0,
    group: int | None = None,
) -> dict[str, Any]:
    """Heads per layer (default 4 in each of 6) and width per layer (default 128).

    With `group` the result has bases per query head, that many query heads for each KV head.
    """
    heads = heads if heads is not None else [4] * 6
    widths = widths if widths is not None else [128] * len(heads)
    rng = np.random.default_rng(seed)
    spectra = {pair: _pair(pair, heads, widths, rng) for pair in pairs}
    rows = []
    if "qk" in spectra and "vo" in spectra:
        rows = [
            _removal(spectra, rate, grid, sum(a * b for a, b in zip(heads, widths, strict=True)))
            for rate in removal
        ]
    first = {f"energy_share_{key}": 0.01 for key in "qkv"} | {"token_share": 1 / 2048}
    data: dict[str, Any] = {"pairs": spectra, "removal": rows, "first_position": first}
    if group is not None:
        data["per_query_head"] = _per_query_head(spectra["qk"], heads, widths, removal, grid, group)
    return {
        "schema": "kvprof/1",
        "kind": "spectrum",
        "complete": complete,
        "warnings": list(warnings),
        "created": "2026-01-01T00:00:00+00:00",
        "environment": {},
        "inputs": {
            "model": "reference",
            "fingerprint": "ab12cd34ef56",
            "source": "random:8192",
            "source_description": "8,192 random tokens, seed 0",
            "tokens": 8192,
            "seq_len": 2048,
            "positions": "0–2047",
            "seed": 0,
            "skip_first": 0,
            "pairs": list(pairs),
            "dtype": "float32",
            "device": "cpu",
            "value_weight_tokens": 8192,
            "grid": grid,
            "layers": len(heads),
            "num_heads": 2 * max(heads),
            "num_kv_heads": max(heads),
            "head_dim": max(widths),
            "default_tokens_source": "8k is the papers' figure (FDC §6.7), not one measured here.",
            "labels": list(labels),
        },
        "data": data,
    }


def _pair(
    name: str, heads: list[int], widths: list[int], rng: np.random.Generator
) -> dict[str, Any]:
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
        values.append(layer)
    flat = [head for layer in values for head in layer]
    longest = max(len(head) for head in flat)
    mean = [float(np.mean([h[i] for h in flat if i < len(h)])) for i in range(longest)]
    largest = np.array([head[0] for head in flat])
    share = [[head / head.sum() for head in layer] for layer in values]
    return {
        "singular_values": [[head.tolist() for head in layer] for layer in values],
        "mean": mean,
        "cv_of_max": float(largest.std() / largest.mean()),
        "effective_rank": [
            [float(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum())) for p in layer] for layer in share
        ],
        "energy_kept": [
            [(np.cumsum(head**2) / (head**2).sum()).tolist() for head in layer] for layer in values
        ],
    }


def _removal(spectra: dict[str, Any], rate: float, grid: int, dims: int) -> dict[str, Any]:
    row: dict[str, Any] = {"removal_rate": rate, "grid": grid}
    for pair in ("qk", "vo"):
        ranks = [
            [_rank(np.array(head), rate) for head in layer]
            for layer in spectra[pair]["singular_values"]
        ]
        row[f"ranks_{pair}"] = ranks
        row[f"rounded_ranks_{pair}"] = [
            [min(-(-rank // grid) * grid, len(head)) for rank, head in zip(rs, layer, strict=True)]
            for rs, layer in zip(ranks, spectra[pair]["singular_values"], strict=True)
        ]
    for key, prefix in (("dim_rate", ""), ("dim_rate_rounded", "rounded_")):
        kept = sum(sum(map(sum, row[f"{prefix}ranks_{pair}"])) for pair in ("qk", "vo"))
        row[key] = 1 - kept / (2 * dims)
    return row


def _per_query_head(
    grouped: dict[str, Any],
    heads: list[int],
    widths: list[int],
    removal: tuple[float, ...],
    grid: int,
    group: int,
) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    own = _pair("q", [count * group for count in heads], widths, rng)

    def ranks(pair: dict[str, Any], rate: float, multiple: int) -> list[list[int]]:
        return [
            [min(-(-_rank(np.array(head), rate) // multiple) * multiple, len(head)) for head in x]
            for x in pair["singular_values"]
        ]

    rows = []
    for rate in removal:
        row: dict[str, Any] = {"removal_rate": rate, "grid": grid}
        row |= {"ranks": ranks(own, rate, 1), "rounded_ranks": ranks(own, rate, grid)}
        for key, pair in (("stored_dims", own), ("grouped_dims", grouped)):
            row[key] = sum(map(sum, ranks(pair, rate, 1)))
            row[f"{key}_rounded"] = sum(map(sum, ranks(pair, rate, grid)))
        row["full_dims"] = sum(a * b for a, b in zip(heads, widths, strict=True))
        rows.append(row)
    return {"group": [group] * len(heads), "qk": own, "removal": rows}


def _rank(head: np.ndarray, rate: float) -> int:
    removed = head.sum() - np.cumsum(head)
    return int(np.argmax(removed <= rate * head.sum() + 1e-12)) + 1
