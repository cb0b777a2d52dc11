from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.evaluation import decode
from kvprof.evaluation import evaluator as module
from kvprof.evaluation.evaluator import (
    EvaluationSettings,
    Evaluator,
    hidden_in_one_pass,
    needs_decoding,
)
from kvprof.evaluation.requests import option_names
from kvprof.methods.family import MethodInputs, plan_at
from kvprof.methods.plan import HeadGroup, LayerPlan
from kvprof.methods.registry import method_names, plan_family
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.models.load import wrap_model
from kvprof.runtime.compressed import compressed
from tests.evaluation.sample import evaluator, plan, questions, text
from tests.methods.models import BLOCKS, FINE, inputs, model
from tests.models.tiny import tiny

TIMES = ("seconds",)


def figures(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Leave out what differs from run to run."""
    return {key: value for key, value in evaluation.items() if key not in TIMES}


def close(found: Any, wanted: Any) -> None:
    """Compare nested figures to rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    else:
        assert found == wanted


@torch.no_grad()
def independent(name: str, rate: float) -> dict[str, Any]:
    """Evaluate one sequence after the other, token by token, in float64 numpy."""
    loaded = model("Llama")
    hits: list[float] = []
    losses: list[float] = []
    divergences: list[float] = []
    for ids in text().ids:
        whole = loaded.model(ids[None]).logits[0].double().numpy()
        with compressed(loaded, plan(name, rate, 15)) as session:
            cache = session.new_cache()
            rows = [loaded.model(ids[None, :10], past_key_values=cache).logits[0, -1]]
            for position in range(10, 19):
                step = loaded.model(ids[None, position : position + 1], past_key_values=cache)
                rows.append(step.logits[0, -1])
        for position, row in zip(range(10, 20), rows, strict=True):
            p, q = whole[position - 1], row.double().numpy()
            p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (p, q))
            hits.append(float(q.argmax() == int(ids[position])))
            losses.append(-np.log(q[ids[position]]))
            divergences.append(float((p * np.log(p / q)).sum()))
    return {
        "accuracy": float(np.mean(hits)),
        "perplexity": float(np.exp(np.mean(losses))),
        "kl": {
            "mean": float(np.mean(divergences)),
            "p999": float(np.quantile(divergences, 0.999)),
            "worst": float(np.max(divergences)),
        },
    }


def test_figures_agree_with_an_independent_computation() -> None:
    one = Evaluator(model("Llama"), [text()], [], EvaluationSettings(batch_size=2))
    assert one.context == 15  # contexts 10 to 19
    found = one.evaluate(plan("kq", 0.5, 15))
    close({key: found[key] for key in ("accuracy", "perplexity", "kl")}, independent("kq", 0.5))
    assert found["decoded_tokens"] == 50
    assert found["kl"]["mean"] > 1e-3  # the plan does cost something here


def test_the_baseline_is_the_models_own_prediction_of_the_second_half() -> None:
    sample = text()
    found = Evaluator(model("Llama"), [sample], [], EvaluationSettings()).baseline()
    logits = model("Llama").model(sample.ids).logits[:, 9:-1].double()
    target = sample.ids[:, 10:]
    loss = -logits.log_softmax(-1).gather(-1, target[..., None])
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == target).double().mean().item())
    assert found["perplexity"] == pytest.approx(loss.mean().exp().item(), rel=1e-6)
    assert found["method"] == "full"
    assert found["rate"] == 0
    assert found["relative_accuracy_interval"] is None


@pytest.mark.parametrize("decode", [False, True])
def test_full_changes_nothing(decode: bool) -> None:
    found = evaluator(decode=decode).evaluate(plan("full", 0, 15))
    assert found["kl"]["worst"] < 1e-9
    assert found["accuracy"] == found["baseline_accuracy"]
    assert found["perplexity"] == pytest.approx(found["baseline_perplexity"], rel=1e-6)
    assert found["protocol"] == ("decode" if decode else "one_pass")
    assert found["measured_bytes"] == (found["accounted_bytes"] if decode else None)
    assert not found["warnings"]


@pytest.mark.parametrize("name", [n for n in method_names() if n not in ("hqq", "quanto", *BLOCKS)])
def test_one_pass_gives_what_decoding_gives(name: str) -> None:
    """Whatever the method is called: its plan decides."""
    options = {key: value for key, value in FINE.items() if key in option_names(name)}
    if name == "kq-wf":
        options["allocation"] = "output"  # the other weighs by what was measured of a model
    family = plan_family(name, inputs("Llama"), **options)
    # Bases of a prompt of ten tokens are arbitrary beyond their tenth column.
    knob = 0.5 if name == "strawman" else 0.3
    wanted = plan_at(family, family.settings[-1]) if family.settings else family.build(knob)
    decoded = evaluator(decode=True).evaluate(wanted)
    single = evaluator().evaluate(wanted)
    assert single["protocol"] == ("decode" if needs_decoding(wanted) else "one_pass")
    assert abs(single["kl"]["mean"] - decoded["kl"]["mean"]) < 1e-6
    assert single["accuracy"] == decoded["accuracy"]
    assert not single["warnings"]


