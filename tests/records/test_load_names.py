"""What methods and rates of a load are called."""

import pytest

from kvprof.records.load_names import baseline_of, load_methods, tps_of


def test_a_label_names_the_gpus_where_there_are_several_numbers():
    several = load_methods(["full", "kq:grid=32"], [2, 4])
    assert [one.label for one in several] == [
        "full tp=2", "kq:grid=32 tp=2", "full tp=4", "kq:grid=32 tp=4",
    ]  # fmt: skip
    alone = load_methods(["full", "my tp=9.plan"], [4])
    assert [one.label for one in alone] == ["full", "my tp=9.plan"]


@pytest.mark.parametrize(
    ("label", "baseline", "held"),
    [
        ("fdc tp=4", "full tp=2", "full tp=4"),
        ("full tp=2", "full tp=2", "full tp=2"),
        ("fdc", "full", "full"),
        # Files of plans may be called anything.
        ("my tp=9.plan", "full", "full"),
        ("full", "my tp=9.plan", "my tp=9.plan"),
    ],
)
def test_who_is_held_against_whom(label, baseline, held):
    assert baseline_of(label, baseline) == held


def test_inputs_tell_one_number_of_gpus_or_several():
    assert [tps_of({}), tps_of({"tp": 4}), tps_of({"tp": [2, 4]})] == [[1], [4], [2, 4]]
