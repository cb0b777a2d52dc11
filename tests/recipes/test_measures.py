import re

import pytest

from kvprof.recipes.ledger import (
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    TREND,
    judge_line,
    open_because,
    verdict_of,
)
from kvprof.recipes.measures import Measured, find, measure_all, parse_path
from kvprof.recipes.recipe import Line, Measure
from kvprof.records.fold import result_of
from tests.records.load_stream import load_stream
from tests.views.synthetic_evaluation import evaluation_result

DATA = {
    "rows": [
        {"method": "fdc", "rate": 0.3, "seq": 4096, "accuracy": 0.9, "accuracy_interval": [0.8, 1]},
        {"method": "kq:allocation=budget", "rate": 0.3, "seq": 4096, "accuracy": 0.95},
        {"method": "kq", "rate": 0.5, "seq": 4096, "accuracy": None},
    ],
    "max_rates": {"0.99": 0.4},
    "seconds": [3, 1, 2],
}


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("rows[method=fdc].accuracy", [0.9]),
        ("rows[0].accuracy", [0.9]),
        ("rows[-1].method", ["kq"]),
        ("rows[method=kq:allocation=budget].accuracy", [0.95]),
        ("rows[rate=0.30].accuracy", [0.9, 0.95]),
        ("rows[rate=0.30, method=fdc].accuracy", [0.9]),
        ("rows[rate=0.30][method=fdc].accuracy", [0.9]),
        ('max_rates["0.99"]', [0.4]),
        ("max_rates[*]", [0.4]),
        ("seconds[*]", [3, 1, 2]),
        ("rows[method=tale].accuracy", []),
        ("rows.accuracy", []),
        ("rows[9]", []),
    ],
)
def test_a_path_leads_to_its_values(path: str, values: list[object]) -> None:
    assert [found.value for found in find(DATA, path)] == values


def test_the_interval_beside_a_value_comes_along() -> None:
    assert find(DATA, "rows[0].accuracy")[0].interval == (0.8, 1)


@pytest.mark.parametrize("path", ["", "rows[", "rows[a]", "rows[=1]", "rows]"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"path|neither"):
        parse_path(path)


KEPT = {"fdc": (0.9, [0.8, 1.0]), "kq": (0.95, [0.9, 1.0])}
RESULTS = {"a": evaluation_result(tuple(KEPT), tasks=()), "b": {"kind": "bench", "data": DATA}}
for row in RESULTS["a"]["data"]["evaluations"]:
    row["relative_accuracy"], row["relative_accuracy_interval"] = KEPT[row["method"]]


def measured(*measures: Measure) -> Measured:
    return list(measure_all(measures, RESULTS, {"c": "c: out of memory"}).values())[-1]


FDC = Measure("fdc", cell="a", figure="relative_accuracy", where={"method": "fdc"})
KQ = Measure("kq", cell="a", figure="relative_accuracy", where={"method": "kq"})


def test_figures_keep_their_interval_and_its_ends_make_those_of_a_quotient() -> None:
    assert measured(FDC) == Measured(0.9, (0.8, 1.0))
    ratio = measured(FDC, KQ, Measure("ratio", divide=("kq", "fdc")))
    assert ratio.value == pytest.approx(0.95 / 0.9)
    assert ratio.interval == pytest.approx((0.9, 1.25))
    gap = measured(FDC, KQ, Measure("gap", subtract=("kq", "fdc")))
    assert gap.interval == pytest.approx((-0.1, 0.2))
    saved = measured(FDC, Measure("saved", subtract=(1, "fdc")))
    assert (saved.value, *saved.interval) == pytest.approx((0.1, 0.0, 0.2))
    assert measured(FDC, Measure("half", divide=("fdc", 2))).interval == (0.4, 0.5)


def test_several_matches_need_to_be_told_how() -> None:
    alone = Measure("all", cell="a", figure="relative_accuracy")
    assert "add over" in str(measured(alone).missing)
    worst = measured(Measure("all", cell="a", figure="relative_accuracy", over="min"))
    assert worst == Measured(0.9, (0.8, 1.0))
    assert measured(Measure("s", cell="b", data="seconds[*]", over="median")).value == 2


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (
            Measure("m", cell="a", figure="relative_accuracy", where={"method": "zack"}),
            "it is there of method fdc; method kq",
        ),
        (Measure("m", cell="a", figure="speed"), "no figure speed; it has relative_accuracy"),
        (Measure("m", cell="b", data="rows[method=kq].accuracy"), "has no value"),
        (Measure("m", cell="b", data="rows[0].method"), "not a number"),
        (Measure("m", cell="b", data="seconds"), r"add \[\*\] and over"),
        (Measure("m", cell="b", data="lows[0]"), "its data has rows, max_rates"),
        (Measure("m", cell="c", figure="rate"), "c: out of memory"),
        (Measure("m", cell="d", figure="rate"), "no cell d was run"),
    ],
)
def test_why_there_is_no_number(measure: Measure, said: str) -> None:
    found = measured(measure)
    assert found.value is None
    assert re.search(said, str(found.missing))


