"""The angles of every stored token, slot by slot, as the model itself rotated that token.

Rebuilt keys are rotated by the cosines and sines that the model's rotary function got in the pass
that the token came in: no position is computed here, so rows with positions of their own and
scalings that change with the length need nothing special. Tables are working memory, no part of the
cache (`kvprof.runtime.rotary`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import LARGEST_GROUP, STEP, chunks
from kvprof.kernels.reconstruct.form import halves
from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.tokens import quantises
from kvprof.models.interface import Rotation, text_decoder, wrapped_rotations
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.runtime.rotary import RotaryTable, angles
from kvprof.runtime.tensors import is_capturing

if TYPE_CHECKING:
    from kvprof.runtime.backends.state import KernelPass

__all__ = [
    "RotaryForm",
    "SlotTable",
    "SlotTables",
    "rebuilds",
    "rotary_form",
    "rotary_reasons",
    "shared_reason",
    "shares",
]

# --- Which layers store latents that KV heads share or rebuild, and which of them the kernels
# run.


def rebuilds(layer: LayerPlan, facts: LayerLayout) -> bool:
    """Whether keys are stored before RoPE, in a layer that has it, and rebuilt at every use."""
    return layer.keys.placement is Placement.PRE_ROPE and facts.rotary_dim > 0


def shares(layer: LayerPlan) -> bool:
    """Whether KV heads share latents."""
    return any(group.heads > 1 for group in (*layer.keys.groups, *layer.values.groups))


def shared_reason(plan: Plan, layer: LayerPlan, facts: LayerLayout) -> str | None:
    """Return why a layer that rebuilds keys or shares latents cannot run; None where it can.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers, with `rebuilds` or `shares`.
    facts : LayerLayout
        The model's layer.
    """
    what = "keys are rebuilt before RoPE" if rebuilds(layer, facts) else "heads share latents"
    if layer.sliding_window is not None:
        return f"{what} in a sliding window"
    if quantises(plan, layer):
        return f"{what} and latents are quantised"
    if plan.eviction is not None:
        return f"{what} and tokens are evicted"
    sides = (*layer.keys.groups, *layer.values.groups)
    if any(len(set(group.ranks)) > 1 for group in sides):
        return f"{what} and tokens are stored at several ranks (levels)"
    sizes = sorted({group.heads for group in sides})
    if len(sizes) > 1:
        return (
            f"latents are shared by {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} KV heads, "
            "and the kernels want the same number in all keys and values of a layer"
        )
    if sizes[0] * facts.group > LARGEST_GROUP:
        return f"{sizes[0] * facts.group} query heads share a latent, more than {LARGEST_GROUP}"
    return _widths(layer) or (_rotation(facts) if rebuilds(layer, facts) else None)


def _widths(layer: LayerPlan) -> str | None:
    for name, groups in (("keys", layer.keys.groups), ("values", layer.values.groups)):
        for group in groups:
            if not _runs(group.rank):
                return (
                    f"KV head {group.first} keeps {group.rank} columns of its {name}, and widths "
                    f"are multiples of {STEP} to 256 and of {2 * STEP} to 512"
                )
    return None


def _rotation(facts: LayerLayout) -> str | None:
    if not _runs(facts.qk_head_dim):
        return f"keys are {facts.qk_head_dim} wide, and kernels rebuild multiples of {STEP}"
    if facts.rotary_offset != 0 or facts.rotary_dim % 2:
        return (
            f"RoPE turns {facts.rotary_dim} columns from column {facts.rotary_offset} on, and the "
            "kernels an even number of a head's first ones"
        )
    return None


def _runs(width: int) -> bool:
    try:
        chunks(width)
    except UsageError:
        return False
    return True


# --- How a model's rotary function pairs columns and reads its tables, as the kernels have to
# know it.


_UNKNOWN = "keys are rotated in a form that the kernels do not know"


@dataclass(frozen=True)
class RotaryForm:
    """How a rotary function works.

    Attributes
    ----------
    width : int
        Columns that turn, the first of a head.
    interleaved : bool
        Whether neighbours are pairs (GLM, Cohere), and not column i and ``width / 2 + i``.
    stride : int
        Pair i's angle is in column ``i * stride`` of a table.
    """

    width: int
    interleaved: bool
    stride: int

    def pairs(self, table: Tensor) -> Tensor:
        """Return a table's columns with one angle per pair, ``[..., width / 2]``: a view."""
        return table[..., : self.width // 2 * self.stride : self.stride]

    def turned(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``[..., d]`` by angles ``[..., width / 2]``."""
        first, second = halves(self.width, self.interleaved)
        one, other = keys[..., first], keys[..., second]
        result = keys.clone()
        result[..., first] = one * cos - other * sin
        result[..., second] = other * cos + one * sin
        return result


@lru_cache(maxsize=64)
def rotary_form(function: Callable[..., Any], width: int, transposed: bool) -> RotaryForm | None:
    """Find out how a function ``f(q, k, cos, sin)`` works; None where no kernel knows it.

    Parameters
    ----------
    function : callable
    width : int
        Columns that it turns.
    transposed : bool
        Whether it sees ``[B, T, heads, width]``.
    """
    generator = torch.Generator().manual_seed(0)
    angles = 6 * torch.rand(1, 3, width // 2, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 1, 3, width, generator=generator, dtype=torch.float64)
    for whole, stride in ((_twice, 1), (_doubled, 2), (_once, 1)):
        cos, sin = whole(angles.cos()), whole(angles.sin())
        given = keys.transpose(1, 2) if transposed else keys
        try:
            found = function(given, given, cos, sin)[1]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue  # a function of other arguments, or a table of another width
        if not isinstance(found, Tensor) or found.shape != given.shape:
            continue
        found = found.transpose(1, 2) if transposed else found
        for interleaved in (False, True):
            form = RotaryForm(width, interleaved, stride)
            wanted = form.turned(keys, form.pairs(cos), form.pairs(sin))
            # Some functions compute in float32 whatever they get.
            if torch.allclose(found.double(), wanted, atol=1e-4):
                return form
    return None


def _twice(angles: Tensor) -> Tensor:
    return torch.cat([angles, angles], dim=-1)


def _doubled(angles: Tensor) -> Tensor:
    return angles.repeat_interleave(2, dim=-1)


def _once(angles: Tensor) -> Tensor:
    return angles


def rotary_reasons(loaded: LoadedModel, plan: Plan) -> list[str | None]:
    """Say of each layer whether its keys are rotated in a form that the kernels do not know.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
    """
    wanted = [
        rebuilds(layer, facts)
        for layer, facts in zip(plan.layers, loaded.layout.layers, strict=True)
    ]
    if not any(wanted):
        return [None] * len(wanted)
    functions: list[Callable[..., Any]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        # Another context may be watching the same function.
        functions.append(unwrap(function))
        return function

    with wrapped_rotations(text_decoder(loaded.model), noted):
        pass
    reasons: list[str | None] = []
    for needed, facts in zip(wanted, loaded.layout.layers, strict=True):
        # Which of several functions a layer calls is known only when it does.
        forms = {
            rotary_form(function, facts.rotary_dim, facts.rotary_transposed) if needed else None
            for function in functions
        }
        known = len(forms) == 1 and None not in forms
        reasons.append(_UNKNOWN if needed and not known else None)
    return reasons


@dataclass(eq=False)
class SlotTable:
    """Cosines and sines of one way to rotate.

    Attributes
    ----------
    both : Tensor
        ``[2, rows, capacity + 1, width]``: cosines and sines. One row serves a batch whose rows
        are rotated alike. The last slot takes what has no other: padding.
    checked : bool
        Whether they were seen to rotate keys as the model does.
    captured : bool
        Whether a CUDA graph reads them where they lie.
    """

    both: Tensor
    checked: bool = False
    captured: bool = False

    @property
    def cos(self) -> Tensor:
        """``[rows, capacity + 1, width]``."""
        return self.both[0]

    @property
    def sin(self) -> Tensor:
        """``[rows, capacity + 1, width]``."""
        return self.both[1]

    def served(self) -> tuple[Tensor, Tensor]:
        """Return both as a decoding kernel takes them, without a batch where one row serves all."""
        cos, sin = self.both
        return (cos[0], sin[0]) if len(cos) == 1 else (cos, sin)

    def fit(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` tokens; what is there stays."""
        old = self.both
        if old.shape[1] == rows and old.shape[2] > capacity:
            return
        if is_capturing(old.device):
            raise UsageError(
                "a CUDA graph cannot make room for the angles of rebuilt keys; capture a step of "
                "a static cache (new_cache(capacity=...)) that has run once before, with the same "
                "position_ids"
            )
        if self.captured:
            raise UsageError(
                "a CUDA graph reads this cache's angles, which rows that are padded otherwise "
                "cannot share; make a new cache for them, and capture a step of it"
            )
        slots = max(old.shape[2], capacity + 1)
        self.both = _empty((2, rows, slots, old.shape[3]), old, old.dtype)
        if old.shape[1] in (1, rows):  # else of another batch, before the cache was emptied
            self.both[:, :, : old.shape[2] - 1] = old[:, :, :-1]

    def write(self, cos: Tensor, sin: Tensor, slots: Tensor) -> None:
        """Put a pass's angles ``[rows or 1, tokens, width]`` into slots ``[rows, tokens]``."""
        last = self.both.shape[2] - 1
        slots = slots[: self.both.shape[1]].clamp(max=last).long()
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        fresh = torch.stack([cos, sin]).to(self.both.dtype)
        self.both[:, rows, slots] = fresh.expand(-1, len(slots), -1, -1)

    def select(self, index: Tensor) -> None:
        """Make row i what row ``index[i]`` was."""
        if self.both.shape[1] == 1:
            return
        moved = self.both.index_select(1, index)
        if moved.shape != self.both.shape:
            self.both = _empty(tuple(moved.shape), moved, moved.dtype)
        self.both.copy_(moved)

    def unslotted(self, first: Sequence[int], total: int) -> RotaryTable:
        """Return the angles by place in the padded sequence, zeros where there is padding.

        Parameters
        ----------
        first : sequence of int
            Where each row's first real token stands.
        total : int
            Tokens so far, padding included.
        """
        device = self.both.device
        begins = torch.tensor(first, device=device)[:, None]
        slots = torch.arange(total, device=device) - begins
        rows = torch.arange(len(first), device=device)[:, None]
        if self.both.shape[1] == 1:
            rows = torch.zeros_like(rows)
        found = self.both[:, rows, slots.clamp(min=0)]
        found = torch.where((slots >= 0)[..., None], found, 0)
        return RotaryTable(found[0], found[1])


class SlotTables:
    """The tables of one cache; layers that rotate alike share one."""

    def __init__(self) -> None:
        self._of: dict[int, SlotTable] = {}

    def extended(
        self,
        layer: int,
        rotation: Rotation,
        passing: "KernelPass",
        aligned: bool,
        capacity: int,
        dtype: torch.dtype,
    ) -> SlotTable:
        """Return a layer's table with the angles of the pass under way.

        Parameters
        ----------
        layer : int
        rotation : Rotation
            The layer's call of the model's rotary function.
        passing : KernelPass
        aligned : bool
            Whether all rows have their first real token in the same place.
        capacity : int
            Slots that the layer has room for.
        dtype : torch.dtype
            Of the states.

        Raises
        ------
        UsageError
            For a function without tables, and when a CUDA graph would have to make room.
        """
        given = angles(rotation, -1)
        source = rotation.args[2] if len(rotation.args) > 2 else rotation.kwargs["cos"]

        def written() -> tuple[Tensor, SlotTable]:
            batch, known = len(passing.start), self._of.get(layer)
            rows = 1 if aligned and len(given.cos) == 1 else batch
            if known is None:
                # What the kernels read: their own dtype or float32.
                kept = dtype if given.cos.dtype == dtype else torch.float32
                shape = (2, rows, capacity + 1, given.cos.shape[-1])
                table = SlotTable(_empty(shape, given.cos, kept))
            elif known in passing.once("tables", list):
                # Layers that shared a table, and turn by angles of their own from this pass on.
                both = _empty(tuple(known.both.shape), known.both, known.both.dtype)
                table = SlotTable(both.copy_(known.both), known.checked)
            else:
                table = known
            table.fit(batch if table.both.shape[1] == batch else rows, capacity)
            table.captured |= is_capturing(table.both.device)
            table.write(given.cos, given.sin, _slots(passing))
            passing.once("tables", list).append(table)
            return source, table  # the source is held: no other tensor may get its identity

        known: tuple[Tensor, SlotTable] = passing.once(("angles", id(source)), written)
        self._of[layer] = known[1]
        return known[1]

    def select(self, index: Sequence[int]) -> None:
        """Make row i what row ``index[i]`` was."""
        for table in self._tables():
            table.select(torch.tensor(index, dtype=torch.int64, device=table.both.device))

    def unslotted(self, first: Sequence[int], total: int) -> list[tuple[list[int], RotaryTable]]:
        """Return every table as the torch path keeps it, with the layers that share it."""
        if not first:  # nothing stored
            return []
        return [
            (
                [layer for layer, own in self._of.items() if own is table],
                table.unslotted(first, total),
            )
            for table in self._tables()
        ]

    def _tables(self) -> list[SlotTable]:
        return list({id(table): table for table in self._of.values()}.values())


def _empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    # Not as inference tensors: a cache outlives the mode it was made in.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=like.device)


def _slots(passing: "KernelPass") -> Tensor:
    """Return the slot of every token of a pass, ``[batch, tokens]``; of padding none there is."""

    def made() -> Tensor:
        token = torch.arange(passing.tokens, dtype=torch.int32, device=passing.start.device)
        slots = passing.start[:, None] + token
        if passing.hidden is None:
            return slots
        hidden = passing.hidden[:, None]
        return torch.where(token < hidden, torch.iinfo(torch.int32).max, slots - hidden)

    found: Tensor = passing.once("slots", made)
    return found
