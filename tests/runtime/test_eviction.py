"""Evicted tokens are the ones that the rule names, and attention is over those that stay."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.registry import plan_family
from kvprof.methods.storage import Eviction
from kvprof.models.load import LoadedModel
from kvprof.runtime import retention
from kvprof.runtime.compressed import compressed
from kvprof.runtime.retention import gumbel
from tests.methods.models import FINE, inputs, model
from tests.models.tiny import seeded, token_ids
from tests.runtime.plans import loaded, make_plan, ragged
from tests.runtime.test_formula import (
    LENGTH,
    PREFILL,
    attention_outputs,
    by_models_rope,
    one_layer,
    reconstructed,
    relative,
    taps,
)

RECENT = Eviction("recent", 0.5, sink=2)
H2O = Eviction("h2o", 0.5, sink=2, recent_share=0.5)
KEYFORMER = Eviction("keyformer", 0.4, sink=1, recent_share=0.3, tau=(1.0, 3.0), seed=5)
SNAPKV = Eviction("snapkv", 0.5, sink=0, recent_share=0.0, window=3, pool=3)
ALL = [RECENT, H2O, KEYFORMER, SNAPKV]


def survivors(eviction: Eviction, seen: int, alive: list[int], scores: dict[int, float]) -> Any:
    """Drop the lowest scores, but neither first nor newest tokens."""
    count = min(seen, max(eviction.sink + 1, math.ceil(eviction.keep * seen - 1e-9)))
    newest = min(int(eviction.recent_share * count + 1e-9), count - eviction.sink)
    middle = alive[eviction.sink : len(alive) - newest]  # all of them where nothing is kept by age
    best = sorted(middle, key=lambda token: -scores[token])[: count - eviction.sink - newest]
    return sorted([*alive[: eviction.sink], *best, *alive[len(alive) - newest :]])


def snapkv_scores(
    eviction: Eviction,
    there: list[int],
    own: list[int],
    sums: dict[int, float],
    before: dict[int, float],
) -> dict[int, float]:
    """Average what the last queries read over neighbours; what comes later ranks by its age."""
    if len(own) == 1:
        return before | {own[0]: 1e6 + own[0]}
    early = there[: len(there) - min(eviction.window, len(own))]
    reach = eviction.pool // 2
    found = {token: 1e6 + token for token in there}
    for place, token in enumerate(early):
        near = early[max(0, place - reach) : place + reach + 1]
        found[token] = sum(sums[other] for other in near) / eviction.pool
    return found


def oracle(
    model: LoadedModel,
    plan: Plan,
    q: Tensor,
    exact: Tensor,
    keys: Tensor,
    values: Tensor,
    units: list[list[int]],
) -> Tensor:
    """Run the passes one query at a time for one sequence; returns ``[1, T, hidden]``."""
    facts, eviction = model.layout.layers[0], plan.eviction
    out = torch.zeros(LENGTH, facts.num_heads, facts.v_head_dim, dtype=torch.float64)
    for place, unit in enumerate(units):
        alive: list[int] = []
        scores: dict[int, float] = {}
        noise = gumbel(eviction, 0, len(units), 0, LENGTH, torch.device("cpu"))[place].double()
        ranks: dict[int, float] = {}
        for own in [range(PREFILL), *([t] for t in range(PREFILL, LENGTH))]:
            scores |= dict.fromkeys(own, 0.0)
            if eviction.kind == "snapkv":
                scores = dict.fromkeys(scores, 0.0)
            there = [*alive, *own]
            for i in own:
                visible = [t for t in there if t <= i]
                for head in unit:
                    for h in range(head * facts.group, (head + 1) * facts.group):
                        x = facts.scaling * keys[0, head, visible] @ q[0, h, i]
                        out[i, h] = x.softmax(0) @ values[0, head, visible]
                        if eviction.order == "evict_first" and len(own) > 1:
                            x = facts.scaling * exact[0, head, visible] @ q[0, h, i]
                        if eviction.kind == "keyformer":
                            share = i / (model.context_length - 1)
                            tau = eviction.tau[0] + (eviction.tau[1] - eviction.tau[0]) * share
                            x = (x + noise[visible]) / tau
                        if eviction.kind == "snapkv" and i < own[-1] + 1 - eviction.window:
                            continue
                        for token, p in zip(visible, x.softmax(0).tolist(), strict=True):
                            scores[token] += p
            if eviction.kind == "snapkv":
                ranks = snapkv_scores(eviction, there, list(own), scores, ranks)
                alive = survivors(eviction, own[-1] + 1, there, ranks)
                continue
            alive = survivors(eviction, own[-1] + 1, there, scores)
    attention = model.model.get_submodule(facts.attention)
    return attention.get_submodule(facts.output_projection)(out.flatten(1)[None])


@pytest.mark.parametrize("eviction", ALL, ids=lambda e: e.kind)
@pytest.mark.parametrize("order", ["compress_first", "evict_first"])
def test_attention_is_over_the_tokens_that_stay(eviction: Eviction, order: str) -> None:
    model, ids = one_layer("Llama"), token_ids(1, LENGTH)
    eviction = Eviction(**{**vars(eviction), "order": order})
    plan = make_plan(model, ranks=ragged, eviction=eviction)
    tap, layer = taps(model, ids, pre_rope=False), plan.layers[0]
    keys, values = (
        reconstructed(side.groups, states)
        for side, states in ((layer.keys, tap.k), (layer.values, tap.v))
    )
    wanted = oracle(model, plan, tap.q, tap.k, keys, values, [[0], [1]])
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    assert relative(found, wanted) < 1e-6
    whole = make_plan(model, ranks=ragged)
    assert relative(attention_outputs(model, whole, ids, prefill=PREFILL), wanted) > 1e-3


def test_heads_that_share_a_latent_are_evicted_together() -> None:
    """And keys that are rebuilt stay at their own positions."""
    model, ids = one_layer("Llama"), token_ids(1, LENGTH)
    plan = make_plan(model, ranks=ragged, heads=2, placement=Placement.PRE_ROPE, eviction=H2O)
    tap, layer = taps(model, ids, pre_rope=True), plan.layers[0]
    rebuilt = by_models_rope(model, ids, tap, reconstructed(layer.keys.groups, tap.k_pre))
    values = reconstructed(layer.values.groups, tap.v)
    wanted = oracle(model, plan, tap.q, tap.k, rebuilt, values, [[0, 1]])
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    assert relative(found, wanted) < 1e-5


@pytest.mark.parametrize("eviction", ALL, ids=lambda e: e.kind)
@pytest.mark.parametrize("placement", [Placement.POST_ROPE, Placement.PRE_ROPE])
def test_padding_does_not_change_what_is_evicted(eviction: Eviction, placement: Placement) -> None:
    model = loaded("Llama")
    plan = make_plan(model, ranks=ragged, eviction=eviction, placement=placement)
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with compressed(model, plan):
        both = model.model.generate(ids, attention_mask=mask, **settings)
        alone = model.model.generate(ids[1:, 5:], **{**settings, "max_new_tokens": 8})
    # keyformer's temperature depends on how far generation may go, which padding shifts
    if eviction.kind != "keyformer":
        assert torch.equal(both[1, 5:], alone[0])
    assert both.shape == (2, 20)


def test_eviction_refuses_padding_on_the_right() -> None:
    model = loaded("Llama")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    with (
        compressed(model, make_plan(model, eviction=H2O)),
        pytest.raises(UsageError),
    ):
        model.model(token_ids(2, 12), attention_mask=mask)


@pytest.mark.parametrize("sizes", [(9, 2, 1, 1, 6, 1), (12, 1, 1, 5)])
def test_snapkv_looks_again_at_every_pass_of_several_tokens(sizes: tuple[int, ...]) -> None:
    """Scores are of the last pass over a text; pieces that are shorter than the window have it all.

    Independent of the oracle above: what is read is the model's own attention over all keys, which
    it is as long as nothing left.
    """
    seeded(3)
    eviction = Eviction("snapkv", 0.5, sink=0, recent_share=0.0, window=4, pool=3)
    probabilities = torch.rand(1, 2, 2, sizes[0], sizes[0]).tril().double()
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    sums = probabilities[..., -4:, :].sum((2, 3)).float()
    found = retention.snapkv_scores(eviction, sums, sizes[0], torch.tensor([2, 2]), sizes[0])
    mean = probabilities[..., -4:, : sizes[0] - 4].mean((2, 3))
    padded = torch.nn.functional.pad(mean, (1, 1))
    wanted = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
    torch.testing.assert_close(found[..., :-4].double(), wanted, atol=1e-6, rtol=0)
    assert found[..., :-4].max() <= 1 < found[..., -4:].min()
    assert (found[..., -4:].diff(dim=-1) > 0).all()
    model = loaded("Llama")
    plan = make_plan(model, ranks=ragged, eviction=eviction)
    ids = token_ids(1, sum(sizes))
    with compressed(model, plan) as runtime:
        cache, seen = runtime.new_cache(), 0
        for size in sizes:
            model.model(ids[:, seen : seen + size], past_key_values=cache)
            seen += size
            (row_group,) = cache.layers[0].row_groups
            assert row_group.stored == math.ceil(0.5 * seen)
            assert row_group.scores.shape[-1] == row_group.stored
            # of a pass's own tokens the last four stay, as many as are kept
            newest = min(4 if size > 1 else 1, size, row_group.stored)
            ages = row_group.scores[..., -newest:]
            assert torch.equal(ages, torch.arange(seen - newest + 2.0, seen + 2.0).expand_as(ages))


@pytest.mark.parametrize("name", ["h2o", "sink-recent", "fdc+keyformer"])
def test_a_centred_cache_keeps_where_its_tokens_stood(name: str) -> None:
    """Means go back by position, which eviction tears apart; the account counts that too."""
    options = FINE if name.startswith("fdc") else {}
    plan = plan_family(name, inputs("Llama"), centre=True, **options).build(0.5)
    ids = token_ids(2, 43)
    with compressed(model("Llama"), plan, "off") as session, torch.inference_mode():
        cache = session.new_cache()
        for start, stop in [(0, 40), *((i, i + 1) for i in range(40, 43))]:
            model("Llama").model(ids[:, start:stop], past_key_values=cache)
    assert cache.nbytes == bytes_at(plan, 43, itemsize=4, batch=2).total
