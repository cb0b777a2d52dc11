"""Options of methods as they are written on a command line: read as what they are, or refused."""

from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.methods.option_types import Among, AtLeast, option_types, read_option
from kvprof.methods.registry import METHODS, typed_options


@pytest.mark.parametrize(
    ("method", "written", "value"),
    [
        ("palu", "hadamard=no", False), ("palu", "hadamard=True", True), ("palu", "heads=0", 0),
        ("tale", "lazy=off", False), ("tale", "recent=1e-1", 0.1), ("tale", "recent=0", 0.0),
        ("tale+kivi", "bits=2, 4", (2, 4)), ("kq+kivi", "bits=4", 4), ("kq+h2o", "keep=0.5", 0.5),
        ("fdc-4bit", "keys=svd-k", "svd-k"), ("kq", "allocation=tail", "tail"),
        ("kq", "values=none", "none"), ("h2o", "sink=0", 0),
    ],
)  # fmt: skip
def test_what_is_written_is_what_is_meant(method: str, written: str, value: Any) -> None:
    name, _, text = written.partition("=")
    assert typed_options(method, {name: text}) == {name: value}
    # A value of Python is read the same.
    assert typed_options(method, {name: value}) == {name: value}


@pytest.mark.parametrize(
    ("method", "written", "accepted"),
    [
        ("tale", "lazy=maybe", "true or false"), ("palu", "hadamard=1", "true or false"),
        ("palu", "hadamard=", "true or false"), ("palu", "heads=", "a whole number"),
        ("palu", "heads=-1", "a whole number from 0 on"), ("palu", "heads=2.5", "a whole number"),
        ("kq", "grid=abc", "a whole number"), ("kq", "grid=0", "a whole number from 1 on"),
        ("kq", "minimum=1e30", "a whole number"), ("tale", "sink=99999999999", "up to 2,147"),
        ("tale", "recent=nan", "a number"), ("tale", "recent=half", "a number"),
        ("tale+kivi", "bits=0", "2 values"),
        ("tale+kivi", "bits=2,5", "each one of 8, 4, 3, 2"),
        ("kq+kivi", "bits=0", "one of 8, 4, 3, 2"), ("kq+h2o", "keep=", "a number"),
        ("kq", "keys=nope", "one of svd-qk, "), ("kq", "allocation=", "one of removal, "),
        ("kq", "allocation=" + "x" * 5000, "one of removal, "),
    ],
)  # fmt: skip
def test_a_wrong_word_is_refused_with_what_is_accepted(
    method: str, written: str, accepted: str
) -> None:
    name, _, text = written.partition("=")
    with pytest.raises(UsageError) as refused:
        typed_options(method, {name: text})
    said = str(refused.value)
    assert f"{method}: option {name} is " in said.replace("kq: ", f"{method}: ")
    assert accepted in said
    assert len(said) < 300


@given(st.sampled_from(sorted(METHODS)), st.text(max_size=12), st.data())
def test_any_text_is_read_or_refused(method: str, text: str, data: st.DataObject) -> None:
    types = option_types(METHODS[method])
    if not types:
        return
    name = data.draw(st.sampled_from(sorted(types)))
    try:
        (value,) = typed_options(method, {name: text}).values()
    except UsageError:
        return
    # What is accepted is what is declared: reading it again changes nothing.
    assert read_option(method, name, types[name], value) == value
    assert not isinstance(value, str) or value == text.strip()


def test_a_method_of_somebody_elses_is_read_by_its_annotations_or_defaults() -> None:
    def method(
        inputs: object,
        *,
        flag: bool = True,
        share: "Nowhere" = 0.5,  # type: ignore[name-defined]  # noqa: F821
        name=None,
        mode: Annotated[str, Among("a", "b")] = "a",
        sizes=(1, 2),
        most: int | None = None,
        low: Annotated[float, AtLeast(1.5)] = 2.0,
    ) -> None: ...

    types = option_types(method)

    def read(option: str, text: str) -> Any:
        return read_option("mine", option, types[option], text)

    # One annotation that cannot be read makes all of them text; defaults say the rest.
    assert read("flag", "no") is False
    assert read("share", "0.25") == 0.25
    assert read("name", "x") == "x"
    assert read("sizes", "3,4,5") == (3, 4, 5)
    del method.__annotations__["share"]
    types = option_types(method)
    assert read("most", "none") is None
    assert read("most", "3") == 3
    for option, text in (("most", "x"), ("mode", "c"), ("low", "1"), ("flag", "2")):
        with pytest.raises(UsageError, match=f"mine: option {option} is "):
            read(option, text)
