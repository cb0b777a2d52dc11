"""How fast memory can be read here: the limit that decides what a smaller cache can gain."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvprof.environment import usable_threads

__all__ = ["cpu_read_bandwidth", "gpu_read_bandwidth"]

_CPU_BYTES = 256 * 1024**2  # far over any last-level cache, yet quick to fill
_GPU_BYTES = 2 * 1024**3
_GPU_REPEATS = 20
_REPEATS = 5


def cpu_read_bandwidth(repeats: int = _REPEATS) -> float:
    """Read 256 MiB with every thread and return the best rate of a few, in TB/s.

    The figure is a first look (0.2 s), not a benchmark: NumPy's sum, on all usable threads.
    """
    threads = usable_threads()
    # Written once, or every page would be the same page of zeros.
    parts = np.array_split(np.ones(_CPU_BYTES // 4, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            times.append(time.perf_counter() - start)
    return _CPU_BYTES / min(times) / 1e12


def gpu_read_bandwidth(index: int) -> float:
    """Sum 2 GiB on a GPU and return the median rate, in TB/s.

    Imports torch and makes a CUDA context.
    """
    import torch

    with torch.cuda.device(index):
        block = torch.ones(_GPU_BYTES // 4, device="cuda")
        block.sum()  # to warm up
        times = []
        for _ in range(_GPU_REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            block.sum()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return _GPU_BYTES / float(np.median(times)) / 1e12
