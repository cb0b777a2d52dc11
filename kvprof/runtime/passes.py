"""What one forward pass brings to one layer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvprof.models.interface import Rotation
from kvprof.runtime.rotary import RotaryTable

__all__ = ["OwnTokens"]


@dataclass(frozen=True)
class OwnTokens:
    """A cohort's real tokens of one pass, in one layer.

    Attributes
    ----------
    query, key, value : Tensor
        ``[rows, heads, t, width]`` as the attention function got them.
    unrotated : Tensor or None
        K before RoPE, where the plan needs it.
    visible : Tensor or None
        ``[rows, 1, t, N]`` bool, N stored tokens and the pass's own.
    place : int
        Where the first of them stands in the padded sequence.
    several : bool
        Whether the pass had more than one token.
    options : dict
        The attention function's other arguments.
    rotation : Rotation or None
        The layer's rotary call.
    angles : RotaryTable or None
        Of all tokens so far.
    reach : int
        Longest sequence that generation may reach.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    unrotated: Tensor | None
    visible: Tensor | None
    place: int
    several: bool
    options: dict[str, Any]
    rotation: Rotation | None
    angles: RotaryTable | None
    reach: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.query.shape[2]
