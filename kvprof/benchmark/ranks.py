"""How wide each KV head's K and V are kept, for a shape that has no calibrated plan of its own.

The recorded profile holds what FDC's removal rate and ``kq`` gave the heads of the reference model
at nine rates. For another shape its heads are sorted by what they keep and read off at evenly
spaced quantiles, scaled to the shape's head_dim, and rounded to multiples of 16 by largest
remainder, so that the layer keeps the bytes that the rate asks for.
"""

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprof.analysis.width_clusters import KindChooser, Lattice, left_sums
from kvprof.benchmark.plans import Widths, check_heads, measured_layer
from kvprof.benchmark.shapes import Shape
from kvprof.errors import KvprofError, UsageError
from kvprof.kernels.planes import STEP, widened
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.plan_files import load_plan
from kvprof.records.files import parse_json

__all__ = [
    "plan_pairs",
    "ranks_from",
    "resampled_layers",
]

# --- The widths of a saved plan, for the shape that is measured.


def plan_pairs(file: Path, shape: Shape) -> tuple[list[tuple[int, int]], str]:
    """Return the ranks of K and V per KV head of a plan's representative layer, and its label."""
    plan = load_plan(file)
    check_heads(f"--ranks {file.name}", plan, shape)
    _refuse_levels(plan, file)
    if any(layer.keys.per_query_head for layer in plan.layers):
        raise UsageError(
            f"--ranks {file.name}: it stores one key per query head; bench measures one per KV head"
        )
    if all(layer.sliding_window is not None for layer in plan.layers):
        raise UsageError(f"--ranks {file.name}: every layer of the plan has a sliding window")
    layer = measured_layer(plan)
    pairs = zip(_ranks(layer.keys.groups, file), _ranks(layer.values.groups, file), strict=True)
    return list(pairs), (
        f"the plan {file.name} ({plan.method}), the layer closest to its mean bytes"
    )


def _refuse_levels(plan: Plan, file: Path) -> None:
    if len(plan.levels.shares) > 1:
        raise UsageError(
            f"--ranks {file.name}: a plan with token levels has several widths per head; use "
            "--methods tale"
        )


def _ranks(groups: tuple[HeadGroup, ...], file: Path) -> list[int]:
    if any(group.heads > 1 for group in groups):
        raise UsageError(
            f"--ranks {file.name}: its KV heads share latents, so it has no width per head; use "
            "--methods palu"
        )
    return [group.rank for group in groups]


Pairs = Sequence[tuple[int, int]]


@cache
def _profile() -> dict[str, Any]:
    text = (files("kvprof") / "assets" / "shapes" / "profile.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def resampled_layers(
    shape: Shape, layers: int, rate: float, method: str = "fdc", *, kinds: int = 0, seed: int = 0
) -> list[Widths]:
    """Return the reference model's profile, resampled to the heads of several layers together."""
    if shape.head_dim % STEP:
        raise UsageError(
            f"{shape.name} has heads of {shape.head_dim} dimensions; the kernels require "
            f"multiples of {STEP}"
        )
    heads, full = layers * shape.num_kv_heads, shape.head_dim // STEP
    total = round((1 - rate) * 2 * heads * full)
    if not 0 <= rate < 1 or not 2 * heads <= total <= 2 * heads * full:
        raise UsageError(
            f"rate {rate:g} is out of reach: widths are multiples of {STEP}, so heads of "
            f"{shape.head_dim} ({shape.name}) reach rates from 0 to {1 - 1 / full:.4g}"
        )
    rates, recorded = _recorded(method)
    now = _at_rate(rates, recorded, rate)  # [heads of the profile, 2], as shares of head_dim
    order = np.argsort(now.sum(axis=1), kind="stable")  # least first
    positions = (np.arange(heads) + 0.5) / heads * len(order) - 0.5
    drawn = _interpolate(now[order], positions)
    units = _rounded(drawn, total, full)
    if kinds and len(np.unique(units, axis=0)) > kinds:
        curves = np.stack([_interpolate(kept[order], positions) for kept in recorded])
        units = _of_few_kinds(rates, curves, units, full, kinds)
    units = units[np.random.default_rng(seed).permutation(heads)]
    source = (
        f"{_profile()['label']} ({method} at rate {rate:g}), resampled to "
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}"
        + (f" in each of {layers} layers" if layers > 1 else "")
        + (f", at most {kinds} head shapes" if kinds else "")
    )
    return [
        Widths(
            tuple(int(k) * STEP for k, _ in layer),
            tuple(int(v) * STEP for _, v in layer),
            source,
        )
        for layer in units.reshape(layers, -1, 2)
    ]


