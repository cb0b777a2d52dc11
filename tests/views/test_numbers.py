import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.views.numbers import MISSING, axis_number, count, interval, number, percent, span


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.040123, "0.0401"), (61.26, "61.3"), (9.996, "10.0"), (999.6, "1,000"),
        (12345.6, "12,346"), (-0.5, "-0.500"), (3.1e-7, "3.1e-07"), (4e-9, "4e-09"),
        (math.inf, "∞"),
        (math.nan, MISSING),
        (None, MISSING),
    ],
)  # fmt: skip
def test_number(value, text):
    assert number(value) == text


@given(st.floats(-1e12, 1e12, allow_nan=False))
def test_number_is_the_value_to_three_digits(value):
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.01e-3, abs=1e-300)


def test_percent_and_span_and_interval():
    assert percent(0.0534) == "5.3 %"
    assert percent(None) == MISSING
    assert span([12, 96, 40]) == "12–96"
    assert span([0.5, 0.25]) == "0.250–0.500"
    assert span([4, 4]) == "4"
    assert span([]) == MISSING
    assert interval(1.487, (1.41, 1.584)) == "1.49 [1.41, 1.58]"
    assert interval(1.487, None) == "1.49"
    assert count(8192) == "8k"
    assert axis_number(0.25) == "0.25"
