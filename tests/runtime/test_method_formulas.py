"""Below full rank each method's outputs are its own formula's, on a one-layer model in float64.

`tests.runtime.test_formula` asks the runtime that of any bases. Here the bases are found again from
the captured vectors by plain numpy. Quantisers: `tests.runtime.test_quantiser_formulas`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvprof.methods.accounting import bytes_at, dim_rate
from kvprof.methods.family import plan_at
from kvprof.methods.named import ENGINE_FORMATS, PAPERS
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import compare_plans
from kvprof.methods.registry import METHODS, plan_family
from kvprof.runtime.backends.support import LayerSpec, why_not
from kvprof.runtime.compressed import compressed
from tests.methods.models import FINE
from tests.models.tiny import token_ids
from tests.runtime.calibrated import HALF, TOKENS, Array, known, one_layer
from tests.runtime.test_formula import (
    LENGTH,
    PREFILL,
    attention_outputs,
    by_models_rope,
    heads_out,
    relative,
    taps,
)
from tests.runtime.test_strawman import projected

#: By the test's name: the method and its options.
LOW_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "fdc": ("fdc", HALF),
    "fdc_stacked": ("fdc", {**HALF, "keys": "svd-qk-stacked"}),
    "fdc_weight_v": ("fdc", {**HALF, "values": "weight-v"}),
    "zack": ("zack", HALF),
    "zack:paper": ("zack:paper", HALF),
    "kq": ("kq", HALF),
    "svd_kv": ("svd-kv", HALF),
    "svd_k": ("svd-k", HALF),
    "svd_v": ("svd-v", HALF),
    "palu": ("palu", {**HALF, "heads": 2}),
    "palu_hadamard": ("palu", {**HALF, "heads": 2, "hadamard": True}),
}
#: Tested below, in test_quantiser_formulas, test_rotated_formulas, test_library_codecs (HQQ against
#: the library itself), test_eviction and test_bits_by_head.
ELSEWHERE = {"tale", "tale+kivi", "strawman", "fp8", "per-token", "kivi", "kvquant"} | {
    "kq-wf", "hqq", "quanto", "sink-recent", "h2o", "keyformer", "snapkv",
    "hadamard-int4", "hadamard-int3", "hadamard-int2", "turboquant", "oscar", "kvtc", "xkv",
    *ENGINE_FORMATS,
}  # fmt: skip


def leading(rows: Array, rank: int) -> Array:
    """Project on the leading right singular vectors: ``R_r R_rᵀ``."""
    right = np.linalg.svd(rows, full_matrices=False)[2][:rank]
    return right.T @ right


def best_for_product(stored: Array, other: Array, rank: int) -> Array:
    """Return ``A Bᵀ`` for which ``stored A Bᵀ other.T`` is the best product of that rank."""
    r_stored, r_other = np.linalg.qr(stored)[1], np.linalg.qr(other)[1]
    left = np.linalg.svd(r_stored @ r_other.T)[0][:, :rank]
    return np.linalg.solve(r_stored, left @ left.T @ r_stored)


def projector(name: str, side: str, head: int, rank: int, seen: dict[str, Array]) -> Array | None:
    """Return what a method's K or V of one head (for Palu: of two) is multiplied by."""
    group = len(seen["q"]) // len(seen["k"])
    own = slice(head * group, (head + 1) * group)
    q, k, v = np.concatenate(list(seen["q"][own])), seen["k"][head], seen["v"][head]
    w_o = np.concatenate(list(seen["w_o"][own].swapaxes(1, 2)))
    if name.startswith("palu"):
        joined = seen["k_pre" if side == "keys" else "v"] - bias(side, seen)
        return leading(np.concatenate(list(joined[head : head + 2]), axis=1), rank)
    if name in ("full", "svd_v" if side == "keys" else "svd_k"):
        return None
    if name.startswith("svd"):
        return leading(k if side == "keys" else v, rank)
    if name == "kq":
        return best_for_product(*((k, q) if side == "keys" else (v, w_o)), rank)
    if side == "keys":  # each query head brings its key, or all of them the group's once
        return leading(np.concatenate([q, *[k] * (1 if name == "fdc_stacked" else group)]), rank)
    if name == "zack:paper":
        return leading(np.concatenate([v, w_o]), rank)  # as many values as were seen
    if name == "fdc_weight_v":
        return leading(seen["w_v"][head].T, rank)
    return leading(np.concatenate([math.sqrt(8192 / TOKENS) * v, w_o]), rank)


