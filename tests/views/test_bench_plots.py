"""The plots and the figure of a bench, whatever is missing; its CSV."""

import csv
import io
import math
from typing import Any

import pytest

from kvprof.records.schema import validate_result
from kvprof.views.bench import context_curves, figure, groups, roofline_points, roofs, to_csv
from kvprof.views.figure import figure_bytes
from tests.views.synthetic_bench import (
    ARITHMETIC,
    FULL_BYTES,
    LIMIT,
    METHODS,
    SWEEP,
    bench_result,
    flat,
    text_of,
)

FIGURES = (
    "seconds",
    "seconds_interval",
    "bytes_moved",
    "cache_bytes",
    "tb_per_s",
    "bandwidth_share",
    "flop_per_s",
    "speedup",
    "error",
    "makespan_over_mean",
    "ranks",
    "schedule",
    "baseline",
    "rate",
)


def emptied(result: dict[str, Any], *, keep: int | None = None) -> dict[str, Any]:
    """Return the result with every figure of its rows (but the first `keep`) not measured."""
    for row in result["data"]["rows"][keep or 0 :]:
        row |= dict.fromkeys(FIGURES) | {"seconds": []}
    return result


# --- plots ------------------------------------------------------------------------------------


def test_time_is_drawn_against_context_only_where_there_are_several() -> None:
    assert "time by context" not in text_of(bench_result())
    text = text_of(bench_result(**SWEEP))
    assert text.count("time by context") == 4


def test_a_curve_is_in_milliseconds_by_growing_context() -> None:
    result = bench_result(**SWEEP, phases=("decode",), batches=(8,))
    first, *methods = context_curves(groups(result))
    assert first.label == "fastest uncompressed"
    assert [one.label for one in methods] == list(METHODS)
    for one in methods:
        assert list(one.x) == [4096, 32_768, 102_400]
        assert one.y == sorted(value for value in one.y if value is not None)
    fdc = next(one for one in methods if one.label == "fdc")
    row = next(r for r in result["data"]["rows"] if r["method"] == "fdc" and r["seq"] == 102_400)
    assert fdc.y[-1] == pytest.approx(sorted(row["seconds"])[2] * 1e3)
    assert fdc.low is not None
    assert fdc.low[-1] == pytest.approx(row["seconds_interval"][0] * 1e3)


def test_the_roofline_has_intensity_and_rate_and_no_line_between_points() -> None:
    result = bench_result(phases=("decode",), batches=(8,), methods=("full",))
    (full,) = roofline_points(result)
    # 4 · G · d operations for each token's 2 · d values of two bytes: G FLOP per byte.
    assert list(full.x) == pytest.approx([4.0])
    row = result["data"]["rows"][0]
    assert full.y[0] == pytest.approx(row["flop_per_s"] / 1e12)
    memory, arithmetic = roofs([full], result["data"])
    assert memory.y[0] == pytest.approx(memory.x[0] * LIMIT)
    assert memory.x[0] < 4.0 < memory.x[-1]
    # They meet where both give the same, and only memory limits before.
    assert memory.x[-1] == arithmetic.x[0] == pytest.approx(ARITHMETIC / 1e12 / LIMIT)
    assert memory.y[-1] == pytest.approx(arithmetic.y[0])
    assert arithmetic.y[0] == arithmetic.y[-1] == pytest.approx(ARITHMETIC / 1e12)
    del result["data"]["compute"]  # of an older record
    (alone,) = roofs([full], result["data"])
    assert alone.y[-1] == pytest.approx(alone.x[-1] * LIMIT)
    for one in roofline_points(bench_result()):
        drawn = [value is not None for value in one.y]
        assert drawn == [place % 2 == 0 for place in range(len(drawn))]
        assert sum(drawn) == 4


def test_the_roofline_takes_the_longest_context() -> None:
    longest = roofline_points(bench_result())
    swept = roofline_points(bench_result(**SWEEP))
    assert [one.y for one in swept] == [one.y for one in longest]


