"""Measure what errors in stored keys and values cost, by one backward pass per sequence.

Gradients give a matrix per head, so directions count. Attention is traced by hand, because a
token's neighbours in the window read it uncompressed and must not count.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.analysis.moments import LossMoments
from kvprof.errors import FailedError, UsageError
from kvprof.models.interface import AttentionCall, intercept
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.moments.fisher import only_these

__all__ = ["loss_moments"]

# Of what a layer put out, where its attention is computed a second time: above a narrow dtype's
# rounding, far below another attention.
_DEVIATION = 0.05


def loss_moments(
    loaded: LoadedModel,
    batches: Iterable[Tensor],
    *,
    sink: int = 0,
    window: int = 0,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> LossMoments | None:
    """Return the Fisher information of every layer's keys and values, head by head.

    For each sequence one token is drawn at every position from the model's own distribution, and
    the gradient ``g_t`` of their log-likelihood is taken at the key and the value of each token t;
    the moment is the mean of ``g_t g_tᵀ``. Drawn tokens, not the text's, make it the Hessian of the
    divergence whatever the model thinks of the text. Positions are drawn independently, so that the
    products between them are 0 in the mean.
    """
    for name, weight in loaded.model.named_parameters():
        if weight.is_meta:
            raise UsageError(
                f"{loaded.spec}: {name} is offloaded and has no gradient; use another "
                "--allocation or --device"
            )
    layers = loaded.layout.layers
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    count = 0
    # Something before the first layer has to ask for a gradient; its own is never taken.
    start = loaded.model.get_input_embeddings().weight
    with only_these(loaded, [start]):
        for sequence in (row for batch in batches for row in batch):
            stored = max(0, len(sequence) - sink - window - 1)
            if stored:
                for read in _reads(loaded, sequence, generator):
                    key, value = (x.double() for x in _gradients(loaded, read, sink, window))
                    joined = value.transpose(0, 1).flatten(1)  # [T, H * d]
                    index = read.facts.index
                    for moments, moment in ((keys, key.mT @ key), (values, joined.mT @ joined)):
                        moments[index] = moments.get(index, 0) + moment
            count += stored
            advance(len(sequence))
            if should_stop():
                return None
    if not count:
        raise UsageError(
            f"--allocation loss requires sequences of more than {sink + window + 1} tokens: the "
            f"first {sink} and newest {window} stay uncompressed"
        )
    return LossMoments(
        *(
            tuple(_finite(loaded, moments[x.index] / count, x.index) for x in layers)
            for moments in (keys, values)
        )
    )


@dataclass(frozen=True, eq=False)
class _Read:
    """One layer's attention over one sequence, and the gradient at its heads' outputs."""

    facts: LayerLayout
    call: AttentionCall
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    slope: Tensor


def _reads(loaded: LoadedModel, sequence: Tensor, generator: torch.Generator) -> list[_Read]:
    layers = loaded.layout.layers
    of_module = {id(loaded.model.get_submodule(x.attention)): x for x in layers}
    calls: dict[int, AttentionCall] = {}

    def keep(call: AttentionCall) -> None:
        calls[of_module[id(call.module)].index] = call

    ids = sequence.unsqueeze(0).to(loaded.device)
    with torch.enable_grad():
        with intercept(loaded.model, keep, rotary=False):
            logits = loaded.model(input_ids=ids, use_cache=False).logits[0]
        with torch.no_grad():
            # The gradient of -log p(drawn) at the logits: p less a one where the token is.
            slope = logits.float().softmax(-1)
            drawn = torch.multinomial(slope.cpu(), 1, generator=generator).to(slope.device)
            slope.scatter_add_(-1, drawn, -torch.ones_like(drawn, dtype=slope.dtype))
        slopes = torch.autograd.grad(
            logits, [call.output for call in calls.values()], slope.to(logits.dtype)
        )
    found = []
    for (index, call), given in zip(calls.items(), slopes, strict=True):
        facts = layers[index]
        heads = (facts.num_kv_heads, -1)
        # [1, T, heads, d] as attention puts it out.
        output, out_slope = (x.detach()[0].transpose(0, 1) for x in (call.output, given))
        found.append(
            _Read(
                facts,
                call,
                call.query.detach()[0].unflatten(0, heads),
                call.key.detach()[0],
                call.value.detach()[0],
                output.unflatten(0, heads),
                out_slope.unflatten(0, heads),
            )
        )
    return found


@torch.no_grad()
def _gradients(loaded: LoadedModel, read: _Read, sink: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the gradients at K and V through the reads that count, ``[num_kv_heads, T, d]``."""
    facts, options = read.facts, read.call.options
    scaling = options.get("scaling")
    scaling = facts.scaling if scaling is None else scaling
    cap, sinks = options.get("softcap"), options.get("s_aux")
    place = torch.arange(read.key.shape[1], device=read.key.device)
    seen = _seen(read, place)
    counts = (place >= sink) & (place < place.unsqueeze(-1) - window)
    keys, values = torch.zeros_like(read.key), torch.zeros_like(read.value)
    for head, (query, output, slope) in enumerate(
        zip(read.query, read.output, read.slope, strict=True)
    ):
        # Products of 16 bits are off by whole units where keys have channels of some hundreds.
        scores = query.float() @ read.key[head].float().mT * scaling
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        masked = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            own = sinks.float().view(facts.num_kv_heads, -1)[head]
            own = own.view(-1, 1, 1).expand(-1, len(place), 1)
            chances = torch.cat([masked, own], dim=-1).softmax(-1)[..., :-1]
        else:
            chances = masked.softmax(-1)
        again = chances @ read.value[head].float()
        if not bool((again - output).norm() <= _DEVIATION * output.float().norm()):
            raise UsageError(
                f"{loaded.spec}: the attention of layer {facts.index} cannot be traced; use "
                "another --allocation"
            )
        wide = slope.float()
        turned = wide @ read.value[head].float().mT - (wide * again).sum(-1, keepdim=True)
        steps = chances * turned * counts
        if cap is not None:
            steps = steps * (1 - (scores / cap).square())
        keys[head] = ((steps.mT @ query.float()) * scaling).sum(0)
        values[head] = ((chances * counts).mT @ wide).sum(0)
    return keys, values


def _seen(read: _Read, place: Tensor) -> Tensor:
    """Return which tokens a query reads at all, ``[T, T]``."""
    mask = read.call.mask
    if mask is None:
        return place <= place.unsqueeze(-1)
    mask = mask[0, 0, :, : len(place)]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _finite(loaded: LoadedModel, moment: Tensor, layer: int) -> Tensor:
    if not bool(moment.isfinite().all()):
        raise FailedError(
            f"{loaded.spec}: the gradient at layer {layer} is not finite; use --dtype float32"
        )
    return moment.cpu()