def bias(side: str, seen: dict[str, Array]) -> Array:
    """Return what the projection adds, which Palu's code adds after the rebuild."""
    return seen["b_k" if side == "keys" else "b_v"][:, None]


def through(name: str, side: str, plan: Plan, states: Tensor, seen: dict[str, Array]) -> Tensor:
    groups = getattr(plan.layers[0], side).groups
    parts = []
    added = torch.from_numpy(bias(side, seen)) if name.startswith("palu") else 0.0
    states = states.double() - added
    for group in groups:
        x = states[:, group.first : group.first + group.heads]
        flat = torch.cat(list(x.unbind(1)), dim=-1)
        matrix = projector(name, side, group.first, group.rank, seen)
        flat = flat if matrix is None else flat @ torch.from_numpy(matrix)
        parts.append(torch.stack(flat.split(group.head_dim, dim=-1), dim=1))
    return torch.cat(parts, dim=1) + added


@pytest.mark.parametrize("arch", ["Llama", "Qwen2", "GPT2", "Gemma2"])
@pytest.mark.parametrize("name", LOW_RANK)
def test_outputs_are_the_formulas(name: str, arch: str) -> None:
    if name == "fdc_weight_v" and arch == "GPT2":
        pytest.skip("W_V is a slice of a fused projection; the same code reads it")
    model, ids = one_layer(arch), token_ids(2, LENGTH)
    given, seen = known(arch)
    method, options = LOW_RANK[name]
    plan = plan_at(plan_family(method, given, **options), 0.0 if method == "full" else 0.5)
    pre = method == "palu" and model.layout.layers[0].rotary_dim > 0
    tap = taps(model, ids, pre_rope=pre)
    keys = through(name, "keys", plan, tap.k_pre if pre else tap.k, seen)
    if pre:
        keys = by_models_rope(model, ids, tap, keys)
    wanted = heads_out(model, tap.q, keys, through(name, "values", plan, tap.v, seen))
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    assert relative(found, wanted) < 2e-5  # bases, and RoPE's tables, pass through float32
    exact = heads_out(model, tap.q, tap.k, tap.v)
    assert (relative(exact, wanted) > 1e-2) is (method != "full")


def test_no_method_is_left_out() -> None:
    assert {method for method, _ in LOW_RANK.values()} | ELSEWHERE | set(PAPERS) == set(METHODS)


