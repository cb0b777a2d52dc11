"""Plans with random bases for any tiny model: exact at full rank, lossy below."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvprof.evaluation.decode import last_states, state_logits
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.storage import Levels
from kvprof.models.load import LoadedModel, wrap_model
from tests.models.tiny import tiny, two_layers

Ranks = Callable[[int, str, int, int], tuple[int, ...]]


@cache
def loaded(arch: str, **overrides: Any) -> LoadedModel:
    """Return a tiny model of two layers, examined once per test process."""
    return wrap_model(tiny(arch, **{**two_layers(arch), **overrides}))


def full(layer: int, side: str, first: int, width: int) -> tuple[int, ...]:
    """Keep every dimension."""
    return (width,)


def ragged(layer: int, side: str, first: int, width: int) -> tuple[int, ...]:
    """Keep another number of dimensions for every layer, side and head."""
    return (max(1, width // 2 + (layer + 2 * first + (side == "keys")) % 3 - 1),)


def basis(width: int, rank: int, seed: int, *, oblique: bool) -> tuple[Tensor, Tensor]:
    """Draw ``down`` and ``up``: orthonormal, or a pair with ``down.T @ up = I``."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(square)[0]
    scale = torch.linspace(0.5, 2.0, width, dtype=torch.float64) if oblique else torch.ones(width)
    return (q / scale)[:, :rank].float(), (q * scale)[:, :rank].float()


def make_plan(
    model: LoadedModel,
    *,
    ranks: Ranks = full,
    key_ranks: Ranks | None = None,
    placement: Placement = Placement.POST_ROPE,
    heads: int = 1,
    key_heads: int | None = None,
    fold_keys: bool = False,
    fold_values: tuple[bool, bool] = (True, True),
    project_values: bool = True,
    oblique: bool = True,
    levels: Levels = Levels(),  # noqa: B008 - frozen
    **options: Any,
) -> Plan:
    """Build a plan with random bases.

    `heads` is the size of a head group; `fold_values` says down and up; with `fold_keys` layers
    fold their keys wherever that is sound.
    """

    def groups(layer: int, side: str, count: int, total: int, width: int) -> tuple[HeadGroup, ...]:
        made = []
        for first in range(0, total, count):
            n = min(count, total - first)
            choose = (key_ranks or ranks) if side == "keys" else ranks
            wanted = choose(layer, side, first, n * width)
            seed = 1000 * layer + 10 * first + (side == "keys")
            down, up = basis(n * width, wanted[-1], seed, oblique=oblique)
            made.append(HeadGroup(first, n, width, wanted, down, up))
        return tuple(made)

    def identity(total: int, width: int) -> tuple[HeadGroup, ...]:
        return tuple(
            HeadGroup(head, 1, width, (width,) * len(levels.shares)) for head in range(total)
        )

    layers = []
    for facts in model.layout.layers:
        i, total = facts.index, facts.num_kv_heads
        free = facts.rotary_dim == 0 and not facts.qk_norm
        fold = fold_keys and (free or (placement is Placement.PRE_ROPE and not facts.qk_norm))
        if placement is Placement.NONE:
            keys = KeyPlan(placement, identity(total, facts.qk_head_dim))
        else:
            keys = KeyPlan(
                placement,
                groups(i, "keys", key_heads or heads, total, facts.qk_head_dim),
                fold_down=fold,
                fold_up=fold and placement is Placement.POST_ROPE,
            )
        if project_values:
            values = ValuePlan(groups(i, "values", heads, total, facts.v_head_dim), *fold_values)
        else:
            values = ValuePlan(identity(total, facts.v_head_dim))
        layers.append(LayerPlan(keys, values, facts.sliding_window))
    return Plan("test", model.fingerprint, tuple(layers), levels=levels, **options)


def one_pass_logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Return the second half's logits ``[B, T - T // 2, vocabulary]``, from a single pass."""
    return torch.stack(list(state_logits(loaded, last_states(loaded, ids))), 1)
