"""The parts of a request's time: what each is called, belongs to and looks like.

One table for everybody: events and cases take names and groups from it, the terminal report, the
figure and the live view take fills and colours. A new part is a new row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = [
    "CACHE_PARTS",
    "OVERHEADS",
    "PARTS",
    "SHARED_PARTS",
    "UNATTRIBUTED",
    "UNTIMED",
    "Part",
    "ordered_parts",
    "part_of",
]

#: What no part explains of a time that was measured to its end; it follows from the others.
UNATTRIBUTED = "unattributed"
#: Stands among a bar's parts for time that was measured and cannot be shown in parts.
UNTIMED = "not in parts"


@dataclass(frozen=True)
class Part:
    """A part of a request's time."""

    name: str
    #: `cache` works on the cache, and a layer's own time is the sum of it; `model` is the same with
    #: every method; `machine` belongs to the machine alone; `rest` is what is in no part.
    group: str
    fill: str  # told apart from the others without colour, and one column wide everywhere
    ascii: str  # the same where there is nothing but ASCII
    #: Colour of a terminal's own palette, which suits its ground; the fill tells parts of one
    #: colour apart.
    ansi: int | None
    print: str  # colour of a figure
    hatch: str  # on that colour, so that neighbours are told apart in print as well
    #: Colours on a dark ground and on a light one, all at 4.5:1 or better against it. Blue and
    #: brown work on the cache, violet is the model's own work, grey is the rest; green, red and
    #: yellow are verdicts and turquoise and pink are curves (`kvprof.views.bars.Ink`).
    dark: str
    light: str
    #: Whether it is what a method adds to attention, and its share is told (FDC tables 12 and 13).
    overhead: bool = False


_TABLE = (
    Part("attention", "cache", "█", "A", 4, "#0072B2", "", "#58a6ff", "#0b5cad"),
    Part("decompress", "cache", "▓", "D", 1, "#D55E00", "", "#ff9a3d", "#974700", overhead=True),
    Part("compress", "cache", "▒", "C", 3, "#E69F00", "", "#f2c08a", "#7a5326", overhead=True),
    Part("quantise", "cache", "▞", "Q", 3, "#E69F00", "//", "#c9986a", "#85501f", overhead=True),
    Part("evict", "cache", "▚", "E", 3, "#E69F00", "..", "#b98a4a", "#5e4310"),
    Part("basis", "cache", "◆", "B", 1, "#D55E00", "xx", "#e8a598", "#80382a", overhead=True),
    Part("merge", "cache", "▌", "G", 6, "#56B4E9", "", "#a5c8f0", "#1f4f86"),
    Part("schedule", "cache", "║", "S", 6, "#56B4E9", "//", "#7f9cf5", "#2b46b0", overhead=True),
    Part("embedding", "model", "∘", "e", None, "#BBBBBB", "", "#a9b4c6", "#4d5a6e"),
    Part("norm", "model", "-", "-", None, "#BBBBBB", "//", "#d5dae2", "#3c4552"),
    Part("qkv_proj", "model", "╱", "/", 5, "#CC79A7", "", "#b79cff", "#6034b8"),
    Part("rope", "model", "~", "~", 5, "#CC79A7", "//", "#d9cdfb", "#5c4f86"),
    Part("o_proj", "model", "╲", "\\", 5, "#CC79A7", "..", "#9a86e8", "#4b39a8"),
    Part("mlp", "model", "░", "m", 2, "#009E73", "", "#cf9bf2", "#7d2fa8"),
    Part("head", "model", "╳", "x", 2, "#009E73", "//", "#b487c9", "#6b3a80"),
    Part("sampling", "model", "+", "+", None, "#009E73", "..", "#96a0ae", "#58616d"),
    Part("communication", "machine", "≡", "=", 1, "#000000", "", "#d3b2c4", "#71465c"),
    Part("host", "machine", "·", ".", None, "#888888", "", "#b9b9b9", "#5a5a5a"),
    Part(UNATTRIBUTED, "rest", "?", "?", None, "#FFFFFF", "xx", "#ececec", "#2e2e2e"),
)
_UNTIMED = Part(UNTIMED, "rest", "┄", "_", None, "#F4F4F4", "--", "#ececec", "#2e2e2e")
# A record of a newer kvprof may name parts that this one does not know.
_UNKNOWN = Part("", "rest", "#", "#", None, "#DDDDDD", "..", "#ececec", "#2e2e2e")
_BY_NAME = {part.name: part for part in (*_TABLE, _UNTIMED)}

#: Names of the parts, in the order in which tables and bars show them.
PARTS = tuple(part.name for part in _TABLE)
#: Parts that work on the cache: what a layer's own time is the sum of.
CACHE_PARTS = tuple(part.name for part in _TABLE if part.group == "cache")
#: Parts that cost the same with every method.
SHARED_PARTS = tuple(part.name for part in _TABLE if part.group == "model")
#: Parts whose share of the request's time is told for every method that has them.
OVERHEADS = tuple(part.name for part in _TABLE if part.overhead)


def part_of(name: str) -> Part:
    """Return the part of a name; one that this version does not know has a look of its own."""
    return _BY_NAME.get(name) or replace(_UNKNOWN, name=name)


def ordered_parts(names: Iterable[str]) -> list[str]:
    """Return parts in the order in which tables and bars show them, each once."""
    known = set(names)
    return [*(part for part in PARTS if part in known), *sorted(known - set(PARTS))]
