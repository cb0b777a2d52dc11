"""Stands between a model and its attention function, through transformers' attention interface.

The model's own attention still runs, so that its output does not change; what went in and what
came out is shown to an observer, which may put another output in its place. The interface passes Q
and K after RoPE and after QK-norm, with K and V not repeated for grouped queries; what they were
before RoPE is taken from the rotation that was watched.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from kvprof.errors import UsageError
from kvprof.models.noise import unheard

__all__ = [
    "AttentionCall",
    "RotaryTable",
    "Rotation",
    "before_rotation",
    "find_rotation",
    "intercept",
    "refusal",
    "rotary_angles",
    "rotary_pairs",
    "rotary_tables",
    "rotated",
    "set_attention",
    "text_decoder",
    "watched_rotations",
    "wrapped_rotations",
]

_NAMES = {"sdpa": "kvprof_sdpa", "eager": "kvprof_eager"}
_ROTARY = re.compile(r"apply_\w*rotary\w*")
# Scores that eager attention may hold at once; longer sequences are computed in slices of queries.
_EAGER_SCORES = 1 << 28


@dataclass(frozen=True)
class Rotation:
    """One call of a model's rotary function: what it got, what it returned."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one forward pass, with the model's own output.

    ``query``, ``key``, ``value`` are ``[B, heads, T, width]``; ``output`` is ``[B, T, heads,
    width]``; ``options`` are the other keyword arguments (scaling, softcap, sinks, ...).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor
    rotations: tuple[Rotation, ...]


@dataclass
class Interception:
    implementation: str
    observe: Callable[[AttentionCall], Tensor | None]
    rotations: list[Rotation] = field(default_factory=list)
    inside_rotation: bool = False


