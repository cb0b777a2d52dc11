"""The recorded run that ships: every command that takes a run opens it, and it was a GPU's."""

import csv
import json
from pathlib import Path

import pytest

from kvprof.commands.run_source import DEMO, events_of, load_run
from kvprof.commands.tui import open_run
from kvprof.records.files import write_result
from tests.commands.running import kvprof

METHODS = ["full", "palu", "fdc", "kq"]


def test_its_report_has_every_method_and_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = kvprof("show", DEMO)
    assert (shown.code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("method   rate  JCT"))
    assert [line.split()[0] for line in lines[first + 2 : first + 6]] == METHODS
    assert "NVIDIA H200" in shown.stdout
    assert "INCOMPLETE" not in shown.stdout
    assert max(map(len, lines)) <= 120


def test_the_live_view_plays_it_to_its_end() -> None:
    session = open_run(DEMO)
    assert session.source.playing
    session.source.jump()
    while session.advance():
        pass
    assert session.status() == "■ finished"
    assert session.banner() is None
    assert len(session.state.requests()) == 7
    assert list(dict.fromkeys(c.method for c in session.state.cases.values())) == METHODS
    assert all(case.finished is not None for case in session.state.cases.values())


def test_without_a_terminal_the_live_view_prints_the_report() -> None:
    assert kvprof("tui", "--demo").stdout == kvprof("show", DEMO).stdout


def test_it_is_exported_and_compared(tmp_path: Path) -> None:
    table, trace, page = tmp_path / "d.csv", tmp_path / "d.json", tmp_path / "d.md"
    for path, to in ((table, "csv"), (trace, "perfetto"), (page, "md")):
        done = kvprof("export", DEMO, "--to", to, "--output", path)
        assert (done.code, done.stdout) == (0, "")
    with table.open() as file:
        assert {row["method"] for row in csv.DictReader(file)} >= set(METHODS)
    assert json.loads(trace.read_text())["traceEvents"]
    result = load_run(DEMO)
    for name, factor in (("same.json", 1.0), ("slower.json", 1.1)):
        for case in result["data"]["cases"]:  # the record is older than intervals
            case["jct_seconds"] *= factor
            case["jct_seconds_interval"] = [0.99 * case["jct_seconds"], 1.01 * case["jct_seconds"]]
        write_result(tmp_path / name, result)
    done = kvprof("compare", tmp_path / "same.json", tmp_path / "slower.json", "--fail-over", "5%")
    assert done.code == 4
    assert "+10.0 %" in done.stdout


def test_it_names_no_place_of_the_machine_that_it_is_from() -> None:
    events = events_of(DEMO)
    command = events[0].command
    assert command[:3] == ("kvprof", "bench", "--jct")
    assert not any("/" in word for word in command)
    assert "--out" not in command
