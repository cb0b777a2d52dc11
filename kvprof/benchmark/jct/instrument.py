"""Puts a clock's marks around a model's modules, and takes them away without a trace."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from kvprof.benchmark.jct.modules import find_places
from kvprof.models.interface import text_decoder, wrapped_rotations
from kvprof.models.load import LoadedModel
from kvprof.runtime.clock import Clock, part

__all__ = ["OTHERS", "Instrument"]

#: Work in layers that are not sampled. It is no part: the sampled layers stand for it.
OTHERS = "others"


class Instrument:
    """Marks for one model, to be made where it will run (see `find_places`).

    Parameters
    ----------
    loaded : LoadedModel

    Raises
    ------
    UsageError
        As `find_places` does.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._places = find_places(loaded)
        self._decoder = text_decoder(loaded.model)

    @contextmanager
    def attached(
        self, clock: Clock, layers: Collection[int], *, outside: bool = True
    ) -> Iterator[None]:
        """Mark the modules of some layers, and those that belong to none, while the body runs.

        Parameters
        ----------
        clock : Clock
            Running (`kvprof.runtime.clock.timing`) whenever the model runs.
        layers : collection of int
            The layers that are sampled.
        outside : bool
            Otherwise all that belongs to no layer is left without a name.
        """
        with ExitStack() as stack:
            every = self._places.layers
            some = not outside or len(set(layers)) < len(every)
            if outside:
                for module, name in self._places.outside:
                    _marked(stack, module, clock, name, None)
            else:
                clock.muted = True
                stack.callback(setattr, clock, "muted", False)
            if some and outside:
                _surrounded(stack, clock, every[0][0][0], every[-1][0][0])
            for layer in layers:
                (own, name), *modules = every[layer]
                _sampled(stack, own, clock, name, layer, some)
                for module, inner in modules:
                    _marked(stack, module, clock, inner, layer)
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


def _sampled(
    stack: ExitStack, module: nn.Module, clock: Clock, name: str, layer: int, some: bool
) -> None:
    """Mark a layer that is sampled among others that are not: only there the runtime's own."""

    def before(*_: Any) -> None:
        clock.muted = False
        clock.enter(name, layer)

    def after(*_: Any) -> None:
        clock.leave()
        clock.muted = some

    stack.callback(module.register_forward_pre_hook(before).remove)
    # Before the hook that ends the whole stack of layers.
    stack.callback(module.register_forward_hook(after, prepend=True).remove)


def _surrounded(stack: ExitStack, clock: Clock, first: nn.Module, last: nn.Module) -> None:
    """Mark everything from the first layer to the last."""

    def before(*_: Any) -> None:
        clock.enter(OTHERS)
        clock.muted = True

    def after(*_: Any) -> None:
        clock.muted = False
        clock.leave()

    stack.callback(first.register_forward_pre_hook(before).remove)
    stack.callback(last.register_forward_hook(after).remove)