@pytest.mark.parametrize("name", ["q5_1", "q4_0", "turboquant_k3v4_nc"])
def test_engines_types_are_stored_and_read_as_accounted(name: str) -> None:
    loaded = wrap_model(tiny("Llama", head_dim=64, num_hidden_layers=5).double())
    family = plan_family(name, MethodInputs(loaded.layout, loaded.fingerprint))
    wanted = plan_at(family, family.settings[0])
    single, decoded = (
        Evaluator(loaded, [text()], [], EvaluationSettings(decode=decode)).evaluate(wanted)
        for decode in (False, True)
    )
    assert single["kl"]["mean"] == pytest.approx(decoded["kl"]["mean"], abs=1e-9)
    assert single["kl"]["mean"] > 1e-5
    assert decoded["measured_bytes"] == decoded["accounted_bytes"]


_ROUNDED = Quantiser("affine", SideQuantiser((4,)), None)


@pytest.mark.parametrize(
    ("changes", "hidden"),
    [
        ({}, None),
        ({"quantiser": _ROUNDED}, None),
        ({"quantiser": _ROUNDED, "prefill_uncompressed": True}, "quantising"),
        ({"eviction": Eviction("recent", 0.5)}, "evicting"),
        ({"eviction": Eviction("recent", 1.0)}, None),
        ({"levels": Levels(0, (0.5, 0.5))}, None),  # two levels of one rank are one
        ({"levels": Levels(0, (0.25, 0.75))}, "down levels"),  # here of two ranks
        ({"lazy": True}, "prefill is exact"),
    ],
)
def test_what_of_a_plan_a_single_pass_hides(changes: dict[str, Any], hidden: str | None) -> None:
    made = plan("svd-kv", 0.25, 15)
    layers = tuple(_unfolded(layer, changes.get("levels")) for layer in made.layers)
    found = hidden_in_one_pass(replace(made, layers=layers, **changes))
    assert found is None if hidden is None else found is not None and hidden in found


def _unfolded(layer: LayerPlan, levels: Levels | None) -> LayerPlan:
    """Fold nothing, which lazy plans cannot have, and give every level a rank."""

    def ranks(group: HeadGroup) -> tuple[int, ...]:
        if levels is None:
            return group.ranks
        return (group.rank - (levels.shares[0] < 0.5), group.rank)

    def side(of: Any) -> Any:
        groups = tuple(replace(group, ranks=ranks(group)) for group in of.groups)
        return replace(of, groups=groups, fold_down=False, fold_up=False)

    return replace(layer, keys=side(layer.keys), values=side(layer.values), key_mean=None)


@pytest.mark.parametrize("name", ["kq", "fp8", "tale", "fdc+keyformer", "strawman"])
def test_the_cache_holds_what_the_account_says(name: str) -> None:
    found = evaluator(decode=True).evaluate(plan(name, 0.25, 15))
    assert found["measured_bytes"] == pytest.approx(found["accounted_bytes"], rel=0.01)
    assert not found["warnings"]


def test_a_cache_that_is_larger_than_its_account_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvprof.runtime.cache import CompressedCache

    held = CompressedCache.nbytes.fget  # type: ignore[attr-defined]  # of the property
    monkeypatch.setattr(CompressedCache, "nbytes", property(lambda cache: int(1.02 * held(cache))))
    found = evaluator(decode=True).evaluate(plan("kq", 0.4, 15))
    (warning,) = found["warnings"]
    assert "tokens, its plan accounts for" in warning


def test_batches_and_lack_of_room_change_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    items, _ = questions(model("Llama"))
    compared = plan("kq", 0.5, 15)

    def evaluated(batch_size: int | None) -> tuple[Evaluator, dict[str, Any], list[int]]:
        one = Evaluator(
            model("Llama"),
            [text(), text(3, name="other", seed=9)],
            items,
            EvaluationSettings(batch_size=batch_size),
        )
        told: list[int] = []
        return one, one.evaluate(compared, told.append), told

    whole, wanted, told = evaluated(None)
    assert sum(told) == whole.steps()
    single, found, told = evaluated(1)
    close(figures(found), figures(wanted))
    assert sum(told) == single.steps()
    assert single.digest == whole.digest
    monkeypatch.setattr(decode, "logit_budget", lambda loaded: 10 * 97 * 4 * 2)
    narrow, found, told = evaluated(None)
    assert narrow.workload.batch_size == 2
    assert sum(told) == narrow.steps()
    close(figures(found), figures(wanted))


