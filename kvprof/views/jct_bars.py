"""Job completion time as stacked bars: a fill of its own per part, a colour on top of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.records.cases import UNTIMED, Account, ordered_parts
from kvprof.views.numbers import MISSING, duration
from kvprof.views.page import flow

__all__ = [
    "FILLS",
    "SERIES",
    "BalanceStrip",
    "Bar",
    "Ink",
    "StackedBars",
    "bar_of",
    "fill",
    "makespan_over_mean",
    "strip_scales",
]

# --- How schedules load the multiprocessors: a column per SM, as high as its work.


_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_LEAST_CELLS = 8
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
        if slots < _LEAST_CELLS:
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


#: One glyph per part, told apart without colour and one column wide everywhere.
FILLS = {
    "attention": "█", "decompress": "▓", "compress": "▒", "quantise": "▞", "evict": "▚",
    "basis": "◆", "merge": "▌", "schedule": "║", "embedding": "∘", "norm": "-",
    "qkv_proj": "╱", "rope": "~", "o_proj": "╲", "mlp": "░", "head": "╳", "sampling": "+",
    "communication": "≡", "host": "·", "unattributed": "?", UNTIMED: "┄",
}  # fmt: skip
_ASCII = {
    "attention": "A", "decompress": "D", "compress": "C", "quantise": "Q", "evict": "E",
    "basis": "B", "merge": "G", "schedule": "S", "embedding": "e", "norm": "-", "qkv_proj": "/",
    "rope": "~", "o_proj": "\\", "mlp": "m", "head": "x", "sampling": "+", "communication": "=",
    "host": ".", "unattributed": "?", UNTIMED: "_",
}  # fmt: skip
# The terminal's own palette, so that it suits the background; the fill tells the rest apart.
_COLOURS = {
    "attention": 4, "decompress": 1, "compress": 3, "quantise": 3, "evict": 3, "basis": 1,
    "merge": 6, "schedule": 6, "mlp": 2, "head": 2, "qkv_proj": 5, "rope": 5, "o_proj": 5,
    "communication": 1,
}  # fmt: skip
_LEAST_SLOTS = 12


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes
    ----------
    label : str
        In front of it.
    parts : mapping
        Part to value, from left to right; what is not positive is not drawn.
    note : str
        Behind it.
    """

    label: str
    parts: Mapping[str, float]
    note: str = ""

    @property
    def drawn(self) -> float:
        """Value of the whole bar."""
        return sum(value for value in self.parts.values() if value > 0)


def bar_of(label: str, account: Account) -> Bar:
    """Return the bar of a request: its time, and beside it whatever its parts do not add up to.

    Parameters
    ----------
    label : str
    account : Account
    """
    time = duration(account.seconds)
    said = [time if account.walls is not None else f"{time} so far"]
    if (misfit := account.misfit()) is not None:
        said.append(f"! {misfit}")
    return Bar(label, account.stack(), ", ".join(said))


@dataclass(frozen=True)
class StackedBars:
    """Rich renderable of bars on one scale, with their legend.

    Attributes
    ----------
    bars : sequence of Bar
    title : str
        Above them; empty for none.
    shares : bool
        Every bar fills the width, so that shares are compared; otherwise the longest one does.
    """

    bars: Sequence[Bar]
    title: str = ""
    shares: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold", overflow="fold")
        fills = _ASCII if options.ascii_only else FILLS
        gutter = max((len(bar.label) for bar in self.bars), default=0) + 1
        behind = max((len(bar.note) for bar in self.bars), default=0) + 1
        slots = options.max_width - gutter - behind
        most = max((bar.drawn for bar in self.bars), default=0.0)
        shown: list[str] = []
        for bar in self.bars:
            if slots < _LEAST_SLOTS:
                yield Text(f"{bar.label}: {bar.note}", overflow="fold")
                continue
            line = Text(f"{bar.label:<{gutter}}")
            for part, length in columns(bar, bar.drawn if self.shares else most, slots):
                line.append(fills.get(part, "#") * length, style=_style(part))
                shown += [part] * bool(length)
            line.append(" " * max(0, slots + gutter - line.cell_len))
            line.append(f"{bar.note:>{behind}}")
            line.rstrip()
            yield line
        entries = [
            Text.assemble((fills.get(part, "#") * 2, _style(part)), f" {part}")
            for part in ordered_parts(shown)
        ]
        yield from flow(entries, options.max_width)