# By the identity of every module of the models being watched: the registered functions are
# global, the observers are not.
_active: dict[int, Interception] = {}


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that maps token ids to hidden states, without the head."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def forward_namespace(module: nn.Module) -> dict[str, Any]:
    """Return the globals that a module's forward looks its helper functions up in."""
    # The class's forward, not the instance's: accelerate replaces the latter.
    forward = inspect.unwrap(type(module).forward)
    namespace: dict[str, Any] = getattr(forward, "__globals__", {})
    return namespace


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Any:
    function = forward_namespace(module).get("eager_attention_forward")
    if function is None:
        raise UsageError(
            f"{type(module).__name__}: kvprof cannot capture its Q, K and V (its module defines "
            "no eager attention)"
        )
    batch, heads, length, _ = query.shape
    step = max(1, _EAGER_SCORES // (batch * heads * key.shape[2]))
    if step >= length:
        return function(module, query, key, value, mask, **options)
    parts = [
        function(
            module,
            query[:, :, start : start + step],
            key,
            value,
            None if mask is None else mask[..., start : start + step, :],
            **options,
        )[0]
        for start in range(0, length, step)
    ]
    return torch.cat(parts, dim=1), None


def _tapped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    watching = _active.get(id(module))
    if watching is None:
        raise UsageError(f"{type(module).__name__} uses kvprof's attention outside a capture")
    if watching.implementation == "eager":
        result = _eager(module, query, key, value, attention_mask, options)
    else:
        # A modeling file may keep an interface of its own that overrides sdpa.
        functions = forward_namespace(module).get("ALL_ATTENTION_FUNCTIONS") or AttentionInterface()
        result = functions["sdpa"](module, query, key, value, attention_mask, **options)
    rotations = tuple(watching.rotations)
    watching.rotations.clear()
    other = watching.observe(
        AttentionCall(module, query, key, value, attention_mask, options, result[0], rotations)
    )
    return result if other is None else (other, *result[1:])


for _implementation, _mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
    AttentionInterface.register(_NAMES[_implementation], _tapped)
    # Without a mask function under the same name the model would silently not be causal.
    AttentionMaskInterface.register(_NAMES[_implementation], _mask)


@contextmanager
def watched_rotations(decoder: PreTrainedModel, watching: Interception) -> Iterator[None]:
    """Note every call of a rotary function by the decoder's attention modules."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if watching.inside_rotation:  # one helper calling another: the outer call counts
                return function(*args, **kwargs)
            watching.inside_rotation = True
            try:
                result = function(*args, **kwargs)
            finally:
                watching.inside_rotation = False
            watching.rotations.append(Rotation(function, args, kwargs, result))
            return result

        return wrapper

    with wrapped_rotations(decoder, wrap):
        yield


@contextmanager
def wrapped_rotations(
    decoder: PreTrainedModel, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace the rotary functions that the decoder's attention modules look up in their file."""
    originals: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []
    namespaces = {id(space): space for space in map(forward_namespace, decoder.modules())}
    try:
        for space in namespaces.values():
            if "ALL_ATTENTION_FUNCTIONS" not in space:
                continue
            for name, function in list(space.items()):
                if _ROTARY.fullmatch(name) and callable(function):
                    originals.append((space, name, function))
                    space[name] = wrap(function)
        yield
    finally:
        for space, name, function in originals:
            space[name] = function


@contextmanager
def intercept(
    model: PreTrainedModel, observe: Callable[[AttentionCall], Tensor | None], *, rotary: bool
) -> Iterator[None]:
    """Show every attention call of the model's decoder to `observe` while the body runs."""
    decoder = text_decoder(model)
    identities = [id(module) for module in decoder.modules()]
    if any(identity in _active for identity in identities):
        raise UsageError(f"{type(model).__name__} is already captured; captures do not nest")
    before = decoder.config._attn_implementation
    own = before if before in _NAMES else "sdpa" if decoder._supports_sdpa else "eager"
    watching = Interception(own, observe)
    with ExitStack() as stack:
        stack.callback(set_attention, decoder, before)
        set_attention(decoder, _NAMES[own])
        if decoder.config._attn_implementation != _NAMES[own]:
            raise UsageError(refusal(model))
        _active.update(dict.fromkeys(identities, watching))
        stack.callback(lambda: [_active.pop(identity) for identity in identities])
        if rotary:
            stack.enter_context(watched_rotations(decoder, watching))
        yield


def set_attention(decoder: PreTrainedModel, implementation: str) -> None:
    """Give a decoder another attention function, without transformers' words about it."""
    with unheard("transformers.modeling_utils"):
        decoder.set_attn_implementation(implementation)


def refusal(model: PreTrainedModel) -> str:
    """Say why a model whose attention never reaches the interface is not supported."""
    return (
        f"{type(model).__name__} is not supported: no layer uses transformers' attention "
        "interface, so Q, K and V cannot be captured"
    )


# --- Q and K before RoPE: where the slice that a model's rotary function rotates lies in Q and K.


def find_rotation(call: AttentionCall) -> tuple[int, int | None, bool] | None:
    """Say how a layer rotates Q and K, checked on the call's own values."""
    width = call.query.shape[-1]
    if not call.rotations:
        return None
    pair = _pair(call.rotations[0])
    if len(call.rotations) != 1 or pair is None:
        return width, None, False
    query, key = pair[2:]
    rotary_dim = _rotated_dims(call.rotations[0])
    for transposed in (False, True):
        for offset in {0, width - query.shape[-1]}:
            if _lies_at(query, call.query, offset, transposed) and _lies_at(
                key, call.key, offset, transposed
            ):
                return rotary_dim, offset, transposed
    return rotary_dim, None, False


def rotary_tables(rotation: Rotation) -> tuple[Tensor, Tensor] | None:
    """Return a rotary call's cos and sin, ``[B or 1, T, columns]``; None for unknown forms."""
    named = dict(zip(("q", "k", "cos", "sin"), rotation.args, strict=False)) | rotation.kwargs
    cos, sin = named.get("cos"), named.get("sin")
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.dim() != 3:
        return None
    return cos, sin


def rotary_pairs(
    rotation: Rotation, offset: int, transposed: bool
) -> tuple[tuple[int, int, int, int], ...] | None:
    """Return which dimensions a rotary function rotates together: ``(x, y, s, column)``."""
    names = ("q", "k", "cos", "sin")
    named = dict(zip(names, rotation.args, strict=False)) | rotation.kwargs
    tables = rotary_tables(rotation)
    if tables is None or "k" not in named:
        return None
    width, columns = named["k"].shape[-1], named["cos"].shape[-1]
    # As many tokens as dimensions, each a unit vector; one head, so both orders of axes will do.
    units = torch.eye(width, dtype=torch.float64)
    states = units[None, :, None] if transposed else units[None, None]

    def image(cos: Tensor, sin: Tensor) -> Tensor:
        given = {"q": states, "k": states}
        given |= {"cos": cos.expand(1, width, -1), "sin": sin.expand(1, width, -1)}
        args = [given[n] for n, _ in zip(names, rotation.args, strict=False)] + [*rotation.args[4:]]
        kwargs = {name: given.get(name, value) for name, value in rotation.kwargs.items()}
        turned: Tensor = rotation.function(*args, **kwargs)[1]
        return turned.reshape(width, width).double()

    ramp = torch.arange(1, columns + 1, dtype=torch.float64)
    zero, one = torch.zeros_like(ramp), torch.ones_like(ramp)
    try:
        unturned, turned = image(one, zero), image(zero, one)
        by_cos, by_sin = image(ramp, zero).diagonal(), image(zero, ramp)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not torch.equal(unturned, units):
        return None
    found = []
    for x in range(width):
        image_of_x = turned[x].nonzero().flatten().tolist()
        if image_of_x == [x] and turned[x, x] == 1:
            continue  # it is not rotated
        if len(image_of_x) != 1 or image_of_x == [x]:
            return None
        y, sign = image_of_x[0], float(turned[x, image_of_x[0]])
        reads = {int(z) - 1 for z in (by_cos[x], by_cos[y], abs(by_sin[x, y]), abs(by_sin[y, x]))}
        # Tables often hold each angle twice, in two columns.
        own = [table[..., [*reads]] for table in tables]
        if (
            abs(sign) != 1
            or turned[y, x] != -sign
            or any((one != one[..., :1]).any() for one in own)
        ):
            return None
        if x < y:
            found.append((offset + x, offset + y, int(sign), min(reads)))
    return tuple(found)


def before_rotation(
    rotation: Rotation, query: Tensor, key: Tensor, offset: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return Q and K with the rotated slice as it was before the rotary function."""
    pair = _pair(rotation)
    assert pair is not None  # find_rotation has seen to it
    return (
        _put_back(pair[0], query, offset, transposed),
        _put_back(pair[1], key, offset, transposed),
    )


def _pair(rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Q and K, in and out, of a function that takes and returns the two of them first."""
    names = ("q", "k")
    found = [*rotation.args[:2], *(rotation.kwargs[n] for n in names if n in rotation.kwargs)]
    result = rotation.result
    if len(found) != 2 or not isinstance(result, tuple) or len(result) != 2:
        return None
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (*found, *result)):
        return None
    if any(x.shape != y.shape for x, y in zip(found, result, strict=True)):
        return None
    return found[0], found[1], result[0], result[1]


def _rotated_dims(rotation: Rotation) -> int:
    """Count the rotated dimensions: the map is linear in cos and sin, so doubling both shows."""

    def call(factor: int) -> Tensor:
        def change(argument: int | str, value: object) -> object:
            if not isinstance(value, Tensor) or not (
                value.is_floating_point() or value.is_complex()
            ):
                return value
            return torch.ones_like(value) if argument in (0, 1, "q", "k") else value * factor

        args = [change(i, value) for i, value in enumerate(rotation.args)]
        kwargs = {name: change(name, value) for name, value in rotation.kwargs.items()}
        result: Tensor = rotation.function(*args, **kwargs)[0]
        return result

    once, twice = call(1), call(2)
    return int((once != twice).flatten(0, -2).any(0).sum())


def _heads_first(x: Tensor, transposed: bool) -> Tensor:
    return x.transpose(1, 2) if transposed else x


def _lies_at(part: Tensor, whole: Tensor, offset: int, transposed: bool) -> bool:
    part = _heads_first(part, transposed)
    target = whole[..., offset : offset + part.shape[-1]]
    try:
        part = part.expand_as(target)  # MLA: one rotated key for all heads
    except RuntimeError:
        return False
    return torch.equal(part.to(target.dtype), target)


def _put_back(part: Tensor, whole: Tensor, offset: int, transposed: bool) -> Tensor:
    part = _heads_first(part, transposed).to(whole.dtype)
    if part.shape == whole.shape:
        return part
    result = whole.clone()
    result[..., offset : offset + part.shape[-1]] = part
    return result


# --- Keys that are rotated again: by the model's own function, at their own positions.


@dataclass
class RotaryTable:
    """Cosines and sines of every token, ``[batch, T, rotary width]`` each; not counted."""

    cos: Tensor
    sin: Tensor

    def extended(self, cos: Tensor, sin: Tensor) -> "RotaryTable":
        """Return the table with the tokens of one more pass."""
        batch = self.cos.shape[0]
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        return RotaryTable(torch.cat([self.cos, cos], 1), torch.cat([self.sin, sin], 1))

    def at(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up tokens."""
        index = rows.view(-1, 1, 1)
        return self.cos[index, positions], self.sin[index, positions]


def rotary_angles(rotation: Rotation, batch: int) -> RotaryTable:
    """Return the cosines and sines that a call of a rotary function got."""
    tables = rotary_tables(rotation)
    if tables is None:
        name = getattr(rotation.function, "__name__", "its rotary function")
        raise UsageError(f"keys cannot be rebuilt before RoPE: {name} takes no cos and sin tables")
    return RotaryTable(*(x.expand(batch, -1, -1) for x in tables))


def rotated(
    rotation: Rotation, keys: Tensor, cos: Tensor, sin: Tensor, offset: int, transposed: bool
) -> Tensor:
    """Rotate keys by the model's own function."""
    flat = keys.flatten(0, 1)
    width = (rotation.args[1] if len(rotation.args) > 1 else rotation.kwargs["k"]).shape[-1]
    part = flat[..., offset : offset + width]
    part = part.transpose(1, 2) if transposed else part
    tables = {"q": part, "k": part, "cos": cos.flatten(0, 1), "sin": sin.flatten(0, 1)}
    names = ("q", "k", "cos", "sin")
    args = [tables[n] for n, _ in zip(names, rotation.args, strict=False)] + [*rotation.args[4:]]
    kwargs = {name: tables.get(name, value) for name, value in rotation.kwargs.items()}
    own: Tensor = rotation.function(*args, **kwargs)[1]
    own = own.transpose(1, 2) if transposed else own
    result = flat.clone() if width != flat.shape[-1] else own
    if width != flat.shape[-1]:
        result[..., offset : offset + width] = own
    return result.to(keys.dtype).view(*keys.shape[:2], *result.shape[1:])