def test_progress_of_baseline_and_single_pass() -> None:
    items, _ = questions(model("Llama"))
    one = Evaluator(model("Llama"), [text()], items, EvaluationSettings())
    told: list[int] = []
    one.baseline(told.append)
    assert sum(told) == one.baseline_steps
    told.clear()
    one.evaluate(plan("kq", 0.5, 15), told.append)
    assert sum(told) == one.steps()


@pytest.mark.parametrize("name", ["full", "kq"])
def test_questions_are_answered_as_generate_would(name: str) -> None:
    loaded = model("Llama")
    items, right = questions(loaded)
    one = Evaluator(loaded, [text()], items, EvaluationSettings())
    found = one.evaluate(plan(name, 0.0, 15))["tasks"]
    assert list(found) == ["needle", "copy"]
    for task in ("needle", "copy"):
        own = [good for item, good in zip(items, right, strict=True) if item.task == task]
        assert found[task]["accuracy"] == found[task]["baseline"] == np.mean(own)
        assert found[task]["items"] == len(own)
    assert found["needle"]["by_depth"]["0"] == {"accuracy": 1.0, "baseline": 1.0, "items": 2}
    assert found["needle"]["by_length"]["9"] == {"accuracy": 0.0, "baseline": 0.0, "items": 1}


def test_worst_tokens_are_those_of_largest_divergence() -> None:
    one = evaluator(worst=4)
    found = one.evaluate(plan("kq", 0.6, 15))
    worst = found["worst_tokens"]
    assert len(worst) == 4
    assert [token["kl"] for token in worst] == sorted((t["kl"] for t in worst), reverse=True)
    assert worst[0]["kl"] == found["kl"]["worst"]
    for token in worst:
        ids = next(s for s in one.samples if s.name == token["source"]).ids
        assert token["token"] == ids[token["sequence"], token["position"]]
        assert 10 <= token["position"] < 20
        assert token["text"] is None  # a model made in memory has no tokenizer
        assert 0 < token["probability"] < 1


def test_an_interrupt_keeps_what_was_done() -> None:
    one = evaluator(batch_size=2)
    one.baseline()
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    found = one.evaluate(plan("kq", 0.5, 15), should_stop=stop)
    assert not found["complete"]
    assert found["sequences"] == 4
    assert list(found["sources"]) == ["text"]
    assert one.evaluate(plan("kq", 0.5, 15))["complete"]


def test_an_interrupted_baseline_is_compared_on_what_it_has() -> None:
    one = evaluator(batch_size=2)
    assert not one.baseline(should_stop=lambda: True)["complete"]
    found = one.evaluate(plan("kq", 0.5, 15))
    assert not found["complete"]
    assert found["sequences"] == 2


def test_the_digest_names_data_and_settings() -> None:
    wanted = evaluator().digest
    assert evaluator().digest == wanted
    assert evaluator(decode=True).digest != wanted
    assert evaluator(worst=3).digest != wanted
    other = Evaluator(model("Llama"), [text(seed=3)], [], EvaluationSettings())
    assert other.digest != wanted
    assert Evaluator(model("Qwen3"), other.samples, [], EvaluationSettings()).digest != other.digest


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(UsageError, match="one length"):
        Evaluator(model("Llama"), [text(), text(tokens=18, name="b")], [], EvaluationSettings())
    items, _ = questions(model("Llama"))
    long = replace(items[0], prompt=[5] * 127)
    with pytest.raises(UsageError, match="tokens exceeds the context of"):
        Evaluator(model("Llama"), [text()], [long], EvaluationSettings())
    with pytest.raises(UsageError, match="the plan is for"):
        evaluator("Qwen3").evaluate(plan("kq", 0.5, 15))


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_says_what_would_fit(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = evaluator(batch_size=5)
    one.baseline()

    def short(*_: Any) -> Any:
        raise problem

    monkeypatch.setattr(module, "last_states", short)
    with pytest.raises(LackingError, match=r"kq with 5 sequences of 20 tokens .*--batch-size 2"):
        one.evaluate(plan("kq", 0.5, 15))


def test_another_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(module, "last_states", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        evaluator().baseline()


def test_logits_that_are_not_finite_are_refused() -> None:
    broken = wrap_model(tiny("Llama", seed=3))
    one = Evaluator(broken, [text()], [], EvaluationSettings())
    with torch.no_grad():
        broken.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FailedError, match="not finite"):
        one.baseline()


def test_another_version_or_processor_or_a_changed_weight_is_another_evaluation(monkeypatch):
    loaded = wrap_model(tiny("Llama"))

    def digest() -> str:
        return Evaluator(loaded, [text()], [], EvaluationSettings()).digest

    found = [digest()]
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.up_proj.weight[:, :4] = 0
    found.append(digest())
    monkeypatch.setattr(module, "package_version", lambda name: "0.0")
    found.append(digest())
    monkeypatch.setattr(module, "cpu_model", lambda: "another")
    found.append(digest())
    assert len(set(found)) == 4
    assert digest() == found[-1]
