"""Rates that frontiers recorded: kept here, shipped, or in a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.evaluation import recorded_rates
from kvprof.evaluation.recorded_rates import load_recorded_rates, record_rates
from kvprof.evaluation.targets import Target
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


def test_shipped_records_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "package" / "assets" / "frontier"
    write_result(shipped / "reference.json", changed("kq", 0.39))
    monkeypatch.setattr(recorded_rates.resources, "files", lambda _: tmp_path / "package")
    found = load_recorded_rates(MODEL, cache=tmp_path)
    assert (found["kq"].max_rate, found["kq"].origin) == (0.39, "shipped record of reference")
    record_rates(frontier_result(), tmp_path)
    assert load_recorded_rates(MODEL, cache=tmp_path)["kq"].max_rate == 0.41


def test_a_quick_look_does_not_overrule_what_rests_on_more_tokens(tmp_path: Path) -> None:
    def scored(tokens: int, rate: float) -> dict[str, Any]:
        result = changed("fdc", rate)
        for method in result["data"]["methods"]:
            for point in method["points"]:
                point["decoded_tokens"] = tokens
        return result

    shipped, quick = scored(50_000, 0.2), scored(256, 0.9)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(recorded_rates, "_shipped", lambda: [shipped])
        record_rates(quick, tmp_path)
        assert load_recorded_rates(MODEL, cache=tmp_path)["fdc"].max_rate == 0.2
        record_rates(scored(50_000, 0.3), tmp_path)
        assert load_recorded_rates(MODEL, cache=tmp_path)["fdc"].max_rate == 0.3


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
