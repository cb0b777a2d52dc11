"""Stability results as `kvprof stability` writes them, from made-up moments, without a model."""

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from kvprof.analysis.stability import PairFactors, Run
from kvprof.analysis.stability_data import stability_data
from kvprof.analysis.stability_study import RankChoice
from tests.results.made import made as made_up

COUNTS = (1024, 2048, 4096, 8192, 16384, 32768)


#: Results as bytes, of which a new one is read several times faster than one is copied.
_MADE: dict[str, bytes] = {}


def stability_result(**shape: Any) -> dict[str, Any]:
    """Return the result of a shape, worked out once, to be changed at will.

    Heads and widths are per layer; `apart` is how far each dataset is from random tokens.
    """
    key = repr(sorted(shape.items()))
    if key not in _MADE:
        _MADE[key] = pickle.dumps(_stability_result(**shape))
    made: dict[str, Any] = pickle.loads(_MADE[key])
    return made


def _stability_result(
    *,
    source: str = "random",
    targets: Sequence[str] = ("prose", "code", "tasks"),
    pairs: Sequence[str] = ("qk", "vo"),
    counts: Sequence[int] = COUNTS,
    seeds: int = 3,
    heads: Sequence[int] = (2, 2, 2),
    widths: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    removal: Sequence[float] = (0.05, 0.1),
    apart: float = 0.2,
    noise_floor: bool = True,
    seq_lens: tuple[int, int] = (1024, 1024),
    complete: bool = True,
    warnings: Sequence[str] = (),
    model: str | None = "reference",
) -> dict[str, Any]:
    widths = tuple(widths or (32,) * len(heads))
    shape = tuple(zip(heads, widths, strict=True))
    ranks = list(ranks or (max(1, max(widths) // 4), max(1, max(widths) // 2)))
    random = source == "random"

    def run(name: str, seed: int | None, tokens: Sequence[int], length: int, away: float) -> Run:
        snapshots = {
            n: {pair: _factors(pair, shape, away, name, seed or 0, n) for pair in pairs}
            for n in tokens
        }
        return Run(name, seed, length, snapshots)

    if random:
        sources = [run(source, seed, counts, seq_lens[0], 0.0) for seed in range(seeds)]
    else:
        sources = [run(source, None, counts, seq_lens[0], apart / 2)]
    noise = []
    if noise_floor and (not random or seeds == 1):
        first = 1 if random else 0
        noise = [run("random", s, counts, seq_lens[0], 0.0) for s in range(first, 3 - first)]
    longest = (max(counts),)
    judged = [
        run(name, None, longest, seq_lens[1], apart * (1 + i)) for i, name in enumerate(targets)
    ]
    short = [
        run(name, None, longest, seq_lens[0], 0.5 * apart * (1 + i))
        for i, name in enumerate(targets)
        if max(seq_lens) > 2 * min(seq_lens)
    ]
    choices = [*map(RankChoice, ranks), *(RankChoice(removal_rate=rate) for rate in removal)]
    data, found = stability_data(
        sources, noise, judged, short, pairs, choices, random_source=random
    )
    tied = {} if model else {"dtype": None, "device": None}
    return made_up(
        "stability",
        data,
        inputs={
            **{"model": model, "source": source, "targets": targets, "pairs": pairs, **tied},
            **{"tokens": counts, "target_tokens": max(counts), "seeds": [x.seed for x in sources]},
            **{"seq_len": seq_lens[0], "target_seq_len": seq_lens[1], "ranks": ranks},
            **{"removal": removal},
        },
        warnings=[*warnings, *found],
        complete=complete,
    )


@functools.cache
def _factors(
    pair: str, shape: tuple[tuple[int, int], ...], away: float, name: str, seed: int, tokens: int
) -> PairFactors:
    """Turn a fixed rotation by `away` and blur it as so many tokens would."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + seed)
    fixed = torch.Generator().manual_seed(len(pair) + ord(pair[0]))
    grams, lefts, rights = [], [], []
    for layer, (heads, width) in enumerate(shape):
        decay = torch.exp(-torch.arange(width, dtype=torch.float64) * 8 / width)
        start = torch.randn(heads, width, width, generator=fixed, dtype=torch.float64)
        turn = torch.randn(heads, width, width, generator=fixed, dtype=torch.float64)
        skew = (turn - turn.mT) * away * (1 + layer) / width**0.5 / len(shape)
        basis = torch.linalg.qr(start)[0] @ torch.matrix_exp(skew)
        blur = torch.randn(heads, width, width, generator=generator, dtype=torch.float64)
        root = basis * decay.sqrt() @ (torch.eye(width) + blur * (2 / tokens) ** 0.5)
        gram = root @ root.mT
        grams.append(gram)
        lefts.append(0.6 * gram)
        rights.append(0.4 * gram + 0.001 * torch.eye(width))
    return PairFactors(grams, lefts, rights)


SMALL = {"counts": (1024, 4096, 16384), "heads": (2, 2), "widths": (16, 16), "apart": 0.04}
SHAPES = {
    "plain": SMALL,
    "one count": {**SMALL, "counts": (4096,)},
    "one target": {**SMALL, "targets": ("prose",)},
    "text": {**SMALL, "source": "a-file-with-a-rather-long-name.txt", "pairs": ("k", "v")},
    "moments": SMALL
    | {"source": "saved.safetensors", "counts": (8192,), "noise_floor": False, "model": None},
    "one seed": {**SMALL, "seeds": 1, "noise_floor": False},
    "ragged": {**SMALL, "heads": (3, 1), "widths": (8, 16), "ranks": (4, 12)},
    "lengths": {**SMALL, "seq_lens": (512, 2048)},
    "many heads": {**SMALL, "heads": (40,), "widths": (8,), "pairs": ("vo",)},
    "itself": {**SMALL, "source": "prose", "targets": ("prose",), "apart": 0.0},
    "one dimension": {**SMALL, "heads": (1,), "widths": (1,), "seeds": 2},
    "loud": {**SMALL, "complete": False, "warnings": ("interrupted", "[bold]literal[/bold]")},
}


def made(name: str = "plain") -> dict[str, Any]:
    """Return one of `SHAPES`, to be changed at will."""
    return stability_result(**SHAPES[name])


def averages(result: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    """Return the rows averaged over heads and seeds that have these values."""
    rows = [row for row in result["data"]["curves"] if row["layer"] is None]
    return [row for row in rows if all(row[key] == value for key, value in keys.items())]
