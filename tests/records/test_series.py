import pytest

from kvprof.records.cases import Series


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 1000])
def test_a_series_holds_no_more_than_it_may_and_spans_everything(count):
    series: Series[int] = Series(8)
    for value in range(count):
        series.add(value)
    kept = list(series)
    assert len(kept) <= 8
    assert series.count == count
    assert series.last == (count - 1 if count else None)
    assert kept == [index * series.stride for index in range(len(kept))]
    if count:
        assert count - kept[-1] <= series.stride


def test_nothing_is_left_out_of_a_short_series():
    series: Series[int] = Series(100)
    for value in range(99):
        series.add(value)
    assert list(series) == list(range(99))
