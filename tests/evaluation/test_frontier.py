"""Methods in turn: cached, resumed, interrupted, and those that do not fit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError, Interrupted, UsageError
from kvprof.evaluation.evaluation_cache import EvaluationCache
from kvprof.evaluation.frontier import Frontier, FrontierOptions, Half, expected_steps
from kvprof.evaluation.requests import MethodRequest
from kvprof.evaluation.targets import Target
from kvprof.methods.family import PlanFamily
from tests.evaluation.search_families import FakeEvaluator, family, fine


def share(rate: float) -> float:
    return 1.0 - 0.04 * max(rate, 0.0) ** 2


def family_of(request: MethodRequest) -> PlanFamily:
    if request.label == "zack":
        raise UsageError("zack does not fit this model")
    return family(request.method) if request.method in ("full", "fp8") else fine(request.method)


def rows(*labels: str) -> list[MethodRequest]:
    return [MethodRequest(label, label) for label in (*labels, "full", "fp8")]


class Run:
    """One frontier, with all that it told."""

    def __init__(
        self,
        requests: Sequence[MethodRequest],
        folder: Path | None = None,
        evaluator: FakeEvaluator | None = None,
        families: Callable[[MethodRequest], PlanFamily] = family_of,
        **options: Any,
    ) -> None:
        self.evaluator = evaluator or FakeEvaluator(share)
        self.cache = EvaluationCache(folder, self.evaluator.digest)
        # The half that is searched has no spread: rates are tried near what truly holds.
        searched = Half(self.evaluator.without_spread(), EvaluationCache(folder, "searched"))
        self.halves = (searched, Half(self.evaluator, self.cache))
        self.steps = 0
        self.said: list[str] = []
        self.frontier = Frontier(
            *self.halves,
            FrontierOptions(**options),
            families,
            describe=self.said.append,
            advance=self._advance,
            should_stop=self.evaluator.stopped,
        )
        self.data = self.frontier.run(requests)
        self.by_label = {method["label"]: method for method in self.data["methods"]}

    def _advance(self, amount: int) -> None:
        self.steps += amount


def test_every_method_is_searched_and_the_bar_comes_to_its_end() -> None:
    requests = rows("kq", "fdc")
    run = Run(requests)
    assert [len(run.by_label[label]["points"]) for label in run.by_label] == [6, 6, 1, 1]
    kq = run.by_label["kq"]
    # share is 0.99 at a rate of 0.5.
    assert 0.46 < kq["max_rate"] <= 0.5
    assert kq["max_rates"]["0.99"] == kq["max_rate"]
    assert kq["max_rates"]["0.98"] >= kq["max_rate"]
    assert kq["max_rates"]["0.999"] is None or kq["max_rates"]["0.999"] < kq["max_rate"]
    rates = [point["rate"] for point in kq["points"]]
    assert rates == sorted(rates)
    assert all(point["method"] == "kq" for point in kq["points"])
    assert kq["points"][0]["compression_ratio"] == pytest.approx(1 / (1 - rates[0]))
    assert run.by_label["full"]["max_rate"] == 0
    assert run.steps == expected_steps(requests, 6, run.halves)
    assert any("kq (1 of 4): evaluation 2 of 6 at most" in text for text in run.said)
    assert run.frontier.complete


def test_methods_with_the_same_plans_share_evaluations() -> None:
    # Where the model has RoPE, zack folds nothing that fdc does not.
    alone = Run(rows("fdc"))
    both = Run(
        rows("fdc", "zack"),
        families=lambda request: (
            fine(request.method) if request.method in ("fdc", "zack") else family(request.method)
        ),
    )
    assert len(both.evaluator.rates) == len(alone.evaluator.rates)
    figures = [
        [(point["rate"], point["share"]) for point in both.by_label[label]["points"]]
        for label in ("fdc", "zack")
    ]
    assert figures[0] == figures[1]
    assert {point["method"] for point in both.by_label["zack"]["points"]} == {"zack"}


def test_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    requests = rows("kq", "fdc")
    first = Run(requests, tmp_path)
    assert first.frontier.measured == 28
    second = Run(requests, tmp_path)
    assert second.evaluator.rates == []
    assert second.evaluator.baselines == 0
    assert second.frontier.measured == 0
    assert second.cache.found == 15
    assert second.data == first.data
    # More points go on from there: brackets and first halvings are the same.
    further = Run(requests, tmp_path, points=8)
    assert len(further.evaluator.rates) < 8
    assert further.evaluator.baselines == 1


def test_an_interruption_keeps_what_was_measured_and_resumes(tmp_path: Path) -> None:
    requests = rows("kq", "fdc")
    stopped = Run(requests, tmp_path, FakeEvaluator(share, stop_after=8))
    assert not stopped.frontier.complete
    assert [len(stopped.by_label[label]["points"]) for label in stopped.by_label] == [6, 2, 0, 0]
    assert stopped.by_label["fdc"]["reason"] == "interrupted"
    assert stopped.by_label["full"]["reason"] == "interrupted"
    resumed = Run(requests, tmp_path)
    assert len(resumed.evaluator.rates) == 6
    assert resumed.data == Run(requests).data


def test_an_evaluation_cut_short_is_not_kept(tmp_path: Path) -> None:
    class Cut(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> dict[str, Any]:
            return {**super().evaluate(*arguments), "complete": False}

    run = Run(rows("kq"), tmp_path, Cut(share))
    assert not run.frontier.complete
    assert run.by_label["kq"]["points"] == []
    assert len(EvaluationCache(tmp_path, "data")) == 1  # the baseline


def test_interrupted_before_the_baseline_there_is_nothing() -> None:
    class Cut(FakeEvaluator):
        def baseline(self, *arguments: Any) -> dict[str, Any]:
            return {**super().baseline(*arguments), "complete": False}

    with pytest.raises(Interrupted):
        Run(rows("kq"), None, Cut(share))


def test_a_method_that_does_not_fit_is_a_row_that_says_why() -> None:
    for order in (("zack", "kq"), ("kq", "zack")):
        run = Run(rows(*order))
        assert run.by_label["zack"]["reason"] == "zack does not fit this model"
        assert run.by_label["zack"]["max_rate"] is None
        assert run.by_label["zack"]["points"] == []
        assert len(run.by_label["kq"]["points"]) == 6
        assert run.frontier.complete
        assert run.steps == expected_steps(rows(*order), 6, run.halves)


def test_the_only_method_that_does_not_fit_is_refused_before_anything_runs() -> None:
    evaluator = FakeEvaluator(share)
    with pytest.raises(UsageError, match="does not fit"):
        Run(rows("zack"), None, evaluator)
    assert evaluator.baselines == 0


def test_a_method_that_fails_on_the_way_keeps_its_points() -> None:
    class Fragile(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> dict[str, Any]:
            if len(self.rates) == 3 and self is fragile:
                self.rates.append(0.0)
                raise FailedError("logits are not finite")
            return super().evaluate(*arguments)

    fragile = Fragile(share)
    run = Run(rows("kq", "fdc"), None, fragile)
    assert len(run.by_label["kq"]["points"]) == 3
    assert run.by_label["kq"]["reason"] == "logits are not finite"
    assert "kq: stopped after 3 evaluations" in run.frontier.warnings[0]
    assert len(run.by_label["fdc"]["points"]) == 6


def test_a_method_that_never_meets_the_target_says_how_near_it_came() -> None:
    run = Run(rows("kq"), None, FakeEvaluator(lambda rate: 0.9 - rate / 10))
    assert run.by_label["kq"]["max_rate"] is None
    assert "the lowest, 0.000: 0.9000" in run.by_label["kq"]["reason"]


def test_other_metrics_decide() -> None:
    run = Run(rows("kq"), None, targets=(Target("needle", 0.98),))
    assert all(
        point["share"] == pytest.approx(share(point["rate"]))
        for point in run.by_label["kq"]["points"]
    )


class Forgetful(FakeEvaluator):
    """Keeps its accuracy for longer than it finds needles: from a quarter on it loses them."""

    def evaluate(self, *arguments: Any) -> dict[str, Any]:
        found = super().evaluate(*arguments)
        needle = found["tasks"]["needle"]
        needle["accuracy"] = 0.8 * (1.0 if self.rates[-1] <= 0.25 else 0.5)
        needle["difference_interval"] = [-0.02, 0.01] if self.rates[-1] <= 0.25 else [-0.5, -0.3]
        return found


def test_several_targets_hold_together_and_the_row_says_which_binds() -> None:
    both = (Target("accuracy", 0.99), Target("needle", 0.95))
    run = Run(rows("kq"), None, Forgetful(share), targets=both, points=10)
    kq = run.by_label["kq"]
    alone = Run(rows("kq"), None, Forgetful(share), points=10).by_label["kq"]
    # share: 0.99 at a rate of one half. The needles are lost at a quarter.
    assert 0.45 < alone["max_rate"] <= 0.5
    assert alone["binding"] == ["accuracy"]
    assert 0.2 < kq["max_rate"] <= 0.25
    assert kq["binding"] == ["needle"]
    met = [
        point["rate"]
        for point in kq["points"]
        if point["relative_accuracy"] >= 0.99 and point["tasks"]["needle"]["accuracy"] >= 0.76
    ]
    assert kq["max_rate"] == max(met)
    # It was looked for where it is: the bisection heeds both.
    near = [point["rate"] for point in kq["points"] if 0.15 < point["rate"] < 0.35]
    assert len(near) >= 4
    for point in kq["points"]:
        assert point["share"] == point["shares"]["accuracy"]["share"] == point["relative_accuracy"]
        kept = point["tasks"]["needle"]["accuracy"] / 0.8
        assert point["shares"]["needle"]["share"] == pytest.approx(kept)
    assert run.data["targets"] == [
        {"metric": "accuracy", "target": 0.99},
        {"metric": "needle", "target": 0.95},
    ]
    # 20 questions cannot have shown a loss of 5 %: no rate is sure, and one is shown to miss.
    assert kq["max_rate_interval"] == [None, min(r for r in _rates(kq) if r > 0.25)]


def _rates(row: dict[str, Any]) -> list[float]:
    return [point["rate"] for point in row["points"]]


def test_a_row_that_no_target_stops_is_bound_by_none() -> None:
    run = Run(rows("kq"), None, FakeEvaluator(lambda rate: 1.0))
    assert run.by_label["kq"]["binding"] == []
    lost = Run(
        rows("kq"),
        None,
        FakeEvaluator(lambda rate: 0.5),
        targets=(Target("accuracy", 0.99), Target("needle", 0.4)),
    ).by_label["kq"]
    assert (lost["max_rate"], lost["binding"]) == (None, ["accuracy"])
    assert "0.99 of the baseline's accuracy and 0.4 of the baseline's needle" in lost["reason"]
