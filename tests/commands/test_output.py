import errno
import io
import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import typer

from kvprof.commands import output
from kvprof.commands.output import Outputs
from kvprof.errors import ExitCode, FailedError, LackingError, UsageError
from kvprof.records.files import read_result
from kvprof.records.fold import result_of
from kvprof.records.journal import EVENTS_NAME, Journal, find_events
from kvprof.views import kinds
from kvprof.views.jct import to_csv
from tests.commands.running import kvprof
from tests.records.sample import benchmark_result
from tests.records.streams import stream, write


def some_result(**changes: Any) -> dict[str, Any]:
    """Return a result that has all that its report, its CSV and its figure tell."""
    return result_of(stream(("full",), layers=1, steps=2)) | changes


def test_every_destination_is_written(tmp_path: Path) -> None:
    result = some_result()
    outputs = Outputs(
        json=tmp_path / "r.json",
        csv=tmp_path / "r.csv",
        out=tmp_path / "run",
        svg=tmp_path / "r.svg",
        png=tmp_path / "r.png",
    )
    outputs.check()
    assert list(tmp_path.iterdir()) == []
    outputs.finish(result)
    assert read_result(tmp_path / "r.json") == read_result(tmp_path / "run") == result
    assert (tmp_path / "r.csv").read_text() == to_csv(result)
    assert b"<svg" in (tmp_path / "r.svg").read_bytes()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert outputs.report_to_stdout


def test_nothing_is_made_that_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_result: object) -> None:
        raise AssertionError

    monkeypatch.setattr(kinds, "csv_of", fail)
    monkeypatch.setattr(kinds, "figure_of", fail)
    Outputs(json=tmp_path / "r.json").finish(some_result())
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_json_on_stdout_is_exact_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    result = some_result(
        warnings=["a [bold]warning[/bold] :smile: " + "x" * 300],
        complete=False,
        incomplete_reason="σ ≥ 1",
    )
    outputs = Outputs(json=Path("-"))
    outputs.check()
    assert not outputs.report_to_stdout
    outputs.finish(result)
    assert json.loads(capsys.readouterr().out) == result


def test_csv_on_stdout_is_exact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = Outputs(csv=Path("-"))
    assert not outputs.report_to_stdout
    text = "a [red] " + "x," * 200 + "\n1\n"
    monkeypatch.setattr(kinds, "csv_of", lambda _result: lambda: text)
    outputs.finish(some_result())
    assert capsys.readouterr().out == text


def test_what_exists_is_refused_before_the_work_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    with pytest.raises(UsageError, match=r"r\.json exists; --force"):
        Outputs(json=path).check()
    with pytest.raises(UsageError, match=r"result\.json exists; --force"):
        Outputs(out=tmp_path / "run").check()
    with pytest.raises(UsageError, match=r"r\.json exists; --force"):
        Outputs().check({"--save": path})
    forced = Outputs(json=path, out=tmp_path / "run", force=True)
    forced.check()
    forced.finish(some_result())
    assert read_result(tmp_path / "run") == read_result(path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"json": "a", "csv": "a"}, "--json and --csv both name"),
        ({"json": "a", "csv": "b/../a"}, "--json and --csv both name"),
        ({"svg": "a", "png": "a"}, "--svg and --png both name"),
        ({"json": "run/result.json", "out": "run"}, "--json and --out both name"),
    ],
)
def test_two_outputs_in_one_place_are_refused(
    names: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        Outputs(**{option: tmp_path / name for option, name in names.items()}).check()


def test_what_is_read_is_not_written_over_by_force(tmp_path: Path) -> None:
    """As a path of its own, in a list, through a link, and as what a run's folder holds."""
    run = tmp_path / "run"
    run.mkdir()
    result, events, table = run / "result.json", run / EVENTS_NAME, run / "table.csv"
    for path in (result, events, table):
        path.touch()
    (tmp_path / "link.json").symlink_to(result)
    outputs = Outputs(json=result, csv=table, force=True)
    for read in ([result], [None, ["prose", str(tmp_path / "link.json")]], [run]):
        with pytest.raises(UsageError, match=r"--json .* reads that file; name another"):
            outputs.check(read=read)
    with pytest.raises(UsageError, match=r"--save .*reads that file"):
        Outputs(force=True).check({"--save": events}, read=[run])
    outputs.check(read=[table.with_name("other.csv"), "a/hub-id", None])
    outputs.check(read=["x" * 300])  # which whoever reads it tells
    (run / "config.json").touch()
    outputs.check(read=[run])  # a model's folder, whose result of a run nobody reads
    with pytest.raises(UsageError, match=r"config\.json: this command reads that file"):
        replace(outputs, json=run / "config.json").check(read=[run])
    (run / "config.json").unlink()
    replace(outputs, json=None).check(read=[run])  # what was made of a run may lie beside it


def test_stdout_holds_one_of_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json and --csv both name -; give each its own"):
        Outputs(json=Path("-"), csv=Path("-")).check()
    with pytest.raises(UsageError, match="--png -: a figure cannot go to stdout"):
        Outputs(png=Path("-")).check()
    with pytest.raises(UsageError, match="--save -: only --json and --csv"):
        Outputs().check({"--save": Path("-")})
    run = Outputs(json=tmp_path / "r" / "result.json", out=tmp_path / "r", force=True)
    with pytest.raises(UsageError, match="--json and --out both name"):
        run.check({"--out": run.events})
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "result.json").touch()
    with pytest.raises(UsageError, match=r"result\.json exists"):
        replace(run, json=None, force=False).check({"--out": run.events})
    with pytest.raises(UsageError, match="--json and --save both name"):
        Outputs(json=tmp_path / "a").check({"--save": tmp_path / "a"})