def _interpolate(
    shares: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return shares of K and of V at places between the profile's heads."""
    known = np.arange(len(shares))
    return np.stack([np.interp(positions, known, shares[:, side]) for side in (0, 1)], axis=1)


def _of_few_kinds(
    rates: list[float],
    curves: NDArray[np.float64],
    units: NDArray[np.int64],
    full: int,
    kinds: int,
) -> NDArray[np.int64]:
    """Return steps of 16 with at most so many distinct pairs, as many in all as `units` have."""
    ranks = range(1, full + 1)
    at = np.array(ranks) / full
    # A head keeps a rank up to the rate at which its recorded share falls below it.
    loss = [
        np.array(
            [
                left_sums(ranks, np.interp(at, kept[::-1], rates[::-1]).tolist())
                for kept in curves[:, :, side].T
            ]
        )
        for side in (0, 1)
    ]
    cost = np.tile(np.array(ranks, dtype=np.float64), (len(units), 1))
    chooser = KindChooser(Lattice(loss[0], loss[1], cost, cost), kinds)
    return np.array(chooser.choose(float(units.sum())), dtype=np.int64) + 1


def _recorded(method: str) -> tuple[list[float], list[NDArray[np.float64]]]:
    """Return the rates that were recorded, 0 and 1 beside them, and ``[heads, 2]`` kept at each."""
    profile = _profile()
    if method not in profile["methods"]:
        raise UsageError(f"no recorded profile of {method!r}; use {', '.join(profile['methods'])}")
    known = profile["methods"][method]
    width, heads = profile["head_dim"], len(known[0]["keys"])
    kept = [np.ones((heads, 2))]
    kept += [np.array([entry["keys"], entry["values"]]).T / width for entry in known]
    kept.append(np.zeros((heads, 2)))
    return [0.0, *(entry["rate"] for entry in known), 1.0], kept


def _at_rate(
    rates: list[float], recorded: list[NDArray[np.float64]], rate: float
) -> NDArray[np.float64]:
    """Return shares kept of K and of V, interpolated between recorded rates."""
    stacked = np.stack(recorded)
    found = np.empty(stacked.shape[1:])
    for head, side in np.ndindex(found.shape):
        found[head, side] = np.interp(rate, rates, stacked[:, head, side])
    return found


def _rounded(shares: NDArray[np.float64], total: int, full: int) -> NDArray[np.int64]:
    """Return whole steps of 16 per head and side, from 1 to `full`, that sum to `total`."""
    wanted = shares * (total / shares.sum())
    units: NDArray[np.int64] = np.clip(np.floor(wanted), 1, full).astype(np.int64)
    while (left := total - int(units.sum())) != 0:
        # Largest remainder first; heads at their bound take no part.
        step = 1 if left > 0 else -1
        free = (units < full) if step > 0 else (units > 1)
        gain = np.where(free, step * (wanted - units), -np.inf)
        for index in np.argsort(-gain, axis=None, kind="stable")[: abs(left)]:
            if np.isfinite(gain.flat[index]):
                units.flat[index] += step
    return units


def ranks_from(path: str | Path, shape: Shape) -> Widths:
    """Read widths from a file: a JSON list of [K, V] pairs per KV head, or a saved plan."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"--ranks {path}: no such file")
    if file.suffix == ".json":
        return _fitted(_read_pairs(file), shape, f"given in {file.name}")
    try:
        pairs, words = plan_pairs(file, shape)
    except UsageError:
        raise
    except KvprofError as problem:
        raise UsageError(
            f"--ranks {file.name}: not a JSON list of [K, V] pairs or a saved plan ({problem})"
        ) from problem
    return _fitted(pairs, shape, words)


def _read_pairs(file: Path) -> Pairs:
    try:
        given = parse_json(file.read_bytes())
    except OSError as problem:
        raise UsageError(f"--ranks {file.name}: {problem.strerror or problem}") from problem
    except ValueError as problem:
        raise UsageError(f"--ranks {file.name}: not JSON with pairs: it {problem}") from problem
    pairs = [
        tuple(entry)
        for entry in (given if isinstance(given, list) else [])
        if isinstance(entry, list | tuple)
        and len(entry) == 2
        and all(isinstance(width, int) and not isinstance(width, bool) for width in entry)
    ]
    if not pairs or len(pairs) != len(given):  # also for what is no list
        raise UsageError(
            f"--ranks {file.name}: write a list of [K, V] pairs, one per KV head: [[64, 48], …]"
        )
    return pairs


def _fitted(pairs: Pairs, shape: Shape, source: str) -> Widths:
    """Return the pairs as widths that run, or refuse them in one line."""
    if len(pairs) != shape.num_kv_heads:
        raise UsageError(
            f"ranks {source}: {len(pairs)} pairs, but {shape.name} has {shape.num_kv_heads} KV "
            "heads"
        )
    widest = max(width for pair in pairs for width in pair)
    if widest > shape.head_dim or min(width for pair in pairs for width in pair) < 1:
        bad = widest if widest > shape.head_dim else min(width for pair in pairs for width in pair)
        raise UsageError(
            f"ranks {source}: rank {bad} is outside 1 to {shape.head_dim}, the head dimensions of "
            f"{shape.name}"
        )
    rounded = [(widened(key), widened(value)) for key, value in pairs]
    warnings: tuple[str, ...] = ()
    if lost := [
        f"{a} to {b}"
        for p, r in zip(pairs, rounded, strict=True)
        for a, b in zip(p, r, strict=True)
        if a != b
    ]:
        several = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        warnings = (
            f"widths were rounded up to multiples of {STEP}: {lost[0]}{several}; the rate counts "
            "what is stored",
        )
    return Widths(
        tuple(key for key, _ in rounded), tuple(value for _, value in rounded), source, warnings
    )
