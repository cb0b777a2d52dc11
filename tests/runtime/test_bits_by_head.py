"""Heads with bits of their own, and heads that a quantiser leaves out, against their formula."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import bytes_at, dim_rate, paper_rate
from kvprof.methods.family import plan_at
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.plan_files import FORMAT, load_plan, save_plan, structure
from kvprof.methods.plan_report import compare_plans, describe, plan_report
from kvprof.methods.quantisers import kivi, kvquant, per_token
from kvprof.methods.registry import plan_family
from kvprof.methods.soundness import head_kinds
from kvprof.methods.storage import Levels, Quantiser, SideQuantiser
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from kvprof.serving.refusals import refusal
from kvprof.tensor_files import load_tensors, save_tensors
from tests.methods.models import inputs, model
from tests.methods.test_plan_files import read_or_refused_in_one_line
from tests.models.tiny import token_ids
from tests.records.hostile import mutations
from tests.runtime.calibrated import Array, one_layer
from tests.runtime.plans import basis
from tests.runtime.test_formula import attention_outputs, heads_out, relative, taps

WIDTH = 16
#: What each KV head has: bits, a rank, or nothing.
KEYS, VALUES = (2, "full"), ("rank", 4)
QUANTISERS = {
    "per-token": per_token(()),
    "kivi": replace(kivi((), group=4, window=4, block=4), values=SideQuantiser((), "token", WIDTH)),
    "kvquant": kvquant((), outliers=0.1, block=8),
}


def heads_of(choices: tuple[Any, ...], width: int = WIDTH) -> tuple[HeadGroup, ...]:
    found = []
    for head, choice in enumerate(choices):
        whole = HeadGroup(head, 1, width, (width,), quantised=False)
        if choice == "rank":
            whole = replace(whole, ranks=(6,), **dict(zip(("down", "up"), low(head), strict=True)))
        elif choice != "full":
            whole = replace(whole, quantised=True, column_bits=((width, choice),))
        found.append(whole)
    return tuple(found)


def low(head: int) -> tuple[torch.Tensor, torch.Tensor]:
    return basis(WIDTH, 6, head, oblique=True)


def layer_of(keys: tuple[Any, ...], values: tuple[Any, ...]) -> LayerPlan:
    placement = Placement.POST_ROPE if "rank" in keys else Placement.NONE
    return LayerPlan(KeyPlan(placement, heads_of(keys)), ValuePlan(heads_of(values), True, True))


def plan_of(loaded: LoadedModel, quantiser: Quantiser, *layers: LayerPlan, **more: Any) -> Plan:
    return Plan("mixed", loaded.fingerprint, layers, quantiser=quantiser, **more)


def mixed(name: str) -> Plan:
    levels = Levels(1) if name == "kvquant" else Levels()
    layer = layer_of(KEYS, VALUES)
    return plan_of(one_layer("Llama"), QUANTISERS[name], layer, levels=levels)


# --- What attention reads, against the formula in numpy.


def half(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float64)


def affine(rows: Array, bits: int, axis: int) -> Array:
    """Quantise by minimum and range along an axis: one group of a token, or of a few tokens."""
    low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
    zero, scale = half(low), half((high - low) / (2**bits - 1))
    codes = np.clip(np.round((rows - zero) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1)
    return zero + scale * codes


def read(rows: Array, side: str, choice: Any, head: int, name: str, seen: int) -> Array:
    """Return what is read of a head's first `seen` tokens."""
    found = rows.copy()
    if choice == "rank":
        down, up = (x.double().numpy() for x in low(head))
        found = rows @ down @ up.T
    elif choice != "full":
        if name == "per-token":
            found[:seen] = affine(rows[:seen], choice, 1)
        else:  # KIVI, four tokens at a time but for the newest four
            old = max(0, seen - 4) // 4 * 4
            for start in range(0, old, 4):
                block = slice(start, start + 4)
                found[block] = affine(rows[block], choice, 0 if side == "keys" else 1)
    return found


