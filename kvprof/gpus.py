"""NVIDIA GPUs as the driver describes them, without importing torch or starting a context."""

from dataclasses import asdict, dataclass, field
from typing import Any

import pynvml

__all__ = ["Gpu", "Gpus", "read_gpus"]


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str  # as the driver gives it
    memory_bytes: int | None  # of the whole device; None where the driver does not say
    memory_free_bytes: int | None
    compute_capability: str | None  # for example `"9.0"`
    #: Memory clock times bus width times two (double data rate): what the datasheet gives.
    peak_tb_per_s: float | None

    def description(self) -> dict[str, Any]:
        """Return what does not change from one moment to the next."""
        facts = asdict(self)
        del facts["memory_free_bytes"]
        return facts


@dataclass(frozen=True)
class Gpus:
    """All GPUs and their driver; `problem` says why there are none."""

    devices: list[Gpu] = field(default_factory=list)
    driver: str | None = None
    driver_cuda: str | None = None
    problem: str | None = None


def read_gpus() -> Gpus:
    """Ask the driver for its GPUs; without a driver there are none.

    ``CUDA_VISIBLE_DEVICES`` is not looked at: the machine is described, not the process.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as missing:
        return Gpus(problem=str(missing))
    try:
        cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
        return Gpus(
            devices=[_describe(index) for index in range(pynvml.nvmlDeviceGetCount())],
            driver=_ask(pynvml.nvmlSystemGetDriverVersion),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    except pynvml.NVMLError as failed:
        return Gpus(problem=str(failed))
    finally:
        pynvml.nvmlShutdown()


def _describe(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    clock_mhz = _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    bus_bits = _ask(pynvml.nvmlDeviceGetMemoryBusWidth, handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total if memory else None,
        memory_free_bytes=memory.free if memory else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
        peak_tb_per_s=clock_mhz * 1e6 * 2 * bus_bits / 8 / 1e12 if clock_mhz and bus_bits else None,
    )


def _ask(question: Any, *arguments: Any) -> Any:
    """Return an answer of the driver, or None where it has none (MIG slices, virtual GPUs)."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
