import csv
import io
from typing import Any

import pytest

from kvprof.records.figures import figures_of
from kvprof.results.eval import EvalResult
from tests.views.synthetic_evaluation import evaluation_result


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return evaluation_result(texts=("prose", "code"), harness=True, written=True)


@pytest.fixture(scope="module")
def rows(result: dict[str, Any]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(EvalResult.of(result).to_csv())))


def one(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    (row,) = [r for r in rows if all(r[key] == value for key, value in wanted.items())]
    return row


def test_csv_holds_every_figure_in_full(result: dict[str, Any], rows: list[dict[str, str]]) -> None:
    assert tuple(rows[0]) == EvalResult.columns
    for evaluation in result["data"]["evaluations"]:
        name = evaluation["method"]
        row = one(rows, method=name, scope="all", metric="relative_accuracy")
        assert float(row["value"]) == evaluation["relative_accuracy"]
        assert [float(row["low"]), float(row["high"])] == evaluation["relative_accuracy_interval"]
        row = one(rows, method=name, scope="text", name="code", metric="perplexity")
        assert float(row["baseline"]) == evaluation["sources"]["code"]["baseline_perplexity"]
        row = one(rows, method=name, scope="all", metric="kl_p999")
        assert float(row["value"]) == evaluation["kl"]["p999"]
        row = one(rows, method=name, scope="task", name="copy", metric="accuracy")
        assert float(row["value"]) == evaluation["tasks"]["copy"]["accuracy"]
        assert int(row["count"]) == 6
        row = one(rows, method=name, scope="task_depth", name="needle 0.5")
        assert float(row["value"]) == evaluation["tasks"]["needle"]["by_depth"]["0.5"]["accuracy"]
        lengths = evaluation["answer_lengths"]["by_task"]["vt"]
        for metric in ("ratio", "never_ended"):
            row = one(rows, method=name, scope="answers", name="vt", metric=metric)
            assert float(row["value"]) == lengths[metric]
    assert one(rows, method="kq", scope="harness", metric="acc")["value"] == "0.5"


def test_what_is_compared_is_known_by_method_and_task(result: dict[str, Any]) -> None:
    found = {(one.key, one.name): one for one in figures_of(result)}
    row = result["data"]["evaluations"][2]
    kq = (("method", "kq"),)
    kept = found[kq, "relative_accuracy"]
    assert (kept.value, kept.better, kept.headline) == (row["relative_accuracy"], "higher", True)
    assert list(kept.interval or ()) == row["relative_accuracy_interval"]
    assert found[kq, "kl_mean"].value == row["kl"]["mean"]
    assert found[(*kq, ("of", "answers")), "ratio"].value == row["answer_lengths"]["ratio"]
    task = found[(*kq, ("task", "copy")), "task_accuracy"]
    assert task.value == row["tasks"]["copy"]["accuracy"]
    assert task.interval is not None
    assert len(found) == len(result["data"]["evaluations"]) * (6 + len(row["tasks"]))


def test_a_task_at_chance_is_not_compared() -> None:
    found = figures_of(evaluation_result(at_chance=("copy",)))
    tasks = {dict(one.key).get("task") for one in found if one.name == "task_accuracy"}
    assert tasks == {"needle", "variables", "frequent_words"}
