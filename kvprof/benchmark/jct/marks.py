"""A clock's marks around a model's modules, each with its part, and none left afterwards."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from kvprof.errors import UsageError
from kvprof.models.interface import text_decoder, wrapped_rotations
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.models.projections import head_columns
from kvprof.runtime.clock import REST, Clock, part

__all__ = ["Instrument"]


_NO_WORK = (nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class TimedModules:
    """The modules whose forward passes are parts."""

    outside: list[tuple[nn.Module, str]]  # what belongs to no layer
    #: Per layer, the layer itself first. Its own time, without its modules', is the residual
    #: additions'; that of its attention module is nobody's (`REST`).
    layers: list[list[tuple[nn.Module, str]]]


def find_timed_modules(loaded: LoadedModel) -> TimedModules:
    """Sort a model's modules into parts, by position and class name."""
    model, layers = loaded.model, []
    stacks: set[int] = set()
    for facts in loaded.layout.layers:
        name = _layer_name(loaded, facts)
        layer = model.get_submodule(name)
        stacks.add(id(model.get_submodule(name.rpartition(".")[0])))
        layers.append([(layer, "norm"), *_inside(loaded, facts, name, layer)])
    outside = [
        (child, part)
        for child in text_decoder(model).children()
        if id(child) not in stacks and (part := _outside(child)) is not None
    ]
    for module, part in (
        (model.get_input_embeddings(), "embedding"),
        (model.get_output_embeddings(), "head"),
    ):
        if module is not None and all(module is not known for known, _ in outside):
            outside.append((module, part))
    return TimedModules(outside, layers)


def _layer_name(loaded: LoadedModel, facts: LayerLayout) -> str:
    parts = facts.attention.split(".")
    for end in range(len(parts), 0, -1):
        parent = loaded.model.get_submodule(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList):
            return ".".join(parts[:end])
    raise UsageError(
        f"{loaded.layout.architecture}: layer {facts.index} is not in a list of layers, so its "
        "parts cannot be timed"
    )


def _projections(loaded: LoadedModel, facts: LayerLayout) -> dict[str, str]:
    found = {
        head_columns(loaded.model, facts, kind, [0])[0]: "qkv_proj"
        for kind in ("q", "k", "v")
        if facts.value_projection is not None
    }
    if facts.output_projection is not None:
        found[f"{facts.attention}.{facts.output_projection}"] = "o_proj"
    return found


def _inside(
    loaded: LoadedModel, facts: LayerLayout, name: str, layer: nn.Module
) -> list[tuple[nn.Module, str]]:
    projections = _projections(loaded, facts)
    found: list[tuple[nn.Module, str]] = []

    def walk(prefix: str, module: nn.Module, in_attention: bool) -> None:
        for child_name, child in module.named_children():
            full = f"{prefix}.{child_name}"
            if full in projections:
                found.append((child, projections[full]))
            elif full == facts.attention:
                found.append((child, REST))
                walk(full, child, True)
            elif facts.attention.startswith(full + "."):
                walk(full, child, in_attention)
            elif (part := _kind(child)) is not None:
                found.append((child, part))
            elif not in_attention and not isinstance(child, _NO_WORK):
                found.append((child, "mlp"))

    walk(name, layer, False)
    return found


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__.lower()
    if "norm" in name:
        return "norm"
    return "rope" if "rotary" in name else None


def _outside(module: nn.Module) -> str | None:
    kind = _kind(module)
    if kind is None and "embedding" in type(module).__name__.lower():
        return "embedding"
    return kind


class Instrument:
    """Marks for one model, to be made where it will run (see `find_timed_modules`)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._modules = find_timed_modules(loaded)
        self._decoder = text_decoder(loaded.model)

    @contextmanager
    def attached(self, clock: Clock) -> Iterator[None]:
        """Mark the modules while the body runs."""
        with ExitStack() as stack:
            for module, name in self._modules.outside:
                _marked(stack, module, clock, name, None)
            for layer, modules in enumerate(self._modules.layers):
                for module, name in modules:
                    _marked(stack, module, clock, name, layer)
            stack.enter_context(wrapped_rotations(self._decoder, _rotating))
            yield


def _rotating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with part("rope"):
            return function(*args, **kwargs)

    return wrapper


def _marked(
    stack: ExitStack, module: nn.Module, clock: Clock, name: str, layer: int | None
) -> None:
    def before(*_: Any) -> None:
        clock.enter(name, layer)

    def after(*_: Any) -> None:
        clock.leave()

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after).remove)
