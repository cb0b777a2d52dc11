"""Where ``kvprof bench`` computes."""

import re

from kvprof.errors import LackingError, UsageError

__all__ = ["resolve_device"]

_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")


def resolve_device(name: str) -> str:
    """Return ``cpu`` or ``cuda:N``, and say what to do where there is no such GPU.

    Raises
    ------
    UsageError
        For another name.
    LackingError
        When there is no such GPU.
    """
    match = _DEVICE.fullmatch(name)
    if match is None and name != "auto":
        raise UsageError(f"--device: {name!r} is none of auto, cpu, cuda, cuda:1")
    if name == "cpu":
        return name
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(match[1] or 0) if match is not None else 0
    if index < gpus:
        return f"cuda:{index}"
    if match is None:
        return "cpu"
    instead = f"the last one is cuda:{gpus - 1}" if gpus else "--device cpu measures the CPU"
    raise LackingError(
        f"--device {name}: torch sees {gpus or 'no'} CUDA GPU{'' if gpus == 1 else 's'} here; "
        f"{instead}, and kvprof doctor shows what this machine has"
    )
