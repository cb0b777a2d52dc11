"""A request that was put together from times of one layer."""

from dataclasses import dataclass

from kvprof.benchmark.jct.lengths import Request

__all__ = ["Composition", "Step", "Times"]

#: Seconds by part.
Times = dict[str, float]
#: Context, seconds of the pass, and passes that it stands for.
Step = tuple[int, float, float]


@dataclass(frozen=True)
class Composition:
    """A request, put together.

    Attributes
    ----------
    request : Request
    prefill, decode : dict of float
        Seconds by part.
    prefill_seconds, decode_seconds : float
        Of whole layers and what a pass does once.
    steps : list of (int, float, float)
        Context, seconds of the pass, and passes that it stands for.
    error : float or None
        Of `decode_seconds`, because steps between rungs were not measured.
    predicted_from : int or None
        The longest prompt that was measured, where this one was not.
    energy_joules : float or None
        Power while whole layers ran, times the seconds of each phase.
    prefill_interval, decode_interval : (float, float) or None
        95 % intervals of the seconds of the two phases.
    """

    request: Request
    prefill: dict[str, float]
    decode: dict[str, float]
    prefill_seconds: float
    decode_seconds: float
    steps: list[Step]
    error: float | None
    predicted_from: int | None
    energy_joules: float | None = None
    prefill_interval: tuple[float, float] | None = None
    decode_interval: tuple[float, float] | None = None

    @property
    def jct(self) -> float:
        """Seconds of the request."""
        return self.prefill_seconds + self.decode_seconds
