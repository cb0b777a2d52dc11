"""One pass reads what decoding reads: equal logits, for every way to store that it can show."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.evaluation.data import Scoring, TaskItem
from kvprof.evaluation.decode import (
    TaskBatch,
    checked_answers,
    decoded_logits,
    greedy_answers,
    prefill_length,
    written_answers,
)
from kvprof.methods.across import read_alike
from kvprof.methods.family import MethodInputs
from kvprof.methods.plan import Plan
from kvprof.methods.registry import plan_family
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.runtime.compressed import compressed
from kvprof.sources.grammar import parse_source
from tests.methods.models import FINE
from tests.models.tiny import VOCABULARY, seeded, tiny
from tests.runtime.plans import one_pass_logits

_TOKENS = 60
_SINK = 3
#: A method, its options, and where its knob stands.
PLANS: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "kq": ("kq", FINE, 0.4),
    "palu": ("palu", {**FINE, "heads": 2}, 0.4),
    "svd-qk-literal": ("fdc", {**FINE, "keys": "svd-qk-literal"}, 0.4),
    "fdc-4bit": ("fdc-4bit", FINE, 0.3),
    "per-token": ("per-token", {"bits": 3}, None),
    "hadamard": ("hadamard-int3", {"bits": "k3v2"}, None),
    "turboquant": ("turboquant", {"bits": 3}, None),
    "fp8": ("fp8", {}, None),
    "kivi": ("kivi", {"bits": 2}, None),
    "kvquant": ("kvquant", {"bits": 3}, None),
    "tale": ("tale", {**FINE, "heads": 2}, 0.5),
    "tale+kivi": ("tale+kivi", {**FINE, "heads": 2, "window": 4}, 0.5),
    "strawman": ("strawman", FINE, 0.5),
}


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def calibrated(request: pytest.FixtureRequest) -> tuple[LoadedModel, MethodInputs]:
    loaded = wrap_model(tiny(request.param).double())
    options = {"pre_rope": True, "joint_heads": 2, "magnitudes": True, "across": (2, _SINK)}
    settings = CollectOptions(512, 64, **options)
    *_, moments = collect_moments(loaded, parse_source("random:512"), settings)
    return loaded, MethodInputs(loaded.layout, loaded.fingerprint, moments)


def logits(loaded: LoadedModel, plan: Plan, ids: Tensor, *, one_pass: bool) -> Tensor:
    start = prefill_length(ids.shape[1])
    with compressed(loaded, plan, "off", prompt=start if one_pass else None) as session:
        if one_pass:
            return one_pass_logits(loaded, ids)
        return torch.stack([*decoded_logits(loaded, ids, session.new_cache())], dim=1)


def made(inputs: MethodInputs, name: str, *, centre: bool) -> Plan:
    method, options, knob = PLANS[name]
    family = plan_family(method, inputs, **options, centre=centre)
    plan = family.build(family.settings[0] if knob is None else knob)
    if plan.quantiser is not None and plan.quantiser.block == 1 and len(plan.levels.shares) == 1:
        # Sinks and a window are read in another form than what lies between.
        plan = replace(
            plan,
            levels=replace(plan.levels, sink=_SINK),
            quantiser=replace(plan.quantiser, window=5),
        )
    return plan


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("centre", [False, True], ids=["whole", "centred"])
def test_logits_are_those_of_decoding(
    calibrated: tuple[LoadedModel, MethodInputs], name: str, centre: bool
) -> None:
    loaded, inputs = calibrated
    plan = made(inputs, name, centre=centre)
    seeded(1)
    ids = torch.randint(3, VOCABULARY, (2, _TOKENS))
    for by_age in {False, plan.by_age}:
        own = replace(plan, prefill_uncompressed=not by_age)
        wanted = logits(loaded, own, ids, one_pass=False)
        found = logits(loaded, own, ids, one_pass=True)
        assert float((found - wanted).abs().max()) < 1e-9, by_age


@pytest.mark.parametrize("name", ["per-token", "hadamard", "fp8", "turboquant", "fdc-4bit"])
def test_no_border_of_a_pass_changes_what_reads_by_age(
    calibrated: tuple[LoadedModel, MethodInputs], name: str
) -> None:
    loaded, inputs = calibrated
    method, options, knob = PLANS[name]
    family = plan_family(method, inputs, **options)
    plan = family.build(family.settings[-1] if knob is None else knob)
    assert plan.by_age
    seeded(2)
    ids = torch.randint(3, VOCABULARY, (2, 24))
    found = []
    for borders in ([24], [1, 2, 24], [7, 8, 19, 24]):
        with compressed(loaded, plan, "off") as session, torch.inference_mode():
            cache = session.new_cache()
            rows, start = [], 0
            for stop in borders:
                output = loaded.model(
                    input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True
                )
                rows.append(output.logits)
                start = stop
        found.append(torch.cat(rows, dim=1))
    for other in found[1:]:
        assert float((other - found[0]).abs().max()) < 1e-9


def divergence(logits: Tensor, others: Tensor) -> Tensor:
    """Return the mean over tokens of KL(logits ‖ others) in nats."""
    left, right = (x.double().log_softmax(-1) for x in (logits, others))
    return (left.exp() * (left - right)).sum(-1).mean()


@pytest.mark.parametrize(
    ("method", "options", "passes"),
    [
        ("kvtc", {"window": 5}, 2),
        ("xkv", {"window": 5, "block": 7, "bases": "calibration"}, 5),
        ("xkv", {"window": 4, "block": 26}, 2),  # its bases come of tokens that were decoded
    ],
)
def test_few_passes_read_what_decoding_reads_across_layers(
    calibrated: tuple[LoadedModel, MethodInputs], method: str, options: Any, passes: int
) -> None:
    loaded, inputs = calibrated
    plan = plan_family(method, inputs, **options, layers=2, sink=_SINK).build(0.6)
    assert plan.across is not None
    seeded(3)
    ids = torch.randint(3, VOCABULARY, (2, _TOKENS))
    runs = read_alike(plan.across, _SINK, prefill_length(_TOKENS), _TOKENS - 1)
    assert len(runs) == passes
    narrow = wrap_model(deepcopy(loaded.model).float())
    for model in (loaded, narrow):
        own = replace(plan, fingerprint=model.fingerprint)
        found, held = [], []
        for steps in (runs, None):
            with compressed(model, own, "off") as session:
                cache = session.new_cache()
                found.append(torch.stack([*decoded_logits(model, ids, cache, steps)], dim=1))
                held.append(cache.nbytes)
        assert held[0] == held[1]
        exact = one_pass_logits(model, ids)
        assert float(divergence(exact, found[1])) > 1e-6
        assert float(divergence(found[1], found[0])) < 1e-8
        assert model is narrow or float((found[0] - found[1]).abs().max()) < 1e-9


@pytest.mark.parametrize("name", [None, "kq", "hadamard", "kivi", "tale+kivi"])
def test_answers_are_judged_as_decoding_judges_them(
    calibrated: tuple[LoadedModel, MethodInputs], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, inputs = calibrated
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", None)
    plan = None if name is None else made(inputs, name, centre=False)
    seeded(3)
    # Padded on the left by 17, 9, 8 and 0; two end alike, with prompts of unlike length.
    sizes = ((23, 12), (31, 5), (32, 4), (40, 12))
    prompts = [torch.randint(3, VOCABULARY, (prompt,)).tolist() for prompt, _ in sizes]

    def batch(answers: list[list[int]]) -> TaskBatch:
        scoring = Scoring.TOKENS if answers[0] else Scoring.STRINGS
        rows = zip(prompts, sizes, answers, strict=True)
        items = [TaskItem("copy", 1, None, p, a, scoring, (), n) for p, (_, n), a in rows]
        return TaskBatch(tuple(range(len(items))), tuple(items))

    def decoding(run: Any, answers: list[list[int]]) -> Any:
        if plan is None:
            return run(loaded, batch(answers), None, lambda _: None)
        with compressed(loaded, plan, "off") as session:
            return run(loaded, batch(answers), session.new_cache, lambda _: None)

    def judged(answers: list[list[int]]) -> list[bool]:
        asked = batch(answers)
        if plan is None:
            return checked_answers(loaded, asked)
        with compressed(loaded, plan, "off", prompt=1) as session:
            session.prompt = asked.prompt_tokens
            return checked_answers(loaded, asked)

    written = [tokens for tokens, _ in decoding(written_answers, [[]] * len(sizes))]
    assert [len(tokens) for tokens in written] == [n for _, n in sizes]
    assert judged(written) == [True] * len(sizes)
    for place in range(max(n for _, n in sizes)):
        spoilt = [list(tokens) for tokens in written]
        for row in range(place % 2, len(sizes), 2):
            at = min(place, sizes[row][1] - 1)
            spoilt[row][at] = (spoilt[row][at] + 1) % VOCABULARY
        right = [row % 2 != place % 2 for row in range(len(sizes))]
        assert judged(spoilt) == right
        if place in (0, 4, 11):  # an answer's first token, its last, and one that a row has alone
            assert decoding(greedy_answers, spoilt) == right
