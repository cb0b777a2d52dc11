"""A line per device: clocks, power, temperature, memory, load, and whether it was slowed down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.tui.palette import Ink
from kvprof.tui.state import DeviceState
from kvprof.tui.words import size

__all__ = ["Telemetry", "spark"]

_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 16  # columns of the history
_WRITTEN: dict[str, Callable[[float], str]] = {
    "utilisation": lambda value: f"{100 * value:.0f} % busy",
    "load": lambda value: f"{100 * value:.0f} % of its threads",  # in older records
    "power_w": lambda value: f"{value:.0f} W",
    "temperature_c": lambda value: f"{value:.0f} °C",
    "sm_mhz": lambda value: f"SM {value:,.0f} MHz",
    "memory_mhz": lambda value: f"memory {value:,.0f} MHz",
    "memory_bytes": lambda value: f"{size(value)} used",
}
# What the history shows: the first that is there.
_HISTORY = {"power_w": "power", "utilisation": "busy", "load": "busy", "memory_bytes": "memory"}


@dataclass(frozen=True)
class Telemetry:
    """Rich renderable of the newest samples.

    Attributes
    ----------
    devices : mapping of str to DeviceState
    ink : Ink
    """

    devices: Mapping[str, DeviceState]
    ink: Ink

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.devices:
            yield Text("no telemetry yet", style="dim")
        for name, device in self.devices.items():
            yield self._line(name, device, options.max_width)

    def _line(self, name: str, device: DeviceState, width: int) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{name:<6}", style="bold")
        if device.throttled:
            line.append(f" ▼ slowed down: {', '.join(device.throttled)}", style=self.ink.bad())
        words = [
            write(device.latest[key]) for key, write in _WRITTEN.items() if key in device.latest
        ]
        if name == "cpu":  # the one busy of the machine, the other of the measurement
            words = [
                word.replace("% busy", "% of all cores busy").replace("used", "in this process")
                for word in words
            ]
        for index, word in enumerate(words):
            text = f"{' ·' if index or device.throttled else ''} {word}"
            if line.cell_len + len(text) > width:
                break
            line.append(text)
        shown = next((key for key in _HISTORY if key in device.latest), None)
        if shown is not None:
            values = [values[shown] for _, values in device.history if shown in values]
            drawn = f"  {_HISTORY[shown]} {spark(values, _SPARK)}"
            if line.cell_len + len(drawn) <= width:
                line.append(drawn)
        return line


def spark(values: list[float], width: int) -> str:
    """Return the newest `width` values as bars from their lowest to their highest."""
    newest = values[-width:]
    if not newest:
        return ""
    low, high = min(newest), max(newest)
    if high <= low:
        return _BARS[3] * len(newest)
    steps = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low) * steps)] for value in newest)
