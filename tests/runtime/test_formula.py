"""Below full rank the outputs are the formula's, by an independent float64 computation."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.methods.plan import HeadGroup, Placement
from kvprof.methods.storage import Levels
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import Tap, capture
from kvprof.runtime.compressed import compressed
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import make_plan, ragged

PREFILL, LENGTH = 7, 15


def one_layer(arch: str) -> LoadedModel:
    overrides = {"SmolLM3": {"no_rope_layers": [0]}, "Gemma2": {"sliding_window": 64}}
    types = {"layer_types": ["full_attention"]} if arch in ("GptOss", "Gemma3") else {}
    more = overrides.get(arch, {})
    model = tiny(arch, num_hidden_layers=1, **more, **types)
    # torch's grouped matrix product, which its experts use, knows no float64
    return wrap_model(model if arch == "GptOss" else model.double())


def attention_outputs(model: LoadedModel, plan: Any, ids: Tensor, *, prefill: int) -> Tensor:
    """Return what the attention module puts out, an uncompressed prefill and then tokens."""
    plan = replace(plan, prefill_uncompressed=True)
    outputs: list[Tensor] = []
    attention = model.model.get_submodule(model.layout.layers[0].attention)
    with compressed(model, plan) as session, torch.inference_mode():
        # Only now: opening a model runs it.
        hook = attention.register_forward_hook(lambda m, a, result: outputs.append(result[0]))
        cache = session.new_cache()
        model.model(ids[:, :prefill], past_key_values=cache)
        for t in range(prefill, ids.shape[1]):
            model.model(ids[:, t : t + 1], past_key_values=cache)
    hook.remove()
    return torch.cat(outputs, dim=1)


def taps(model: LoadedModel, ids: Tensor, *, pre_rope: bool) -> Tap:
    seen: list[Tap] = []
    with capture(model, seen.append, pre_rope=pre_rope), torch.inference_mode():
        model.model(ids, use_cache=False)
    return seen[0]


def reconstructed(groups: tuple[HeadGroup, ...], states: Tensor, rank: int | None = None) -> Tensor:
    """Return ``x @ down_r @ up_r.T`` of ``[B, heads, T, d]``, in float64."""
    parts = []
    for group in groups:
        x = states[:, group.first : group.first + group.heads].double()
        flat = torch.cat(list(x.unbind(1)), dim=-1)
        r = group.rank if rank is None else rank
        flat = flat @ group.down[:, :r].double() @ group.up[:, :r].double().T
        parts.append(torch.stack(flat.split(group.head_dim, dim=-1), dim=1))
    return torch.cat(parts, dim=1)


def heads_out(model: LoadedModel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention with W_O, written out: ``[B, T, hidden]``."""
    facts = model.layout.layers[0]
    attention = model.model.get_submodule(facts.attention)
    project = copy.deepcopy(attention.get_submodule(facts.output_projection)).double()
    q, k, v = (x.double() for x in (q, k, v))
    # Keys may be given per query head.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = facts.scaling * q @ k.mT
    if facts.softcap:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    length = q.shape[2]
    scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    if facts.sinks:
        sinks = attention.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        probabilities = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    joined = (probabilities @ v).transpose(1, 2).flatten(2)
    return project(joined)


def relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("arch", ["Llama", "Qwen2", "Gemma2", "GPT2", "OPT", "GptOss", "GPTNeoX"])
@pytest.mark.parametrize("fold_values", [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("heads", [1, 2])
def test_projection_after_rope(arch: str, fold_values: tuple[bool, bool], heads: int) -> None:
    model, ids = one_layer(arch), token_ids(2, LENGTH)
    fold_keys = heads == 1 and arch in ("GPT2", "OPT")
    plan = make_plan(model, ranks=ragged, heads=heads, fold_values=fold_values, fold_keys=fold_keys)
    tap = taps(model, ids, pre_rope=False)
    layer = plan.layers[0]
    wanted = heads_out(
        model,
        tap.q,
        reconstructed(layer.keys.groups, tap.k),
        reconstructed(layer.values.groups, tap.v),
    )
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    # bases pass through float32
    assert relative(found, wanted) < (1e-5 if arch == "GptOss" else 1e-6)
    exact = heads_out(model, tap.q, tap.k, tap.v)
    assert relative(exact, wanted) > 1e-2  # the ranks are low enough to matter


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "GPTNeoX", "StableLm", "Phi3", "Cohere"])
@pytest.mark.parametrize("fold_keys", [False, True])
def test_keys_rebuilt_before_rope(arch: str, fold_keys: bool) -> None:
    model, ids = one_layer(arch), token_ids(2, LENGTH)
    plan = make_plan(
        model, ranks=ragged, heads=2, placement=Placement.PRE_ROPE, fold_keys=fold_keys
    )
    tap = taps(model, ids, pre_rope=True)
    layer = plan.layers[0]
    rebuilt = reconstructed(layer.keys.groups, tap.k_pre)
    wanted = heads_out(
        model,
        tap.q,
        by_models_rope(model, ids, tap, rebuilt),
        reconstructed(layer.values.groups, tap.v),
    )
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    # the models' own RoPE computes its tables in float32
    assert relative(found, wanted) < 1e-5


def by_models_rope(model: LoadedModel, ids: Tensor, tap: Tap, keys: Tensor) -> Tensor:
    """Rotate as RoPE does, by the rotation that took k_pre to k, pair by pair.

    Every rotated pair of dimensions is a complex number; k / k_pre is the rotation itself.
    """
    facts = model.layout.layers[0]
    turned = keys.clone()
    width = facts.rotary_dim
    half = width // 2
    interleaved = type(model.model).__name__.startswith("Cohere")
    first = slice(0, width, 2) if interleaved else slice(0, half)
    second = slice(1, width, 2) if interleaved else slice(half, width)

    def pairs(x: Tensor) -> Tensor:
        return torch.complex(x[..., first].double(), x[..., second].double())

    ratio = pairs(tap.k)[:, :1] / pairs(tap.k_pre)[:, :1]
    result = pairs(keys) * ratio
    turned[..., first], turned[..., second] = result.real, result.imag
    return turned


@pytest.mark.parametrize("lazy", [False, True])
def test_token_levels_decide_ranks(lazy: bool) -> None:
    """TALE: first tokens whole, the recent share at the top rank, the middle truncated."""
    model, ids = one_layer("Llama"), token_ids(2, LENGTH)
    levels = Levels(sink=2, shares=(0.7, 0.3), batch=2)
    plan = make_plan(
        model,
        heads=2,
        placement=Placement.NONE,
        levels=levels,
        lazy=lazy,
        ranks=lambda *a: (9, a[3]),
        fold_values=(False, True),
        oblique=False,
    )
    tap = taps(model, ids, pre_rope=False)
    groups = plan.layers[0].values.groups
    low, top = reconstructed(groups, tap.v, 9), reconstructed(groups, tap.v)

    def middle(seen: int) -> int:
        """Tokens of level 0 after `seen`, by the rule: the recent share is 0.3, floor, in twos."""
        rest = seen - 2
        return (rest - int(0.3 * rest + 1e-9)) // 2 * 2

    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    rows = []
    for query in range(LENGTH):
        prefill = query < PREFILL
        stored = 0 if prefill else query  # tokens of earlier passes are as they were stored
        own = middle(PREFILL if prefill else query + 1)
        count = middle(stored) if stored else 0
        values = top.clone()
        values[:, :, 2 : 2 + count] = low[:, :, 2 : 2 + count]
        if prefill and lazy:
            values = tap.v.clone()
        else:
            begin = max(stored, 2)
            values[:, :, begin : 2 + own] = low[:, :, begin : 2 + own]
        rows.append(heads_out(model, tap.q, tap.k, values)[:, query])
    assert relative(found, torch.stack(rows, dim=1)) < 1e-6
