"""A small recipe as text, machines, and a runner that measures nothing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvprof.recipes.machine import Machine
from kvprof.recipes.runs import Outcome
from kvprof.records.result import build_result
from tests.records.sample import ENVIRONMENT

TEXT = """\
format: kvprof-recipe/1
name: small-claim
paper: FDC
item: Table 7
claim: The method keeps most of the accuracy.
published:
  - {id: kept, value: 0.95, unit: share of accuracy, cell: "Table 7, row FDC"}
direction: The method keeps more than another.
judged: true
set: {rate: "0.30"}
profiles:
  smoke:
    stand_in: The shipped model instead of the paper's.
    matrix: {method: [fdc, kq]}
    cells:
      - {id: "plan-{method}", run: "plan reference --method {method} --rate {rate}"}
measures:
  - {id: rate_fdc, cell: plan-fdc, figure: rate, where: {method: fdc}}
  - {id: worst, cell: "plan-*", figure: rate, over: min}
  - {id: ratio, divide: [rate_fdc, worst]}
verdict:
  - {measure: rate_fdc, published: kept, at_least: 0.95, tolerance: 0.01}
  - {measure: ratio, at_least: 1, direction: true}
"""

CPU = Machine("some CPU, 2 threads", (), lambda _: True, lambda _: True)


def write(folder: Path, text: str = TEXT, name: str = "small-claim") -> Path:
    """Write a recipe's text."""
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def plan_result(
    method: str, rate: float, *, interval: tuple[float, float] | None = None, complete: bool = True
) -> dict[str, Any]:
    """Return a result with one figure."""
    beside = {} if interval is None else {"rate_interval": list(interval)}
    return build_result(
        "benchmark",
        environment=ENVIRONMENT,
        inputs={"benchmark": "fake"},
        data={"rows": [{"method": method, "rate": rate, **beside}]},
        complete=complete,
    )


class FakeRunner:
    """Answers cells from a table of rates by method, and counts what it was asked."""

    def __init__(self, rates: Mapping[str, float | str]) -> None:
        self.rates = dict(rates)
        self.asked: list[tuple[str, ...]] = []
        self.after: Callable[[], None] = lambda: None

    def __call__(self, words: Sequence[str], should_stop: Callable[[], bool]) -> Outcome:
        self.asked.append(tuple(words))
        self.after()
        if should_stop():
            return Outcome(None, 130, "interrupted")
        found = self.rates[words[words.index("--method") + 1]]
        if isinstance(found, str):
            return Outcome(None, 1, found)
        return Outcome(plan_result(words[words.index("--method") + 1], found), 0)
