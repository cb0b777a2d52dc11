"""How schedules load the multiprocessors: a column per SM, as high as its work."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.views.numbers import MISSING

__all__ = ["BalanceStrip", "makespan_over_mean", "strip_scales"]

_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_LEAST_SLOTS = 8
_FLATTEST = 0.25  # of a full column, below which a strip says nothing


@dataclass(frozen=True)
class BalanceStrip:
    """Rich renderable of the loads of all SMs, 0 to the largest of the strips it stands among.

    Attributes
    ----------
    label : str
        In front of it.
    loads : sequence of float
        Per multiprocessor.
    most : float
        What a full column stands for.
    """

    label: str
    loads: Sequence[float]
    most: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ratio = makespan_over_mean(self.loads)
        behind = MISSING if ratio is None else f"max/mean {ratio:.3f}"
        slots = options.max_width - len(self.label) - len(behind) - 2
        label = f"{self.label} "
        if slots < _LEAST_SLOTS:
            yield Text(self.label.rstrip(), overflow="fold")
            label, slots = "", max(1, options.max_width - len(behind) - 1)
        # Several SMs share a column where there is no room for all: the busiest of them counts.
        each = -(-len(self.loads) // slots)
        tops = [max(self.loads[i : i + each]) for i in range(0, len(self.loads), each)]
        bars = _ASCII_BARS if options.ascii_only else _BARS
        line = Text(label)
        for top in tops:
            share = top / self.most if self.most > 0 else 0.0
            line.append(bars[min(8, max(int(top > 0), round(8 * share)))], style="cyan")
        line.append(f" {behind}")
        yield line


def strip_scales(highest: Sequence[float]) -> list[float]:
    """Return what a full column stands for in each of several strips.

    They share a scale, so that they can be compared, but for those that it would leave flat: these
    have their own.

    Parameters
    ----------
    highest : sequence of float
        The largest load of each strip.
    """
    most = max(highest, default=0.0)
    return [most if own >= _FLATTEST * most else own for own in highest]


def makespan_over_mean(loads: Sequence[float]) -> float | None:
    """Return the largest load over the mean; None where nothing is loaded."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else None
