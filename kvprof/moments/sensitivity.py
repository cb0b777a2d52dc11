"""Measure the loss of the next token per unit of predicted error, per head and pair.

These are the weights of ``--allocation budget``: one target is truncated at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvprof.analysis.rank_allocation import RankTarget, share_of
from kvprof.errors import FailedError, UsageError
from kvprof.methods.family import HeadWeights, PlanFamily, by_head
from kvprof.methods.low_rank import identity_groups, identity_layer
from kvprof.methods.plan import KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed

__all__ = ["PROBED_LENGTH", "PROBED_TOKENS", "Sensitivities", "measure_sensitivities", "probe_rank"]

#: Text that each target is probed on: one forward pass per target is what a user waits for.
PROBED_TOKENS = 2048
#: Longest sequence: short enough that prose, code and tasks all take part.
PROBED_LENGTH = 512
#: Of the width: the middle of the ranks that an allocation chooses among. Far above, the loss would
#: drown in rounding; far below, it is no longer proportional to the error.
PROBE_SHARE = 0.5
# A predicted error below this share of the whole is rounding: nothing was cut.
_NO_ERROR = 1e-9
# Tokens whose logits are widened at a time.
_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """What probing found."""

    #: Increase of the KL divergence (nats per token) per unit of predicted error.
    weights: HeadWeights
    #: JSON values: share of the width that was kept, noise of the measurement, how many of the
    #: targets were not above it.
    described: dict[str, Any]


def measure_sensitivities(
    loaded: LoadedModel,
    family: PlanFamily,
    batches: Sequence[Tensor],
    *,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Sensitivities | None:
    """Cut one target of a family after the other and see what the next token's distribution does.

    A target is cut to `probe_rank`; everything else is stored as it is. Measured is the mean KL
    divergence to the uncompressed model over all tokens, in one forward pass without a cache. What
    the same pass shows with nothing cut is its noise (other order of sums, and a narrow dtype's
    rounding): it is subtracted, and it is the least that a target counts. A smaller figure, or a
    negative one, is not a smaller loss, it is one that could not be seen; and a weight of 0 would
    let the allocation take everything from that head.
    """
    if not batches:
        raise UsageError("sensitivities require text of at least two tokens")
    assert family.at_ranks is not None  # the caller has looked
    exact = [_logits(loaded, ids) for ids in batches]
    whole = [target.width for target in family.targets]
    complete = family.at_ranks(whole)
    noise = _divergence(loaded, _alone(complete, loaded, None), batches, exact)
    figures, unseen = [], 0
    for index, target in enumerate(family.targets):
        rank = probe_rank(target)
        error = float(target.errors[rank])
        if error <= _NO_ERROR * float(target.errors[0]):
            figures.append(0.0)  # nothing to lose at any rank
        else:
            cut = family.at_ranks([*whole[:index], rank, *whole[index + 1 :]])
            seen = _divergence(loaded, _alone(cut, loaded, target), batches, exact) - noise
            unseen += seen <= noise
            figures.append(max(seen, noise, 0.0) / error)
        advance(1)
        if should_stop():
            return None
    described = {"probe_share": PROBE_SHARE, "noise": noise, "below_noise": unseen}
    return Sensitivities(by_head(family.targets, figures), described)


def probe_rank(target: RankTarget) -> int:
    """Return the rank to truncate a target to: half its width, or less if that loses nothing."""
    rank = share_of(target.width, PROBE_SHARE)
    while rank > 1 and float(target.errors[rank]) <= _NO_ERROR * float(target.errors[0]):
        rank -= 1
    return rank


def _alone(plan: Plan, loaded: LoadedModel, target: RankTarget | None) -> Plan:
    """Return the plan with one target compressed and everything else uncompressed."""
    levels = len(plan.levels.shares)
    layers = []
    for facts, layer in zip(loaded.layout.layers, plan.layers, strict=True):
        if target is None or facts.index != target.layer:
            layers.append(identity_layer(facts, levels))
        else:
            layers.append(_one_side(layer, facts, target.side, levels))
    return replace(plan, layers=tuple(layers), lazy=False, quantiser=None, eviction=None)


def _one_side(layer: LayerPlan, facts: LayerLayout, side: str, levels: int) -> LayerPlan:
    heads = facts.num_kv_heads
    if side == "keys":
        return replace(layer, values=ValuePlan(identity_groups(heads, facts.v_head_dim, levels)))
    keys = identity_groups(heads, facts.qk_head_dim, levels)
    return replace(layer, keys=KeyPlan(Placement.NONE, keys), key_mean=None)


@torch.inference_mode()
def _logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    logits: Tensor = loaded.model(input_ids=ids.to(loaded.device), use_cache=False).logits
    return logits


def _divergence(
    loaded: LoadedModel, plan: Plan, batches: Sequence[Tensor], exact: Sequence[Tensor]
) -> float:
    """Return the mean over tokens of ``KL(exact ‖ plan)`` in nats."""
    total = torch.zeros((), dtype=torch.float64, device=exact[0].device)
    with compressed(loaded, plan):
        for ids, reference in zip(batches, exact, strict=True):
            found = _logits(loaded, ids)
            for p, q in zip(
                torch.split(reference.flatten(0, 1), _BLOCK),
                torch.split(found.flatten(0, 1), _BLOCK),
                strict=True,
            ):
                total += _kl(p, q)
    mean = float(total) / sum(ids.numel() for ids in batches)
    if not mean < float("inf"):
        raise FailedError(f"{loaded.spec}: the KL divergence is not finite; use --dtype float32")
    return mean


def _kl(p: Tensor, q: Tensor) -> Tensor:
    # float64: the terms are of the size of the logits' difference and cancel to its square.
    left, right = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (left.exp() * (left - right)).sum()
