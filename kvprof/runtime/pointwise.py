"""Run norms, rotary embeddings and gated units of single tokens in one GPU launch each.

They take a fifth of an 8B model's decoding step. Random states decide whether a module has the
usual form: rotations must agree bit for bit, norms and units within rounding.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprof.kernels.checks import DTYPES
from kvprof.models.interface import text_decoder, wrapped_rotations
from kvprof.runtime.tensors import on

__all__ = ["few_launches"]

# Columns of a row that one program takes.
_WIDEST = 16384


@contextmanager
def few_launches(model: PreTrainedModel, *, rotations: bool) -> Iterator[None]:
    """Run the norms, rotations and gated units of a model's decoder so while the body runs."""
    decoder = text_decoder(model)
    with torch.inference_mode(), on(model.device):
        found = {
            module: _norm(module, model.dtype) or _unit(module, model.dtype)
            for module in decoder.modules()
            if "forward" not in module.__dict__  # somebody else's, who moves weights or counts
        }
    with ExitStack() as stack:
        for module, forward in found.items():
            if forward is not None:
                stack.callback(module.__dict__.pop, "forward", None)
                module.__dict__["forward"] = forward
        if rotations:
            stack.enter_context(wrapped_rotations(decoder, _rotation))
        yield


def _single(states: Any, tokens: int = 1) -> bool:
    """Whether states are of one token per row, where the kernels run; it is dimension `tokens`."""
    return (
        isinstance(states, Tensor)
        and states.is_cuda
        and states.dim() >= 3
        and states.shape[tokens] == 1
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Whether two results differ in the last place of their dtype at most."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    most = 2 * torch.finfo(wanted.dtype).eps
    apart = (found.float() - wanted.float()).abs()
    return bool((apart <= most * wanted.float().abs() + 1e-30).all())


def _alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether two results are the same but for some roundings."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    apart = (found.float() - wanted.float()).norm(dim=-1)
    return bool((apart <= torch.finfo(wanted.dtype).eps * wanted.float().norm(dim=-1)).all())


def _tried(module: nn.Module, given: Tensor) -> Tensor | None:
    """Return what a module makes of random states; None where it takes no such thing."""
    try:
        found = module.forward(given)  # hooks are no part of its form
    except Exception:  # whatever a module's own code does with what it does not expect
        return None
    return found if isinstance(found, Tensor) else None


def _alone(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the states of single tokens that a module is called with and nothing else, or None."""
    if len(args) != 1 or kwargs or not _single(args[0]) or args[0].dtype != dtype:
        return None
    return args[0]


def _norm(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return the forward of a norm ``weight · round(x / rms)``; None for another module."""
    from kvprof.kernels.pointwise.launch import normalised  # Triton is for Linux only

    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, nn.Parameter)
        or not isinstance(eps, float)
        or weight.dim() != 1
        or len(weight) > _WIDEST
        or not {weight.dtype, dtype} <= set(DTYPES)
        or list(module.parameters()) != [weight]
    ):
        return None
    given = _random(weight, 2, 1, len(weight), dtype=dtype)
    wanted = _tried(module, given)
    if wanted is None or not _near(normalised(given, weight, eps), wanted):
        return None
    original: Callable[..., Any] = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        states, own = _alone(args, kwargs, dtype), module.weight
        if states is None or own is not weight or states.stride(-1) != 1:
            return original(*args, **kwargs)
        with on(states.device):
            return normalised(states, weight, eps)

    return forward


# Clamps of gates that only large states reach are part of a unit's form.
_LARGE = 16


def _unit(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return the forward of ``down(silu(gate(x)) · up(x))``; None for another module."""
    from kvprof.kernels.pointwise.launch import gated  # Triton is for Linux only

    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)) or not isinstance(
        down, nn.Linear
    ):
        return None
    if not {gate.weight.dtype, dtype} <= set(DTYPES):
        return None

    gate_of, up_of, down_of = gate, up, down

    def fused(states: Tensor) -> Tensor:
        gate, up = gate_of(states), up_of(states)
        with on(states.device):
            inner = gated(gate, up)
        found: Tensor = down_of(inner)
        return found

    given = _random(gate.weight, 2, 1, gate.in_features, dtype=dtype)
    given[1] *= _LARGE
    wanted = _tried(module, given)
    if wanted is None or not _alike(fused(given), wanted):
        return None
    original: Callable[..., Any] = module.forward
    children = list(module.children())
    others = [child for child in children if child not in (gate, up, down)]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        states = _alone(args, kwargs, dtype)
        if (
            states is None
            or list(module.children()) != children  # an adapter came between
            or any(child._forward_hooks or child._forward_pre_hooks for child in others)
        ):
            return original(*args, **kwargs)
        return fused(states)

    return forward


def _rotation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in a rotary function's place: halves of a head as pairs, in one launch."""
    from kvprof.kernels.pointwise.launch import rotated  # Triton is for Linux only

    known: dict[tuple[Any, ...], bool] = {}

    @functools.wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not _rotates(*args):
            return function(*args, **kwargs)
        form = tuple((x.dtype, tuple(x.shape[1:])) for x in args)
        if form not in known:
            if torch.cuda.is_current_stream_capturing():
                return function(*args)
            with on(args[0].device):
                known[form] = _same(rotated(*args), function(*args))
        if not known[form]:
            return function(*args)
        with on(args[0].device):
            return rotated(*args)

    return rotate


def _rotates(query: Any, keys: Any, cos: Any, sin: Any) -> bool:
    if not all(isinstance(x, Tensor) for x in (keys, cos, sin)) or not _single(query, 2):
        return False
    width = query.shape[-1]
    return (
        query.dim() == keys.dim() == 4
        and keys.shape[-2:] == query.shape[-2:]
        and cos.shape == sin.shape
        and cos.dim() == 3
        and tuple(cos.shape[1:]) == (1, width)
        and width % 2 == 0
        and all(x.stride(-1) == 1 for x in (query, keys, cos, sin))
        and {query.dtype, keys.dtype, cos.dtype, sin.dtype} == {query.dtype}
    )


def _same(found: tuple[Tensor, Tensor], wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _random(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=source, device=like.device, dtype=dtype)
