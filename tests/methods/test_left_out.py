"""Layers left out are stored and attended to as the model does it, beside any method."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, dim_rate, paper_rate
from kvprof.methods.family import MethodInputs, PlanFamily, plan_at, plan_for_rate
from kvprof.methods.named import method_entries
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import describe
from kvprof.methods.registry import plan_family
from kvprof.methods.soundness import check_kinds, head_kinds
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.runtime.compressed import compressed
from kvprof.serving.refusals import refusal
from kvprof.sources.grammar import parse_source
from tests.methods.models import FINE
from tests.models.tiny import tiny, token_ids

LAYERS, PREFILL, LENGTH = 3, 70, 76
# Each with a knob at which it loses something.
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "kq": (FINE, 0.5),
    "kq-k4v2": (FINE, 0.5),
    "kq-wf": ({"grid": 4, "window": 8, "allocation": "output"}, 0.8),
    "palu": ({**FINE, "heads": 2}, 0.5),
    "tale": (FINE, 0.5),
    "tale+kivi": ({**FINE, "window": 0}, 0.5),
    "svd-k": (FINE, 0.5),
    "strawman": (FINE, 0.5),
    "fp8": ({}, 8.0),
    "kvquant": ({}, 2.0),
    "full-k8v4": ({}, 0.0),
    "hadamard-int4": ({"bits": "k8v3"}, 5.5),
    "turboquant": ({}, 3.0),
    "oscar": ({"sink": 2, "window": 8}, 2.0),
    "h2o": ({}, 0.5),
    "snapkv": ({"window": 4}, 0.5),
    "fdc+keyformer": ({**FINE, "keep": 0.5}, 0.3),
}


@cache
def model() -> LoadedModel:
    deep = tiny("Llama", num_hidden_layers=LAYERS, max_position_embeddings=256)
    return wrap_model(deep.double())


@cache
def inputs() -> MethodInputs:
    options = CollectOptions(512, 64, pre_rope=True, joint_heads=2, magnitudes=True, outputs=True)
    *_, moments = collect_moments(model(), parse_source("random:512"), options)
    return MethodInputs(model().layout, model().fingerprint, moments)


def family(name: str, skip: tuple[int, ...]) -> PlanFamily:
    return plan_family(name, inputs(), **METHODS[name][0], **({"skip": skip} if skip else {}))


def plan_of(name: str, *skip: int) -> Plan:
    return plan_at(family(name, skip), METHODS[name][1])


def decoded(plan: Plan) -> tuple[list[Tensor], list[Tensor], int]:
    """Return what goes into each layer's attention and comes out, and the cache's bytes."""
    ids = token_ids(1, LENGTH)
    came: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    went: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    with compressed(model(), plan, "off") as session, torch.inference_mode():
        hooks = []
        for index, facts in enumerate(model().layout.layers):
            attention = model().model.get_submodule(facts.attention)

            def keep(_: Any, args: Any, kwargs: Any, result: Any, index: int = index) -> None:
                came[index].append(kwargs["hidden_states"])
                went[index].append(result[0])

            hooks.append(attention.register_forward_hook(keep, with_kwargs=True))
        cache = session.new_cache()
        model().model(ids[:, :PREFILL], past_key_values=cache)
        for t in range(PREFILL, LENGTH):
            model().model(ids[:, t : t + 1], past_key_values=cache)
        for hook in hooks:
            hook.remove()
        size = cache.nbytes
    return [torch.cat(x, dim=1) for x in came], [torch.cat(x, dim=1) for x in went], size


def exact_attention(index: int, states: Tensor) -> Tensor:
    """Return what a layer's attention makes of its inputs, without any cache."""
    body = model().model.model
    attention = body.layers[index].self_attn
    positions = torch.arange(states.shape[1])[None]
    hidden = torch.full((states.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)
    with torch.inference_mode():
        result: Tensor = attention(
            hidden_states=states,
            position_embeddings=body.rotary_emb(states, positions),
            attention_mask=hidden[None, None],
        )[0]
    return result


@pytest.mark.parametrize("name", METHODS)
def test_what_is_left_out_attends_exactly_and_the_rest_as_ever(name: str) -> None:
    plan = plan_of(name, 1)
    came, went, size = decoded(plan)
    _, everywhere, _ = decoded(plan_of(name))
    for index in range(LAYERS):
        lost = (went[index] - exact_attention(index, came[index]))[:, PREFILL:].norm()
        lost = float(lost / went[index][:, PREFILL:].norm())
        assert lost < 1e-5 if index == 1 else lost > 1e-3, (name, index)
    # What lies before the layer that is left out has not changed by it.
    torch.testing.assert_close(went[0], everywhere[0], atol=1e-9, rtol=1e-9)
    assert size == bytes_at(plan, LENGTH, itemsize=8).total


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_left_out_counts_uncompressed(name: str) -> None:
    whole, plan = plan_of(name), plan_of(name, 0, -1)
    full = 2 * 2 * 16 * 8  # K and V of two heads of 16 in float64
    assert [layer.left_out for layer in plan.layers] == [True, False, True]
    alone = replace(plan, layers=(plan.layers[1],) * LAYERS)
    for tokens in (5, 70, 300):
        middle = bytes_at(alone, tokens, itemsize=8).total / LAYERS
        found = bytes_at(plan, tokens, itemsize=8)
        assert found.total == middle + 2 * full * tokens
    assert paper_rate(plan) < paper_rate(whole) + 1e-12
    assert dim_rate(plan) == pytest.approx(dim_rate(alone) / LAYERS)
    assert plan.made["options"]["skip"] == [0, 2]
    assert "layers 0, 2." in " ".join(describe(plan, 100)["sentences"])


def test_a_rate_is_reached_by_the_layers_that_are_left() -> None:
    for name in ("kq", "fdc+keyformer", "h2o"):
        options = {key: value for key, value in METHODS[name][0].items() if key != "keep"}
        made = plan_family(name, inputs(), **options, skip=(1,))
        plan = plan_for_rate(made, 0.4, 128)
        found = 1 - bytes_at(plan, 128, itemsize=2).total / (3 * 2 * 2 * 16 * 2 * 128)
        assert 0.4 <= found + 1e-9 < 0.43
        with pytest.raises(UsageError, match="reach"):
            plan_for_rate(made, 0.7, 128)


def test_few_kinds_of_head_are_spent_on_the_layers_that_are_left() -> None:
    options = {**FINE, "kinds": 2}
    for skip in ((), (0,), (0, 2)):
        more = {"skip": skip} if skip else {}
        plan = plan_at(plan_family("kq", inputs(), **options, **more), 0.5)
        check_kinds(plan)
        assert 1 <= len(head_kinds(plan)) <= 2


def test_sensitivities_are_for_the_layers_that_are_left() -> None:
    made = plan_family("kq", inputs(), **FINE, skip=(1,))
    assert {target.layer for target in made.targets} == {0, 2}
    assert made.at_ranks is not None
    assert made.at_ranks([16] * len(made.targets)).layers[1].left_out
    stand_in = uncalibrated_family(model(), "kq", **FINE, skip="1")
    assert stand_in is not None
    assert stand_in.build(0.5).layers[1].left_out


@pytest.mark.parametrize(
    ("skip", "complaint"),
    [
        ((3,), "kq: skip=3: LlamaForCausalLM has 3 layers, 0 to 2, or -1 to -3 from the last"),
        ((0, -4), "kq: skip=-4: LlamaForCausalLM has 3 layers"),
        ((0, 1, -1), "kq: skip leaves out every layer"),
        ("x", "option skip is a list with commas between|option skip is a whole number"),
        ("1.5", "a whole number"),
    ],
)
def test_layers_that_there_are_none_of_are_refused(skip: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        plan_family("kq", inputs(), **FINE, skip=skip)


def test_a_list_of_methods_may_hold_lists_of_layers() -> None:
    text = "fdc,kq:grid=32,skip=0,1,-1,palu:skip=2,tale+kivi:bits=2,4,h2o"
    assert [(method, written) for _, method, written in method_entries(text)] == [
        ("fdc", []),
        ("kq", ["grid=32", "skip=0,1,-1"]),
        ("palu", ["skip=2"]),
        ("tale+kivi", ["bits=2,4"]),
        ("h2o", []),
    ]


def test_a_saved_plan_knows_what_is_left_out(tmp_path: Any) -> None:
    plan = plan_of("kq", 1)
    save_plan(plan, tmp_path / "plan")
    assert [layer.left_out for layer in load_plan(tmp_path / "plan").layers] == [False, True, False]


def test_pages_are_not_served_of_two_sizes() -> None:
    assert refusal(plan_of("kq", 1)) is None
    assert "layers" in str(refusal(plan_of("fp8", 1)))