def columns(bar: Bar, scale: float, slots: int) -> list[tuple[str, int]]:
    """Return how many of `slots` columns each part takes.

    A bar is as long as its sum, and its columns are shared out by largest remainders: rounding
    where parts end would draw one of a thousandth and leave out one of a hundredth beside it.

    Parameters
    ----------
    bar : Bar
    scale : float
        Value of the whole width.
    slots : int
    """
    drawn = {part: value for part, value in bar.parts.items() if value > 0}
    if not drawn or scale <= 0:
        return []
    whole = sum(drawn.values())
    length = min(slots, round(whole / scale * slots))
    exact = {part: value / whole * length for part, value in drawn.items()}
    found = {part: int(value) for part, value in exact.items()}
    by_remainder = sorted(exact, key=lambda part: found[part] - exact[part])
    for part in by_remainder[: length - sum(found.values())]:
        found[part] += 1
    return list(found.items())


def _style(part: str) -> str:
    return f"color({_COLOURS[part]})" if part in _COLOURS else ""


# --- What a part looks like: a fill of its own first, a colour on top of it.


#: Glyphs of what the Cache screen stacks: levels, and bytes.
SERIES = "█▓▒░╱╲║≡"

# On a dark ground and on a light one, all at 4.5:1 or better against it. A colour has one meaning:
# green, red and yellow are verdicts, turquoise and pink are curves of methods, and the parts have
# what is left. Blue and brown work on the cache, violet is the model's own work, grey is the rest.
_ON_GROUND = {
    "attention": ("#58a6ff", "#0b5cad"),
    "decompress": ("#ff9a3d", "#974700"),
    "compress": ("#f2c08a", "#7a5326"),
    "quantise": ("#c9986a", "#85501f"),
    "evict": ("#b98a4a", "#5e4310"),
    "basis": ("#e8a598", "#80382a"),
    "merge": ("#a5c8f0", "#1f4f86"),
    "schedule": ("#7f9cf5", "#2b46b0"),
    "embedding": ("#a9b4c6", "#4d5a6e"),
    "norm": ("#d5dae2", "#3c4552"),
    "qkv_proj": ("#b79cff", "#6034b8"),
    "rope": ("#d9cdfb", "#5c4f86"),
    "o_proj": ("#9a86e8", "#4b39a8"),
    "mlp": ("#cf9bf2", "#7d2fa8"),
    "head": ("#b487c9", "#6b3a80"),
    "sampling": ("#96a0ae", "#58616d"),
    "communication": ("#d3b2c4", "#71465c"),
    "host": ("#b9b9b9", "#5a5a5a"),
    "unattributed": ("#ececec", "#2e2e2e"),
}
_GOOD, _BAD, _WARN = ("#5fd068", "#1b6b22"), ("#ff6b6b", "#b3121e"), ("#f5e04a", "#6b5d00")
_CURVES = (("#2ee6d0", "#006b66"), ("#ff7ad9", "#b3067f"))
_UNKNOWN = _ON_GROUND["unattributed"]


@dataclass(frozen=True)
class Ink:
    """Colours of a ground: `dark` or light, and whether there are any."""

    dark: bool = True
    colour: bool = True

    def part(self, name: str) -> str:
        """Return the style of a part."""
        return self._of(_ON_GROUND.get(name, _UNKNOWN))

    def good(self) -> str:
        """Return the style of what is better than the baseline."""
        return self._of(_GOOD)

    def bad(self) -> str:
        """Return the style of what is worse, or failed."""
        return self._of(_BAD)

    def warn(self) -> str:
        """Return the style of a warning."""
        return self._of(_WARN)

    def curves(self, count: int) -> tuple[str, ...]:
        """Return the styles of so many curves; without one, a curve has its markers alone."""
        found = [self._of(colours) for colours in _CURVES]
        return (*found, *[""] * max(0, count - len(found)))

    def _of(self, colours: tuple[str, str]) -> str:
        return colours[0 if self.dark else 1] if self.colour else ""


def fill(part: str) -> str:
    """Return the glyph of a part, or of what is none."""
    return FILLS.get(part, "┄")
