"""What a part looks like: a fill of its own first, a colour on top of it."""

from dataclasses import dataclass

from kvprof.views.jct_bars import FILLS

__all__ = ["SERIES", "Ink", "fill"]

#: Glyphs of what the Cache screen stacks: levels, and bytes.
SERIES = "█▓▒░╱╲║≡"

# On a dark ground and on a light one, both at 4.5:1 or better against it.
_COLOURS = {
    "attention": ("#58a6ff", "#0b5cad"),
    "decompress": ("#ffa24d", "#9c4700"),
    "compress": ("#ffd54d", "#785b00"),
    "quantise": ("#e0b888", "#7a5320"),
    "evict": ("#d09a5b", "#6f4a12"),
    "basis": ("#ff7b72", "#b3261e"),
    "merge": ("#79d3e8", "#046a80"),
    "schedule": ("#3fcfa5", "#00694b"),
    "embedding": ("#a9b4c6", "#4d5a6e"),
    "norm": ("#b4bcc8", "#525c69"),
    "qkv_proj": ("#b79cff", "#6034b8"),
    "rope": ("#d2c4ff", "#5a4a8c"),
    "o_proj": ("#a08df0", "#4b39a8"),
    "mlp": ("#8fd16a", "#2f6b12"),
    "head": ("#74b85a", "#2a5d1c"),
    "sampling": ("#dd9ad0", "#83336f"),
    "communication": ("#ff90c8", "#a31563"),
    "host": ("#c4c4c4", "#565656"),
    "unattributed": ("#d0d0d0", "#494949"),
}
_UNKNOWN = ("#d0d0d0", "#494949")


@dataclass(frozen=True)
class Ink:
    """Colours of a ground: `dark` or light, and whether there are any."""

    dark: bool = True
    colour: bool = True

    def part(self, name: str) -> str:
        """Return the style of a part."""
        if not self.colour:
            return ""
        return _COLOURS.get(name, _UNKNOWN)[0 if self.dark else 1]

    def good(self) -> str:
        """Return the style of what is better than the baseline."""
        return self.part("mlp")

    def bad(self) -> str:
        """Return the style of what is worse, or failed."""
        return self.part("basis")

    def warn(self) -> str:
        """Return the style of a warning."""
        return self.part("compress")

    def accent(self) -> str:
        """Return the style of what is chosen or measured."""
        return self.part("attention")

    def series(self, index: int) -> str:
        """Return the style of the entry `index` of a stack."""
        names = ("attention", "schedule", "compress", "decompress", "qkv_proj", "communication")
        return self.part(names[index % len(names)])


def fill(part: str) -> str:
    """Return the glyph of a part, or of what is none."""
    return FILLS.get(part, "┄")
