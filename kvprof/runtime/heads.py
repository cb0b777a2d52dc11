"""Head groups of one layer that are alike in shape, computed together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.methods.plan import HeadGroup
from kvprof.runtime.clock import part
from kvprof.runtime.shapes import index_of, unflatten

__all__ = ["Bundle", "bundled"]


@dataclass(frozen=True, eq=False)
class Bundle:
    """``g`` head groups of one side with ``n`` heads and the same ranks each.

    Attributes
    ----------
    kv_heads : tuple of int
        Their KV heads, group after group, ``g * n``.
    heads : int
        KV heads of a group, n.
    head_dim : int
    ranks : tuple of int
        As in `HeadGroup`.
    down, up : Tensor or None
        ``[g, n * d, r]`` in the run's dtype, or ``[rows, g, n * d, r]`` for bases of a sequence's
        own; None for the identity.
    folded : bool
        Whether the model's projection puts out the latent already, in the group's first columns.
    online : bool
        Whether each sequence gets a basis of its own.
    copies : int
        Keys that are stored for one of the model's: above 1 (a key per query head) `kv_heads`
        counts them, number h being of KV head ``h // copies``.
    """

    kv_heads: tuple[int, ...]
    heads: int
    head_dim: int
    ranks: tuple[int, ...]
    down: Tensor | None
    up: Tensor | None
    folded: bool
    online: bool
    copies: int = 1

    @property
    def groups(self) -> int:
        """Number of groups, g."""
        return len(self.kv_heads) // self.heads

    @property
    def projected(self) -> bool:
        """Whether latents are stored instead of heads."""
        return self.up is not None or self.online

    def by_group(self, states: Tensor) -> Tensor:
        """Take the bundle's heads out of ``[rows, Hkv, t, d]``: ``[rows, g, n, t, d]``."""
        if self.kv_heads != tuple(range(states.shape[1])):
            states = states.index_select(1, index_of(self.kv_heads, states.device))
        return unflatten(states, 1, (self.groups, self.heads))

    def joined(self, states: Tensor) -> Tensor:
        """Lay a group's heads side by side: ``[rows, g, t, n * d]``."""
        return self.by_group(states).transpose(2, 3).flatten(3)

    def latent(self, states: Tensor) -> Tensor:
        """Return what is stored for ``[rows, Hkv, t, d]`` at the top rank: ``[rows, g, t, r]``."""
        joined = self.joined(states)
        if self.folded:
            return joined[..., : self.ranks[-1]]
        if self.down is None:
            return joined
        with part("compress"):
            return joined @ self.down

    def split(self, joined: Tensor) -> Tensor:
        """Part the heads of ``[rows, g, N, n * d]`` again: ``[rows, g, n, N, d]``."""
        return unflatten(joined, -1, (self.heads, self.head_dim)).transpose(2, 3)

    def rebuilt(self, latent: Tensor) -> Tensor:
        """Return the heads that ``[rows, g, N, r']`` stand for: ``[rows, g, n, N, d]``."""
        if self.up is None:
            return self.split(latent)
        with part("decompress"):
            return self.split(latent @ self.up[..., : latent.shape[-1]].mT)

    def up_by_head(self) -> Tensor:
        """Return ``up_j`` per head, ``[..., g, n, d, r]``."""
        assert self.up is not None  # asked for projected groups only
        return unflatten(self.up, -2, (self.heads, self.head_dim))


def bundled(
    groups: Sequence[HeadGroup],
    device: torch.device,
    dtype: torch.dtype,
    *,
    folded: bool,
    online: bool,
    copies: int = 1,
) -> list[Bundle]:
    """Put head groups of the same shape together.

    Parameters
    ----------
    groups : sequence of HeadGroup
        One side of one layer.
    device, dtype
        Where and in what the projections run.
    folded : bool
        ``fold_down`` of the side.
    online : bool
        ``online_bases`` of the plan.
    copies : int
        ``key_copies`` of the layer, for its keys.
    """
    alike: dict[tuple[object, ...], list[HeadGroup]] = {}
    for group in groups:
        key = (group.heads, group.ranks, group.down is None)
        alike.setdefault(key, []).append(group)
    bundles = []
    for members in alike.values():
        first = members[0]
        down = up = None
        if first.down is not None:
            downs = [group.down for group in members if group.down is not None]
            ups = [group.up for group in members if group.up is not None]
            down = torch.stack(downs).to(device, dtype)
            up = torch.stack(ups).to(device, dtype)
        bundles.append(
            Bundle(
                kv_heads=tuple(h for g in members for h in range(g.first, g.first + g.heads)),
                heads=first.heads,
                head_dim=first.head_dim,
                ranks=first.ranks,
                down=down,
                up=up,
                folded=folded and first.down is not None,
                online=online and first.down is None and not first.identity,
                copies=copies,
            )
        )
    return bundles
