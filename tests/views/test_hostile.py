"""Whatever stands in a record, no view of it moves a cursor, runs a formula or falls over."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprof.console import PrintableConsole
from kvprof.errors import KvprofError
from kvprof.printable import UNPRINTABLE, printable
from kvprof.records.compare import compare
from kvprof.records.event_lines import event_from
from kvprof.records.events import event_line
from kvprof.records.files import json_text, parse_json, read_result, render_result, what_was_read
from kvprof.records.fold import result_of
from kvprof.records.journal import read_events
from kvprof.records.perfetto import trace_of
from kvprof.tui.state import RunState
from kvprof.views.export import to_html, to_markdown
from kvprof.views.figure import figure_bytes
from kvprof.views.kinds import csv_of, figure_of, report
from kvprof.views.page import render_text, tidy_csv
from tests.records.hostile import HOSTILE, mutations, texts_filled
from tests.records.streams import stream
from tests.views.test_kinds import RESULTS

# What a schema has a list of, and nothing else may stand in.
_LISTED = frozenset(
    ("schema", "kind", "created", "phase", "protocol", "mode", "check", "profile", "verdict")
) | {"scoring", "side", "more", "limited_by", "pays", "ended"}
# Every figure is drawn by the same functions; these have all of them but the heat maps.
_DRAWN = ("bench", "eval", "frontier", "recipe")
_KINDS = sorted(set(RESULTS) - {"benchmark"})


def plain(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(RESULTS[kind]))
    return found


def hostile(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = texts_filled(plain(kind), keep=_LISTED)
    return found


def unprintable(text: str) -> list[str]:
    return UNPRINTABLE.findall(text)


def test_joiners_and_marks_of_scripts_stay() -> None:
    kept = "á e\u0301 क्\u200dष 👩\u200d💻 العربية\tx\n"
    assert printable(kept) == kept
    assert printable("a\x1b[31mb\x9b0m\r\x00c\ud800") == "a[31mb0mc?"


def test_what_python_calls_printable_holds_nothing_that_is_obeyed() -> None:
    obeyed = UNPRINTABLE.findall("".join(map(chr, range(0x110000))))
    assert len(obeyed) > 2000
    assert [letter for letter in obeyed if printable(letter) not in ("", "?")] == []


def test_a_terminal_gets_the_codes_of_this_program_alone() -> None:
    drawn = io.StringIO()
    console = PrintableConsole(file=drawn, force_terminal=True, width=100)
    console.print(HOSTILE, style="red")
    console.out(HOSTILE)
    shown = re.sub("\x1b\\[[0-9;]*m", "", drawn.getvalue())
    assert not unprintable(shown)
    assert "[red][link=x]y[/]" in shown  # no markup
    piped = io.StringIO()  # behind which a terminal may be
    PrintableConsole(file=piped).out("a\tb\n" + HOSTILE, end="")
    assert piped.getvalue() == "a\tb\n" + printable(HOSTILE)


@pytest.mark.parametrize("kind", _KINDS)
def test_no_text_is_obeyed(kind: str) -> None:
    pytest.importorskip("matplotlib")
    result = hostile(kind)
    for width in (60, 120):
        shown = render_text(report(result, width, colour=False), width)
        assert "[red]" in shown
        assert not unprintable(shown)
    if kind in _DRAWN:
        page = to_html(result)
        assert not unprintable(page)
        assert "<script" not in page
        for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            ElementTree.fromstring(svg)
    text = re.sub(r"^(`{3,})text\n.*?^\1$", "", to_markdown(result), flags=re.M | re.S)
    assert not unprintable(text)
    assert not re.search(r"(?<!\\)[<`]", text)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    if kind in _DRAWN and (draw := figure_of(result)) is not None:
        ElementTree.fromstring(figure_bytes(draw(), "svg"))
    if (make := csv_of(result)) is not None:
        assert not unprintable(make())
        for cell in [cell for row in csv.reader(io.StringIO(make())) for cell in row]:
            assert not cell.startswith(("=", "+", "@", "-1+", "\t"))
    written = render_result(result)
    assert not unprintable(written)
    assert json.loads(written) == result


def test_a_cell_is_a_figure_or_a_text_and_never_a_formula() -> None:
    names = ["=1+1", "+x", "-x", "@x", "\tx", " =1", "＝1", "-0.5", "-1e-3", "x", "x=1"]
    rows = [{"name": name, "figure": -0.5} for name in names]
    read = list(csv.reader(io.StringIO(tidy_csv(["name", "figure"], rows))))[1:]
    assert [row[0].startswith("'") for row in read] == [True] * 7 + [False] * 4
    assert {row[1] for row in read} == {"-0.5"}


def test_events_and_what_is_made_of_them_are_printable() -> None:
    lines = [
        texts_filled(
            event_line(event),
            keep=frozenset(("event", "phase", "format", "created", "mode", "kind")),
        )
        for event in stream(("full", "fdc"), steps=3)
    ]
    events = [event_from(line) for line in lines]
    assert not unprintable(json.dumps(trace_of(events), allow_nan=False))
    assert not unprintable(render_text(report(result_of(events), 80, colour=False), 80))


_FUZZ = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_FUZZED_KINDS = ("bench", "eval", "frontier", "recipe", "jct", "load", "sensitivity", "generate")
_FUZZED = {kind: plain(kind) for kind in _FUZZED_KINDS}


@_FUZZ
@given(data=st.data(), kind=st.sampled_from(sorted(_FUZZED)))
def test_a_record_is_shown_or_refused_in_one_line(
    tmp_path: Path, data: st.DataObject, kind: str
) -> None:
    whole = _FUZZED[kind]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data.draw(mutations(whole))))
    try:
        result = read_result(path)
        with what_was_read(path):
            assert not unprintable(render_text(report(result, 80, colour=False), 80))
            if (make := csv_of(result)) is not None:
                assert not unprintable(make())
            assert not unprintable(to_markdown(result))
            compare([whole, result], ["a", "b"], fail_over=0.05)
    except KvprofError as problem:
        told = str(problem)
    else:
        told = str(path)
    # A record in which nothing is left that the other has is refused as a pair.
    assert str(path) in told or "kinds" in told or "in common" in told
    assert len(told) < 500


_LINES = [event_line(event) for event in stream(("full", "tale"), layers=2, steps=2)]


@_FUZZ
@given(data=st.data(), place=st.integers(0, len(_LINES) - 1))
def test_events_are_read_up_to_what_cannot_be(
    tmp_path: Path, data: st.DataObject, place: int
) -> None:
    lines = [*_LINES]
    lines[place] = data.draw(mutations(lines[place]))
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        recording = read_events(path)
        assert (recording.damage is None) is (len(recording.events) == len(lines))
        with what_was_read(path):
            state = RunState()
            state.add_all(recording.events)
            result_of(recording.events, damage=recording.damage)
            json.dumps(trace_of(recording.events), allow_nan=False)
    except KvprofError as problem:
        told = str(problem)
    else:
        told = str(path)
    assert str(path) in told or "the record" in told


@settings(max_examples=30)
@given(
    st.text()
    | st.recursive(
        st.none()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        st.lists,
    )
)
def test_json_comes_back_and_can_be_printed(value: Any) -> None:
    text = json_text(value)
    assert not unprintable(text)
    assert json.loads(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ('{"n": ' + "9" * 5000 + "}", "a number of 5,000 digits"),
        ('{"n": 99999999999999999999}', "too large for any count"),
        ('["\\ud800"]', "half a surrogate"),
        ("[Infinity]", "Infinity"),
        ('"' + '\\"' * 200_000, "cut off"),
        (b"\xff", "not text"),
        ("", "is empty"),
    ],
)
def test_json_that_no_parser_should_see(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_json_that_is_deep_in_words_alone_is_read() -> None:
    assert parse_json(json.dumps("[" * 500)) == "[" * 500
    assert parse_json('["\\\\ud800"]') == ["\\ud800"]
