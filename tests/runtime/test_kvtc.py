"""A prompt's cache coded across layers and back, against plain numpy and the model's own cache."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvprof.errors import UsageError
from kvprof.evaluation.evaluator import hidden_in_one_pass
from kvprof.methods.accounting import bytes_at, dim_rate, full_bytes, paper_rate, rate
from kvprof.methods.across import Across, LayerGroup
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import compare_plans, describe
from kvprof.methods.registry import plan_family
from kvprof.runtime.compressed import compressed
from kvprof.serving.refusals import check_servable
from tests.analysis.test_transform_coding import in_numpy
from tests.methods.models import inputs, model
from tests.runtime.restored import PROMPT, check_decoded, held, prompts, restore

SINK, WINDOW = 3, 6


def coded_plan(arch: str, knob: float = 0.6, **options: Any) -> Plan:
    given = {"sink": SINK, "window": WINDOW, **options}
    return plan_at(plan_family("kvtc", inputs(arch), **given), knob)


def coded(rows: np.ndarray, group: LayerGroup) -> np.ndarray:
    """Return what ``[n, w]`` rows come back as, in float64 but for the integers' 16 bits."""
    basis, mean = group.basis.double().numpy(), group.mean.double().numpy()
    return mean + in_numpy(((rows - mean) @ basis).astype(np.float32), group.blocks) @ basis.T


@pytest.mark.parametrize(
    "options", [{}, {"layers": 2}, {"deflate": False}, {"skip": (1,)}, {"sink": 0, "window": 0}]
)
def test_decoding_goes_on_from_what_comes_back(options: dict[str, Any]) -> None:
    """The model itself, its own cache filled with what numpy makes of the prompt's."""
    check_restored(coded_plan("Llama", **options))


def check_restored(plan: Plan) -> None:
    across, ids = plan.across, prompts(2)
    assert across is not None
    with compressed(model("Llama"), plan) as session, torch.no_grad():
        cache = session.new_cache()
        model("Llama").model(ids[:, :-1], past_key_values=cache)
        assert cache.rest_bytes is None
        found = model("Llama").model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        assert session.kernel_notes

    states = held("Llama", ids[:, :-1])
    for group in across.groups:
        restore(states, group, slice(plan.levels.sink, PROMPT - across.window), coded)
    # What lies between two levels is rounded either way, by processor: one component is some 0.04.
    check_decoded(found, ids, states, within=0.1)


def test_bytes_at_rest_are_those_of_the_streams_and_of_what_stays_exact() -> None:
    """Packed: of any prompt. After DEFLATE: of the sequence that they were measured on."""
    for tokens in (2, SINK + WINDOW, SINK + WINDOW + 1, PROMPT):
        plan = coded_plan("Llama", deflate=False)
        ids = prompts(3, tokens)
        with compressed(model("Llama"), plan) as session, torch.no_grad():
            cache = session.new_cache()
            model("Llama").model(ids[:, :-1], past_key_values=cache)
            model("Llama").model(ids[:, -1:], past_key_values=cache)
        assert cache.rest_bytes == bytes_at(plan, tokens, itemsize=4, batch=3).total
        # Decoding holds all of it, uncompressed.
        assert cache.nbytes == full_bytes(plan, tokens + 1, itemsize=4, batch=3)
    plan = coded_plan("Llama")
    assert plan.across is not None
    known = inputs("Llama").moments.across
    for group in plan.across.groups:
        rows = known.samples[group.side, 0].double().numpy()
        (size, count) = group.measured
        assert count == len(rows) == 60  # sequences of 64 without their first 4
        values = (rows - group.mean.double().numpy()) @ group.basis.double().numpy()
        assert size == pytest.approx(len(zlib.compress(_stream(values, group.blocks), 6)), rel=0.02)
    wanted = sum(group.measured[0] for group in plan.across.groups)
    exact = full_bytes(plan, SINK + WINDOW, itemsize=4)
    assert bytes_at(plan, 60 + SINK + WINDOW, itemsize=4).total == wanted + exact


def _stream(values: np.ndarray, blocks: tuple[tuple[int, int], ...]) -> bytes:
    """Return the bytes before DEFLATE, code by code."""
    found, start = bytearray(), 0
    for width, bits in blocks:
        own = values[:, start : start + width].astype(np.float32)
        start += width
        if not bits:
            continue
        low, high = own.min(1), own.max(1)
        shift = low.astype(np.float16)
        scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16)
        step = np.maximum(scale.astype(np.float64), np.finfo(np.float16).tiny)
        codes = np.round((own - shift[:, None].astype(np.float64)) / step[:, None])
        codes = codes.clip(0, 2**bits - 1).astype(int)
        per_byte = 8 // bits
        for first in range(0, width, per_byte):
            for row in codes:
                found.append(
                    sum(int(c) << bits * at for at, c in enumerate(row[first : first + per_byte]))
                )
        for halves in (shift, scale):
            octets = halves.view(np.uint8).reshape(-1, 2)
            found += octets[:, 0].tobytes() + octets[:, 1].tobytes()
    return bytes(found)


