"""Latents that several layers share, against a singular value decomposition in plain numpy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, dim_rate, rate
from kvprof.methods.across import LayerGroup
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import compare_plans, describe
from kvprof.methods.registry import calibration_needs, plan_family
from kvprof.runtime.compressed import compressed
from kvprof.serving.refusals import check_servable
from tests.methods.models import inputs, model
from tests.runtime.restored import PROMPT, check_decoded, held, prompts, restore


def shared_plan(knob: float = 0.6, arch: str = "Llama", **options: Any) -> Plan:
    given = {"layers": 2, "block": 8, **options}
    return plan_at(plan_family("xkv", inputs(arch), **given), knob)


@pytest.mark.parametrize("bases", ["prompt", "calibration"])
@pytest.mark.parametrize("options", [{}, {"sink": 3, "window": 5}, {"skip": (1,)}])
def test_decoding_reads_the_shared_latents(bases: str, options: dict[str, Any]) -> None:
    """The model itself, its own cache filled with what numpy makes of the prompt's."""
    options = {**options, "layers": 0 if "skip" in options else 2, "bases": bases}
    plan, ids = shared_plan(**options), prompts(2)
    across = plan.across
    assert across is not None
    with compressed(model("Llama"), plan) as session, torch.no_grad():
        cache = session.new_cache()
        exact = model("Llama").model(ids[:, :-1], past_key_values=cache).logits
        found = model("Llama").model(ids[:, -1:], past_key_values=cache).logits[:, -1]

    def back(rows: np.ndarray, group: LayerGroup) -> np.ndarray:
        if bases == "prompt":
            u, s, v = np.linalg.svd(rows, full_matrices=False)
            return (u[:, : group.rank] * s[: group.rank]) @ v[: group.rank]
        basis = group.basis.double().numpy()
        assert np.allclose(basis.T @ basis, np.eye(group.rank), atol=1e-5)
        return rows @ basis @ basis.T

    states = held("Llama", ids[:, :-1])
    sink = plan.levels.sink
    for group in across.groups:
        restore(states, group, slice(sink, sink + (PROMPT - sink - across.window) // 8 * 8), back)
    own = check_decoded(found, ids, states, within=0.01)
    assert torch.allclose(own, exact, atol=1e-4)  # a prompt sees its own as it is


@pytest.mark.parametrize(
    "options", [{}, {"sink": 3, "window": 5}, {"bases": "calibration"}, {"layers": 0, "block": 1}]
)
def test_the_bytes_stored_are_those_of_the_account_at_every_length(options: dict[str, Any]) -> None:
    plan, ids = shared_plan(**options), prompts(2, 30)
    with compressed(model("Llama"), plan) as session, torch.no_grad():
        cache = session.new_cache()
        for start, stop in [(0, 9), *((x, x + 1) for x in range(9, 31))]:
            model("Llama").model(ids[:, start:stop], past_key_values=cache)
            assert cache.nbytes == bytes_at(plan, stop, itemsize=4, batch=2).total
            assert cache.layers[0].row_groups[0].stored == stop
    # A latent of two layers of 64 columns a side, in place of them.
    if not options:
        counted = bytes_at(plan, 800, itemsize=4)
        ranks = [(x.rank, x.width, x.side) for x in plan.across.groups]
        assert counted.keys == sum(800 * r * 4 for r, _, side in ranks if side == "keys")
        assert counted.bases == sum(r * w * 4 for r, w, _ in ranks)


def test_whole_latents_change_nothing_and_padding_does_not_count() -> None:
    plan, ids = shared_plan(0.0, block=1, bases="calibration"), prompts(2)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :5] = 0
    settings = {
        "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    with torch.no_grad():
        wanted = model("Llama").model.generate(ids[:, :-1], **settings)
        with compressed(model("Llama"), plan):
            assert torch.equal(model("Llama").model.generate(ids[:, :-1], **settings), wanted)
            with pytest.raises(UsageError, match="cannot be reordered"):
                model("Llama").model.generate(ids[:, :-1], num_beams=2, **settings)


def test_ranks_are_in_the_papers_ratio_until_one_is_whole(tmp_path: Any) -> None:
    family = plan_family("xkv", inputs("Llama"), bases="calibration", layers=2)
    assert dim_rate(plan_at(family, 0.0)) == 0
    for knob in (0.1, 0.3, 0.7):
        plan = plan_at(family, knob)
        assert dim_rate(plan) == pytest.approx(knob, abs=0.01)
        ranks = {x.side: x.rank / x.width for x in plan.across.groups}
        wanted = 1.5 if knob > 0.2 else 1 / (1 - 2 * knob)
        assert ranks["values"] / ranks["keys"] == pytest.approx(wanted, rel=0.05)
    for wanted in (0.3, 0.8):
        plan = plan_for_rate(family, wanted, 1000)
        assert wanted <= rate(plan, 1000) < wanted + 0.03
    save_plan(plan, tmp_path / "a.plan")
    assert compare_plans(plan, load_plan(tmp_path / "a.plan", layout=model("Llama").layout)) == {}
    said = " ".join(describe(plan, 100, layout=model("Llama").layout)["sentences"])
    assert "a latent for several layers together, on bases of the plan's" in said
    own = shared_plan()
    save_plan(own, tmp_path / "b.plan")
    assert compare_plans(own, load_plan(tmp_path / "b.plan")) == {}


def test_a_sequences_own_bases_need_no_calibration() -> None:
    assert calibration_needs("xkv") is None
    needs = calibration_needs("xkv", bases="calibration", layers="3", sink="2")
    assert needs is not None
    assert needs.across == (3, 2)
    assert needs.pre_rope


def test_what_does_not_go_with_it_is_refused_in_a_line() -> None:
    plan = shared_plan()
    across = plan.across
    assert across is not None
    moments = replace(inputs("Llama").moments, across=None)
    refused = {
        "a quantiser": lambda: plan_family("xkv+kivi", inputs("Llama")),
        "engine": lambda: check_servable(plan),
        "kernel": lambda: compressed(model("Llama"), plan, "on").__enter__(),
        "every layer has a sliding window": lambda: plan_family("xkv", inputs("Mistral")),
        "calibrate again": lambda: plan_family(
            "xkv", replace(inputs("Llama"), moments=moments), bases="calibration"
        ),
        "not between 0.1 and 10": lambda: plan_family("xkv", inputs("Llama"), ratio=99),
        "no static cache": _static,
        "same groups": lambda: replace(plan, across=replace(across, groups=across.groups[:1])),
        "DEFLATE": lambda: replace(plan, across=replace(across, deflate=True)),
    }
    for words, attempt in refused.items():
        with pytest.raises(UsageError, match=words) as said:
            attempt()
        assert "\n" not in str(said.value)


def _static() -> None:
    with compressed(model("Llama"), shared_plan()) as session:
        session.new_cache(capacity=50)
