"""In which formats, and by which stages, a plan's tokens are stored where they change with age."""

from kvprof.kernels.levels.codes import Bits
from kvprof.kernels.levels.layout import Segment
from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.storage import SideQuantiser
from kvprof.runtime.kernels.stages import Stages

__all__ = ["Format", "formats_of", "stages_of"]


class Format:
    """How the tokens of a segment are stored.

    Attributes
    ----------
    key_widths, value_widths : tuple of int
        Per KV head.
    key_bits, value_bits : int, "fp8" or None
    columns : int or None
        That share a scale.
    """

    def __init__(
        self, key_widths: tuple[int, ...], value_widths: tuple[int, ...], key_bits: Bits = None,
        value_bits: Bits = None, columns: int | None = None,
    ) -> None:  # fmt: skip
        self.key_widths, self.value_widths = key_widths, value_widths
        self.key_bits, self.value_bits, self.columns = key_bits, value_bits, columns

    def segment(self, group: int, batch: int, capacity: int) -> Segment:
        """Return the segment with room for `capacity` tokens of `batch` rows."""
        layout = RaggedLayout(self.key_widths, self.value_widths, group, batch, capacity)
        return Segment(layout, self.key_bits, self.value_bits, self.columns)


def stages_of(plan: Plan) -> Stages:
    """Return how tokens age in a plan's layers without a window."""
    quantiser = plan.quantiser
    return Stages(plan.levels, quantiser is not None, quantiser.window if quantiser else 0)


def formats_of(plan: Plan, layer: LayerPlan) -> list[Format]:
    """Return how a layer's segments are stored, in the order of `Stages`."""
    levels = range(len(plan.levels.shares))
    keys, values = (
        [tuple(group.ranks[level] for group in side.groups) for level in levels]
        for side in (layer.keys, layer.values)
    )
    found = [Format(keys[-1], values[-1])]
    quantiser = plan.quantiser
    if quantiser is None:
        return [*found, Format(keys[0], values[0])]
    sides = [side for side in (quantiser.keys, quantiser.values) if side is not None]

    def bits(side: SideQuantiser | None, level: int) -> Bits:
        assert quantiser is not None
        if side is None:
            return None
        return "fp8" if quantiser.kind == "fp8" else side.bits[level]

    # e4m3 has no scales that columns could share.
    columns = None if quantiser.kind == "fp8" else sides[0].group
    for level in reversed(levels):
        own = bits(quantiser.keys, level), bits(quantiser.values, level)
        found.append(Format(keys[level], values[level], *own, columns))
    return found
