"""Layouts and plans of any shape, without a model."""

import torch

from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.models.layout import LayerLayout, ModelLayout


def layer_layout(index=0, *, heads=8, kv_heads=2, width=16, **facts):
    defaults = {
        "index": index,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "qk_head_dim": width,
        "v_head_dim": width,
        "position": "rope",
        "rotary_dim": width,
        "qk_norm": False,
        "fused_qkv": False,
        "sliding_window": None,
        "softcap": None,
        "sinks": False,
        "mla": False,
        "scaling": width**-0.5,
        "output_projection": "o_proj",
        "value_projection": "v_proj",
        "rotary_offset": 0,
    }
    return LayerLayout(**{**defaults, **facts})


def layout(layers=1, *, hidden=128, **facts):
    return ModelLayout(tuple(layer_layout(i, **facts) for i in range(layers)), hidden, "Made")


def whole(heads=2, width=16, levels=1):
    return tuple(HeadGroup(head, 1, width, (width,) * levels) for head in range(heads))


def group(first, heads, width, ranks):
    generator = torch.Generator().manual_seed(first * 100 + heads)
    down, up = (torch.randn(heads * width, ranks[-1], generator=generator) for _ in range(2))
    return HeadGroup(first, heads, width, tuple(ranks), down, up)


def plan(*layers, **fields):
    return Plan("made", "f" * 32, tuple(layers), **fields)


def layer(
    keys=None,
    values=None,
    *,
    placement=None,
    window=None,
    fold_keys=(False, False),
    fold_values=(False, False),
    levels=1,
):
    where = placement or (Placement.NONE if keys is None else Placement.POST_ROPE)
    return LayerPlan(
        KeyPlan(where, keys or whole(levels=levels), *fold_keys),
        ValuePlan(values or whole(levels=levels), *fold_values),
        window,
    )
