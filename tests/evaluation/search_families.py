"""Families whose plans are real ones of a tiny model, and an evaluator that knows their quality."""

from collections.abc import Callable
from typing import Any

from kvprof.errors import Interrupted
from kvprof.methods.accounting import rate
from kvprof.methods.family import PlanFamily
from kvprof.methods.plan import Plan
from kvprof.methods.registry import plan_family
from kvprof.results.eval import Evaluation
from tests.methods.models import FINE, inputs
from tests.results.made import part

CONTEXT = 100


def family(method: str = "kq", **options: Any) -> PlanFamily:
    """Return a family of the tiny Llama (heads of 16)."""
    return plan_family(method, inputs("Llama"), **options)


def fine(method: str = "kq", **options: Any) -> PlanFamily:
    """Return a family with ranks of any size."""
    return family(method, **{**FINE, **options})


def true_rate(plan: Plan) -> float:
    return rate(plan, CONTEXT)


def evaluation(share: float, *, half: float = 0.004, baseline: float = 0.5) -> dict[str, Any]:
    """Return an evaluation that keeps `share` of the accuracy, give or take `half`."""
    interval = [share - half, share + half]
    known = {
        "accuracy": share * baseline,
        "baseline_accuracy": baseline,
        "relative_accuracy": share,
    }
    lost = {"accuracy": 0.8 * share, "baseline": 0.8, "difference_interval": [-0.08, 0.04]}
    kept = {"accuracy": 0.4, "baseline": 0.4, "difference_interval": [0.0, 0.0]}
    return part(
        Evaluation,
        **known,
        relative_accuracy_interval=interval,
        perplexity=10.0 / share,
        baseline_perplexity=10.0,
        perplexity_ratio=1.0 / share,
        perplexity_ratio_interval=[0.99 / share, 1.01 / share],
        kl={"mean": 1.0 - share},
        sources={name: {**known, "interval": interval} for name in ("prose", "code")},
        tasks={"needle": {**lost, "items": 20}, "copy": {**kept, "items": 20}},
        decoded_tokens=800,
        complete=True,
    )


class FakeEvaluator:
    """Knows what share of the baseline a plan of some rate keeps, and counts what it was asked."""

    digest = "data"
    context = CONTEXT
    baseline_steps = 4

    def steps(self, plan: Any = None) -> int:
        return 10

    def __init__(
        self, share: Callable[[float], float], *, stop_after: int | None = None, half: float = 0.004
    ) -> None:
        self._share, self._half = share, half
        self._stop_after = stop_after
        self.rates: list[float] = []
        self.baselines = 0

    def without_spread(self) -> "FakeEvaluator":
        """Return one that knows the same, with intervals of no width."""
        return type(self)(self._share, half=0.0)

    def baseline(
        self,
        advance: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        self.baselines += 1
        advance(self.baseline_steps)
        found = evaluation(1.0)
        for task in found["tasks"].values():
            task["accuracy"] = task["baseline"]
        return found

    def evaluate(
        self,
        plan: Plan,
        advance: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        assert self.baselines, "plans are compared with the baseline's logits"
        if self._stop_after is not None and len(self.rates) >= self._stop_after:
            return {**evaluation(0.0), "complete": False}
        self.rates.append(true_rate(plan))
        advance(self.steps() - 1)  # rounding: one step is never told
        return evaluation(self._share(self.rates[-1]), half=self._half)

    def stopped(self) -> bool:
        return self._stop_after is not None and len(self.rates) >= self._stop_after


def counted(share: Callable[[float], float]) -> tuple[Callable[..., Any], list[float]]:
    """Return an ``evaluate`` for `search_rates` and the rates that it was asked for."""
    seen: list[float] = []

    def evaluate(plan: Plan, digest: str) -> dict[str, Any]:
        if len(seen) > 40:
            raise Interrupted
        seen.append(true_rate(plan))
        return evaluation(share(seen[-1]))

    return evaluate, seen
