"""Where a model's weights go, and in which dtype."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from kvprof.errors import LackingError, UsageError
from kvprof.models.interface import text_decoder
from kvprof.sizes import format_bytes, read_dtype

__all__ = ["device_map_for", "main_device", "parse_dtype"]

_STRATEGIES = ("auto", "balanced", "offload")
# Weights may take this share of what is free; the rest is for activations and moments.
_SHARE = 0.9


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """Read ``--dtype``: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    found: torch.dtype = getattr(torch, read_dtype(name, device.type))
    return found


def main_device(name: str) -> torch.device:
    """Read ``--device``: where the model computes, or starts to when it is spread out."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name in _STRATEGIES:
        if name == "balanced" and gpus < 2:
            raise LackingError(f"--device balanced requires two GPUs; this machine has {gpus}")
        return torch.device("cuda", 0) if gpus else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "mps":
        raise LackingError("--device mps: Apple GPUs have no float64; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name!r}: use auto, cpu, cuda, cuda:N, balanced or offload")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= gpus:
            raise LackingError(f"--device {name}: this machine has {gpus} usable CUDA GPUs")
    return device


def device_map_for(
    name: str, device: torch.device, needed: int, config: Any, build: Callable[[], PreTrainedModel]
) -> str | dict[str, Any] | None:
    """Decide how weights are spread, in the form that transformers' ``device_map`` takes."""
    if name == "balanced":
        return "balanced"
    if name == "offload":
        return _layers_apart(config, device, build)
    free = _free(device)
    if free is not None and needed > _SHARE * free:
        if name == "auto":
            return "auto"
        raise LackingError(
            f"the weights need {format_bytes(needed)}, but {device} has {format_bytes(free)} "
            "free; use --device auto or --device offload"
        )
    return None if device.type == "cpu" else {"": device}


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def _layers_apart(
    config: Any, device: torch.device, build: Callable[[], PreTrainedModel]
) -> dict[str, Any]:
    with init_empty_weights():
        model = build()
    count = config.get_text_config(decoder=True).num_hidden_layers
    texts = {id(module) for module in text_decoder(model).modules()}
    lists = (
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == count and id(m) in texts
    )
    layers = next(lists, None)
    if layers is None:
        raise UsageError(f"--device offload: {type(model).__name__} has no list of layers")
    storage = "disk" if device.type == "cpu" else "cpu"
    # safetensors takes a name or an index here, not a torch.device
    target = "cpu" if device.type == "cpu" else device.index or 0
    result: dict[str, Any] = {}

    def spread(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            if full == layers:
                result.update({f"{full}.{i}": storage for i in range(count)})
            elif layers.startswith(f"{full}."):
                spread(child, f"{full}.")
            else:
                result[full] = target

    spread(model, "")
    return result
