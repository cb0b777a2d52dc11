"""Telemetry asks at its rate, leaves out what it is not told, and never outlives its body."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.errors import FailedError, UsageError
from kvprof.records.events import TelemetrySample

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing was sampled"
        time.sleep(0.002)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_cpu_tells_memory_and_how_busy_the_machine_is() -> None:
    events: list[TelemetrySample] = []
    with Telemetry(events.append, time.monotonic, CPU, rate_hz=50) as telemetry:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            sum(range(1000))
        wait_for(lambda: len(events) >= 4)
    assert "telemetry" not in threads()
    assert {event.device for event in events} == {"cpu"}
    for event in events:
        assert event.values["memory_bytes"] > 2**20
    # The first answer would be of no time at all.
    assert "utilisation" not in events[0].values
    shares = [event.values["utilisation"] for event in events[1:]]
    assert all(0 <= share <= 1 for share in shares)
    assert max(shares) > 0.05 / psutil.cpu_count()  # of the machine: one core is busy here
    assert telemetry.energy_joules(events[0].time, events[-1].time) is None


def test_it_keeps_its_rate() -> None:
    events: list[TelemetrySample] = []
    begin = time.monotonic()
    with Telemetry(events.append, time.monotonic, CPU, rate_hz=20):
        wait_for(lambda: len(events) >= 4)
    # One at once, and no more than 20 in a second; a busy machine gives fewer.
    assert len(events) <= 2 + 20 * (time.monotonic() - begin)


class Driver:
    """A driver with one GPU, whose answers tests change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = 0
        self.silent: set[str] = set()
        self.joules = self.watts = 0.0
        self.reasons = 0
        answers = {
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(used=7 * 2**30),
            "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=42),
            "nvmlDeviceGetPowerUsage": lambda h: round(self.watts * 1e3),
            "nvmlDeviceGetClockInfo": lambda h, kind: (
                1980 if kind == pynvml.NVML_CLOCK_SM else 3201
            ),
            "nvmlDeviceGetTemperature": lambda h, kind: 55,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda h: self.reasons,
            "nvmlDeviceGetTotalEnergyConsumption": lambda h: round(self.joules * 1e3),
        }

        def answered(name: str) -> Any:
            def answer(*args: Any) -> Any:
                if name in self.silent:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
                return answers[name](*args)

            return answer

        for name in answers:
            monkeypatch.setattr(pynvml, name, answered(name))
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: self._count(1))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: self._count(-1))
        facts = SimpleNamespace(uuid="1-2-3")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)

    def _count(self, change: int) -> None:
        self.open += change


def test_a_gpu_tells_what_its_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, events = Driver(monkeypatch), []
    driver.watts = 612.5
    driver.reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
    with Telemetry(events.append, time.monotonic, GPU, rate_hz=100):
        wait_for(lambda: events)
        assert driver.open == 1
    assert driver.open == 0
    assert events[0].device == "gpu 0"
    assert events[0].values == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 612.5,
        "temperature_c": 55.0,
        "memory_bytes": 7.0 * 2**30,
        "utilisation": 0.42,
    }
    assert events[0].throttled == ("power",)


def test_what_a_driver_does_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, events = Driver(monkeypatch), []
    driver.silent = {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTotalEnergyConsumption",
    }
    with Telemetry(events.append, time.monotonic, GPU, rate_hz=200) as telemetry:
        wait_for(lambda: len(events) > 3)
    assert set(events[0].values) == {"sm_mhz", "memory_mhz", "temperature_c", "memory_bytes"}
    assert events[0].throttled == ()
    assert telemetry.energy_joules(events[0].time, events[-1].time) is None


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    events: list[Any] = []
    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with Telemetry(events.append, time.monotonic, GPU, rate_hz=100):
        time.sleep(0.05)
    assert events == []


@pytest.mark.parametrize("counter", [True, False])
def test_energy_is_counted_or_integrated(counter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power rises evenly, 10 W more with every second of a clock that the driver advances."""
    driver, events, clock = Driver(monkeypatch), [], [0.0]
    if not counter:
        driver.silent = {"nvmlDeviceGetTotalEnergyConsumption"}

    def emit(event: Any) -> None:
        events.append(event)
        clock[0] += 0.25
        driver.watts = 10 * clock[0]
        driver.joules = 1000 + 5 * clock[0] ** 2

    with Telemetry(emit, lambda: clock[0], GPU, rate_hz=1000) as telemetry:
        wait_for(lambda: len(events) > 12)
    # 10 t dt from 0.5 to 2.5
    assert telemetry.energy_joules(0.5, 2.5) == pytest.approx(30.0, rel=1e-4)
    # Within a sample's time it is taken to grow evenly.
    found = telemetry.energy_joules(0.625, 2.5)
    assert found == pytest.approx(30.0 - (5 * 0.75**2 - 5 * 0.5**2) / 2, rel=1e-4)
    assert telemetry.energy_joules(0.6, 0.8) is None  # one sample tells little
    assert telemetry.energy_joules(0.5, clock[0] + 1) is None
    assert telemetry.energy_joules(-1.0, 2.0) is None


def test_a_full_disk_ends_the_sampling_and_is_told_at_the_end() -> None:
    calls = []

    def emit(event: Any) -> None:
        calls.append(event)
        raise FailedError("the disk is full")

    telemetry = Telemetry(emit, time.monotonic, CPU, rate_hz=200)
    telemetry.__enter__()
    wait_for(lambda: calls)
    time.sleep(0.05)
    with pytest.raises(FailedError, match="disk is full"):
        telemetry.__exit__(None, None, None)
    assert len(calls) == 1


def test_an_error_of_the_body_is_the_one_that_is_told() -> None:
    def emit(event: Any) -> None:
        raise FailedError("the disk is full")

    with pytest.raises(ValueError, match="mine"), Telemetry(emit, time.monotonic, CPU, rate_hz=200):
        raise ValueError("mine")
    assert "telemetry" not in threads()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_must_be_one(rate: float) -> None:
    with pytest.raises(UsageError, match="samples per second"):
        Telemetry(lambda event: None, time.monotonic, CPU, rate_hz=rate)