@pytest.mark.parametrize("arch", ["Llama", "Gemma2"])
def test_to_the_letter_fdc_has_a_basis_and_a_key_per_query_head(arch: str) -> None:
    """FDC §5.1: the SVD of each query head's queries and keys, G stored keys per KV head."""
    model, ids = one_layer(arch), token_ids(2, LENGTH)
    given, seen = known(arch)
    plan = plan_at(plan_family("fdc", given, **HALF, keys="svd-qk-literal"), 0.5)
    tap = taps(model, ids, pre_rope=False)
    copied = tap.k.double().repeat_interleave(model.layout.layers[0].group, dim=1)
    keys = []
    for head, group in enumerate(plan.layers[0].keys.groups):
        own = np.concatenate([seen["q"][head], seen["k"][head // model.layout.layers[0].group]])
        keys.append(copied[:, head] @ torch.from_numpy(leading(own, group.rank)))
    values = through("fdc", "values", plan, tap.v, seen)
    wanted = heads_out(model, tap.q, torch.stack(keys, dim=1), values)
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    assert relative(found, wanted) < 2e-5
    assert relative(heads_out(model, tap.q, tap.k, tap.v), wanted) > 1e-2


def test_a_key_per_query_head_is_counted_stored_and_kept_from_the_kernels(tmp_path: Path) -> None:
    model, ids = one_layer("Llama"), token_ids(2, LENGTH)
    facts = model.layout.layers[0]
    family = plan_family("fdc", known("Llama")[0], **FINE, keys="svd-qk-literal")
    full, plan = plan_at(family, 0.0), plan_at(family, 0.4)
    # At full rank it stores G keys and one value where the model stores one of each.
    assert dim_rate(full) == pytest.approx(1 - (facts.group + 1) / 2)
    with compressed(model, plan, kernels="auto") as session, torch.inference_mode():
        cache = session.new_cache()
        model.model(ids, past_key_values=cache)
        assert cache.nbytes == 2 * bytes_at(plan, LENGTH, itemsize=8).total
    reason = why_not(LayerSpec(plan, plan.layers[0], facts, torch.device("cpu"), torch.float32))
    assert reason is not None
    assert "each query head" in reason
    save_plan(plan, tmp_path / "literal.safetensors")
    assert compare_plans(load_plan(tmp_path / "literal.safetensors"), plan) == {}


@pytest.mark.parametrize("evictor", ["h2o", "keyformer", "snapkv", "sink-recent"])
def test_tokens_of_a_kv_head_leave_together_whatever_is_stored_of_each(evictor: str) -> None:
    model, ids = one_layer("Llama"), token_ids(2, LENGTH)
    found = []
    for keys in ("svd-qk", "svd-qk-literal"):
        family = plan_family(f"fdc+{evictor}", known("Llama")[0], **FINE, keys=keys, keep=0.5)
        found.append(attention_outputs(model, family.build(0.0), ids, prefill=PREFILL))
    assert relative(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("arch", ["Llama", "Gemma2"])
def test_the_strawman_finds_its_bases_in_the_prompt(arch: str) -> None:
    model, ids = one_layer(arch), token_ids(2, LENGTH)
    # Rank 5, as `projected` has it.
    plan = plan_at(plan_family("strawman", known(arch)[0], **FINE), 1 - 5 / 16)
    assert plan.layers[0].keys.groups[0].rank == 5
    tap = taps(model, ids, pre_rope=False)
    exact = heads_out(model, tap.q, tap.k, tap.v)
    lossy = heads_out(model, tap.q, projected(tap.k), projected(tap.v))
    found = attention_outputs(model, plan, ids, prefill=PREFILL)
    assert relative(found[:, :PREFILL], exact[:, :PREFILL]) < 1e-6
    assert relative(found[:, PREFILL:], lossy[:, PREFILL:]) < 1e-6


@pytest.mark.parametrize("lazy", [True, False])
def test_tale_truncates_the_middle(lazy: bool) -> None:
    """Sinks and the recent share whole, the middle at r_0 of the joint values (TALE §2.2)."""
    model, ids = one_layer("Llama"), token_ids(2, 40)
    given, seen = known("Llama")
    family = plan_family("tale", given, **HALF, heads=2, lazy=lazy)
    plan = plan_at(family, 0.5)
    (group,) = plan.layers[0].values.groups
    assert group.ranks == (16, 32)
    tap = taps(model, ids, pre_rope=False)
    joined = torch.cat(list(tap.v.unbind(1)), dim=-1)
    matrix = leading(np.concatenate(list(seen["v"]), axis=1), 16)
    low = torch.stack((joined @ torch.from_numpy(matrix)).split(16, dim=-1), dim=1)
    prefill, rows = 30, []
    for query in range(40):
        # An eager prefill sees its own tokens at the level that they have afterwards.
        seen_so_far = query if query >= prefill else 0 if lazy else prefill
        middle = max(0, seen_so_far - 4) - math.floor(0.1 * max(0, seen_so_far - 4) + 1e-9)
        if query >= prefill:  # a token's own step cuts nothing but itself, and it is recent
            middle = (query - 4) - math.floor(0.1 * (query - 4) + 1e-9)
        values = tap.v.clone()
        values[:, :, 4 : 4 + middle] = low[:, :, 4 : 4 + middle]
        rows.append(heads_out(model, tap.q, tap.k, values)[:, query])
    found = attention_outputs(model, plan, ids, prefill=prefill)
    assert relative(found, torch.stack(rows, dim=1)) < 2e-5
