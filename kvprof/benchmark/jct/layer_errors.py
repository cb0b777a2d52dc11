"""How far each layer's attention is from full width in float64, on the very same inputs.

Inputs and outputs of every attention module are caught while the model decodes through the
compressed cache. Then the uncompressed model runs over the same tokens, and a float64 copy of each
module attends to what its compressed twin was given. Both ends are hidden states, so that folded
projections and rotated bases do not matter.
"""

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kvprof.models.load import LoadedModel
from kvprof.models.noise import quiet
from kvprof.runtime.session import Compression

__all__ = ["Captured", "ErrorSample", "error_sample", "layer_errors"]

# Attention in float64 over more tokens would take longer than the run itself.
_CPU_TOKENS = 1024
_GPU_TOKENS = 4096
_HELD_BYTES = 2**29  # of hidden states
_DECODED = 16


@dataclass(frozen=True)
class Captured:
    """What went through the attention modules of one sequence.

    Attributes
    ----------
    ids : Tensor
        ``[1, T]``.
    inputs, outputs : list of Tensor
        Per layer ``[1, T, hidden]``; the outputs of the decoded tokens alone, ``[1, n, hidden]``.
    """

    ids: Tensor
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True)
class ErrorSample:
    """The part of a request on which errors are measured.

    Attributes
    ----------
    prefill, decoded : int
        Tokens; only what is decoded is compared.
    """

    prefill: int
    decoded: int

    @property
    def label(self) -> str:
        """What a reader of the errors must know."""
        return (
            f"of {self.decoded} decoded tokens after the first {self.prefill:,}, one sequence, "
            "behind the output projection"
        )

    @torch.no_grad()
    def captured(self, session: Compression, tokens: list[int]) -> Captured:
        """Run the sample through a compressed cache.

        Parameters
        ----------
        session : Compression
            Open.
        tokens : list of int
            Of the request, prompt first; as many as the sample has at least.
        """
        loaded = session.loaded
        total = self.prefill + self.decoded
        ids = torch.tensor([tokens[:total]], device=loaded.device)
        inputs: list[list[Tensor]] = [[] for _ in loaded.layout.layers]
        outputs: list[list[Tensor]] = [[] for _ in loaded.layout.layers]

        def catch(index: int, args: Any, kwargs: Any, result: Any) -> None:
            inputs[index].append(_hidden(args, kwargs).detach().clone())
            output = result[0] if isinstance(result, tuple) else result
            outputs[index].append(output.detach().clone())

        with ExitStack() as stack:
            for facts in loaded.layout.layers:
                hook = loaded.model.get_submodule(facts.attention).register_forward_hook(
                    lambda m, a, k, r, i=facts.index: catch(i, a, k, r), with_kwargs=True
                )
                stack.callback(hook.remove)
            cache = session.new_cache()
            cache.reach = total
            cuts = [0, *range(self.prefill, total + 1)]
            for start, stop in pairwise(cuts):
                loaded.model(ids[:, start:stop], past_key_values=cache, use_cache=True)
        return Captured(
            ids, [torch.cat(x, 1) for x in inputs], [torch.cat(x[1:], 1) for x in outputs]
        )


def error_sample(loaded: LoadedModel, input_len: int, output_len: int) -> ErrorSample | None:
    """Choose how much of a request errors are measured on; None where not even two tokens fit.

    Parameters
    ----------
    loaded : LoadedModel
    input_len, output_len : int
    """
    layout = loaded.layout
    each = len(layout.layers) * layout.hidden_size * loaded.dtype.itemsize
    most = _GPU_TOKENS if loaded.device.type == "cuda" else _CPU_TOKENS
    tokens = min(input_len + output_len, most, _HELD_BYTES // each)
    if tokens < 2:
        return None
    decoded = min(_DECODED, tokens // 2)
    return ErrorSample(tokens - decoded, decoded)


@torch.no_grad()
def layer_errors(loaded: LoadedModel, captured: Captured) -> list[float | None]:
    """Return each layer's relative Frobenius error; None where nothing was put out.

    Parameters
    ----------
    loaded : LoadedModel
        Uncompressed.
    captured : Captured
    """
    found: list[float | None] = [None] * len(loaded.layout.layers)
    decoded = captured.outputs[0].shape[1]

    def compare(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        exact = _in_float64(module)
        given = captured.inputs[index].double()
        kwargs = {name: _wide(value) for name, value in kwargs.items()}
        if args:
            result = exact(given, *map(_wide, args[1:]), **kwargs)
        else:
            result = exact(**{**kwargs, "hidden_states": given})
        wanted = (result[0] if isinstance(result, tuple) else result)[:, -decoded:]
        norm = float(wanted.norm())
        if norm > 0:
            found[index] = float((captured.outputs[index].double() - wanted).norm()) / norm

    with ExitStack() as stack, quiet():
        for facts in loaded.layout.layers:
            hook = loaded.model.get_submodule(facts.attention).register_forward_pre_hook(
                lambda m, a, k, i=facts.index: compare(i, m, a, k), with_kwargs=True
            )
            stack.callback(hook.remove)
        loaded.model(captured.ids, use_cache=False)
    return found


def _hidden(args: Any, kwargs: Any) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _in_float64(module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module)
    made._forward_pre_hooks.clear()  # the one that asks for this copy is among them
    return made.double()


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(map(_wide, value))
    return value
