"""How long requests are: as a paper's trace, all alike, or as in a file; and the load they make."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvprof.errors import UsageError
from kvprof.serving.load.arrivals import Arrivals, scaled_times
from kvprof.serving.load.requests import Request
from kvprof.serving.load.trace_files import RecordedTrace, read_trace_file
from kvprof.serving.load.traces import Trace, load_trace, sample_requests, trace_names
from kvprof.sizes import parse_count

__all__ = ["Lengths", "arriving", "load_lengths"]

_SHORT = 256  # tokens written, of lengths that are proposed
_PAPER = "fdc"  # whose lengths a trace without its paper has


@dataclass(frozen=True)
class Lengths:
    """Where the lengths of requests come from; one of the three is set."""

    name: str  # `fdc/arxiv`, `in=8192,out=256` or a file's name
    trace: Trace | None = None  # A paper's
    fixed: tuple[int, int] | None = None  # prompt and output, in tokens
    recorded: RecordedTrace | None = None  # A file's
    default: bool = False  # whether nobody asked for them

    def refuse_over(self, longest: int, why: str) -> None:
        """Refuse more tokens of a request than fit, as `why` says: ``it has 2,048 positions``."""
        if self.longest <= longest:
            return
        output = max(1, min(_SHORT, longest // 8))
        said = f"{self.name} (the default)" if self.default else self.name
        raise UsageError(
            f"--lengths {said}: requests have up to {self.longest:,} tokens, but {why}; use "
            f"shorter ones, such as --lengths in={max(1, longest - output)},out={output}"
        )

    @property
    def timed(self) -> bool:
        """Whether there are times to arrive at: ``--arrivals trace``."""
        return self.recorded is not None and self.recorded.timed

    @property
    def longest(self) -> int:
        """The most tokens, prompt and output, that a request can have."""
        if self.trace is not None:
            return self.trace.input.maximum + self.trace.output.maximum
        if self.fixed is not None:
            return sum(self.fixed)
        assert self.recorded is not None
        return max(one.prompt + one.output for one in self.recorded.requests)

    def described(self) -> dict[str, Any]:
        """Return what a result says of it, as JSON values; nothing of a file's text."""
        recorded = self.recorded
        return {
            "name": self.name,
            "source": self.trace.source
            if self.trace is not None
            else f"{recorded.format} file"
            if recorded is not None
            else "fixed",
            "requests": None if recorded is None else len(recorded.requests),
            "skipped": None if recorded is None else recorded.skipped,
            "digest": None if recorded is None else _digest(recorded.requests),
        }

    def draw(self, count: int, seed: int) -> list[Request]:
        """Return requests of these lengths, in the order in which they shall arrive."""
        if self.trace is not None:
            drawn = sample_requests(self.trace, count, seed)
            return [Request(number, 0.0, *sizes) for number, sizes in enumerate(drawn)]
        if self.fixed is not None:
            return [Request(number, 0.0, *self.fixed) for number in range(count)]
        assert self.recorded is not None
        own = self.recorded.requests
        if not self.recorded.timed:
            order = np.random.default_rng(seed).permutation(len(own))
            own = tuple(own[index] for index in order)
        span = own[-1].arrival * len(own) / max(1, len(own) - 1)
        # Numbers of sessions are blocks': one distance keeps the copies of both apart.
        distance = 1 + max((max(one.blocks, default=0) for one in own), default=0)
        found = []
        for number in range(count):
            again, index = divmod(number, len(own))
            one = own[index]
            found.append(
                replace(
                    one,
                    number=number,
                    arrival=one.arrival + again * span,
                    session=None if one.session is None else one.session + again * distance,
                    blocks=tuple(block + again * distance for block in one.blocks),
                )
            )
        return found


def _digest(requests: Sequence[Request]) -> str:
    """Return what two files of the same requests have in common, and hardly two of others."""
    known = [(one.prompt, one.output, one.arrival, list(one.blocks)) for one in requests]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def load_lengths(text: str, count: Callable[[str], int] | None = None) -> Lengths:
    """Read what ``--lengths`` names."""
    name = text.strip()
    known = trace_names()
    for candidate in (name.lower(), f"{_PAPER}/{name.lower()}"):
        if candidate in known:
            return Lengths(candidate, trace=load_trace(candidate, what="--lengths"))
    if name.startswith("in=") or ",in=" in name:
        fixed = _fixed(name)
        return Lengths(f"in={fixed[0]},out={fixed[1]}", fixed=fixed)
    if not Path(name).exists():
        raise UsageError(
            f"--lengths {name}: not a trace or a file; use {', '.join(known)}, in=8k,out=256 or a "
            "file of requests"
        )
    recorded = read_trace_file(Path(name), count)
    return Lengths(recorded.name, recorded=recorded)


def _fixed(text: str) -> tuple[int, int]:
    sides = dict(part.partition("=")[::2] for part in text.split(","))
    if set(sides) != {"in", "out"} or text.count(",") != 1:
        raise UsageError(f"--lengths {text}: give both lengths, for example in=8k,out=256")
    prompt, output = (parse_count(sides[side], what=f"--lengths {side}") for side in ("in", "out"))
    return prompt, output


def arriving(
    lengths: Lengths, arrivals: Arrivals, rate: float, count: int, seed: int
) -> list[Request]:
    """Return requests with arrival times; count and seed fix them at every rate."""
    requests = lengths.draw(count, seed)
    if arrivals.kind == "trace":
        if not lengths.timed:
            raise UsageError(
                f"--arrivals trace: {lengths.name} has no arrival times; use poisson or a file "
                "with times"
            )
        times = scaled_times([one.arrival for one in requests], rate)
    else:
        times = np.cumsum(arrivals.gaps(count, seed)) / rate
    return [replace(one, arrival=float(time)) for one, time in zip(requests, times, strict=True)]
