"""The table of layers as lines of text, and what stands above its columns."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.tui.layer_rows import COLUMNS, LayerRow
from kvprof.tui.words import size
from kvprof.views.numbers import MISSING, number, span

__all__ = ["TABLE_WIDTH", "LayerTable", "layer_head"]

_TITLES = {
    "layer": "layer",
    "ms": "ms",
    "bytes": "bytes",
    "K": "K rank",
    "V": "V rank",
    "error": "error",
}
_WIDTHS = {"layer": 7, "ms": 9, "bytes": 11, "K": 14, "V": 14, "error": 9}
_BAR = 10  # columns of a layer's time as a bar, where there is room

#: Columns of the table without its bars.
TABLE_WIDTH = sum(_WIDTHS.values())


def layer_head(sort: str, descending: bool) -> Text:
    """Return the titles; a click on one sorts by it, and an arrow shows the order."""
    line = Text(no_wrap=True)
    for name in COLUMNS:
        arrow = (" ▼" if descending else " ▲") if name == sort else ""
        title = Text(f"{_TITLES[name]}{arrow}".rjust(_WIDTHS[name]), style="bold")
        title.apply_meta({"press": f"sort_by({name!r})"})
        line.append_text(title)
    return line


@dataclass(frozen=True)
class LayerTable:
    """Rich renderable of the rows, each with a bar of its time beside it where there is room.

    Attributes
    ----------
    rows : sequence of LayerRow
    """

    rows: Sequence[LayerRow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max((row.seconds or 0.0 for row in self.rows), default=0.0)
        room = min(_BAR, options.max_width - TABLE_WIDTH - 2)
        lines = Text(no_wrap=True)
        for index, row in enumerate(self.rows):
            lines.append("\n" * (index > 0) + _words(row))
            if room > 0 and most > 0:
                lines.append("  " + "━" * round((row.seconds or 0.0) / most * room))
        yield lines


def _words(row: LayerRow) -> str:
    texts = {
        "layer": str(row.layer),
        "ms": number(row.figure("ms")),
        "bytes": size(row.nbytes),
        "K": _rank(row.key_ranks),
        "V": _rank(row.value_ranks),
        "error": number(row.error),
    }
    return "".join(text.rjust(_WIDTHS[name]) for name, text in texts.items())


def _rank(values: list[float]) -> str:
    """Write the mean of the heads and their range: ``48 (40–56)``."""
    if not values:
        return MISSING
    mean = f"{sum(values) / len(values):.0f}"
    return mean if min(values) == max(values) else f"{mean} ({span(values)})"