def test_a_figure_without_matplotlib_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "matplotlib" else ModuleSpec(name, None)

    monkeypatch.setattr(output, "find_spec", find)
    with pytest.raises(LackingError, match=r"--svg requires .* -m pip install .*matplotlib"):
        Outputs(svg=tmp_path / "f.svg").check()
    Outputs(json=tmp_path / "r.json").check()


def test_one_destination_that_fails_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = output.write_bytes_atomic

    def broken(path: Path, content: bytes, force: bool = False) -> None:
        if path.name == "r.json":
            raise FailedError("cannot write r.json: No space left on device")
        write(path, content, force)

    monkeypatch.setattr(output, "write_bytes_atomic", broken)
    outputs = Outputs(json=tmp_path / "r.json", csv=tmp_path / "r.csv", out=tmp_path / "run")
    with pytest.raises(FailedError, match=r"cannot write r\.json"):
        outputs.finish(some_result())
    assert (tmp_path / "r.csv").read_text() == to_csv(some_result())
    assert read_result(tmp_path / "run")["kind"] == "jct"


# --- what cannot be written -----------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)


def full_stdout(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Full())


def test_a_full_disk_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_disk(monkeypatch)
    outputs = Outputs(json=tmp_path / "r.json", csv=tmp_path / "r.csv", out=tmp_path / "run")
    with pytest.raises(FailedError, match="the moments") as failed:
        outputs.finish(
            some_result(),
            lambda *_: "the report",
            lost=["cannot write the moments"],
            interrupted=True,
        )
    for name in ("result.json", "r.json", "r.csv", "No space left"):
        assert name in str(failed.value)
    assert capsys.readouterr().out == "the report\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_drawing_that_fails_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(kinds, "csv_of", lambda _result: broken)
    outputs = Outputs(json=tmp_path / "r.json", csv=tmp_path / "r.csv")
    with pytest.raises(FailedError, match=r"--csv .*ZeroDivisionError: by zero"):
        outputs.finish(some_result(), lambda *_: "the report")
    assert capsys.readouterr().out == "the report\n"
    assert read_result(tmp_path / "r.json")


def test_what_has_come_to_exist_is_left_alone_and_the_result_is_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = Outputs(out=tmp_path)
    outputs.check()
    other = some_result(warnings=["the other run's"])
    Outputs(out=tmp_path).finish(other, lambda *_: None)
    with pytest.raises(FailedError, match=r"was not overwritten; .* is in .*result-2\.json"):
        outputs.finish(some_result(), lambda *_: "the report")
    assert read_result(tmp_path) == other
    assert read_result(tmp_path / "result-2.json") == some_result()
    assert capsys.readouterr().out == "the report\n"


