"""Operators of torch, and what they cost where nobody looks: some 100 µs of the host for a call."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["direct"]


def direct(operator: Any) -> Callable[..., Any]:
    """Return an operator's own function where no trace, dispatch mode or gradient needs it."""
    work: Callable[..., Any] = operator
    # Asked first, and left at once: what follows cannot be traced.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return work
    if not torch._C._len_torch_dispatch_stack():
        work = operator._init_fn
    return work
