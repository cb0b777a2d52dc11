import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.views.plot import linear_ticks, log2_ticks, log10_ticks


def test_counts_are_written_as_people_write_them():
    axis = log2_ticks([1024 * 2**i for i in range(6)], at_most=8)
    assert axis.ticks == tuple((10.0 + i, f"{2**i}k") for i in range(6))


def test_log_ticks_are_powers_of_ten_over_many_decades():
    axis = log10_ticks([3e-8, 1.0], at_most=5)
    assert [label for _, label in axis.ticks] == ["1e-06", "0.0001", "0.01", "1"]
    assert log10_ticks([0.01, 1.0], at_most=7).ticks[0] == (-2.0, "0.01")


def test_narrow_and_single_counts():
    assert log2_ticks([1500, 2500]).ticks[0][1] == "1,600"
    assert log2_ticks([8192]).ticks == ((13.0, "8k"),)


@pytest.mark.parametrize("ticks", [linear_ticks, log2_ticks, log10_ticks])
@given(values=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5), at_most=st.integers(2, 9))
def test_ticks_lie_where_their_labels_say(ticks, values, at_most):
    axis = ticks(values, at_most)
    positions = [position for position, _ in axis.ticks]
    assert positions == sorted(positions)
    for value in values:
        assert axis.low - 1e-9 <= axis.position(value) <= axis.high + 1e-9
    for position, label in axis.ticks:
        assert axis.low - 1e-6 * abs(axis.low) - 1e-9 <= position
        assert position <= axis.high + 1e-6 * abs(axis.high) + 1e-9
        if label[-1].isdigit():
            shown = float(label.replace(",", ""))
            extent = axis.high - axis.low
            # A label has six digits at most.
            reading = axis.position(shown) if shown or ticks is linear_ticks else -math.inf
            assert reading == pytest.approx(
                position, abs=max(1e-3 * extent, 1e-5 * max(1, abs(position)))
            )
