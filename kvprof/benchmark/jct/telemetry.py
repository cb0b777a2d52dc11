"""What the machine does while something is measured, asked at a fixed rate from a thread."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import psutil
import pynvml
import torch

from kvprof.errors import UsageError
from kvprof.records.events import Event, TelemetrySample

__all__ = ["Telemetry"]

_REASONS = {
    "power": "nvmlClocksEventReasonSwPowerCap",
    "heat": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware": "nvmlClocksThrottleReasonHwSlowdown",
    "hardware heat": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


class _Source(Protocol):
    """Something that can be asked; `name` is the event's ``device``."""

    name: str

    def read(self) -> tuple[dict[str, float], tuple[str, ...], float | None]:
        """Return values, reasons for throttling, and joules since some time in the past."""

    def close(self) -> None:
        """Let the driver go."""


class _Cpu:
    """Resident bytes of this process, and how busy all cores of the machine are together."""

    name = "cpu"

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._asked = False

    def read(self) -> tuple[dict[str, float], tuple[str, ...], float | None]:
        values = {"memory_bytes": float(self._process.memory_info().rss)}
        busy = psutil.cpu_percent() / 100.0  # since the last time: the first answer is of nothing
        if self._asked:
            values["utilisation"] = busy
        self._asked = True
        return values, (), None

    def close(self) -> None:
        pass


class _Gpu:
    """A GPU, by its driver. What it does not tell is left out."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.name = f"gpu {index}"
        self._handle: Any = None
        self._opened = False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._opened = True
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._handle = self._ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)

    def read(self) -> tuple[dict[str, float], tuple[str, ...], float | None]:
        if self._handle is None:
            return {}, (), None
        handle, ask = self._handle, self._ask
        used = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        readings = {
            "sm_mhz": ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1e3,
            "temperature_c": ask(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            "memory_bytes": None if used is None else used.used,
            "utilisation": None if rates is None else rates.gpu / 100.0,
        }
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        throttled = tuple(name for name, bit in _REASONS.items() if bits & getattr(pynvml, bit))
        millijoules = ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        values = {name: float(value) for name, value in readings.items() if value is not None}
        return values, throttled, None if millijoules is None else millijoules / 1e3

    def close(self) -> None:
        if self._opened:
            pynvml.nvmlShutdown()

    @staticmethod
    def _ask(question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except pynvml.NVMLError:  # MIG slices and virtual GPUs answer few questions
            return None


class Telemetry:
    """Samples a device while the body runs, in a thread of its own."""

    def __init__(
        self,
        #: Given each sample, from the thread. When it raises, sampling ends and the error is raised
        #: at the end of the body, unless the body has one of its own.
        emit: Callable[[Event], None],
        now: Callable[[], float],  # seconds since the start of the run
        device: torch.device,  # `cpu`, or a GPU
        rate_hz: float = 5.0,  # samples per second
    ) -> None:
        if not 0 < rate_hz < float("inf"):
            raise UsageError(f"{rate_hz:g} samples per second: use more than 0")
        self._emit, self._now, self._device = emit, now, device
        self._period = 1.0 / rate_hz
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._source: _Source | None = None
        self._failure: BaseException | None = None
        # Joules since the first sample that told any, by time; a thread appends to both.
        self._times: list[float] = []
        self._joules: list[float] = []
        self._last_power: tuple[float, float] | None = None

    def __enter__(self) -> "Telemetry":
        self._source = _Gpu(self._device) if self._device.type == "cuda" else _Cpu()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        assert self._source is not None
        self._over.set()
        self._thread.join()
        self._source.close()
        if self._failure is not None and error is None:
            raise self._failure

    def energy_joules(self, start: float, stop: float) -> float | None:
        """Return the device's energy between two times, by counter or integrated power."""
        times, joules = self._times[:], self._joules[:]
        times = times[: len(joules)]
        inside = bisect_right(times, stop) - bisect_left(times, start)
        if inside < 2 or times[0] > start or times[-1] < stop:
            return None
        return _interpolate(times, joules, stop) - _interpolate(times, joules, start)

    def _sample(self) -> None:
        assert self._source is not None
        due = self._now()
        try:
            while True:
                values, throttled, joules = self._source.read()
                moment = self._now()
                self._count(moment, values.get("power_w"), joules)
                if values:
                    self._emit(TelemetrySample(moment, self._source.name, values, throttled))
                due = max(due + self._period, self._now())
                if self._over.wait(max(0.0, due - self._now())):
                    return
        except BaseException as failure:
            # A thread has nobody to tell; the body's end has.
            self._failure = failure

    def _count(self, moment: float, power: float | None, joules: float | None) -> None:
        if joules is None and power is not None:
            joules = self._joules[-1] if self._joules else 0.0
            if self._last_power is not None:
                before, watts = self._last_power
                joules += (moment - before) * (power + watts) / 2
            self._last_power = moment, power
        if joules is not None:
            self._joules.append(joules)
            self._times.append(moment)


def _interpolate(times: list[float], values: list[float], at: float) -> float:
    index = min(max(bisect_right(times, at), 1), len(times) - 1)
    low, high = times[index - 1], times[index]
    share = (at - low) / (high - low) if high > low else 0.0
    return values[index - 1] + share * (values[index] - values[index - 1])
