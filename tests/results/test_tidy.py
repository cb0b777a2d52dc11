import pytest

from kvprof.results.base import tidy_csv


def test_tidy_csv_leaves_missing_empty_and_refuses_unknown_columns():
    assert tidy_csv(("a", "b"), [{"a": 0.1}, {"b": None}]) == "a,b\n0.1,\n,\n"
    with pytest.raises(ValueError, match="c"):
        tidy_csv(("a",), [{"c": 1}])
