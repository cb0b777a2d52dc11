"""What summing hidden states over the GPUs of tensor parallelism costs: measured, or left out."""

import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvprof.analysis.jct import interpolated
from kvprof.child import child_environment, child_python
from kvprof.errors import FailedError
from kvprof.leash import Leash

__all__ = ["AllReduce", "measure_all_reduce"]

_LEAST, _MOST = 2**12, 2**30  # bytes
_SECONDS = 300
# One process per GPU: NCCL, then medians of a graph's replays as elsewhere.
_PROGRAM = """
from kvprof.leash import follow_parent
follow_parent()
import gc, json, os, sys, statistics, torch, torch.distributed as dist
rank, world, sizes = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=world,
                        init_method="tcp://127.0.0.1:" + sys.argv[4],
                        device_id=torch.device("cuda", rank))
found = []
gc.disable()  # what it frees would end a capture
for size in sizes:
    data = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 8
    # NCCL's own threads ask for events meanwhile, which only this mode lets them.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            dist.all_reduce(data)
    samples = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record(); graph.replay(); end.record(); end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / calls)
    found.append(statistics.median(samples[2:]))
    del graph, data
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class AllReduce:
    """Measured times by size.

    Attributes
    ----------
    sizes : list of int
        Bytes on each GPU, ascending.
    seconds : list of float
    """

    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __call__(self, nbytes: int) -> float:
        """Return the seconds of summing so many bytes over all GPUs."""
        if nbytes >= self.sizes[-1]:
            return self.seconds[-1] * nbytes / self.sizes[-1]  # bandwidth is all that counts there
        return interpolated(self.sizes, self.seconds, max(nbytes, self.sizes[0]))


def measure_all_reduce(
    tp: int, *, count: Callable[[], int] = torch.cuda.device_count,
    program: Sequence[str] = tuple(child_python("-c", _PROGRAM)),
) -> AllReduce | None:  # fmt: skip
    """Measure NCCL's all-reduce over `tp` GPUs; None where there are not as many.

    Parameters
    ----------
    tp : int
    count : callable
        How many GPUs there are.
    program : sequence of str
        What each process runs; given its rank, the number of processes, sizes and a port.

    Raises
    ------
    FailedError
        When the processes fail, with their last words.
    """
    if count() < tp:
        return None
    sizes = [size for power in range(12, 31, 2) if _LEAST <= (size := 2**power) <= _MOST]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    leashes = [Leash() for _ in range(tp)]
    running = [
        leashes[rank].start(
            [*program, str(rank), str(tp), json.dumps(sizes), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(),
        )
        for rank in range(tp)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=_SECONDS) for one in running]
    except subprocess.TimeoutExpired:
        raise FailedError(f"all-reduce over {tp} GPUs did not end within {_SECONDS} s") from None
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
        for leash in leashes:
            leash.close()
    if any(one.returncode for one in running):
        words = next(err for one, (_, err) in zip(running, said, strict=True) if one.returncode)
        last = [line for line in words.splitlines() if line.strip()][-1:]
        raise FailedError(f"all-reduce over {tp} GPUs failed: {(last or ['no word why'])[0][:200]}")
    return AllReduce(sizes, json.loads(said[0][0].splitlines()[-1]))