@pytest.mark.parametrize("name", ["per-token", "kivi"])
def test_every_head_is_read_by_its_own_bits(name: str) -> None:
    loaded, prefill, length = one_layer("Llama"), 21, 25
    ids = token_ids(1, length)
    tap = taps(loaded, ids, pre_rope=False)
    rows = []
    for query in range(prefill, length):
        states = {"keys": tap.k.double().clone(), "values": tap.v.double().clone()}
        for side, choices in (("keys", KEYS), ("values", VALUES)):
            for head, choice in enumerate(choices):
                given_rows = states[side][0, head].numpy()
                found = read(given_rows, side, choice, head, name, query)
                states[side][0, head] = torch.from_numpy(found)
        rows.append(heads_out(loaded, tap.q, states["keys"], states["values"])[:, query])
    wanted = torch.stack(rows, dim=1)
    found = attention_outputs(loaded, mixed(name), ids, prefill=prefill)[:, prefill:]
    exact = heads_out(loaded, tap.q, tap.k, tap.v)[:, prefill:]
    assert relative(found, wanted) < 1e-4
    assert relative(exact, wanted) > 3e-2


def by_hand(name: str, tokens: int, itemsize: int) -> int:
    """Count the bytes of `mixed` after so many tokens."""
    full, ranked = WIDTH * itemsize, 6 * itemsize
    if name == "per-token":
        return tokens * (4 + 4 + full + ranked + 8 + 4)
    if name == "kivi":
        old = (tokens - 4) // 4 * 4
        keys = old * 4 + old // 4 * WIDTH * 4 + (tokens - old) * full
        return keys + tokens * (full + ranked) + old * (8 + 4) + (tokens - old) * full
    old = (tokens - 1) // 8 * 8
    apart = math.ceil(0.1 * WIDTH) * (itemsize + 2)
    keys = old * (4 + apart) + old // 8 * WIDTH * 4
    return keys + tokens * (full + ranked) + old * (8 + 4 + apart) + 2 * (tokens - old) * full


@pytest.mark.parametrize("name", QUANTISERS)
def test_bytes_are_counted_by_hand_and_are_those_that_lie_in_the_cache(name: str) -> None:
    tokens, plan = 43, mixed(name)
    assert bytes_at(plan, tokens, itemsize=8).total == by_hand(name, tokens, 8)
    with compressed(one_layer("Llama"), plan) as session, torch.inference_mode():
        cache = session.new_cache()
        one_layer("Llama").model(token_ids(2, tokens - 2), past_key_values=cache)
        for t in range(2):
            one_layer("Llama").model(token_ids(2, tokens)[:, t : t + 1], past_key_values=cache)
    assert cache.nbytes == 2 * by_hand(name, tokens, 8)
    assert dim_rate(plan) == pytest.approx(1 - (3 * WIDTH + 6) / (4 * WIDTH))
    bits = (2 + 16 + 4) * WIDTH + 16 * 6
    assert paper_rate(plan) == pytest.approx(1 - bits / (4 * 16 * WIDTH))


def test_what_all_heads_have_alike_is_the_quantiser_said_once() -> None:
    loaded = model("Llama")
    said = plan_at(plan_family("per-token", inputs("Llama"), centre=False), 4.0)
    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=heads_of((4, 4))),
            values=replace(layer.values, groups=heads_of((4, 4))),
        )
        for layer in said.layers
    ]
    own = plan_of(loaded, per_token(()), *layers)
    assert bytes_at(own, 50, itemsize=2) == bytes_at(said, 50, itemsize=2)
    ids = token_ids(2, 30)
    logits = []
    for plan in (said, own):
        with compressed(loaded, plan) as session, torch.inference_mode():
            cache = session.new_cache()
            loaded.model(ids[:, :20], past_key_values=cache)
            logits.append(loaded.model(ids[:, 20:], past_key_values=cache).logits)
    assert torch.equal(*logits)


# --- What is said, written, read and refused.


def test_a_report_says_who_has_which_bits() -> None:
    said = " ".join(describe(mixed("per-token"), 100)["sentences"])
    assert "uncompressed (50%), 2 bits (50%), 2.00" in said
    told = plan_report(mixed("per-token"), 100)
    assert told["bits"] == {"keys": [[2, 16]], "values": [[16, 4]]}
    alike = plan_at(plan_family("per-token", inputs("Llama"), centre=False), 4.0)
    assert plan_report(alike, 100)["bits"] is None
    layer = layer_of(("full", "full"), ("full", "full"))
    values = (replace(layer.values.groups[0], quantised=True), layer.values.groups[1])
    keys = tuple(replace(group, quantised=True) for group in layer.keys.groups)
    layer = replace(
        layer, keys=replace(layer.keys, groups=keys), values=replace(layer.values, groups=values)
    )
    fp8 = plan_of(one_layer("Llama"), Quantiser("fp8", None, SideQuantiser((8,))), layer)
    said = " ".join(describe(fp8, 100)["sentences"])
    assert "Of the columns of values 50% are not quantised." in said
    assert bytes_at(fp8, 10, itemsize=2).total == 10 * (3 * WIDTH * 2 + WIDTH)
    ranked = plan_of(one_layer("Llama"), per_token(()), layer_of((2, "rank"), (4, "rank")))
    assert len(head_kinds(ranked)) == 2


