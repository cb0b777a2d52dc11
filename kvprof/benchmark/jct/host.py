"""What the host adds to a pass on a GPU, however little it has to launch."""

import time

import torch
from torch import Tensor

from kvprof.benchmark.capture import capturing
from kvprof.benchmark.case import Place
from kvprof.benchmark.jct.units import Unit

__all__ = ["pass_start"]

# About half a millisecond, within which the host has asked for the token.
_CYCLES = 1_000_000


class _Start:
    """A clock around a captured pass, less the GPU's own time for it.

    The pass keeps the GPU busy without doing anything, for the host asks for the token while the
    GPU works: only launching the graph and bringing the token over are waited for.
    """

    note: str | None = None

    def __init__(self, place: Place) -> None:
        kept = torch.zeros(place.batch, dtype=torch.long, device=place.device)
        self._token = torch.zeros_like(kept)
        self._token.copy_(kept)
        # torch leaves these without types.
        self._begin, self._end = (
            torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda.synchronize(place.device)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            stream = torch.cuda.current_stream()
            self._begin.record(stream)
            # As `kvprof.benchmark.jct.steps` waits; torch leaves it without types too.
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
            self._token.copy_(kept)
            self._end.record(stream)
        self.sample()

    def output(self) -> Tensor:
        return self._token

    def sample(self) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._graph.replay()
        self._token.tolist()
        seconds = time.perf_counter() - start
        return max(0.0, seconds - float(self._begin.elapsed_time(self._end)) / 1e3)


def pass_start(place: Place) -> Unit:
    """Return the start of a CUDA graph, and the wait for the token of every row.

    A pass that is captured has them at its two ends, though launching its many nodes takes longer
    than launching these few. A composed prompt is taken to be captured too, though the runtime
    captures steps only.

    Parameters
    ----------
    place : Place
        On a GPU.
    """
    start = _Start(place)
    return Unit("host", [start.output], ("pass", "host", place.batch), per_pass=True, timed=start)
