"""``show``, ``compare`` and ``export``: runs as the user names them, and what is none."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.commands import run_source
from kvprof.records.files import read_result, write_result
from kvprof.records.fold import result_of
from kvprof.records.journal import EVENTS_NAME, Journal
from tests.commands.running import kvprof
from tests.records.sample import spectrum_result
from tests.records.streams import stream, write

EVENTS = stream(methods=("full", "fdc"), layers=2, steps=8)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    folder = tmp_path / "run"
    write(folder / EVENTS_NAME, EVENTS)
    write_result(folder / "result.json", result_of(EVENTS))
    return folder


def slower(folder: Path, target: Path, factor: float) -> Path:
    result = copy.deepcopy(read_result(folder))
    for row in result["data"]["cases"]:
        for key in ("jct_seconds", "ttft_seconds", "decode_seconds", "itl_seconds"):
            row[key] *= factor
        for key in ("jct_seconds", "ttft_seconds", "decode_seconds"):
            row[f"{key}_interval"] = [0.99 * row[key], 1.01 * row[key]]
    for row in result["data"]["steps"]:
        row["seconds"] *= factor
    write_result(target, result)
    return target


def test_a_run_is_shown_by_its_folder_its_result_and_its_events(run: Path) -> None:
    shown = kvprof("show", run)
    assert shown.code == 0
    assert "JCT by part" in shown.stdout
    assert kvprof("show", run / "result.json").stdout == shown.stdout
    assert kvprof("show", run / EVENTS_NAME).stdout == shown.stdout


def test_a_run_that_still_runs_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    with Journal(tmp_path / EVENTS_NAME) as journal:
        for event in EVENTS[:100]:
            journal.emit(event)
        shown = kvprof("show", tmp_path)
    assert shown.code == 0
    assert "INCOMPLETE" in shown.stdout
    assert shown.stderr == ""


def test_a_truncated_record_is_read_up_to_the_damage_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / EVENTS_NAME, EVENTS)
    path.write_bytes(path.read_bytes()[:-200])
    shown = kvprof("show", path.parent, "--json", tmp_path / "kept.json")
    assert shown.code == 0
    assert "warning: " in shown.stderr
    assert "; showing what precedes it" in shown.stderr
    # Whether the run went on to its end nobody can tell.
    assert "INCOMPLETE: the record can be read in part only" in " ".join(shown.stdout.split())
    kept = read_result(tmp_path / "kept.json")
    assert not kept["complete"]
    assert "line" in kept["incomplete_reason"]


@pytest.mark.parametrize("year", [2030, 2001])  # of a clock that was set back
def test_a_result_of_an_earlier_run_does_not_stand_for_the_one_that_runs(
    run: Path, year: int
) -> None:
    events = stream(methods=("kq",), layers=2, steps=8)
    later = [
        type(events[0])(**{**vars(events[0]), "created": f"{year}-01-01T00:00:00Z"}),
        *events[1:50],
    ]
    (run / EVENTS_NAME).unlink()
    write(run / EVENTS_NAME, later)
    shown = kvprof("show", run)
    assert "INCOMPLETE" in shown.stdout
    assert "fdc" not in shown.stdout


def test_the_recorded_run_is_the_word_demo(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = run.parent / "package"
    demo = package / "assets" / "demo"
    demo.mkdir(parents=True)
    content = (run / EVENTS_NAME).read_bytes()
    (demo / f"{EVENTS_NAME}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(run_source, "files", lambda _: package)
    assert kvprof("show", "demo").stdout == kvprof("show", run).stdout
    monkeypatch.setattr(run_source, "files", lambda _: run)
    assert kvprof("show", "demo").code == 3


def test_valid_events_that_make_no_valid_result_are_told(tmp_path: Path) -> None:
    first = json.loads((write(tmp_path / "whole.jsonl", EVENTS)).read_text().splitlines()[0])
    first["environment"] = {}
    (tmp_path / EVENTS_NAME).write_text(json.dumps(first) + "\n")
    done = kvprof("show", tmp_path)
    assert done.code == 1
    assert "valid result: environment" in done.error


def test_results_are_compared_and_a_limit_is_enforced(run: Path) -> None:
    worse = slower(run, run.parent / "worse.json", 1.1)
    assert kvprof("compare", run, worse, "--fail-over", "5%").code == 0  # it has no intervals
    run = slower(run, run.parent / "same.json", 1.0)
    done = kvprof("compare", run, worse)
    assert done.code == 0
    assert "+10.0 %" in done.stdout
    done = kvprof("compare", run, worse, "--fail-over", "5%", "--json", run.parent / "c.json")
    assert done.code == 4
    assert "got worse by more" in done.error
    kept = read_result(run.parent / "c.json")
    assert kept["kind"] == "compare"
    assert kept["data"]["failed"] == 6  # of two methods; ITL is of one run's steps
    assert kvprof("compare", run, worse, "--fail-over", "20%").code == 0
    assert kvprof("compare", worse, run, "--fail-over", "0.05").code == 0
    assert kvprof("show", run.parent / "c.json").code == 0


def test_a_comparison_fits_a_narrow_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = slower(run, run.parent / "worse.json", 1.1)
    for width in ("40", "80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        lines = kvprof("compare", run, worse, worse).stdout.splitlines()
        assert max(map(len, lines)) <= int(width)


def test_a_comparison_says_what_its_intervals_are_of(run: Path) -> None:
    result = read_result(run)
    for case in result["data"]["cases"]:
        case["energy_per_token_joules"] = None
    write_result(run.parent / "one.json", result)
    command = ("compare", run.parent / "one.json", slower(run, run.parent / "x.json", 1.0))
    shown = " ".join(kvprof(*command).stdout.split())
    assert "All 6 figures are unchanged. --all lists them." in shown
    assert kvprof(*command, "--all").stdout.count(" same") > 20


def test_an_incomplete_run_in_a_comparison_is_told(run: Path) -> None:
    write(run.parent / "killed" / EVENTS_NAME, EVENTS[:-1])
    assert "INCOMPLETE" in kvprof("compare", run, run.parent / "killed").stdout


@pytest.mark.parametrize(
    ("to", "start"),
    [
        ("csv", "kind,case"),
        ("md", "# kvprof jct"),
        ("html", "<!DOCTYPE html>"),
        ("svg", "<?xml"),
        ("perfetto", '{"traceEvents"'),
    ],
)
def test_a_run_is_exported(run: Path, to: str, start: str) -> None:
    if to in ("html", "svg"):
        pytest.importorskip("matplotlib")
    target = run.parent / f"out.{to}"
    done = kvprof("export", run, "--to", to, "--output", target)
    assert (done.code, done.stdout) == (0, "")
    assert target.read_text("utf-8").startswith(start)
    again = kvprof("export", run, "--to", to, "--output", target)
    assert again.code == 2
    assert "--force" in again.error


def test_readable_formats_go_to_stdout(run: Path) -> None:
    assert kvprof("export", run, "--to", "csv").stdout.startswith("kind,case")
    assert kvprof("export", run, "--to", "perfetto", "-o", "-").stdout.startswith("{")


def test_the_schema_of_all_results_and_of_one_kind(run: Path) -> None:
    from jsonschema import Draft202012Validator

    def valid(schema: dict[str, Any], result: dict[str, Any]) -> bool:
        Draft202012Validator.check_schema(schema)
        return Draft202012Validator(schema).is_valid(result)

    every = json.loads(kvprof("export", "--schema").stdout)
    jct = json.loads(kvprof("export", "--schema", "jct").stdout)
    own, other = read_result(run), spectrum_result()
    assert valid(every, own)
    assert valid(every, other)
    assert valid(jct, own)
    assert not valid(jct, other)
    own["data"]["cases"][0].pop("method")
    assert not valid(jct, own)
