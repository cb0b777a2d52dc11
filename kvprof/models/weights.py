"""Reads weights wherever they lie: on a device, spread over several, or offloaded."""

from collections.abc import Iterator

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvprof.errors import FailedError

__all__ = [
    "check_finite",
    "compute_device",
    "input_device",
    "named_weights",
    "projection_matrix",
]


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter once, loading offloaded modules one at a time."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        with align_module_device(module):
            for name in own:
                parameter: Tensor = getattr(module, name)
                full = f"{prefix}.{name}" if prefix else name
                if full in tied or id(parameter) in seen:
                    continue
                if not hasattr(module, "_hf_hook"):  # identities of brought-in tensors are reused
                    seen.add(id(parameter))
                yield full, parameter.detach()


def check_finite(model: PreTrainedModel, spec: str) -> None:
    """Make sure that no weight is NaN or infinite."""
    for name, weight in named_weights(model):
        if not weight.is_floating_point() or weight.numel() == 0:
            continue
        values = weight.to(torch.bfloat16) if weight.element_size() == 1 else weight
        # A sum propagates NaN and infinity and needs no temporary; it may overflow by itself.
        if not values.sum(dtype=torch.float32).isfinite() and not values.isfinite().all():
            kind = "NaN" if values.isnan().any() else "infinite"
            raise FailedError(
                f"{spec}: the weight {name} contains {kind} values; the checkpoint is damaged or "
                f"{str(weight.dtype).removeprefix('torch.')} is too narrow"
            )


def projection_matrix(module: nn.Module, width: int) -> Tensor:
    """Return ``W`` of a projection ``y = x @ W + b`` as ``[width, out]``, in its compute dtype."""
    with align_module_device(module), torch.no_grad():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype.itemsize >= 2:
            if type(module) is nn.Linear:
                return weight.detach().T.clone()
            if isinstance(module, Conv1D):
                return weight.detach().clone()
    # What the map does to the unit vectors is its matrix, however it stores it.
    with torch.no_grad():
        device, dtype = _input_kind(module)
        unit = torch.eye(width, device=device, dtype=dtype)
        result: Tensor = module(unit) - module(torch.zeros_like(unit[:1]))
        return result


def _input_kind(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    floats = [p for p in module.parameters() if p.is_floating_point() and p.element_size() > 1]
    some = floats or list(module.parameters())
    device = some[0].device
    hook = getattr(module, "_hf_hook", None)
    if device.type == "meta" and hook is not None:
        device = torch.device(hook.execution_device)
    return device, floats[0].dtype if floats else torch.bfloat16


def compute_device(module: nn.Module) -> torch.device:
    """Return the device that a module with weights computes on, wherever they are kept."""
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            with align_module_device(part):
                device: torch.device = next(part.parameters(recurse=False)).device
                return device
    raise FailedError(f"{type(module).__name__} has no weights, so its device is unknown")


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that a model wants its token ids on."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        weight: Tensor = embedding.weight
        return weight.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
