"""Rates that frontiers recorded: kept here, shipped, or in a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.benchmark.shapes import Rope, Shape, layout_of
from kvprof.errors import FailedError, UsageError
from kvprof.evaluation import recorded_rates
from kvprof.evaluation.recorded_rates import (
    ShippedRates,
    load_recorded_rates,
    record_rates,
    shipped_names,
    shipped_rates,
)
from kvprof.evaluation.targets import Target
from kvprof.models.layout import ModelLayout
from kvprof.models.load import load_model
from kvprof.records.files import write_result
from tests.records.sample import spectrum_result
from tests.views.synthetic_frontier import frontier_result

MODEL = "f" * 32


def changed(label: str, max_rate: float | None, **data: Any) -> dict[str, Any]:
    result = frontier_result()
    result["data"] |= data
    for method in result["data"]["methods"]:
        if method["label"] == label:
            method["max_rate"] = max_rate
    return result


def test_a_complete_frontier_is_remembered(tmp_path: Path) -> None:
    assert load_recorded_rates(MODEL, cache=tmp_path) == {}
    assert record_rates(frontier_result(), tmp_path) is not None
    found = load_recorded_rates(MODEL, cache=tmp_path)
    # zack did not fit the model, so nothing is known of it; palu is known to miss the target.
    assert set(found) == {"fdc", "kq:allocation=budget", "kq", "palu", "full", "fp8"}
    best = found["kq:allocation=budget"]
    assert (best.method, best.options, best.max_rate) == ("kq", {"allocation": "budget"}, 0.48)
    assert (best.target, best.metric, best.context, best.dtype) == (
        0.99,
        "accuracy",
        384,
        "bfloat16",
    )
    assert best.origin == "measured here"
    assert best.created
    assert found["palu"].max_rate is None
    assert load_recorded_rates("another", cache=tmp_path) == {}


def test_later_results_replace_the_same_method_metric_and_target(tmp_path: Path) -> None:
    record_rates(frontier_result(), tmp_path)
    record_rates(changed("fdc", 0.3), tmp_path)
    record_rates(changed("fdc", 0.6, target=0.95), tmp_path)
    record_rates(changed("fdc", 0.2, metric="tasks"), tmp_path)
    assert load_recorded_rates(MODEL, cache=tmp_path)["fdc"].max_rate == 0.3
    assert load_recorded_rates(MODEL, cache=tmp_path)["kq"].max_rate == 0.41
    assert (
        load_recorded_rates(MODEL, cache=tmp_path, targets=[Target("accuracy", 0.95)])[
            "fdc"
        ].max_rate
        == 0.6
    )
    assert (
        load_recorded_rates(MODEL, cache=tmp_path, targets=[Target("tasks")])["fdc"].max_rate == 0.2
    )


def test_an_interrupted_frontier_is_not(tmp_path: Path) -> None:
    assert record_rates(frontier_result(complete=False), tmp_path) is None
    assert load_recorded_rates(MODEL, cache=tmp_path) == {}


def test_a_teacher_forced_frontier_is_not(tmp_path: Path) -> None:
    result = frontier_result()
    result["inputs"]["protocol"] = "teacher_forced"
    assert record_rates(result, tmp_path) is None
    assert load_recorded_rates(MODEL, cache=tmp_path) == {}


@pytest.mark.parametrize("how", ["interrupted", "teacher_forced"])
def test_files_that_decide_nothing_are_refused(how: str, tmp_path: Path) -> None:
    result = frontier_result(complete=how != "interrupted")
    result["inputs"]["protocol"] = "teacher_forced" if how == "teacher_forced" else "decode"
    write_result(tmp_path / "f.json", result)
    with pytest.raises(UsageError, match="a frontier that decoded, to its end"):
        load_recorded_rates(MODEL, [tmp_path / "f.json"], cache=tmp_path)


def test_a_record_knows_up_to_where_its_interval_held(tmp_path: Path) -> None:
    record_rates(frontier_result(), tmp_path)
    found = load_recorded_rates(MODEL, cache=tmp_path)
    assert (found["kq"].max_rate, found["kq"].sure) == (0.41, 0.25)
    assert (found["palu"].max_rate, found["palu"].sure) == (None, None)
    # Records of an earlier kvprof do not say.
    path = tmp_path / next(tmp_path.glob("rates-*.json")).name
    content = json.loads(path.read_text())
    for entry in content["rates"]:
        del entry["sure"]
    path.write_text(json.dumps(content))
    assert load_recorded_rates(MODEL, cache=tmp_path)["kq"].sure is None


def test_files_overrule_what_is_kept_here(tmp_path: Path) -> None:
    record_rates(frontier_result(), tmp_path)
    path = tmp_path / "mine.json"
    write_result(path, changed("fdc", 0.31))
    found = load_recorded_rates(MODEL, [path], cache=tmp_path)
    assert (found["fdc"].max_rate, found["fdc"].origin) == (0.31, "mine.json")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    other, spectrum, cut = (tmp_path / name for name in ("o.json", "s.json", "c.json"))
    write_result(other, frontier_result())
    write_result(spectrum, spectrum_result())
    cut.write_text(other.read_text()[:200])
    with pytest.raises(UsageError, match="reference"):
        load_recorded_rates("another", [other], cache=tmp_path)
    with pytest.raises(UsageError, match="spectrum"):
        load_recorded_rates(MODEL, [spectrum], cache=tmp_path)
    with pytest.raises(FailedError, match=r"c\.json"):
        load_recorded_rates(MODEL, [cut], cache=tmp_path)


def test_a_damaged_record_is_told_and_left_out(tmp_path: Path) -> None:
    path = record_rates(frontier_result(), tmp_path)
    assert path is not None
    path.write_text(path.read_text()[:100])
    told: list[str] = []
    assert load_recorded_rates(MODEL, cache=tmp_path, warn=told.append) == {}
    assert len(told) == 1
    record_rates(frontier_result(), tmp_path)
    assert load_recorded_rates(MODEL, cache=tmp_path)["fdc"].max_rate == 0.34


SHAPE = {"layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
OTHER = {**SHAPE, "head_dim": 32}


def layout(**changes: int) -> ModelLayout:
    shape = Shape(
        "some",
        "",
        hidden_size=64,
        rope=Rope("default", 1e4),
        context=64,
        scaling=1.0,
        **{**SHAPE, **changes},
    )
    return layout_of(shape)


@pytest.fixture
def two_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of two models ship, of unlike shapes."""
    for name, fingerprint, shape, rate in (
        ("big", "a" * 32, OTHER, 0.2),
        ("small", MODEL, SHAPE, 0.39),
    ):
        result = changed("kq", rate)
        result["inputs"] |= {"model": name, "fingerprint": fingerprint, "shape": shape}
        write_result(tmp_path / "package" / "assets" / "frontier" / f"{name}.json", result)
    monkeypatch.setattr(recorded_rates.resources, "files", lambda _: tmp_path / "package")


