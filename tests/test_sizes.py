import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.sizes import (
    format_bytes,
    format_count,
    parse_count,
    parse_counts,
    parse_share,
    second_reading,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("8k", 8192),
        ("100k", 102_400),
        ("8K", 8192),
        ("4M", 4 * 1024**2),
        ("1.5k", 1536),
        ("0.5M", 512 * 1024),
        ("1g", 1024**3),
        ("1_000", 1000),
        ("12,800", 12_800),
        ("1,048,576", 1024**2),
        ("1,024k", 1024**2),
        (" 7 ", 7),
    ],
)
def test_counts_are_read_as_people_write_them(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a count"), ("k", "not a count"), ("8kb", "not a count"), ("-1", "not a count"),
        ("1e3", "not a count"), ("nan", "not a count"), ("8,16", "not a count"),
        ("8,1920", "not a count"), ("8192,384", "not a count"), ("8,", "not a count"),
        (",192", "not a count"), ("0,192", "not a count"), ("8.5,000k", "not a count"),
        ("0.3", "not a whole number"),
        ("1.0001k", "not a whole number"),
        ("0", "below 1"),
    ],
)  # fmt: skip
def test_what_is_no_count_is_refused_with_option_and_value(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_count(text, what="--tokens")
    assert str(caught.value).startswith(f"--tokens: {text!r}")
    assert "\n" not in str(caught.value)


def test_the_minimum_may_be_zero_or_more() -> None:
    assert parse_count("0", minimum=0) == 0
    with pytest.raises(UsageError, match="below 16"):
        parse_count("8", minimum=16)


def test_lists_are_ascending_and_without_repeats() -> None:
    assert parse_counts("4k,1k, 2k,1024") == [1024, 2048, 4096]
    with pytest.raises(UsageError, match="'2x'"):
        parse_counts("1k,2x", what="--tokens")
    for empty in ("", ",", " , "):
        with pytest.raises(UsageError):
            parse_counts(empty)


@pytest.mark.parametrize("text", ["1,024,2,048", "1,024", "64,000", "1, 024k", "1,000,000"])
def test_a_thousands_separator_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"not thousands .*; write .*1024,2048") as caught:
        parse_counts(text, what="--tokens")
    assert str(caught.value).startswith(f"--tokens: {text!r}")
    assert "\n" not in str(caught.value)


def test_three_digits_without_a_leading_zero_are_entries_of_a_list() -> None:
    assert parse_counts("64,128,256") == [64, 128, 256]
    assert parse_counts("0,1", minimum=0) == [0, 1]


@pytest.mark.parametrize("one", [1536, 8192, 16384, 102400, 262144, 1500, 3750])
def test_a_list_that_may_be_one_number_is_told_from_others(one: int) -> None:
    assert second_reading(f"{one:,}") == one
    assert second_reading(f"{one:,}".replace(",", ", ")) is None


@pytest.mark.parametrize(
    "text", ["256,512", "64,128,256", "1,128", "96,112", "1k,2k", "8192", "1024,2048", "8,16"]
)
def test_a_list_that_looks_like_one_is_left_alone(text: str) -> None:
    assert second_reading(text) is None


@given(st.integers(1, 2**31 - 1))
def test_what_is_formatted_is_read_back(value: int) -> None:
    assert parse_count(format_count(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (39.4 * 1024**2, "39.4 MiB"),
        (80 * 1024**3, "80.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_have_a_binary_prefix(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize("text", ["0.3", ".3", "30%", "30 %", " 3e-1 ", 0.3])
def test_a_share_is_read_as_people_write_it(text: str | float) -> None:
    assert parse_share(text, what="--rate") == pytest.approx(0.3)


@pytest.mark.parametrize("text", ["", "%", "a third", "nan", "inf%", "0,3", "3" * 5000 + "x"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rate") as no:
        parse_share(text, what="--rate")
    assert len(str(no.value)) < 120
