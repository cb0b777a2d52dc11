"""Lengths of requests as the papers print them (FDC table 6, ZACK table 3).

Only mean, minimum and maximum are published: lengths are drawn, with a seed, from a stratified,
truncated exponential distribution.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import brentq

from kvprof.errors import UsageError

__all__ = ["TokenRange", "Trace", "load_trace", "sample_requests", "trace_names"]

_PAPERS = ("fdc", "zack")
_FLAT = 1e-6  # of the rate: below it the density is flat to 16 digits


@dataclass(frozen=True)
class TokenRange:
    """One column group of a table, in tokens."""

    average: int
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Trace:
    """Lengths of requests."""

    name: str  # for example `fdc/arxiv`
    source: str  # paper, table and row
    input: TokenRange
    output: TokenRange

    def described(self) -> dict[str, Any]:
        """Return the trace as JSON values."""
        sides = {"input": self.input, "output": self.output}
        return {
            "name": self.name,
            "source": self.source,
            **{
                side: {"average": it.average, "minimum": it.minimum, "maximum": it.maximum}
                for side, it in sides.items()
            },
        }


@cache
def _shipped() -> dict[str, Trace]:
    found = {}
    for paper in _PAPERS:
        text = (files("kvprof") / "assets" / "traces" / f"{paper}.yaml").read_text("utf-8")
        table = yaml.safe_load(text)
        for name, entry in table["traces"].items():
            found[f"{paper}/{name}"] = Trace(
                f"{paper}/{name}",
                f"{table['source']} {table['table']}, {entry['row']}",
                _lengths(entry["input"]),
                _lengths(entry["output"]),
            )
    return found


def _lengths(cells: dict[str, str]) -> TokenRange:
    return TokenRange(*(_tokens(cells[key]) for key in ("average", "minimum", "maximum")))


def _tokens(cell: str) -> int:
    """Read a cell as it is printed: ``6.3K`` is 6,451 tokens."""
    factor = 1024 if cell.endswith("K") else 1
    return round(float(cell.removesuffix("K")) * factor)


def trace_names() -> list[str]:
    """Return the names of all traces."""
    return list(_shipped())


def load_trace(name: str, *, what: str = "--trace") -> Trace:
    """Return a trace by name."""
    found = _shipped().get(name.lower())
    if found is None:
        raise UsageError(f"{what}: no trace {name!r}; use {', '.join(trace_names())}")
    return found


def sample_requests(trace: Trace, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Draw requests, ``(input_len, output_len)``; see the module for the distribution."""
    generator = np.random.default_rng(seed)
    sides = [_drawn(lengths, count, generator) for lengths in (trace.input, trace.output)]
    return [(int(a), int(b)) for a, b in zip(*sides, strict=True)]


def _drawn(lengths: TokenRange, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    low, high = lengths.minimum, lengths.maximum
    strata = (generator.permutation(count) + generator.random(count)) / count
    share = (lengths.average - low) / (high - low)
    drawn = _quantile(strata, _rate(share))
    tokens: NDArray[np.int64] = np.rint(low + drawn * (high - low)).astype(np.int64)
    return tokens


def _mean(rate: float) -> float:
    """Return the mean of ``exp(rate · x)`` on 0 … 1, as a density."""
    if abs(rate) < _FLAT:
        return 0.5 + rate / 12
    return float(1 / -np.expm1(-rate) - 1 / rate)


def _rate(mean: float) -> float:
    """Return the rate whose density has this mean, between 0 and 1."""
    return float(brentq(lambda rate: _mean(rate) - mean, -500.0, 500.0))


def _quantile(shares: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    if abs(rate) < _FLAT:
        return shares
    found: NDArray[np.float64] = np.log1p(shares * np.expm1(rate)) / rate
    return found
