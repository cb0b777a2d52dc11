"""Which rates of one method are evaluated: brackets for the curve, then bisection at the targets.

Of the rates that a family reaches, the points at one and two thirds come first: they give the curve
its shape and the target a bracket. Bisection between the largest rate that keeps the target and the
smallest that does not takes what is left. The last evaluation goes to the end of the range where
nothing has failed yet (or nothing has passed), because only that settles such a case. Rates that
give the same plan, because the grid has no rank between them, are known by the plan's digest and
evaluated once; what that frees goes to the widest gaps of the curve, and to its ends. A family with
few settings is tried at all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvprof.errors import UsageError
from kvprof.evaluation.evaluation_cache import plan_digest
from kvprof.methods.accounting import rate
from kvprof.methods.family import PlanFamily, grid_words, plan_at, plan_for_rate
from kvprof.methods.plan import Plan

__all__ = ["MeasuredRate", "search_rates"]

# Rates nearer than this are not worth an evaluation: about one token in five hundred.
_FINEST = 0.002
_BRACKETS = (1 / 3, 2 / 3)
# With fewer evaluations than this there is nothing left to bisect with after the brackets.
_ENOUGH_FOR_BRACKETS = 4
_END_STEPS = 10  # halvings to find the end of the rates that a combination reaches
_PROBES = 16


@dataclass(frozen=True)
class MeasuredRate:
    """One evaluated plan."""

    rate: float  # what its bytes save at the context of the evaluation
    rate_asked: float | None  # what was asked for; None for a setting
    evaluation: dict[str, Any]


Evaluate = Callable[[Plan, str], dict[str, Any]]


def search_rates(
    family: PlanFamily,
    evaluate: Evaluate,
    *,
    meets: Callable[[MeasuredRate], bool],
    tokens: int,
    points: int,
    keep: Callable[[MeasuredRate], None],
) -> str | None:
    """Evaluate a family at up to `points` rates; see the module."""
    search = _Search(family, evaluate, meets, tokens, points, keep)
    if family.settings and family.at_rate is None and len(family.settings) <= points:
        for setting in family.settings:
            search.test(plan_at(family, setting), None)
        return None
    search.ends = search.reach()
    if points >= _ENOUGH_FOR_BRACKETS:
        low, high = search.ends
        for part in _BRACKETS:
            search.ask(low + part * (high - low))
    search.bisect()
    search.fill_gaps()
    if search.ends[1] > 0:
        return None
    return f"no setting of it saves anything at {tokens:,} tokens{grid_words(family)}"


class _Search:
    def __init__(
        self,
        family: PlanFamily,
        evaluate: Evaluate,
        meets: Callable[[MeasuredRate], bool],
        tokens: int,
        points: int,
        keep: Callable[[MeasuredRate], None],
    ) -> None:
        self._family = family
        self._evaluate = evaluate
        self._meets = meets
        self._tokens = tokens
        self._left = points
        self._keep = keep
        self._by_digest: dict[str, MeasuredRate] = {}
        # What every rate asked for gave: several may have given the same plan.
        self._asked: dict[float, str] = {}
        self.ends = (0.0, 0.0)

    def test(self, plan: Plan, asked: float | None) -> str:
        """Evaluate a plan unless that was done, and return its digest."""
        digest = plan_digest(plan)
        if digest not in self._by_digest:
            evaluation = self._evaluate(plan, digest)
            self._left -= 1
            reached = rate(plan, self._tokens)
            found = MeasuredRate(reached, asked, evaluation)
            self._by_digest[digest] = found
            self._keep(found)
        return digest

    def ask(self, asked: float) -> None:
        """Evaluate what a rate gives."""
        self._asked[asked] = self.test(self._plan(asked), asked)

    def bisect(self) -> None:
        """Halve what lies between passing and failing."""
        while self._left > 0:
            passing, failing = self._bracket()
            low = self.ends[0] if passing is None else passing
            high = self.ends[1] if failing is None else failing
            settled = high - low <= _FINEST
            if (settled or self._left == 1) and failing is None and high not in self._asked:
                self.ask(high)
            elif (settled or self._left == 1) and passing is None and low not in self._asked:
                self.ask(low)
            elif settled:
                return
            else:
                self.ask((low + high) / 2)

    def fill_gaps(self) -> None:
        """Spend what is left on the widest stretches between unlike plans, then on the ends."""
        while self._left > 0:
            known = sorted({*self._asked, *self.ends})
            gaps = [
                (high - low, (low + high) / 2)
                for low, high in pairwise(known)
                if high - low > _FINEST
                and (low not in self._asked or self._asked[low] != self._asked.get(high))
            ]
            ends = [end for end in self.ends if end not in self._asked]
            if not gaps and not ends:
                return
            self.ask(max(gaps)[1] if gaps else ends[0])

    def _bracket(self) -> tuple[float | None, float | None]:
        """Return the last rate asked for that passed before the first that failed, and that one."""
        passing = None
        for asked in sorted(self._asked):
            if not self._meets(self._by_digest[self._asked[asked]]):
                return passing, asked
            passing = asked
        return passing, None

    def reach(self) -> tuple[float, float]:
        """Return the least and the greatest rate that can be asked for.

        A combination's own rule says only whether a rate can be had; then the ends are found by
        trying.
        """
        family = self._family
        if family.at_rate is None:
            values = family.settings or family.bounds
            least, most = (
                rate(family.build(value), self._tokens) for value in (values[0], values[-1])
            )
            return max(0.0, least), max(0.0, most)
        probes = [index / _PROBES for index in range(_PROBES)]
        able = [asked for asked in probes if self._reaches(asked)]
        if not able:
            self._plan(0.0)  # says why not
            raise UsageError(f"{family.method} has no testable rate")
        low, high = able[0], able[-1]
        if low > 0:
            low = self._edge(low, low - 1 / _PROBES)
        return low, self._edge(high, high + 1 / _PROBES)

    def _edge(self, able: float, unable: float) -> float:
        for _ in range(_END_STEPS):
            middle = (able + unable) / 2
            if self._reaches(middle):
                able = middle
            else:
                unable = middle
        return able

    def _reaches(self, asked: float) -> bool:
        try:
            self._plan(asked)
        except UsageError:
            return False
        return True

    def _plan(self, asked: float) -> Plan:
        return plan_for_rate(self._family, asked, self._tokens)
