"""Taps Q, K, V and what attention makes of them, of every layer, while a model runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvprof.errors import FailedError, UsageError
from kvprof.models.interface import (
    AttentionCall,
    before_rotation,
    intercept,
    rotary_tables,
    text_decoder,
)
from kvprof.models.load import LoadedModel

__all__ = ["Tap", "capture", "run_batch"]


@dataclass(frozen=True)
class Tap:
    """One layer of one forward pass; detached, on the layer's device, in the model's dtype.

    Attributes
    ----------
    layer : int
    q : Tensor
        ``[B, num_heads, T, qk_head_dim]``, after RoPE and QK-norm.
    k : Tensor
        ``[B, num_kv_heads, T, qk_head_dim]``, after RoPE and QK-norm.
    v : Tensor
        ``[B, num_kv_heads, T, v_head_dim]``.
    o : Tensor
        ``[B, num_heads, T, v_head_dim]``, what each query head puts out before W_O: ``S V`` with
        its probabilities S.
    q_pre, k_pre : Tensor or None
        As `q` and `k`, before RoPE (after QK-norm), when asked for; equal to `q` and `k` in layers
        that have no RoPE.
    tables : tuple of Tensor or None
        The cosines and sines that the layer's rotary function got, ``[B or 1, T, columns]`` each;
        None in layers without RoPE.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_pre: Tensor | None = None
    k_pre: Tensor | None = None
    tables: tuple[Tensor, Tensor] | None = None


@contextmanager
def capture(
    loaded: LoadedModel, receive: Callable[[Tap], None], *, pre_rope: bool = False
) -> Iterator[None]:
    """Hand every layer's Q, K and V to `receive` while the body runs the model.

    The model's output does not change, and its attention is put back afterwards, also after an
    exception. At the end of each forward pass every layer is proven to have been seen.
    """
    layout = loaded.layout
    if pre_rope and any(layer.rotary_offset is None for layer in layout.layers):
        raise UsageError(
            f"{layout.architecture}: Q and K before RoPE cannot be had (it rotates in a way of its "
            "own); leave out the pairs q_pre and k_pre, and methods that store K before RoPE "
            "(palu, kvtc, xkv)"
        )
    indices = {id(loaded.model.get_submodule(x.attention)): x.index for x in layout.layers}
    seen: set[int] = set()

    def observe(call: AttentionCall) -> None:
        facts = layout.layers[indices[id(call.module)]]
        if call.key.shape[2] != call.query.shape[2]:
            raise UsageError(
                f"capture saw {call.key.shape[2]} keys for {call.query.shape[2]} queries: run the "
                "model without a cache (use_cache=False)"
            )
        seen.add(facts.index)
        q, k, v = call.query.detach(), call.key.detach(), call.value.detach()
        q_pre, k_pre = (q, k) if pre_rope else (None, None)
        if pre_rope and facts.rotary_dim and facts.rotary_offset is not None:
            q_pre, k_pre = before_rotation(
                call.rotations[-1], q, k, facts.rotary_offset, facts.rotary_transposed
            )
            q_pre, k_pre = q_pre.detach(), k_pre.detach()
        tables = rotary_tables(call.rotations[-1]) if facts.rotary_pairs else None
        output = call.output.detach().transpose(1, 2)
        receive(Tap(facts.index, q, k, v, output, q_pre, k_pre, tables))

    def begin(module: nn.Module, args: Any) -> None:
        seen.clear()

    def end(module: nn.Module, args: Any, result: Any) -> None:
        if len(seen) != len(layout.layers):
            missing = next(x.index for x in layout.layers if x.index not in seen)
            raise FailedError(
                f"{layout.architecture}: a forward pass left layer {missing} untapped; nothing "
                "that was captured can be trusted"
            )

    decoder = text_decoder(loaded.model)
    with ExitStack() as stack:
        rotary = pre_rope or any(layer.rotary_pairs for layer in layout.layers)
        stack.enter_context(intercept(loaded.model, observe, rotary=rotary))
        stack.callback(decoder.register_forward_pre_hook(begin).remove)
        stack.callback(decoder.register_forward_hook(end).remove)
        yield


def run_batch(loaded: LoadedModel, input_ids: Tensor) -> None:
    """Run a batch of full sequences through the decoder, without a cache and without logits.

    The head is left out: 8k tokens times a vocabulary of 128k would cost more memory than the
    moments of the whole model.
    """
    with torch.inference_mode():
        text_decoder(loaded.model)(input_ids=input_ids.to(loaded.device), use_cache=False)
