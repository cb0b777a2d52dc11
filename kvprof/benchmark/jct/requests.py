"""Percentiles over the requests of a trace: TTFT, TBT, latency and overheads (FDC §6.5, §6.8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import brentq

from kvprof.analysis.jct import percentiles
from kvprof.benchmark.jct.composition import Composition
from kvprof.errors import UsageError
from kvprof.records.cases import Account

__all__ = [
    "DOUBTFUL",
    "OVERHEADS",
    "Lengths",
    "Trace",
    "load_trace",
    "sample_requests",
    "summary",
    "trace_doubts",
    "trace_names",
]

# --- Requests as long as the papers' (FDC table 6, ZACK table 3), drawn with a seed.


_PAPERS = ("fdc", "zack")
_FLAT = 1e-6  # of the rate: below it the density is flat to 16 digits


@dataclass(frozen=True)
class Lengths:
    """One column group of a table, in tokens."""

    average: int
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Trace:
    """Lengths of requests.

    Attributes
    ----------
    name : str
        For example ``fdc/arxiv``.
    source : str
        Paper, table and row.
    input, output : Lengths
    """

    name: str
    source: str
    input: Lengths
    output: Lengths

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


def _lengths(cells: dict[str, str]) -> Lengths:
    return Lengths(*(_tokens(cells[key]) for key in ("average", "minimum", "maximum")))


def _tokens(cell: str) -> int:
    """Read a cell as it is printed: ``6.3K`` is 6,451 tokens."""
    factor = 1024 if cell.endswith("K") else 1
    return round(float(cell.removesuffix("K")) * factor)


def trace_names() -> list[str]:
    """Return the names of all traces."""
    return list(_shipped())


def load_trace(name: str) -> Trace:
    """Return a trace by name.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    found = _shipped().get(name.lower())
    if found is None:
        raise UsageError(f"--trace: no trace {name!r}: there are {', '.join(trace_names())}")
    return found


def sample_requests(trace: Trace, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Draw requests, ``(input_len, output_len)``; see the module for the distribution.

    Parameters
    ----------
    trace : Trace
    count : int
    seed : int
    """
    generator = np.random.default_rng(seed)
    sides = [_drawn(lengths, count, generator) for lengths in (trace.input, trace.output)]
    return [(int(a), int(b)) for a, b in zip(*sides, strict=True)]


def _drawn(lengths: Lengths, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    low, high = lengths.minimum, lengths.maximum
    strata = (generator.permutation(count) + generator.random(count)) / count
    share = (lengths.average - low) / (high - low)
    places = _quantile(strata, _rate(share))
    tokens: NDArray[np.int64] = np.rint(low + places * (high - low)).astype(np.int64)
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


#: Of decode: an integration error that is worth a warning.
DOUBTFUL = 0.02

#: Parts whose share of JCT is told for every method that has them (FDC tables 12 and 13).
OVERHEADS = ("compress", "decompress", "schedule", "basis", "quantise")


def summary(trace: Trace, seed: int, found: dict[str, list[Composition]]) -> dict[str, Any]:
    """Return ``data.requests``.

    Parameters
    ----------
    trace : Trace
    seed : int
        Of the lengths.
    found : dict
        The composed requests of each method; all of the same lengths.

    Returns
    -------
    dict
        The trace, the distribution, and per method the mean and percentiles over requests of TTFT,
        of each request's mean TBT, of JCT, of JCT per output token (normalised latency), and of the
        share of JCT of each part that compression brings.
    """
    figures: dict[str, list[dict[str, Any]]] = {
        "ttft": [],
        "tbt": [],
        "jct": [],
        "normalised_latency": [],
        "overheads": [],
    }
    for method, requests in found.items():
        decoded = [one for one in requests if one.request.output_len > 1]
        for name, values in (
            ("ttft", [one.prefill_seconds for one in requests]),
            ("tbt", [one.decode_seconds / (one.request.output_len - 1) for one in decoded]),
            ("jct", [one.jct for one in requests]),
            ("normalised_latency", [one.jct / one.request.output_len for one in requests]),
        ):
            if values:
                figures[name].append({"method": method, **_seconds(values)})
        figures["overheads"] += [
            {
                "method": method,
                "part": part,
                **{f"{key}_share": value for key, value in percentiles(shares).items()},
            }
            for part, shares in _shares(requests).items()
        ]
    first = next(iter(found.values()))
    return {
        "trace": trace.name,
        "source": trace.source,
        "lengths": {side: trace.described()[side] for side in ("input", "output")},
        "distribution": "truncated exponential with the published mean, stratified; inputs and "
        "outputs independent",
        "seed": seed,
        "count": len(first),
        "mean_input_len": sum(one.request.input_len for one in first) / len(first),
        "mean_output_len": sum(one.request.output_len for one in first) / len(first),
        **figures,
    }


def trace_doubts(method: str, requests: Sequence[Composition]) -> list[str]:
    """Return what a reader of a method's percentiles must know of its requests.

    Parameters
    ----------
    method : str
    requests : sequence of Composition
    """
    found = []
    if predicted := [one for one in requests if one.predicted_from is not None]:
        found.append(
            f"{method}: prefill of {len(predicted)} of {len(requests)} requests is predicted from "
            f"prompts of up to {predicted[0].predicted_from:,} tokens"
        )
    off = [one.error / one.decode_seconds for one in requests if one.error and one.decode_seconds]
    if off and max(off) > DOUBTFUL:
        found.append(
            f"{method}: decode may be off by up to {max(off):.1%} in one of {len(requests)} "
            "requests: times between the contexts that were measured do not lie on a line"
        )
    if astray := sum(not _account(one).adds_up() for one in requests):
        found.append(
            f"{method}: the parts of {astray} of {len(requests)} requests do not add up to their "
            "time: no shares are told of these"
        )
    return found


def _account(one: Composition) -> Account:
    account = Account(walls={"prefill": one.prefill_seconds, "decode": one.decode_seconds})
    for phase, parts in (("prefill", one.prefill), ("decode", one.decode)):
        for part, seconds in parts.items():
            account.add_part(phase, part, seconds)
    return account


def _seconds(values: Sequence[float]) -> dict[str, float]:
    return {f"{key}_seconds": value for key, value in percentiles(values).items()}


def _shares(requests: Sequence[Composition]) -> dict[str, list[float]]:
    adding_up = [one for one in requests if _account(one).adds_up()]
    return {
        part: [
            (one.prefill.get(part, 0.0) + one.decode.get(part, 0.0)) / one.jct for one in adding_up
        ]
        for part in OVERHEADS
        if any(part in one.prefill or part in one.decode for one in adding_up)
    }