def test_padded_rows_are_coded_as_if_alone() -> None:
    plan, ids = coded_plan("Llama"), prompts(1)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    other = prompts(2, PROMPT + 5)[1:]
    mask = torch.ones(2, padded.shape[1], dtype=torch.long)
    mask[0, :5] = 0
    with compressed(model("Llama"), plan) as session, torch.no_grad():
        alone = session.new_cache()
        model("Llama").model(ids[:, :-1], past_key_values=alone)
        wanted = model("Llama").model(ids[:, -1:], past_key_values=alone).logits[0, -1]
        both, positions = session.new_cache(), (mask.cumsum(1) - 1).clamp(min=0)
        given = torch.cat([padded, other])
        model("Llama").model(
            given[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            past_key_values=both,
        )
        after = model("Llama").model(
            given[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=both
        )
        found = after.logits[0, -1]
    assert torch.allclose(found, wanted, atol=1e-2 * float(wanted.norm()))
    with pytest.raises(UsageError, match="codes a prompt's cache"):
        both.crop(-1)


def test_a_group_may_keep_its_mean_alone(tmp_path: Path) -> None:
    plan = coded_plan("Llama", layers=1)
    assert plan.across is not None
    first, *others = plan.across.groups
    basis = first.basis
    assert basis is not None
    alone = replace(first, rank=0, basis=basis[:, :0], blocks=(), measured=(8, 60))
    plan = replace(plan, across=replace(plan.across, groups=(alone, *others)))
    save_plan(plan, tmp_path / "a.plan")
    loaded = load_plan(tmp_path / "a.plan", layout=model("Llama").layout)
    assert compare_plans(plan, loaded) == {}
    check_restored(loaded)


@pytest.mark.parametrize("knob", [0.9, 0.98, 1.0])
@pytest.mark.parametrize("options", [{}, {"layers": 1}])
def test_the_last_step_keeps_something(knob: float, options: dict[str, Any]) -> None:
    """Rows of 32 and 64 values, of which a byte a token keeps nothing."""
    across = coded_plan("Llama", knob, **options).across
    assert across is not None
    assert any(group.rank for group in across.groups)


@pytest.mark.parametrize("arch", ["Gemma3", "GPT2", "Qwen3", "SmolLM3"])
def test_other_models_keep_all_where_all_is_kept(arch: str) -> None:
    """Layers with windows or without RoPE, biases and norms: with the most bits little is lost."""
    plan, ids = coded_plan(arch, 0.0), prompts(2)
    assert plan.across is not None
    windows = {x.index for x in model(arch).layout.layers if x.sliding_window is not None}
    assert not windows & {layer for group in plan.across.groups for layer in group.layers}
    with torch.no_grad():
        wanted = model(arch).model(ids).logits[:, -1]
        with compressed(model(arch), plan) as session:
            cache = session.new_cache(capacity=PROMPT + 1)
            model(arch).model(ids[:, :-1], past_key_values=cache)
            found = model(arch).model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    assert cache.rest_bytes is not None
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_a_rate_is_reached_and_files_keep_the_plan(tmp_path: Any) -> None:
    family = plan_family("kvtc", inputs("Llama"), sink=2, window=4)
    for wanted in (0.8, 0.9):
        plan = plan_for_rate(family, wanted, 1000)
        assert wanted <= rate(plan, 1000) < wanted + 0.04
        assert 0 <= dim_rate(plan) < 1
        assert paper_rate(plan) > 0
    save_plan(plan, tmp_path / "a.plan")
    loaded = load_plan(tmp_path / "a.plan", layout=model("Llama").layout)
    assert compare_plans(plan, loaded) == {}
    assert bytes_at(loaded, 777, itemsize=4) == bytes_at(plan, 777, itemsize=4)
    said = " ".join(describe(plan, 100, layout=model("Llama").layout)["sentences"])
    assert "stored or moved" in said
    assert "measured on 60 tokens of random" in said
    assert "not for decoding from it" in said
    assert hidden_in_one_pass(plan) == "storing tokens across layers"


def test_what_does_not_go_with_it_is_refused_in_a_line() -> None:
    plan = coded_plan("Llama")
    across = plan.across
    assert across is not None
    refused = {
        "a quantiser": lambda: plan_family("kvtc-4bit", inputs("Llama")),
        "evictor": lambda: plan_family("kvtc+h2o", inputs("Llama")),
        "storing and moving": lambda: check_servable(plan),
        "not decoded from": lambda: compressed(model("Llama"), plan, "on").__enter__(),
        "every layer has a sliding window": lambda: plan_family("kvtc", inputs("Mistral")),
        "latent attention": lambda: plan_family("kvtc", inputs("DeepseekV2")),
        "calibrate again": lambda: plan_family(
            "kvtc", replace(inputs("Llama"), moments=replace(inputs("Llama").moments, across=None))
        ),
        "in two groups": lambda: replace(
            plan, across=replace(across, groups=(*across.groups, across.groups[0]))
        ),
        "5, 3": lambda: _with(plan, across, blocks=((5, 3),)),
        "a mean": lambda: _with(plan, across, mean=torch.zeros(3)),
        "DEFLATE": lambda: replace(plan, across=replace(across, deflate=False)),
        "does not exist": lambda: _with(plan, across, layers=(0, 9)),
    }
    for words, attempt in refused.items():
        with pytest.raises(UsageError, match=words) as said:
            attempt()
        assert "\n" not in str(said.value)


def _with(plan: Plan, across: Across, **changes: Any) -> Plan:
    return replace(plan, across=replace(across, groups=(replace(across.groups[0], **changes),)))
