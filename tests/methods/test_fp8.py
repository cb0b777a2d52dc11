"""FP8's scales are those of the calibration's own keys and values; what a cast loses is said."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import describe
from kvprof.methods.registry import calibration_needs, plan_family
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.sources.grammar import parse_source
from tests.models.tiny import tiny, token_ids
from tests.runtime.calibrated import known
from tests.runtime.test_formula import attention_outputs, heads_out, relative, taps
from tests.runtime.test_quantiser_formulas import e4m3


def one_layer(keys: float, values: float) -> LoadedModel:
    """A model whose first KV head has keys and values that many times as large."""
    model = copy.deepcopy(tiny("Llama", num_hidden_layers=1)).double()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight[: attention.head_dim] *= keys
        attention.v_proj.weight[: attention.head_dim] *= values
    return wrap_model(model)


def inputs(model: LoadedModel) -> MethodInputs:
    options = CollectOptions(512, 64, magnitudes=True)
    *_, moments = collect_moments(model, parse_source("random:512"), options)
    return MethodInputs(model.layout, model.fingerprint, moments)


def scales(plan: Plan, side: str) -> list[float]:
    return [group.scale for layer in plan.layers for group in getattr(layer, side).groups]


def test_scales_hold_twice_the_largest_calibration_value() -> None:
    given, vectors = known("Llama")
    plan = plan_family("fp8", given).build(8.0)
    for side, key in (("keys", "k"), ("values", "v")):
        for head, scale in enumerate(scales(plan, side)):
            largest = np.abs(vectors[key][head]).max()
            assert 2 * largest <= 448 * scale < 4 * largest
            assert math.frexp(scale)[0] == 0.5
    assert plan.made["options"] == {"scale": "head"}
    assert "notes" not in plan.made


@pytest.mark.parametrize(("keys", "values"), [(2.0**5, 2.0**-16), (2.0**-16, 2.0**16)])
def test_a_pass_reads_scaled_casts(keys: float, values: float) -> None:
    """Of heads of any size, by numpy: the plain cast would clip or flush much of the first."""
    model, prefill, length = one_layer(keys, values), 20, 30
    ids = token_ids(1, length)
    plan = plan_family("fp8", inputs(model)).build(8.0)
    tap = taps(model, ids, pre_rope=False)
    exact = heads_out(model, tap.q, tap.k, tap.v)
    rows = [exact[:, query] for query in range(prefill)]
    for query in range(prefill, length):
        states = {"keys": tap.k.double().clone(), "values": tap.v.double().clone()}
        for side, own in states.items():
            for head, scale in enumerate(scales(plan, side)):
                past = own[0, head, :query].numpy()
                own[0, head, :query] = torch.from_numpy(scale * e4m3(past / scale))
        rows.append(heads_out(model, tap.q, states["keys"], states["values"])[:, query])
    wanted = torch.stack(rows, dim=1)[:, prefill:]
    found = attention_outputs(model, plan, ids, prefill=prefill)
    assert relative(found[:, :prefill], exact[:, :prefill]) < 1e-9
    assert relative(found[:, prefill:], wanted) < 1e-9
    assert relative(exact[:, prefill:], wanted) > 1e-4
    if values > 1:
        cast = plan_family("fp8", inputs(model), scale="none").build(8.0)
        clipped = attention_outputs(model, cast, ids, prefill=prefill)[:, prefill:]
        assert relative(clipped, wanted) > 0.5


def test_what_the_plain_cast_loses_is_said_with_its_share() -> None:
    model = one_layer(2.0**14, 2.0**-12)
    given = inputs(model)
    plan = plan_family("fp8", given, scale="none").build(8.0)
    assert set(scales(plan, "keys")) == {1.0}
    clips, flushes = plan.made["notes"]
    assert clips.startswith("fp8:scale=none clips ")
    assert "keys of layer 0, KV head 0, on 512 tokens of random" in clips
    assert flushes.startswith("fp8:scale=none flushes to zero ")
    assert "values of layer 0, KV head 0" in flushes
    drawn = token_ids(1, 8)  # any tokens do: what is told has to be about this size
    tap = taps(model, drawn, pre_rope=False)
    share = float((tap.k[0, 0].abs() > 448).double().mean())
    assert plan.made["cast"]["clipped"]["keys"] == pytest.approx(share, abs=0.1)
    assert plan.made["cast"]["clipped"]["values"] == 0
    assert plan.made["cast"]["flushed"]["values"] > 0.5
    assert "notes" not in plan_family("fp8", given).build(8.0).made


def test_scales_cost_no_byte_and_are_told() -> None:
    given, _ = known("Llama")
    plan, cast = (plan_family("fp8", given, scale=one).build(8.0) for one in ("head", "none"))
    told, plain = (describe(one, 100, layout=given.layout) for one in (plan, cast))
    assert told["bytes"] == plain["bytes"]
    assert told["weights"] == plain["weights"]
    assert told["kinds"] == 0
    said = " ".join(told["sentences"])
    assert "over a scale of its own (2^" in said
    assert "no byte of any token" in said
    assert "without scales" in " ".join(plain["sentences"])


def test_a_saved_plan_keeps_its_scales(tmp_path) -> None:
    given, _ = known("Llama")
    for scale in ("head", "none"):
        plan = plan_family("fp8", given, scale=scale).build(8.0)
        file = tmp_path / scale
        save_plan(plan, file)
        found = load_plan(file)
        assert [scales(found, side) for side in ("keys", "values")] == [
            scales(plan, side) for side in ("keys", "values")
        ]


@pytest.mark.parametrize(
    ("scale", "change", "complaint"),
    [
        (3.0, {}, "layer 0 keys: scale 3 "),
        (float("inf"), {}, "scale inf "),
        (2.0, {"lazy": True}, "lazy"),
        (2.0, {"quantiser": None}, "scales"),
    ],
)
def test_scales_that_are_none_are_refused(scale: float, change: dict, complaint: str) -> None:
    plan = plan_family("fp8", known("Llama")[0], scale="none").build(8.0)
    layer = plan.layers[0]
    groups = tuple(replace(group, scale=scale) for group in layer.keys.groups)
    scaled = replace(layer, keys=replace(layer.keys, groups=groups))
    with pytest.raises(UsageError, match=complaint):
        replace(plan, layers=(scaled, *plan.layers[1:]), **change)


def test_a_scale_beside_a_basis_is_refused() -> None:
    given, _ = known("Llama")
    plan = plan_family("kq-8bit", given, grid=4, minimum=4).build(0.5)
    layer = plan.layers[0]
    assert layer.keys.placement is Placement.POST_ROPE
    groups = tuple(replace(group, scale=2.0) for group in layer.keys.groups)
    with pytest.raises(UsageError, match="basis"):
        replace(plan, layers=(replace(layer, keys=replace(layer.keys, groups=groups)),))


def test_scales_need_calibration_and_the_plain_cast_can_do_without() -> None:
    given, _ = known("Llama")
    bare = replace(given, moments=None)
    assert calibration_needs("fp8").magnitudes
    with pytest.raises(UsageError, match="fp8 needs calibration data"):
        plan_family("fp8", bare)
    assert "notes" not in plan_family("fp8", bare, scale="none").build(8.0).made
    with pytest.raises(UsageError, match="option scale is one of head, none, not 'row'"):
        plan_family("fp8", given, scale="row")
    for layer in (moments := copy.deepcopy(given.moments)).layers:
        layer.magnitudes = {}
    with pytest.raises(UsageError, match="magnitudes"):
        plan_family("fp8", replace(given, moments=moments))
