from pathlib import Path

import pytest

from kvprof.errors import UsageError
from kvprof.reproduction.recipe import parse_yaml, read_yaml


def test_scalars_are_read_as_yaml_1_2_has_them() -> None:
    found = parse_yaml("a: [1e-3, no, 12:30, 0.30, 7, true, ~, '1', 2024-01-01]", "f").data["a"]
    assert found == [1e-3, "no", "12:30", 0.3, 7, True, None, "1", "2024-01-01"]
    assert [type(one) for one in found[3:6]] == [float, int, bool]


def test_every_place_has_its_line_and_every_scalar_its_characters() -> None:
    document = parse_yaml("a: 1\nb:\n  - c: 0.30\n    d:\n      >-\n      long\n      text\n", "f")
    assert document.line(("b", 0, "c")) == 3
    assert document.line(("b", 0, "d")) == 4
    assert document.line(("b", 0, "lacking")) == 3
    assert document.texts[("b", 0, "c")] == "0.30"
    assert document.data["b"][0]["d"] == "long text"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", r"f:2: the key 'a' is written twice"),
        ("a: 1\nb: [1, 2\n", r"f:\d: no YAML"),
        ("a: 1\nb: .nan\n", r"f:2: \.nan is not finite"),
        ("a: 1\nb: 1e999\n", r"f:2: 1e999 is too large"),
        ("a: &x\n  b: *x\n", r"f:1: an alias refers to what it stands in"),
        ("{a: 1}: 2\n", r"f:1: a key must be a word"),
        ("", r"f:1: the file is empty"),
    ],
)
def test_what_is_wrong_names_the_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_yaml(text, "f")


def test_files_that_are_no_text_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        read_yaml(tmp_path / "nowhere.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(UsageError, match=r"bad\.yaml:2: not UTF-8"):
        read_yaml(bad)
    with pytest.raises(UsageError, match="is a folder"):
        read_yaml(tmp_path)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{own}: &{own} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, own in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "nested too deeply"),
        ("- " * 200_000 + "x", "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        ("? " * 200_000, "nested too deeply"),
        (_BOMB, "more entries than any recipe has"),
        ("a: " + "9" * 5000, "5,000 digits"),
    ],
    ids=["flow", "block", "mappings", "keys", "bomb", "digits"],
)
def test_files_that_would_take_the_reader_down(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_yaml(text, "r.yaml")
