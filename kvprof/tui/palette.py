"""What a part looks like: a fill of its own first, a colour on top of it."""

from dataclasses import dataclass

from kvprof.views.jct_bars import FILLS

__all__ = ["SERIES", "Ink", "fill"]

#: Glyphs of what the Cache screen stacks: levels, and bytes.
SERIES = "█▓▒░╱╲║≡"

# On a dark ground and on a light one, all at 4.5:1 or better against it. A colour has one meaning:
# green, red and yellow are verdicts, turquoise and pink are curves of methods, and the parts have
# what is left. Blue and brown work on the cache, violet is the model's own work, grey is the rest.
_COLOURS = {
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
_UNKNOWN = _COLOURS["unattributed"]


@dataclass(frozen=True)
class Ink:
    """Colours of a ground: `dark` or light, and whether there are any."""

    dark: bool = True
    colour: bool = True

    def part(self, name: str) -> str:
        """Return the style of a part."""
        return self._of(_COLOURS.get(name, _UNKNOWN))

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