@pytest.mark.usefixtures("two_ship")
def test_a_model_takes_the_shipped_record_of_its_weights(tmp_path: Path) -> None:
    assert shipped_names() == ["big", "small"]
    taken = shipped_rates(MODEL, layout())
    assert (taken.model, taken.borrowed) == ("small", False)
    found = load_recorded_rates(MODEL, shipped=taken, cache=tmp_path)
    assert (found["kq"].max_rate, found["kq"].origin) == (0.39, "shipped record of small")
    assert not found["kq"].borrowed
    assert shipped_rates(MODEL, layout(), ["small"]).borrowed is False
    record_rates(frontier_result(), tmp_path)
    assert load_recorded_rates(MODEL, shipped=taken, cache=tmp_path)["kq"].max_rate == 0.41


@pytest.mark.usefixtures("two_ship")
def test_a_model_of_the_same_shape_borrows_and_any_other_takes_none(tmp_path: Path) -> None:
    for fingerprint, why in (("b" * 32, "its weights are others"), ("", "its shape is the same")):
        taken = shipped_rates(fingerprint, layout(head_dim=32))
        assert (taken.model, taken.borrowed) == ("big", True)
        assert taken.why.endswith(why)
        found = load_recorded_rates(fingerprint, shipped=taken, cache=tmp_path)
        assert found["kq"].max_rate == 0.2
        assert all(entry.borrowed for entry in found.values())
    none = shipped_rates("b" * 32, layout(num_kv_heads=4))
    assert none.model is None
    assert "big (2 layers, 4 query and 2 KV heads of 32) and small (" in none.why
    assert none.why.endswith("it has 2 layers, 4 query and 4 KV heads of 16")
    assert load_recorded_rates("b" * 32, shipped=none, cache=tmp_path) == {}
    named = shipped_rates("b" * 32, layout(num_kv_heads=4), ["small"])
    assert (named.model, named.borrowed) == ("small", True)
    with pytest.raises(UsageError, match="--rates big and small both name"):
        shipped_rates(MODEL, layout(), ["big", "small"])


