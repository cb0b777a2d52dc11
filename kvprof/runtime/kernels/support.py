"""Which layers of a plan run on kvprof's kernels, and why the others do not."""

import importlib.util
import os
from collections.abc import Sequence

import torch

from kvprof.errors import UsageError
from kvprof.kernels.planes import LARGEST_GROUP, STEP
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.runtime.kernels.levels_support import levelled, levels_reason
from kvprof.runtime.kernels.rebuilt_support import rebuilds, shared_reason, shares

__all__ = ["CHOICES", "choice", "kernel_reasons", "runs_on_kernels"]

CHOICES = ("auto", "on", "off")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256
_OLDEST = (8, 0)


def choice(wanted: str | None) -> str:
    """Return whether kernels are used: what was asked for, or what ``KVPROF_KERNELS`` says.

    Parameters
    ----------
    wanted : str or None
        ``auto`` (where they are the faster way), ``on`` (everywhere, or an error), ``off``; None
        asks the environment, and without an answer there is ``auto``.

    Raises
    ------
    UsageError
        For another word.
    """
    source = "kernels" if wanted is not None else "KVPROF_KERNELS"
    found = wanted if wanted is not None else os.environ.get("KVPROF_KERNELS", "auto")
    if found not in CHOICES:
        raise UsageError(f"{source} is {found!r}; choose from {', '.join(CHOICES)}")
    return found


def runs_on_kernels(
    plan: Plan, layer: LayerPlan, facts: LayerLayout, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a layer cannot run on the kernels; None where it can.

    What a plan says of all layers counts only where it touches this one: levels and eviction stop
    at a sliding window.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers.
    facts : LayerLayout
        The model's layer.
    device : torch.device
        Where the layer runs.
    dtype : torch.dtype
        That it runs in.
    """
    reason = _machine(device, dtype)
    if reason is None:
        reason = _stored(plan, layer)
    if reason is None and (rebuilds(layer, facts) or shares(layer)):
        reason = shared_reason(plan, layer, facts)
    elif reason is None and levelled(plan, layer):
        reason = levels_reason(plan, layer, facts, device, dtype)
    if reason is None:
        reason = _shapes(layer, facts)
    return reason


def kernel_reasons(
    plan: Plan, layout: ModelLayout, device: torch.device, dtype: torch.dtype
) -> list[str | None]:
    """Return `runs_on_kernels` of every layer."""
    return [
        runs_on_kernels(plan, layer, facts, device, dtype)
        for layer, facts in zip(plan.layers, layout.layers, strict=True)
    ]


def _machine(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return f"there are kernels for CUDA and the CPU, none for {device.type}"
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"the kernels compute in bfloat16, float16 or float32, not in {name}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return (
            f"the kernels need compute capability {_OLDEST[0]}.{_OLDEST[1]} (A100) or newer, and "
            f"this GPU has {capability[0]}.{capability[1]}"
        )
    return None


def _stored(plan: Plan, layer: LayerPlan) -> str | None:
    """Say what of the way to store tokens the kernels do not know."""
    if layer.keys.per_query_head:
        return "each query head stores a key of its own, and the kernels share one per KV head"
    if plan.online_bases:
        return "bases are found online, per sequence"
    if plan.lazy and not levelled(plan, layer):
        return "a lazy prefill attends exactly and compresses afterwards"
    if plan.eviction is not None and layer.sliding_window is None:
        return "tokens are evicted"
    return None


def _shapes(layer: LayerPlan, facts: LayerLayout) -> str | None:
    if facts.position == "alibi":
        return "ALiBi adds to the scores"
    if facts.masked:
        return "its mask hides more than what is later or out of its sliding window"
    if facts.group > LARGEST_GROUP:
        return f"{facts.group} query heads share a KV head, more than {LARGEST_GROUP}"
    if rebuilds(layer, facts) or shares(layer):
        return None  # with widths of their own
    return _groups("keys", layer.keys.groups) or _groups("values", layer.values.groups)


def _groups(name: str, groups: Sequence[HeadGroup]) -> str | None:
    for group in groups:
        if group.rank % STEP or group.rank > _WIDEST:
            return (
                f"KV head {group.first} keeps {group.rank} columns of its {name}, and widths are "
                f"multiples of {STEP} to {_WIDEST}"
            )
    return None
