"""Fisher information of the key and value projections, head by head (Palu §3.3)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from kvprof.errors import FailedError, UsageError
from kvprof.methods.family import HeadWeights
from kvprof.models.load import LoadedModel
from kvprof.models.projections import head_columns

__all__ = ["FISHER_FORMS", "GRADIENT_LENGTH", "fisher_information", "only_these"]

#: How the squared gradients of a head's weights become one figure; the first is the default.
FISHER_FORMS = ("paper", "code")

#: Longest sequence that a gradient is taken of, Palu's own (§4.1): the backward pass keeps every
#: activation, and the expectation is over sequences, so more of them say more than longer ones.
GRADIENT_LENGTH = 1024

_SIDES = {"keys": "k", "values": "v"}


def fisher_information(
    loaded: LoadedModel,
    batches: Iterable[Tensor],
    *,
    form: str = "paper",
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> HeadWeights | None:
    """Return how much information about the next token each head's W_K and W_V carry.

    The empirical Fisher information ``E[grad²]``: the mean over sequences of the squared gradient
    of a sequence's mean next-token loss, each sequence by itself (the square of a batch's summed
    gradient would be another figure). The paper sums it over a matrix (Palu §3.3); its code takes
    the mean over the matrix of ``sqrt(E[grad²])``, which flattens the ranks.

    Nothing of the model changes: gradients are taken for these weights alone, no ``.grad`` is
    written, and ``requires_grad`` is put back, also after an exception.
    """
    if form not in FISHER_FORMS:
        raise UsageError(f"fisher_form {form!r}: use {', '.join(FISHER_FORMS)}")
    heads = _head_columns(loaded)
    weights = {name: _weight(loaded, name) for name, _ in heads.values()}
    squares: dict[str, Tensor] = {}
    count = 0
    with only_these(loaded, list(weights.values())):
        for sequence in (row for batch in batches for row in batch):
            gradients = _gradients(loaded, sequence, list(weights.values()))
            for name, gradient in zip(weights, gradients, strict=True):
                square = gradient.float().square_()
                squares[name] = squares[name].add_(square) if name in squares else square
            count += 1
            advance(len(sequence))
            if should_stop():
                return None
    if not count:
        raise UsageError("Fisher information requires text of two tokens or more")
    return _per_head(loaded, heads, {name: s / count for name, s in squares.items()}, form)


_HeadColumns = tuple[str, Tensor]


def _head_columns(loaded: LoadedModel) -> dict[tuple[str, int, int], _HeadColumns]:
    """Return where each side's, layer's and head's weights lie."""
    return {
        (side, facts.index, head): head_columns(loaded.model, facts, kind, [head])
        for side, kind in _SIDES.items()
        for facts in loaded.layout.layers
        for head in range(facts.num_kv_heads)
    }


def _weight(loaded: LoadedModel, name: str) -> nn.Parameter:
    module = loaded.model.get_submodule(name)
    weight = getattr(module, "weight", None)
    plain = type(module) is nn.Linear or isinstance(module, Conv1D)
    if not plain or not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        raise UsageError(
            f"{loaded.spec}: {name} ({type(module).__name__}) has no gradient; use another "
            "--allocation"
        )
    if weight.is_meta:
        raise UsageError(
            f"{loaded.spec}: {name} is offloaded and has no gradient; use another --allocation or "
            "--device"
        )
    return weight


def _gradients(
    loaded: LoadedModel, sequence: Tensor, weights: Sequence[nn.Parameter]
) -> tuple[Tensor, ...]:
    """Return the gradients of one sequence's mean next-token loss."""
    ids = sequence.unsqueeze(0).to(loaded.device)
    with torch.enable_grad():
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = cross_entropy(logits.float(), ids[0, 1:].to(logits.device))
        return torch.autograd.grad(loss, weights)


@contextmanager
def only_these(loaded: LoadedModel, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let gradients flow to some weights and to nothing else; put everything back afterwards."""
    before = {parameter: parameter.requires_grad for parameter in loaded.model.parameters()}
    try:
        loaded.model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for parameter, wanted in before.items():
            parameter.requires_grad_(wanted)


def _per_head(
    loaded: LoadedModel,
    heads: dict[tuple[str, int, int], _HeadColumns],
    means: dict[str, Tensor],
    form: str,
) -> HeadWeights:
    found: dict[str, list[list[float]]] = {
        side: [[] for _ in loaded.layout.layers] for side in _SIDES
    }
    for (side, layer, _), (name, columns) in heads.items():
        linear = isinstance(loaded.model.get_submodule(name), nn.Linear)
        mean = means[name]
        part = mean.index_select(0 if linear else 1, columns.to(mean.device)).double()
        figure = float(part.sum() if form == "paper" else part.sqrt().mean())
        if not figure < float("inf"):
            raise FailedError(
                f"{loaded.spec}: the gradient of {name} is not finite; use --dtype float32"
            )
        found[side][layer].append(figure)
    return found
