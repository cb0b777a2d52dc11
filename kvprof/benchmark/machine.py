"""What the figures of a run are held against, and what makes them doubtful."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

from kvprof.bandwidth import cpu_read_bandwidth, gpu_read_bandwidth
from kvprof.environment import memory_bytes, usable_threads
from kvprof.errors import LackingError

__all__ = ["Machine", "all_threads", "free_bytes", "gpu_warnings", "open_machine"]

_CPU_CACHE = 32 * 2**20  # where the system does not say
_BUSY = 5  # percent of the GPU's time, before the run's own work began
_PERIOD_SECONDS = 1.2  # the driver's is up to a second
_CPU_SHARE = 0.6  # of what is free: other programs, and the reference in float64, need some


@dataclass(frozen=True)
class Machine:
    """Where a run computes."""

    device: torch.device
    tb_per_s: float | None  # read bandwidth, measured in this run
    bandwidth_what: str  # how it was measured
    device_cache_bytes: int  # of the largest cache between the kernels and memory

    @property
    def is_gpu(self) -> bool:
        """Whether the Triton kernels run."""
        return self.device.type == "cuda"


def open_machine(device: torch.device) -> Machine:
    """Measure the device's read bandwidth and ask for what else a run needs to know."""
    if device.type == "cpu":
        return Machine(
            device,
            cpu_read_bandwidth(),
            f"256 MiB summed by NumPy on {usable_threads()} threads, the best of 5",
            _cpu_cache(),
        )
    facts = torch.cuda.get_device_properties(device)
    try:
        bandwidth: float | None = gpu_read_bandwidth(device.index or 0)
        what = "a sum over 2 GiB, the median of 20"
    except torch.OutOfMemoryError:
        bandwidth, what = None, "not measured: the GPU has less than 2 GiB free"
    return Machine(device, bandwidth, what, int(facts.L2_cache_size))


def free_bytes(device: torch.device) -> int:
    """Return how many bytes a run may allocate now."""
    if device.type == "cuda":
        try:
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return int(torch.cuda.mem_get_info(device)[0]) + unused
        except RuntimeError as problem:
            raise LackingError(f"{device} does not report its free memory: {problem}") from problem
    here = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available, max(0, memory_bytes() - here))
    return int(free * _CPU_SHARE)


@contextmanager
def all_threads() -> Iterator[int]:
    """Let torch use every thread of this process while the body runs."""
    before = torch.get_num_threads()
    threads = usable_threads()
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def _cpu_cache() -> int:
    sizes = []
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = entry.read_text("ascii").strip()
        except OSError:
            continue
        factor = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        if (digits := text.rstrip("KM")).isdecimal():
            sizes.append(int(digits) * factor)
    return max(sizes, default=_CPU_CACHE)


def gpu_warnings(device: torch.device, *, before: bool) -> list[str]:
    """Return why times on a GPU may be off: other work on it, or clocks held down."""
    if device.type != "cuda":
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return _warnings(device, before)
    except pynvml.NVMLError:
        return []  # MIG slices and virtual GPUs answer few questions
    finally:
        pynvml.nvmlShutdown()


def _warnings(device: torch.device, before: bool) -> list[str]:
    handle = _handle(device)
    found = []
    if before:
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        if busy > _BUSY:
            # What this process did before the run counts too, until the driver's period is over.
            time.sleep(_PERIOD_SECONDS)
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        if busy > _BUSY:
            found.append(
                f"the GPU was {busy} % busy before the run; another program is using it, so times "
                "may be too long"
            )
        return found
    reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    held = {
        "power": pynvml.nvmlClocksEventReasonSwPowerCap,
        "heat": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "the hardware": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    }
    if why := [name for name, bit in held.items() if reasons & bit]:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        most = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        found.append(
            f"the GPU's clocks were throttled by {' and '.join(why)} ({clock:,} of {most:,} MHz)"
        )
    return found


def _handle(device: torch.device) -> Any:
    """Return the driver's handle of a GPU as torch counts them."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return pynvml.nvmlDeviceGetHandleByUUID(name)
