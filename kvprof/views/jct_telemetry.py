"""The machine during a run: clocks, power, temperature, memory, and what slowed it down."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from kvprof.sizes import format_bytes
from kvprof.views.numbers import number
from kvprof.views.page import bullets
from kvprof.views.tables import Column, DataTable

__all__ = ["telemetry_table", "throttled"]

_UNITS = {
    "sm_mhz": ("SM clock", "MHz", 1.0),
    "memory_mhz": ("memory clock", "MHz", 1.0),
    "power_w": ("power", "W", 1.0),
    "temperature_c": ("temperature", "°C", 1.0),
    "utilisation": ("utilisation", "%", 100.0),
    "load": ("load", "%", 100.0),
}


def telemetry_table(telemetry: Mapping[str, Any]) -> DataTable | None:
    """Return a row per device and value: median and range over the run; None without any."""
    rows = []
    for device, found in telemetry.items():
        for name, values in found["values"].items():
            known = (values["median"], values["least"], values["most"])
            if name.endswith("_bytes"):
                words = name.removesuffix("_bytes")
                cells = tuple(format_bytes(value) for value in known)
            else:
                words, unit, factor = _UNITS.get(name, (name, "", 1.0))
                cells = tuple(f"{number(value * factor)} {unit}".rstrip() for value in known)
            rows.append((device, words, *cells))
    columns = (
        Column("device", words=True), Column("value", words=True), Column("median"),
        Column("least"), Column("most"),
    )  # fmt: skip
    return DataTable(columns, rows) if rows else None


def throttled(telemetry: Mapping[str, Any]) -> list[RenderableType]:
    """Return a line per device and reason for which it ran slower; none where nothing slowed it."""
    lines = [
        f"{device} was throttled in {times} of {found['samples']} samples: {reason}"
        for device, found in telemetry.items()
        for reason, times in found["throttled"].items()
    ]
    return [bullets(lines, "yellow")] if lines else []
