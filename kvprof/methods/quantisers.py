"""Quantisers, alone and on top of any plan: per token, KIVI-like, KVQuant-like, HQQ, quanto."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from statistics import NormalDist
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import full_plan
from kvprof.methods.named import side_bits
from kvprof.methods.option_types import BitsAmong
from kvprof.methods.plan import Plan
from kvprof.methods.storage import LIBRARIES, Quantiser, SideQuantiser, load_library

__all__ = [
    "QUANTISERS",
    "codebook",
    "from_library",
    "kivi",
    "kvquant",
    "lloyd_max",
    "normal_distortion",
    "normal_levels",
    "per_token",
    "quantised",
    "quantiser_family",
]

#: Bits of the quantisers alone, by growing rate.
_BITS = (8, 4, 3, 2)


def codebook(bits: int) -> Tensor:
    """Return the levels of a non-uniform quantiser, ``[2**bits]`` float32 from 0 to 1.

    The quantiles of a normal distribution: what KVQuant's learned levels come close to, without
    its pass over calibration data.

    Parameters
    ----------
    bits : int
    """
    count = 2**bits
    normal = NormalDist()
    levels = torch.tensor(
        [normal.inv_cdf((index + 0.5) / count) for index in range(count)], dtype=torch.float64
    )
    return ((levels - levels[0]) / (levels[-1] - levels[0])).float()


# Points at which the density between two bounds is summed up (fewer where bounds lie close), of the
# start; deviations beyond which there is no density to speak of; and when levels have settled: they
# move less than this share of a deviation. 256 levels settle slowly: after these rounds their error
# is 1.0001 times what 10,000 leave.
_POINTS, _FEW_POINTS, _START_POINTS = 64, 8, 100_001
_TAIL = 12.0
_SETTLED = 1e-12
_ROUNDS = 1_000


@lru_cache(maxsize=64)
def lloyd_max(bits: int, width: int) -> tuple[float, ...]:
    """Return the levels of least squared error for one coordinate of a random unit vector.

    A coordinate of a vector drawn evenly from the unit sphere in ``R^d`` has the density
    ``(1 - x²)^((d - 3) / 2)`` but for a factor (TurboQuant, lemma 1), near a normal one of variance
    1/d. Lloyd's and Max's conditions hold for the result: a bound lies midway between two levels,
    and a level is the mean between its bounds.

    Parameters
    ----------
    bits : int
    width : int
        Dimensions of the vector, d.

    Returns
    -------
    tuple of float
        ``2**bits`` levels, ascending, symmetric about 0.
    """
    count: int = 2**bits
    if width == 1:
        return (-1.0,) * (count // 2) + (1.0,) * (count // 2)
    # With x = sin t the density is cos(t)^(d - 2), which has no pole where d is 2.
    points, weights = np.polynomial.legendre.leggauss(_POINTS if count <= 16 else _FEW_POINTS)
    edge = min(1.0, _TAIL / math.sqrt(width))
    # Panter and Dite: many levels are best spread as the cube root of the density in x.
    grid = np.linspace(-math.asin(edge), math.asin(edge), _START_POINTS)
    spread = np.cumsum(np.cos(grid) ** (width / 3))
    levels = np.sin(np.interp((np.arange(count) + 0.5) / count * spread[-1], spread, grid))
    levels = (levels - levels[::-1]) / 2
    for _ in range(_ROUNDS):
        bounds = np.arcsin(np.concatenate([[-edge], (levels[1:] + levels[:-1]) / 2, [edge]]))
        half = np.diff(bounds)[:, None] / 2
        angles = (bounds[:-1] + bounds[1:])[:, None] / 2 + half * points
        mass = weights * np.cos(angles) ** (width - 2)
        moved = (mass * np.sin(angles)).sum(1) / mass.sum(1)
        moved = (moved - moved[::-1]) / 2
        step = np.abs(moved - levels).max()
        levels = moved
        if step < _SETTLED / math.sqrt(width):
            break
    return tuple(map(float, levels))


# Lloyd's iteration from Panter and Dite's levels: further ones change no float32 level by 1e-4.
_NORMAL_ROUNDS = 2000


@cache
def _normal(bits: int) -> tuple[tuple[float, ...], float]:
    """Return the levels of `normal_levels` and their mean squared error."""
    count = 2**bits
    normal = NormalDist()
    start = [3**0.5 * normal.inv_cdf((index + 0.5) / count) for index in range(count)]
    levels = torch.tensor(start, dtype=torch.float64)
    ends = torch.tensor([math.inf], dtype=torch.float64)

    def cells() -> tuple[Tensor, Tensor]:
        middles = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        density = torch.exp(-middles.square() / 2) / math.sqrt(2 * math.pi)
        return torch.special.ndtr(middles).diff(), density

    for _ in range(_NORMAL_ROUNDS):
        shares, density = cells()
        moved = -density.diff() / shares
        if torch.equal(moved, levels):
            break
        levels = moved
    shares, density = cells()
    # E (x - c)² = 1 - 2 Σ c ∫ x + Σ c² ∫ 1 over the cells.
    error = 1 + (levels.square() * shares + 2 * levels * density.diff()).sum()
    return tuple(levels.tolist()), float(error)


def normal_levels(bits: int) -> Tensor:
    """Return the levels of least squared error for a standard normal variable.

    Lloyd's and Max's quantiser (1960): each level is the mean of what is nearest to it.

    Parameters
    ----------
    bits : int

    Returns
    -------
    Tensor
        ``[2**bits]`` float32, ascending, symmetric about 0.
    """
    return torch.tensor(_normal(bits)[0], dtype=torch.float64).float()


def normal_distortion(bits: int) -> float:
    """Return what `normal_levels` lose of a standard normal variable, squared; all at 0 bits."""
    return _normal(bits)[1] if bits else 1.0


def per_token(bits: tuple[int, ...], *, group: int | None = 32) -> Quantiser:
    """Per-token asymmetric integers; `group` columns share a scale (Palu: None, the whole row)."""
    side = SideQuantiser(bits, "token", group)
    return Quantiser("affine", side, side)


def kivi(
    bits: tuple[int, ...], *, group: int = 32, window: int = 128, block: int = 32
) -> Quantiser:
    """KIVI-like: keys per channel in groups of tokens, values per token, a recent window.

    KIVI keeps between 0 and 127 keys and 128 values at full precision; here both keep `window` to
    ``window + block - 1`` tokens, so that one window serves K and V.
    """
    return Quantiser(
        "affine",
        SideQuantiser(bits, "channel", group),
        SideQuantiser(bits, "token", group),
        window=window,
        block=block,
    )


def kvquant(bits: tuple[int, ...], *, outliers: float = 0.01, block: int = 64) -> Quantiser:
    """KVQuant-like: non-uniform levels, keys per channel, values per token, outliers kept.

    KVQuant calibrates its channels' scales offline and quantises keys before RoPE; here the scales
    come from blocks of tokens and keys are quantised as they are stored (after RoPE, as KVQ-F and
    KVQuant-Z do too). The first token stays exact (`quantised` sees to it).
    """
    return Quantiser(
        "codebook",
        SideQuantiser(bits, "channel", block),
        SideQuantiser(bits, "token", None),
        block=block,
        outliers=outliers,
    )


def from_library(kind: str, bits: tuple[int, ...], *, group: int = 64) -> Quantiser:
    """HQQ's or quanto's own quantiser, per token; up to `group` columns share a scale.

    Both libraries' default is 64. transformers' quantised cache groups across tokens and heads and
    quantises all of the past anew every 128 tokens; here a token is quantised once, alone.

    Parameters
    ----------
    kind : str
        ``hqq`` or ``quanto``.
    bits : tuple of int
        One per token level.
    group : int
    """
    side = SideQuantiser(bits, "token", group)
    return Quantiser(kind, side, side, scale_dtype="model")


#: By name: how to make one, the bits it has alone, and the bits it has on top of another method.
QUANTISERS: dict[str, tuple[Callable[[tuple[int, ...]], Quantiser], tuple[int, ...], int]] = {
    "per-token": (per_token, _BITS, 4),
    "kivi": (kivi, _BITS, 2),
    "kvquant": (kvquant, _BITS, 4),
    "hqq": (partial(from_library, "hqq"), LIBRARIES["hqq"].bits[::-1], 4),
    "quanto": (partial(from_library, "quanto"), LIBRARIES["quanto"].bits[::-1], 4),
}


def quantiser_family(
    name: str,
    inputs: MethodInputs,
    *,
    bits: Annotated[int | str, BitsAmong(*_BITS)] | None = None,
) -> PlanFamily:
    """Return the plans of a quantiser alone, at full rank; the knob is its bits.

    Parameters
    ----------
    name : str
        One of `QUANTISERS`.
    inputs : MethodInputs
        Moments are not needed.
    bits : int, str or None
        One setting instead of all: ``4``, or ``k8v4`` for unlike ones of keys and values, whose
        mean is the knob.
    """
    _require(name)
    _, known, _ = QUANTISERS[name]
    plain = full_plan(inputs, name)
    if bits is None:
        settings = tuple(map(float, known))
        return PlanFamily(
            name, "bits", lambda value: quantised(plain, name, int(value)), settings=settings
        )
    plan = quantised(plain, name, bits)
    plan = replace(plan, made={**plan.made, "options": {"bits": bits}})
    return PlanFamily(name, "bits", lambda _: plan, settings=(sum(_sides(name, bits)) / 2,))


def quantised(
    plan: Plan, how: str | Callable[[tuple[int, ...]], Quantiser], bits: int | str
) -> Plan:
    """Return a plan with its latents quantised, the same bits at every token level.

    Parameters
    ----------
    plan : Plan
        Not quantised yet.
    how : str or callable
        One of `QUANTISERS`, or what makes one of the bits per level.
    bits : int or str
        ``k8v4`` where keys and values have unlike ones.

    Raises
    ------
    UsageError
        When the plan is quantised already, or the quantiser does not have these bits.
    LackingError
        When the quantiser is a library's and the library is not installed.
    """
    name = how if isinstance(how, str) else "per-token"
    make, _, _ = QUANTISERS[name]
    if not isinstance(how, str):
        make = how
    if plan.quantiser is not None:
        raise UsageError(f"{plan.method} is already quantised and cannot be combined with {name}")
    keys, values = _sides(name, bits)
    _require(name)
    levels = plan.levels
    quantiser = make((keys,) * len(levels.shares))
    if values != keys:
        quantiser = replace(quantiser, values=make((values,) * len(levels.shares)).values)
    if name == "kvquant":
        levels = replace(levels, sink=max(1, levels.sink))
    if len(levels.shares) > 1:
        # Tokens that share scales go down a level together.
        levels = replace(levels, batch=-(-levels.batch // quantiser.block) * quantiser.block)
    return replace(plan, quantiser=quantiser, levels=levels)


def _sides(name: str, bits: int | str) -> tuple[int, int]:
    """Return the bits of keys and of values, which the quantiser has."""
    pair, known = side_bits(bits), QUANTISERS[name][1]
    if wrong := [one for one in pair or (bits,) if one not in known]:
        raise UsageError(
            f"{name} does not support {wrong[0]} bits; use {', '.join(map(str, sorted(known)))}"
        )
    assert pair is not None  # else a text would be among the bits
    return pair


def _require(name: str) -> None:
    if name in LIBRARIES:
        load_library(name)