@pytest.mark.parametrize(
    ("check", "limit", "tolerance", "value", "holds"),
    [
        ("at_least", (1.0,), None, 1.0, True),
        ("at_least", (1.0,), None, 0.99, False),
        ("at_least", (1.0,), 0.1, 0.9, True),
        ("at_least", (1.0,), 0.1, 0.89, False),
        ("at_most", (1.0,), 0.1, 1.1, True),
        ("at_most", (1.0,), 0.1, 1.11, False),
        ("above", (1.0,), None, 1.0, False),
        ("below", (1.0,), None, 1.0, False),
        ("about", (1.0,), 0.1, 1.05, True),
        ("about", (1.0,), 0.1, 1.2, False),
        ("about", (1.0,), 0.1, 0.85, False),
        ("between", (1.0, 2.0), None, 2.0, True),
        ("between", (1.0, 2.0), 0.5, 2.5, True),
        ("between", (1.0, 2.0), None, 2.1, False),
    ],
)
def test_limits_and_tolerances(
    check: str, limit: tuple[float, ...], tolerance: float | None, value: float, holds: bool
) -> None:
    line = Line("m", check, limit, tolerance=tolerance)
    assert judge_line(line, Measured(value)).holds is holds


def test_a_share_is_of_the_limit() -> None:
    line = Line("m", "about", (200.0,), tolerance_share=0.1)
    assert judge_line(line, Measured(219.0)).holds
    assert not judge_line(line, Measured(221.0)).holds


@pytest.mark.parametrize(
    ("line", "value", "interval", "holds"),
    [
        (Line("m", "at_least", (1.0,)), 1.1, (0.9, 1.3), None),
        (Line("m", "at_least", (1.0,)), 0.99, (0.9, 1.3), None),
        (Line("m", "at_least", (1.0,)), 1.1, (1.05, 1.3), True),
        (Line("m", "at_least", (1.0,), tolerance=0.2), 0.9, (0.85, 1.3), True),
        (Line("m", "above", (0.0,)), 0.01, (-0.01, 0.03), None),
        # A tie: no member of the sample differs, so that nothing can be said of an order.
        (Line("m", "above", (0.0,)), 0.0, (0.0, 0.0), None),
        (Line("m", "below", (0.0,)), 0.02, (0.01, 0.03), False),
        (Line("m", "about", (1.0,), tolerance=0.1), 1.0, (0.8, 1.2), None),
        (Line("m", "between", (1.0, 2.0)), 2.5, (0.5, 3.0), None),
        (Line("m", "between", (1.0, 2.0)), 1.5, (1.1, 1.9), True),
    ],
)
def test_a_limit_inside_the_interval_leaves_a_line_open(
    line: Line, value: float, interval: tuple[float, float], holds: bool | None
) -> None:
    judged = judge_line(line, Measured(value, interval))
    assert (judged.holds, judged.uncertain) == (holds, holds is None)
    why = open_because(judged)
    assert (why is None) == (holds is not None)
    assert why is None or f"inside its interval, {interval[0]:.4g} to {interval[1]:.4g}" in why


def test_a_doubtful_number_decides_nothing_either_way() -> None:
    line = Line("m", "above", (1.0,))
    for value in (0.5, 2.0):
        judged = judge_line(line, Measured(value, doubt="half of it has no part"))
        assert (judged.holds, judged.uncertain) == (None, False)
        assert open_because(judged) == "half of it has no part"


# Of two lines for the number and one for the direction: True holds, False fails, None is open.
@pytest.mark.parametrize(
    ("strong", "other", "weak", "verdict"),
    [
        (True, None, True, TREND),
        (None, None, True, TREND),
        (False, None, True, TREND),
        (True, True, None, NOT_TESTABLE),
        (False, True, None, NOT_TESTABLE),
        (None, True, False, NOT_REPRODUCED),
    ],
)
def test_open_lines_count_where_the_verdict_hangs_on_them(
    strong: bool | None, other: bool | None, weak: bool | None, verdict: str
) -> None:
    of = {True: Measured(2.0), False: Measured(0.5), None: Measured(1.1, (0.9, 1.3))}
    lines = [
        judge_line(Line("m", "above", (1.0,), direction=place == 2), of[state])
        for place, state in enumerate((strong, other, weak))
    ]
    assert verdict_of(lines) == verdict
    # Without a weaker claim one that fails is enough, and one that is open holds the rest back.
    alone = verdict_of(lines[:2])
    assert alone == (
        NOT_REPRODUCED
        if strong is False
        else NOT_TESTABLE
        if None in (strong, other)
        else REPRODUCED
    )