def test_engines_pages_hold_no_heads_with_bits_of_their_own() -> None:
    assert "bits differ" in str(refusal(mixed("per-token")))


def written(path: Path) -> dict[str, Any]:
    _, metadata = load_tensors(path, format_name=FORMAT, what="plans", made_by="x")
    found: dict[str, Any] = json.loads(metadata["plan"])
    return found


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_saved_plan_comes_back_and_asks_for_a_reader_that_knows_it(
    name: str, tmp_path: Path
) -> None:
    save_plan(mixed(name), tmp_path / "p")
    found = load_plan(tmp_path / "p")
    assert compare_plans(found, mixed(name)) == {}
    assert [group.quantised for group in found.layers[0].keys.groups] == [True, False]


def test_other_plans_are_written_as_they_were(tmp_path: Path) -> None:
    for name in ("per-token", "kq-wf"):
        options = {"grid": 4, "allocation": "output"} if name == "kq-wf" else {}
        knob = 4.0 if name == "per-token" else 0.5
        save_plan(plan_at(plan_family(name, inputs("Llama"), **options), knob), tmp_path / name)
        assert "quantised" not in json.dumps(written(tmp_path / name)["layers"])


_WHOLE = structure(mixed("per-token"))
_BASES = {"layers.0.values.0.down": low(0)[0], "layers.0.values.0.up": low(0)[1]}


@settings(max_examples=60)
@given(stored=mutations(_WHOLE))
def test_a_forged_plan_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, stored: dict[str, Any]
) -> None:
    read_or_refused_in_one_line(tmp_path_factory.mktemp("forged"), _BASES, stored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantised": "no"}, "is not of type 'boolean'"),
        ({"quantised": False}, "unquantised heads"),
        ({"column_bits": [[16, 5]]}, "5; use 2, 3, 4, 8"),
        ({"column_bits": [[16, 0]]}, "by column: 0"),
        ({"column_bits": [[8, 2], [8, 4]]}, "affine"),
        ({"column_bits": [[15, 2]]}, "15 columns"),
        ({"column_bits": []}, "bits are missing"),
    ],
)
def test_a_file_that_says_nonsense_is_damaged(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    stored = json.loads(json.dumps(_WHOLE))
    stored["layers"][0]["keys"]["groups"][0].update(change)
    save_tensors(tmp_path / "p", _BASES, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4")
    with pytest.raises(FailedError, match=f"p: damaged plan: .*({said})"):
        load_plan(tmp_path / "p")


def test_what_contradicts_itself_is_refused() -> None:
    plan = mixed("per-token")

    def with_keys(*groups: HeadGroup, **fields: Any) -> Plan:
        (layer,) = plan.layers
        changed = replace(layer, keys=replace(layer.keys, groups=groups))
        return replace(plan, layers=(changed,), **fields)

    bits, exact = plan.layers[0].keys.groups
    assert plan.quantiser is not None
    values = plan.quantiser.values
    refused = {
        "bits are missing": lambda: with_keys(replace(bits, column_bits=()), exact),
        "without bits": lambda: with_keys(
            bits, exact, quantiser=replace(plan.quantiser, keys=SideQuantiser((4,), group=32))
        ),
        "unquantised heads": lambda: with_keys(
            replace(bits, column_bits=(), quantised=False),
            exact,
            quantiser=Quantiser("affine", None, values),
        ),
        "0 bit widths for 1 token levels": lambda: with_keys(
            bits, exact, quantiser=Quantiser("fp8", SideQuantiser(()), None)
        ),
        "a scale requires": lambda: with_keys(bits, replace(exact, scale=2.0)),
        "skipped": lambda: replace(plan, layers=(replace(plan.layers[0], left_out=True),)),
    }
    for said, make in refused.items():
        with pytest.raises(UsageError, match=said):
            make()
