"""What a plan stores in the measured layer, and the widths of its heads."""

from dataclasses import dataclass, replace
from typing import Any

from kvprof.benchmark.shapes import Shape, layout_of
from kvprof.errors import UsageError
from kvprof.kernels.quantized.codes import Bits
from kvprof.kernels.quantized.operand_layout import SideKind, width_of
from kvprof.methods.accounting import layer_bytes
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.soundness import CENTRED
from kvprof.methods.tokens import segments
from kvprof.runtime.backends.segment_store import kinds_of, shared_columns, stored_as

__all__ = [
    "Part",
    "Widths",
    "check_heads",
    "full_widths",
    "layer_words",
    "measured_layer",
    "of_shape",
    "stored_parts",
    "stored_widths",
]

#: Columns of one token that share a scale where a plan does not say how many.
_COLUMNS = 32
# At which the layers of a plan are compared by bytes.
_CONTEXT = 2**16


@dataclass(frozen=True)
class Widths:
    """Columns kept of K and of V, per KV head of the layer that is measured."""

    keys: tuple[int, ...]  # multiples of 16 from 16 to head_dim
    values: tuple[int, ...]
    source: str  # where they come from, in words that a reader of the result sees
    warnings: tuple[str, ...] = ()  # what had to be changed to run them

    def described(self) -> dict[str, Any]:
        """Return the widths as JSON values."""
        return {"keys": list(self.keys), "values": list(self.values), "source": self.source}


def full_widths(shape: Shape) -> Widths:
    """Return every head at full rank."""
    whole = (shape.head_dim,) * shape.num_kv_heads
    return Widths(whole, whole, "uncompressed")


def check_heads(what: str, plan: Plan, shape: Shape) -> None:
    """Refuse a centred plan, and one for KV heads of another number or width than a shape's."""
    for layer in plan.layers:
        if layer.centre is not None:
            raise UsageError(f"{what}: {CENTRED}")
        heads = layer.kv_heads
        widths = {group.head_dim for group in (*layer.keys.groups, *layer.values.groups)}
        if heads != shape.num_kv_heads or widths != {shape.head_dim}:
            raise UsageError(
                f"{what}: the plan is for {heads} KV heads of "
                f"{'/'.join(map(str, sorted(widths)))} dimensions, but {shape.name} has "
                f"{shape.num_kv_heads} of {shape.head_dim}"
            )


def measured_layer(plan: Plan) -> LayerPlan:
    """Return the representative layer of a plan: the one closest to its mean bytes."""
    stored = [layer for layer in plan.layers if not (layer.shared or layer.left_out)]
    layers = [layer for layer in stored if layer.sliding_window is None] or stored
    whole = [replace(layer, sliding_window=None) for layer in layers]
    sizes = [layer_bytes(plan, layer, _CONTEXT, itemsize=2).total for layer in whole]
    mean = sum(sizes) / len(sizes)
    chosen = min(range(len(sizes)), key=lambda index: (abs(sizes[index] - mean), index))
    return whole[chosen]


def of_shape(plan: Plan, shape: Shape) -> Plan:
    """Return a plan of as many layers as a shape, each the one that is measured."""
    if len(plan.layers) == shape.layers:
        return plan
    layer = measured_layer(plan)
    windows = [facts.sliding_window for facts in layout_of(shape).layers]
    return replace(plan, layers=tuple(replace(layer, sliding_window=own) for own in windows))


def stored_widths(plan: Plan, source: str) -> Widths:
    """Return the widths of a plan's measured layer, at the level that most tokens have."""
    layer = measured_layer(plan)
    level = max(range(len(plan.levels.shares)), key=lambda level: plan.levels.shares[level])
    keys, values = (
        tuple(group.ranks[level] for group in side.groups) for side in (layer.keys, layer.values)
    )
    return Widths(keys, values, source)


def layer_words(plan: Plan, words: str) -> str:
    """Return which layer of a plan is measured, in words."""
    left = sum(layer.left_out for layer in plan.layers)
    of = f" (compressed layers only: {left} of {len(plan.layers)} are left out)" if left else ""
    return f"{words}, the layer closest to its mean bytes{of}"


@dataclass(frozen=True)
class Part:
    """Tokens of a sequence that are stored alike, as a kernel over segments takes them."""

    tokens: int
    keys: tuple[int, ...]  # widths per stored head
    values: tuple[int, ...]
    key_bits: Bits = None  # formats of the kernels; None for values of the run's dtype
    value_bits: Bits = None
    columns: int | None = _COLUMNS  # that share a scale; None for a token's whole row
    #: Per stored head what its keys and values are like.
    kinds: tuple[tuple[SideKind, SideKind], ...] = ()


def stored_parts(plan: Plan, tokens: int) -> list[Part]:
    """Return how the measured layer of a plan stores a sequence, oldest tokens first."""
    layer, quantiser = measured_layer(plan), plan.quantiser
    found = []
    levels = set()
    for segment in segments(plan, layer, tokens):
        if segment.stop > plan.levels.sink:
            levels.add(segment.level)
        applied = quantiser if segment.quantised else None
        key_bits, value_bits = (
            stored_as(applied, getattr(applied, name, None), segment.level, own.groups)
            for name, own in (("keys", layer.keys), ("values", layer.values))
        )
        columns = _COLUMNS if applied is None else shared_columns(applied)
        sides = [
            kinds_of(own, side, bits, segment.level)
            for bits, side, own in (
                (key_bits, applied.keys if applied else None, layer.keys.groups),
                (value_bits, applied.values if applied else None, layer.values.groups),
            )
        ]
        keys, values = (tuple(map(width_of, side)) for side in sides)
        kinds = tuple(zip(*sides, strict=True))
        found.append(Part(segment.tokens, keys, values, key_bits, value_bits, columns, kinds))
    shares = plan.levels.shares
    if len(shares) > 1 and len(levels) < sum(share > 0 for share in shares):
        raise UsageError(
            f"{plan.method}: its levels need more than {tokens:,} tokens: {plan.levels.sink} "
            f"sinks, then {' and '.join(f'{share:.0%}' for share in shares)} of the others"
        )
    return found