def test_a_folder_that_goes_is_made_again_and_one_that_became_a_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    Outputs(out=run).finish(some_result(), lambda *_: "one")
    shutil.rmtree(run)
    Outputs(out=run).finish(some_result(), lambda *_: "two")
    shutil.rmtree(run)
    run.write_text("")
    with pytest.raises(FailedError, match="is a file, not a folder"):
        Outputs(out=run).finish(some_result(), lambda *_: "three")
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_where_stdout_fails_the_files_are_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_stdout(monkeypatch, number)
    with pytest.raises((OSError, SystemExit)):
        Outputs(out=tmp_path).finish(some_result(), lambda *_: "the report")
    assert read_result(tmp_path) == some_result()


def test_the_end_says_the_worst_thing() -> None:
    with pytest.raises(LackingError):
        Outputs().finish(some_result(), problem=LackingError("no GPU"), interrupted=True)
    with pytest.raises(FailedError, match="not kept; no GPU"):
        Outputs().finish(some_result(), problem=LackingError("no GPU"), lost=["not kept"])
    with pytest.raises(typer.Exit) as left:
        Outputs().finish(some_result(), interrupted=True, code=ExitCode.LACKING)
    assert left.value.exit_code == 130
    with pytest.raises(typer.Exit) as left:
        Outputs().finish(some_result(), code=ExitCode.LACKING)
    assert left.value.exit_code == 3


def test_a_journal_in_which_nothing_was_measured_ends_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = Outputs(out=tmp_path / "run")
    with Journal(outputs.events) as journal:
        journal.emit(stream(("full",))[0])
    with pytest.raises(LackingError):
        outputs.end_recorded(journal, problem=LackingError("no GPU"), interrupted=True)
    with pytest.raises(typer.Exit) as left:
        outputs.end_recorded(journal, interrupted=True)
    assert left.value.exit_code == 130
    assert "no result" in capsys.readouterr().err
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_journal_ends_as_the_result_that_its_events_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = Outputs(out=tmp_path / "run")
    with Journal(outputs.events) as journal:
        for event in stream(("full",)):
            journal.emit(event)
    outputs.end_recorded(journal, interrupted=False)
    assert read_result(tmp_path / "run") == result_of(stream(("full",)))
    assert "full" in capsys.readouterr().out


def test_an_event_that_cannot_be_read_back_is_a_failure_and_not_the_end_of_a_run(
    tmp_path: Path,
) -> None:
    """What lies behind it is in no result: that must not look like a run that went well."""
    events = stream(("full",))
    outputs = Outputs(out=tmp_path / "run")
    with Journal(outputs.events) as journal:
        for event in events[:-1]:
            journal.emit(event)
        journal.emit(replace(events[-2], time=-(2.0**70)))
        journal.emit(events[-1])
    with pytest.raises(FailedError, match=f"line {len(events)} "):
        outputs.end_recorded(journal, interrupted=False)
    assert read_result(tmp_path / "run")["complete"] is False


def test_events_of_another_run_are_refused_and_with_force_removed(tmp_path: Path) -> None:
    write(tmp_path / EVENTS_NAME, stream(("full",)))
    with pytest.raises(UsageError, match=r"events\.jsonl exists; --force"):
        Outputs(out=tmp_path).check()
    own = result_of(stream(("full",)))
    forced = Outputs(out=tmp_path, force=True)
    forced.check()
    forced.finish(own)
    assert find_events(tmp_path) is not None  # they are its own
    forced.finish(benchmark_result())
    assert find_events(tmp_path) is None


@pytest.mark.parametrize("option", ["--json", "--csv", "--svg", "--png", "--save"])
def test_a_link_to_nothing_is_no_place_for_a_result(tmp_path: Path, option: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    done = kvprof("spectrum", option, link)
    assert done.code == 2
    assert str(link) in done.error


def test_out_says_that_it_leads_nowhere(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for words in ((link,), (link, "--force"), (link / "run", "--force")):
        done = kvprof("eval", "--method", "full", "--out", *words)
        assert done.code == 2
        assert str(link) in done.error
        assert "exists" not in done.error
