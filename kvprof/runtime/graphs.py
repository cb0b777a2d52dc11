"""How the runtime gets along with CUDA graphs and ``torch.compile``."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["is_capturing", "uncompiled"]

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def is_capturing(device: torch.device) -> bool:
    """Whether what runs on a device now is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def uncompiled(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Mark a function that ``torch.compile`` runs as it is: it keeps count on the host."""
    marked: Callable[_Given, _Returned] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return marked
