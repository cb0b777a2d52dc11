"""When requests arrive: Poisson, more or less bursty than that, or as they were recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import UsageError

__all__ = ["Arrivals", "parse_arrivals", "scaled_times"]

_LEAST_CV, _MOST_CV = 1e-3, 100.0
_WAYS = "poisson, gamma:cv=2 (burstier), gamma:cv=0 (evenly spaced) or trace (times of the file)"


@dataclass(frozen=True)
class Arrivals:
    """A process of arrivals."""

    kind: str = "poisson"  # `poisson`, `gamma` or `trace`
    #: Coefficient of variation of the time between two arrivals: 1 of Poisson, 0 evenly spaced; of
    #: a trace it means nothing.
    cv: float = 1.0

    @property
    def name(self) -> str:
        """As `parse_arrivals` reads it."""
        return f"gamma:cv={self.cv:.15g}" if self.kind == "gamma" else self.kind

    def gaps(self, count: int, seed: int) -> NDArray[np.float64]:
        """Draw inter-arrival times with mean 1 exactly; each rate divides the same times."""
        generator = np.random.default_rng([seed, 1])  # lengths are drawn with the seed itself
        if self.kind == "gamma" and self.cv == 0:
            return np.ones(count)
        shape = self.cv**-2
        drawn = generator.gamma(shape, 1 / shape, count)
        total = float(drawn.sum())
        # Nearly all of very bursty gaps are 0: of few, maybe all.
        return drawn * (count / total) if total > 0 else np.ones(count)


def parse_arrivals(text: str) -> Arrivals:
    """Read ``poisson``, ``gamma:cv=2`` or ``trace``."""
    kind, _, option = text.strip().lower().partition(":")
    if kind in ("poisson", "trace") and not option:
        return Arrivals(kind)
    if kind == "gamma" and option.startswith("cv="):
        try:
            cv = float(option.removeprefix("cv="))
        except ValueError:
            cv = -1.0
        if cv == 0 or _LEAST_CV <= cv <= _MOST_CV:
            return Arrivals("gamma", cv)
        raise UsageError(
            f"--arrivals {text[:40]}: the coefficient of variation must be 0 or from "
            f"{_LEAST_CV:g} to {_MOST_CV:g}"
        )
    raise UsageError(f"--arrivals {text[:40]}: use {_WAYS}")


def scaled_times(times: Sequence[float], rate: float) -> NDArray[np.float64]:
    """Return recorded times stretched to a rate, the first at its mean gap."""
    own = np.asarray(times, dtype=np.float64)
    if len(own) < 2:
        return np.full(len(own), 1 / rate)
    span = float(own[-1] - own[0])
    if span <= 0:
        raise UsageError(
            "--arrivals trace: all requests arrive at the same time, so there is no rate; use "
            "poisson"
        )
    stretched: NDArray[np.float64] = (own - own[0]) * ((len(own) - 1) / span / rate)
    return stretched + 1 / rate