@pytest.mark.parametrize(
    ("strong", "weak", "verdict"),
    [
        (2.0, 2.0, REPRODUCED),
        (0.5, 2.0, TREND),
        (0.5, 0.5, NOT_REPRODUCED),
        (2.0, 0.5, NOT_REPRODUCED),
        (None, 2.0, NOT_TESTABLE),
        (None, 0.5, NOT_REPRODUCED),
    ],
)
def test_verdicts(strong: float | None, weak: float, verdict: str) -> None:
    lines = [Line("a", "above", (1.0,)), Line("b", "above", (1.0,), direction=True)]
    values = [Measured(strong, missing=None if strong else "why"), Measured(weak)]
    assert verdict_of(list(map(judge_line, lines, values))) == verdict


def test_weaker_claims_alone_show_no_more_than_a_direction() -> None:
    line = Line("a", "above", (1.0,), direction=True)
    assert verdict_of([judge_line(line, Measured(2.0))]) == TREND
    assert verdict_of([judge_line(line, Measured(0.5))]) == NOT_REPRODUCED


def test_without_a_weaker_claim_nothing_is_reproduced_in_direction() -> None:
    lines = [Line("a", "above", (1.0,)), Line("b", "above", (1.0,))]
    assert verdict_of(
        [judge_line(lines[0], Measured(2.0)), judge_line(lines[1], Measured(0.5))]
    ) == (NOT_REPRODUCED)
    assert verdict_of([]) == NOT_TESTABLE


@pytest.mark.parametrize(("first", "verdict"), [(0.5, NOT_REPRODUCED), (2.0, NOT_TESTABLE)])
def test_what_was_not_measured_saves_no_claim_that_fails(first: float, verdict: str) -> None:
    line = Line("a", "above", (1.0,))
    values = Measured(first), Measured(None, missing="why")
    assert verdict_of([judge_line(line, value) for value in values]) == verdict


def test_nothing_is_divided_by_0() -> None:
    zero = Measure("none", subtract=("fdc", "fdc"))
    found = measured(FDC, zero, Measure("ratio", divide=("fdc", "none")))
    assert found.missing == "none is 0, and fdc cannot be divided by it"


def test_what_is_larger_than_any_number_is_not_measured() -> None:
    found = measured(FDC, Measure("ratio", divide=("fdc", 1e-320)))
    assert (found.value, found.interval) == (None, None)
    assert found.missing == "what fdc and 1e-320 make is larger than any number"
    # An end of the interval alone takes no more than that.
    huge = Measure("huge", divide=("fdc", 5.5e-309))
    assert measured(FDC, huge).interval is None
    assert measured(FDC, huge).value == pytest.approx(0.9 / 5.5e-309)


def test_times_over_the_baselines_bring_the_interval_of_the_same_requests():
    result = result_of(load_stream())
    path = "methods[method=fdc].pays.ratios[rate=6].ttft_ratio"
    (own,) = (one for one in result["data"]["methods"] if one["method"] == "fdc")
    (row,) = (one for one in own["pays"]["ratios"] if one["rate"] == 6)
    steps = [Measure("over", cell="load", data=path), Measure("saved", subtract=(1, "over"))]
    saved = measure_all(steps, {"load": result}, {})["saved"]
    low, high = row["ttft_ratio_interval"]
    assert (saved.value, *saved.interval) == (1 - row["ttft_ratio"], 1 - high, 1 - low)


def test_a_largest_rate_that_nothing_bounds_decides_nothing():
    one = Measure("more", cell="load", data="methods[method=fdc].ratio")

    def result(*rates):
        many = load_stream(rates=rates, requests=4000, lengths="in=2k,out=50", objective={})
        return result_of(many)

    def measured(result, **changes):
        return measure_all([one], {"load": {**result, **changes}}, {})["more"]

    bounded = result(8.0, 20.0, 48.0)
    found = measured(bounded)
    assert (found.value, found.interval, found.doubt) == (2.5, (1.0, 6.0), None)
    found = measured(result(8.0, 20.0))
    assert (found.interval, found.value) == (None, 2.5)
    assert "above" in found.doubt
    assert judge_line(Line("more", "above", (1.0,)), found).holds is None
    assert "interrupted" in (measured(bounded, complete=False).doubt or "")
