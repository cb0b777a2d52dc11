"""One pass over whole sequences in which chosen heads are read as decoding reads them.

Decoding attends, at each step, to what the steps before have stored and to the step's own token as
it is. All of that is known before the step: which tokens are quantised by then is a function of
their number (`kvprof.methods.tokens`), and a quantised token is what its codec makes of it. So one
pass over a sequence shows the same, query by query: queries of the prefill read the pass's own
tokens, later ones read stored tokens and their own. What a pass without that would hide
(`kvprof.evaluation.evaluator.hidden_in_one_pass`) is thus seen, at the cost of a single pass, and
one layer, side and head at a time, which no plan can be.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kvprof.evaluation.decode import baseline_logits, prefill_length
from kvprof.methods.low_rank import identity_layer
from kvprof.methods.settings import HeadSide, Stored
from kvprof.methods.tokens import segments, stored_tokens
from kvprof.models.interface import AttentionCall, intercept
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.runtime.attention import softmax
from kvprof.runtime.codecs import codec_for

__all__ = ["Assignment", "StoredPasses"]

#: What is stored how; heads that are not in it stay as they are.
Assignment = Mapping[HeadSide, Stored]


@dataclass(frozen=True)
class _Side:
    """A head's keys or values: as the pass reads its own, as later ones read them, and when.

    `own` and `past` are ``[B, T, d]``; `reads` is ``[T, T]``, whether query i reads the past form
    of token j, or None where it never does.
    """

    own: Tensor
    past: Tensor
    reads: Tensor | None


class StoredPasses:
    """Runs a model with any assignment over batches of sequences.

    Layers before the first that an assignment touches do what they did in the pass with nothing
    stored, whose hidden states are kept for the batch in hand; whether the model allows that is
    found out on the batch itself.

    Parameters
    ----------
    loaded : LoadedModel
        Whose layers keep keys and values of their own.
    resume : bool
        Whether to keep hidden states at all.
    """

    def __init__(self, loaded: LoadedModel, *, resume: bool = True) -> None:
        self._loaded = loaded
        self._facts = {
            id(loaded.model.get_submodule(facts.attention)): facts for facts in loaded.layout.layers
        }
        self._blocks = [
            loaded.model.get_submodule(facts.attention.rpartition(".")[0])
            for facts in loaded.layout.layers
        ]
        self._may_resume = resume
        self._ids: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}

    def baseline(self, ids: Tensor) -> Tensor:
        """Return the logits with nothing stored, and keep what later passes start from.

        Parameters
        ----------
        ids : Tensor
            ``[B, T]``.

        Returns
        -------
        Tensor
            ``[B, T - T // 2, vocabulary]``, of every decoded token.
        """
        self._ids, self._inputs = None, {}
        with ExitStack() as stack:
            if self._may_resume:
                for index, block in enumerate(self._blocks):
                    stack.enter_context(_hooked(block, self._keep(index)))
            logits = baseline_logits(self._loaded, ids)
        if self._may_resume:
            self._ids = ids
            self._may_resume = self._resumes(ids, logits)
        if not self._may_resume:
            self._ids, self._inputs = None, {}
        return logits

    def logits(self, ids: Tensor, assignment: Assignment) -> Tensor:
        """Return the logits of every decoded token as decoding with an assignment would give them.

        Parameters
        ----------
        ids : Tensor
            ``[B, T]``; the batch of the last `baseline` is fastest.
        assignment : mapping of HeadSide to Stored
            An empty one shows what this module's own arithmetic changes.

        Returns
        -------
        Tensor
            ``[B, T - T // 2, vocabulary]``.
        """
        first = min((head_side.layer for head_side in assignment), default=0)
        start = prefill_length(ids.shape[1])
        by_layer: dict[int, dict[tuple[str, int], tuple[HeadSide, Stored]]] = {}
        for head_side, stored in assignment.items():
            by_layer.setdefault(head_side.layer, {})[head_side.side, head_side.kv_head] = (
                head_side,
                stored,
            )

        def observe(call: AttentionCall) -> Tensor | None:
            facts = self._facts[id(call.module)]
            own = by_layer.get(facts.index)
            if own is None and assignment:
                return None
            return _attended(call, facts, own or {}, start)

        with self._from_layer(ids, first), intercept(self._loaded.model, observe, rotary=False):
            return baseline_logits(self._loaded, ids)

    def _keep(self, index: int) -> Callable[[Tensor], Tensor]:
        def keep(hidden: Tensor) -> Tensor:
            self._inputs[index] = hidden
            return hidden

        return keep

    def _resumes(self, ids: Tensor, logits: Tensor) -> bool:
        """Whether starting at the last layer gives the very logits that the whole pass gave."""
        if len(self._inputs) < len(self._blocks):
            return False
        try:
            with self._from_layer(ids, len(self._blocks) - 1):
                again = baseline_logits(self._loaded, ids)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            return False  # its blocks hand on more than hidden states
        return torch.equal(again, logits)

    @contextmanager
    def _from_layer(self, ids: Tensor, first: int) -> Iterator[None]:
        """Let the body's passes start with what the baseline had in front of a layer."""
        if self._ids is not ids or first == 0:
            yield
            return
        with ExitStack() as stack:
            for block in self._blocks[:first]:
                stack.enter_context(patch.object(block, "forward", _handed_on))
            kept = self._inputs[first]
            stack.enter_context(_hooked(self._blocks[first], lambda _: kept))
            yield


def _handed_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


@contextmanager
def _hooked(block: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass the hidden states that go into a decoder block through a function."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    handle = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _attended(
    call: AttentionCall,
    facts: LayerLayout,
    own: Mapping[tuple[str, int], tuple[HeadSide, Stored]],
    start: int,
) -> Tensor:
    """Return one layer's output, ``[B, T, H, v_head_dim]``, its heads read as decoding reads them.

    Scores and probabilities are float32 or wider, as in `kvprof.runtime.attention`.
    """
    options, group = call.options, facts.group
    tokens = call.query.shape[2]
    hidden = _hidden(call, tokens)
    outputs = []
    for head in range(facts.num_kv_heads):
        queries = slice(head * group, (head + 1) * group)
        query = call.query[:, queries]
        key = _side(call.key[:, head], facts, own.get(("keys", head)), start)
        value = _side(call.value[:, head], facts, own.get(("values", head)), start)
        scores = query @ key.own.unsqueeze(1).mT
        if key.reads is not None:
            scores = torch.where(key.reads, query @ key.past.unsqueeze(1).mT, scores)
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(wide) * options.get("scaling", facts.scaling)
        if (softcap := options.get("softcap")) is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(hidden, torch.finfo(wide).min)
        sinks = options.get("s_aux")
        shares = softmax(scores.unsqueeze(1), None if sinks is None else sinks[queries])
        shares = shares.squeeze(1).to(call.value.dtype)
        if value.reads is None:
            outputs.append(shares @ value.own.unsqueeze(1))
        else:
            stored = shares.masked_fill(~value.reads, 0) @ value.past.unsqueeze(1)
            outputs.append(stored + shares.masked_fill(value.reads, 0) @ value.own.unsqueeze(1))
    return torch.cat(outputs, dim=1).transpose(1, 2).contiguous()


def _hidden(call: AttentionCall, tokens: int) -> Tensor:
    """Return what each query must not see, ``[1 or B, 1, T, T]``."""
    device = call.query.device
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)[None, None]
    mask = call.mask
    if mask is None:
        return later
    mask = mask[..., :tokens]
    return later | (~mask if mask.dtype == torch.bool else mask < 0)


def _side(
    rows: Tensor, facts: LayerLayout, entry: tuple[HeadSide, Stored] | None, start: int
) -> _Side:
    """Return how one head's ``[B, T, d]`` are read."""
    if entry is None:
        return _Side(rows, rows, None)
    head_side, stored = entry
    group = stored.groups.get(head_side)
    if group is not None and group.down is not None and group.up is not None:
        down, up = (x.to(rows.device, rows.dtype) for x in (group.down, group.up))
        rows = rows @ down @ up.mT
        return _Side(rows, rows, None)
    quantiser = stored.plan.quantiser
    if quantiser is None:
        return _Side(rows, rows, None)
    layer = identity_layer(facts)
    tokens = rows.shape[1]
    reads = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query in range(start, tokens):
        oldest = query - stored_tokens(stored.plan, layer, query)
        for segment in segments(stored.plan, layer, query):
            if segment.quantised:
                reads[query, oldest + segment.start : oldest + segment.stop] = True
    # Groups of tokens that share scales are counted from the first token that can be quantised.
    first = 0 if facts.sliding_window is not None else min(stored.plan.levels.sink, tokens)
    codec = codec_for(quantiser, getattr(quantiser, head_side.side), 0)
    after = rows[:, first:]
    past = codec.decode(codec.encode(after), rows.shape[-1], rows.dtype)
    return _Side(rows, torch.cat([rows[:, :first], past], dim=1), reads.to(rows.device))
