"""What the host adds to a pass on a GPU, however little it has to launch."""

import torch
from torch import Tensor

from kvprof.benchmark.case import Place
from kvprof.benchmark.jct.units import Unit

__all__ = ["pass_start"]


def pass_start(place: Place) -> Unit:
    """Return the start of a CUDA graph, and the wait for the token of every row.

    The graph copies those tokens and does nothing else, so that the clock shows little but the
    host's own time; a pass that is captured has the same at both of its ends. A composed prompt is
    taken to be captured too, though the runtime captures steps only.

    Parameters
    ----------
    place : Place
        On a GPU.
    """
    kept = torch.zeros(place.batch, dtype=torch.long, device=place.device)
    token = torch.zeros_like(kept)
    token.copy_(kept)
    torch.cuda.synchronize(place.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(kept)

    def run() -> Tensor:
        graph.replay()
        token.tolist()
        return token

    return Unit("host", [run], ("pass", "host", place.batch), per_pass=True, on_host=True)
