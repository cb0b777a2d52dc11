"""Which rates are evaluated: brackets, bisection, ends, rank grids, settings."""

from collections.abc import Callable

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.rate_search import MeasuredRate, search_rates
from kvprof.evaluation.targets import max_rate
from kvprof.methods.family import PlanFamily
from kvprof.methods.plan import Plan
from tests.evaluation.search_families import CONTEXT, counted, family, fine


def falling(threshold: float) -> Callable[[float], float]:
    """Return a share that is 0.99 exactly at a rate, and falls ever faster."""
    return lambda rate: 1.0 - 0.01 * (max(rate, 0.0) / threshold) ** 2


def kept(one: MeasuredRate) -> float:
    share: float = one.evaluation["relative_accuracy"]
    return share


def search(
    plans: PlanFamily, share: Callable[[float], float], points: int = 6, target: float = 0.99
) -> tuple[list[MeasuredRate], list[float]]:
    evaluate, seen = counted(share)
    found: list[MeasuredRate] = []
    search_rates(
        plans,
        evaluate,
        meets=lambda one: kept(one) >= target - 1e-12,
        tokens=CONTEXT,
        points=points,
        keep=found.append,
    )
    assert [entry.rate for entry in found] == seen
    return found, seen


def best(found: list[MeasuredRate], target: float = 0.99) -> float | None:
    return max_rate([{"rate": entry.rate, "share": kept(entry)} for entry in found], target)


@pytest.mark.parametrize("threshold", [0.12, 0.3, 0.42, 0.55, 0.8])
def test_six_evaluations_come_within_a_fortieth_of_the_range(threshold: float) -> None:
    found, seen = search(fine(), falling(threshold))
    assert len(seen) == 6
    reached = best(found)
    assert reached is not None
    # Ranks 1 to 16 of two pairs in 6 heads: the range is 15/16, its 48th part is 0.02.
    assert threshold - 0.025 <= reached <= threshold
    # The curve spans the range: something was tested in each third.
    assert min(seen) < 0.35
    assert max(seen) > 0.6


def test_a_family_that_saves_nothing_is_told_with_its_grid() -> None:
    evaluate, seen = counted(lambda _: 1.0)

    def told(plans: PlanFamily) -> str | None:
        return search_rates(
            plans, evaluate, meets=lambda _: True, tokens=CONTEXT, points=3, keep=lambda _: None
        )

    assert told(fine()) is None
    seen.clear()
    assert told(family(grid=999)) == (
        f"no setting of it saves anything at {CONTEXT:,} tokens; ranks are multiples of 999 from "
        "16 on (options grid and minimum)"
    )
    assert seen == [0.0]


def test_more_points_come_nearer() -> None:
    few, _ = search(fine(), falling(0.5), points=4)
    many, _ = search(fine(), falling(0.5), points=9)
    least, most = best(few), best(many)
    assert least is not None
    assert most is not None
    assert least < most <= 0.5
    assert 0.5 - most < 0.01


def test_with_few_points_everything_goes_into_bisection() -> None:
    found, _ = search(fine(), falling(0.4), points=2)
    asked = [entry.rate_asked for entry in found]
    assert asked[0] == pytest.approx(15 / 32, abs=1e-6)


def test_where_nothing_fails_the_end_of_the_range_is_tested() -> None:
    found, seen = search(fine(), lambda _: 1.0)
    assert max(seen) == pytest.approx(15 / 16)
    assert best(found) == max(seen)


def test_where_nothing_passes_the_least_compression_is_tested() -> None:
    found, seen = search(fine(), lambda _: 0.5)
    assert min(seen) == 0
    assert best(found) is None


def test_no_plan_is_evaluated_twice_on_a_coarse_grid() -> None:
    # Uniform ranks 8 and 16 alone: two plans whatever the rate.
    plans = fine(allocation="uniform", grid=8, minimum=8)
    found, seen = search(plans, falling(0.7))
    assert sorted(seen) == [0.0, 0.5]
    assert best(found) == 0.5


def test_evaluations_that_the_grid_frees_go_to_the_gaps() -> None:
    # Four plans: ranks 16, 12, 8, 4. The target lies between the second and the third.
    plans = fine(allocation="uniform", grid=4, minimum=4)
    found, seen = search(plans, falling(0.3))
    assert sorted(seen) == [0.0, 0.25, 0.5, 0.75]
    assert best(found) == 0.25


def test_settings_are_all_tried_by_growing_rate() -> None:
    found, seen = search(family("per-token"), falling(0.8))
    assert len(seen) == 4
    assert seen == sorted(seen)
    assert all(entry.rate_asked is None for entry in found)
    assert best(found) == max(rate for rate in seen if rate <= 0.8)


def test_more_settings_than_points_are_bisected() -> None:
    found, seen = search(family("per-token"), falling(0.8), points=3)
    assert len(seen) == 3
    assert best(found) is not None


@pytest.mark.parametrize("method", ["full", "fp8"])
def test_what_has_nothing_to_turn_is_one_point(method: str) -> None:
    found, _ = search(family(method), lambda _: 1.0)
    assert [round(entry.rate, 3) for entry in found] == [0.0 if method == "full" else 0.5]


def test_combinations_are_searched_by_the_rate_asked() -> None:
    found, seen = search(fine("kq-4bit"), falling(0.8))
    assert all(entry.rate_asked is not None and entry.rate >= 0.625 for entry in found)
    reached = best(found)
    assert reached is not None
    assert 0.75 < reached <= 0.8
    found, seen = search(fine("kq+sink-recent"), falling(0.5))
    assert len(seen) == 6
    reached = best(found)
    assert reached is not None
    assert 0.45 < reached <= 0.5


def test_a_combination_that_cannot_keep_everything_starts_where_it_can() -> None:
    # Half of the tokens are dropped whatever is asked, so no rate below about 0.5 can be had.
    found, _ = search(fine("kq+sink-recent", keep=0.5), falling(0.6))
    assert min(entry.rate for entry in found) > 0.4
    reached = best(found)
    assert reached is not None
    assert 0.55 < reached <= 0.6


def test_a_family_without_a_plan_says_why() -> None:
    def never(wanted: float, tokens: int) -> Plan:
        raise UsageError("made of nothing")

    empty = PlanFamily("empty", "rate", lambda _: pytest.fail("not built"), at_rate=never)
    with pytest.raises(UsageError, match="made of nothing"):
        search(empty, falling(0.5))


def test_a_dip_below_the_target_bounds_the_search() -> None:
    # Point estimates are noisy: a rate that fails by chance at a third ends the range there.
    found, seen = search(fine(), lambda rate: 0.98 if 0.3 <= rate <= 0.35 else 0.995)
    reached = best(found)
    assert reached is not None
    assert reached < 0.35
    assert sum(rate > 0.35 for rate in seen) == 1
