"""Evaluations on disk: found again, told apart, and never believed when damaged."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError
from kvprof.evaluation import evaluation_cache
from kvprof.evaluation.evaluation_cache import EvaluationCache, cache_folder, plan_digest
from kvprof.methods.family import plan_for_rate
from kvprof.methods.plan import Plan
from kvprof.methods.registry import plan_family
from tests.evaluation.search_families import family, fine
from tests.methods.models import inputs
from tests.views.synthetic_evaluation import evaluation_result


def plan(rate: float = 0.5, **options: int) -> Plan:
    return plan_for_rate(fine(**options), rate, 100)


def evaluation(accuracy: float) -> dict[str, Any]:
    (one,) = evaluation_result(("full",))["data"]["evaluations"]
    return {**one, "accuracy": accuracy}


def test_the_digest_is_of_the_means_too() -> None:
    found = [
        plan_digest(plan_family("hadamard-int4", inputs("Llama"), centre=centre).build(4.0))
        for centre in (False, 0, 2, True)
    ]
    assert len(set(found)) == 4


def test_the_digest_is_of_what_is_stored() -> None:
    assert plan_digest(plan()) == plan_digest(plan())
    assert plan_digest(plan()) != plan_digest(plan(0.6))
    renamed = replace(plan(), method="other", made={"rate_asked": 0.499})
    assert plan_digest(renamed) == plan_digest(plan())
    quantised = plan_for_rate(fine("kq-4bit"), 0.7, 100)
    assert plan_digest(quantised) != plan_digest(plan())
    # One element of one matrix is enough.
    changed = plan()
    down = changed.layers[0].keys.groups[0].down
    assert down is not None
    before = plan_digest(changed)
    down[0, 0] += 1e-6
    assert plan_digest(changed) != before
    assert plan_digest(family("full").build(0.0)) != plan_digest(family("fp8").build(8.0))


def test_what_was_put_is_found_by_another_process(tmp_path: Path) -> None:
    first = EvaluationCache(tmp_path / "new", "data")
    first.check()
    assert len(first) == 0
    assert first.get("a") is None
    first.put("a", evaluation(0.1 + 0.2))
    second = EvaluationCache(tmp_path / "new", "data")
    assert len(second) == 1
    assert second.get("a") == evaluation(0.1 + 0.2)
    assert second.found == 1
    assert second.get("b") is None
    assert EvaluationCache(tmp_path / "new", "other data").get("a") is None


def test_a_new_version_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EvaluationCache(tmp_path, "data").put("a", evaluation(1.0))
    monkeypatch.setattr(evaluation_cache, "EVALUATION_VERSION", 999)
    assert EvaluationCache(tmp_path, "data").get("a") is None


@pytest.mark.parametrize(
    "damage", ["cut", "changed", "moved", "no object", "binary", "deep", "forged", "endless"]
)
def test_damaged_files_are_told_and_left_out(tmp_path: Path, damage: str) -> None:
    cache = EvaluationCache(tmp_path, "data")
    cache.put("a", evaluation(0.5))
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[:-20])
    elif damage == "changed":
        path.write_text(text.replace('"accuracy": 0.5', '"accuracy": 0.9'))
    elif damage == "moved":
        path.write_text(json.dumps({**json.loads(text), "plan": "b"}))
    elif damage == "no object":
        path.write_text("[1]")
    elif damage == "deep":
        path.write_text("[" * 200_000)
    elif damage == "endless":
        path.write_text(text.replace('"accuracy": 0.5', f'"accuracy": {"9" * 5000}'))
    elif damage == "forged":  # whoever forges can count, too
        stored = json.loads(text)
        stored["evaluation"]["kl"] = "low"
        whole = json.dumps(stored["evaluation"], sort_keys=True).encode()
        path.write_text(json.dumps({**stored, "digest": hashlib.sha256(whole).hexdigest()}))
    else:
        path.write_bytes(b"\xff\xfe\x00")
    told: list[str] = []
    again = EvaluationCache(tmp_path, "data", told.append)
    assert again.get("a") is None
    assert again.found == 0
    assert len(told) == 1
    assert str(path) in told[0]
    again.put("a", evaluation(0.5))
    assert EvaluationCache(tmp_path, "data").get("a") == evaluation(0.5)


def test_without_a_folder_only_this_process_remembers() -> None:
    cache = EvaluationCache(None, "data")
    cache.check()
    cache.put("a", evaluation(0.5))
    assert cache.get("a") == evaluation(0.5)
    assert len(cache) == 0
    assert EvaluationCache(None, "data").get("a") is None


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    told: list[str] = []
    cache = EvaluationCache(blocked, "data", told.append)
    with pytest.raises(FailedError, match="--no-cache"):
        cache.check()
    # A disk that is full by now costs one warning, not the run.
    cache.put("a", evaluation(0.5))
    cache.put("b", evaluation(0.5))
    assert len(told) == 1
    assert cache.get("a") == evaluation(0.5)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROF_CACHE", str(tmp_path / "stated"))
    assert cache_folder() == tmp_path / "stated"
    assert cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("KVPROF_CACHE")
    assert cache_folder().parts[-2:] == ("kvprof", "evaluations")