def test_without_a_bandwidth_there_is_no_slope() -> None:
    result = bench_result()
    result["data"]["bandwidth"]["tb_per_s"] = None
    result["data"]["compute"]["flop_per_s"] = None
    validate_result(result)
    text = text_of(result)
    assert "● full" in text
    assert "Share: of" not in text


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize(
    "result",
    [
        bench_result(methods=("fdc",), batches=(1,), phases=("decode",)),
        emptied(bench_result()),
        emptied(bench_result(**SWEEP), keep=3),
    ],
    ids=["one row", "nothing measured", "three rows measured"],
)
def test_missing_figures_leave_gaps(result: dict[str, Any], width: int) -> None:
    validate_result(result)
    text = text_of(result, width)
    assert max(map(len, text.splitlines())) <= width
    assert "nan" not in text
    assert "None" not in text
    assert len(list(csv.DictReader(io.StringIO(to_csv(result))))) == sum(
        len(result["data"][name]) for name in ("rows", "baselines")
    )


def test_nan_and_infinity_are_figures_that_are_missing() -> None:
    result = bench_result(**SWEEP)
    for index, row in enumerate(result["data"]["rows"]):
        bad = math.nan if index % 2 else math.inf
        row |= {
            "tb_per_s": bad,
            "speedup": bad,
            "error": bad,
            "seconds": [bad, 1e-4, bad],
            "seconds_interval": [bad, 1e-4],
            "bandwidth_share": bad,
        }
    text = text_of(result, 80)
    assert "nan" not in text
    assert "∞" not in text
    assert "0.1000" in text


def test_nothing_measured_is_still_a_report() -> None:
    result = bench_result(complete=False)
    result["data"] |= {"rows": [], "baselines": [], "ranks": None}
    validate_result(result)
    text = flat(result, 80)
    assert "No speed-up was measured." in text
    assert to_csv(result).count("\n") == 1


# --- files ------------------------------------------------------------------------------------


def test_csv_has_a_row_per_measurement_and_per_baseline() -> None:
    result = bench_result(**SWEEP)
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    methods = [row for row in rows if row["kind"] == "method"]
    others = [row for row in rows if row["kind"] == "baseline"]
    assert len(methods) == 2 * 2 * 3 * len(METHODS)
    assert len(others) == 2 * 2 * 3 * 4
    first = result["data"]["rows"][0]
    assert float(methods[0]["seconds"]) == sorted(first["seconds"])[2]
    assert float(methods[0]["seconds_low"]) == first["seconds_interval"][0]
    assert methods[0]["samples"] == "5"
    assert float(methods[0]["bytes_moved"]) == FULL_BYTES * 102_400
    fdc = next(row for row in methods if row["method"] == "fdc")
    assert (fdc["keys_width_mean"], fdc["values_width_least"]) == ("70.0", "32")
    absent = next(row for row in others if row["method"] == "flashinfer")
    assert absent["reason"] == "FlashInfer is not installed"
    assert absent["seconds"] == ""


@pytest.mark.parametrize("settings", [{}, SWEEP], ids=["plain", "sweep"])
def test_the_figure_has_a_panel_per_sweep_and_the_roofline(settings: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    drawn = figure(bench_result(**settings))
    assert len(drawn.axes) == (5 if settings is SWEEP else 1)
    roofline = drawn.axes[-1]
    assert "intensity" in roofline.get_xlabel()
    assert roofline.get_yscale() == "log"
    if settings is SWEEP:
        assert drawn.axes[0].get_title() == "decode, batch 1"
        assert drawn.axes[0].get_xscale() == "log"


def test_the_figure_is_reproducible() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    result = bench_result(**SWEEP, phases=("decode",), batches=(8,))
    assert figure_bytes(figure(result), "svg") == figure_bytes(figure(result), "svg")


def test_the_figure_of_nothing_is_still_a_figure() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    for result in (emptied(bench_result()), emptied(bench_result(**SWEEP), keep=1)):
        assert figure_bytes(figure(result), "png").startswith(b"\x89PNG")
    nothing = bench_result()
    nothing["data"] |= {"rows": [], "baselines": []}
    assert figure_bytes(figure(nothing), "svg")
