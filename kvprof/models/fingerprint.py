"""A digest that tells models apart by what they compute, not by where or how they are stored."""

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprof.models.layout import ModelLayout
from kvprof.models.weights import named_weights

__all__ = ["fingerprint"]

_SAMPLE = 4096
# Below this float16 keeps fewer bits than bfloat16; such values count as zero in the digest.
_SMALL = 2.0**-16


def _sample(weight: Tensor) -> bytes:
    """Return at most 4,096 values of a tensor, evenly strided, rounded to bfloat16."""
    flat = weight.reshape(-1)
    stride = max(1, -(-flat.numel() // _SAMPLE))
    values = flat[::stride].to(torch.bfloat16).cpu()
    values = torch.where(values.abs() < _SMALL, torch.zeros_like(values), values)
    return values.view(torch.int16).numpy().tobytes()


def fingerprint(model: PreTrainedModel, layout: ModelLayout) -> str:
    """Identify architecture and weights by 32 hexadecimal digits.

    It does not depend on the dtype the model was loaded in (bfloat16 and float32 always; float16
    when the checkpoint's values fit it), the folder it lies in, or whether it is offloaded. It sees
    a sample of each tensor, so it tells models apart but does not guard against tampering.

    Parameters
    ----------
    model : PreTrainedModel
    layout : ModelLayout
        Its layout: the same weights split into other heads are another model.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    facts = {
        "architecture": layout.architecture,
        "model_type": config.model_type,
        "rope": rope,
        "layers": [
            [x.num_heads, x.num_kv_heads, x.qk_head_dim, x.v_head_dim, x.position, x.rotary_dim,
             x.sliding_window, x.softcap, x.scaling]
            for x in layout.layers
        ],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    entries = {
        name: f"{tuple(weight.shape)}".encode() + _sample(weight)
        for name, weight in named_weights(model)
    }
    for name in sorted(entries):
        digest.update(name.encode() + b"\0" + entries[name])
    return digest.hexdigest()[:32]