@pytest.mark.usefixtures("two_ship")
def test_what_was_measured_here_overrules_what_is_borrowed(tmp_path: Path) -> None:
    quick = changed("kq", 0.1)
    quick["inputs"]["fingerprint"] = "b" * 32
    for method in quick["data"]["methods"]:
        for point in method["points"]:
            point["decoded_tokens"] = 1
    record_rates(quick, tmp_path)
    taken = shipped_rates("b" * 32, layout())
    found = load_recorded_rates("b" * 32, shipped=taken, cache=tmp_path)
    assert (found["kq"].max_rate, found["kq"].borrowed) == (0.1, False)
    assert found["kq"].origin == "measured here"


def test_what_ships_is_of_models_that_kvprof_knows() -> None:
    for result in recorded_rates._shipped():
        inputs = result["inputs"]
        assert inputs["model"] in shipped_names()
        assert set(inputs["shape"]) == set(SHAPE)
    reference = load_model("reference", device="cpu")
    taken = shipped_rates(reference.fingerprint, reference.layout)
    assert (taken.model, taken.borrowed) == ("reference", False)


def test_a_quick_look_does_not_overrule_what_rests_on_more_tokens(tmp_path: Path) -> None:
    def scored(tokens: int, rate: float) -> dict[str, Any]:
        result = changed("fdc", rate)
        for method in result["data"]["methods"]:
            for point in method["points"]:
                point["decoded_tokens"] = tokens
        return result

    shipped = ShippedRates("big", False, "the weights are the same", scored(50_000, 0.2))
    record_rates(scored(256, 0.9), tmp_path)
    assert load_recorded_rates(MODEL, shipped=shipped, cache=tmp_path)["fdc"].max_rate == 0.2
    record_rates(scored(50_000, 0.3), tmp_path)
    assert load_recorded_rates(MODEL, shipped=shipped, cache=tmp_path)["fdc"].max_rate == 0.3


BOTH = [Target("accuracy", 0.99), Target("needle", 0.95)]


def test_rates_of_several_targets_are_theirs_alone(tmp_path: Path) -> None:
    result = changed("fdc", 0.25)
    result["data"]["targets"] = [one.described() for one in BOTH]
    record_rates(result, tmp_path)
    assert load_recorded_rates(MODEL, cache=tmp_path) == {}
    for asked in (BOTH, BOTH[::-1]):
        assert load_recorded_rates(MODEL, cache=tmp_path, targets=asked)["fdc"].max_rate == 0.25
    record_rates(frontier_result(), tmp_path)  # of one target: neither replaces the other
    assert load_recorded_rates(MODEL, cache=tmp_path)["fdc"].max_rate == 0.34
    assert load_recorded_rates(MODEL, cache=tmp_path, targets=BOTH)["fdc"].max_rate == 0.25


def test_a_file_is_asked_for_targets_that_were_not_its_own(tmp_path: Path) -> None:
    result = frontier_result()
    for method in result["data"]["methods"]:
        for point in method["points"]:
            for task in point["tasks"].values():
                task["difference_interval"] = [-0.01, 0.01]
            if point["rate"] > 0.3:
                point["tasks"]["needle"]["accuracy"] = 0.5
            point["baseline_accuracy"] = 0.5
    path = tmp_path / "f.json"
    write_result(path, result)
    both = load_recorded_rates(MODEL, [path], cache=tmp_path, targets=BOTH)
    # kq keeps its accuracy to 0.41, and half of the needles are gone from 0.41 on.
    assert (both["kq"].max_rate, both["kq"].also) == (0.25, {"needle": 0.95})
    one = load_recorded_rates(MODEL, [path], cache=tmp_path)
    assert one["kq"].max_rate == 0.41
    with pytest.raises(UsageError, match="json: --target: 'vt' is not measured"):
        load_recorded_rates(MODEL, [path], cache=tmp_path, targets=[Target("vt")])
