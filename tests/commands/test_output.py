import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kvprof.commands import output
from kvprof.commands.output import Outputs
from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.records.files import read_result
from tests.records.sample import spectrum_result


def test_every_destination_is_written(tmp_path: Path) -> None:
    from kvprof.views.figure import new_figure

    result = spectrum_result()
    outputs = Outputs(
        json=tmp_path / "r.json",
        csv=tmp_path / "r.csv",
        out=tmp_path / "run",
        svg=tmp_path / "r.svg",
        png=tmp_path / "r.png",
    )
    outputs.check()
    assert list(tmp_path.iterdir()) == []
    outputs.finish(result, csv_text=lambda: "a,b\n1,2\n", figure=lambda: new_figure(2, 2))
    assert read_result(tmp_path / "r.json") == read_result(tmp_path / "run") == result
    assert (tmp_path / "r.csv").read_text() == "a,b\n1,2\n"
    assert b"<svg" in (tmp_path / "r.svg").read_bytes()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert outputs.report_to_stdout


def test_nothing_is_made_that_was_not_asked_for(tmp_path: Path) -> None:
    def fail() -> str:
        raise AssertionError

    Outputs(json=tmp_path / "r.json").finish(spectrum_result(), csv_text=fail, figure=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_json_on_stdout_is_exact_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    result = spectrum_result(
        warnings=["a [bold]warning[/bold] :smile: " + "x" * 300], inputs={"note": "σ ≥ 1"}
    )
    outputs = Outputs(json=Path("-"))
    outputs.check()
    assert not outputs.report_to_stdout
    outputs.finish(result)
    assert json.loads(capsys.readouterr().out) == result


def test_csv_on_stdout_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs(csv=Path("-"))
    assert not outputs.report_to_stdout
    text = "a [red] " + "x," * 200 + "\n1\n"
    outputs.finish(spectrum_result(), csv_text=lambda: text)
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
        Outputs().check(extra=[path])
    forced = Outputs(json=path, out=tmp_path / "run", force=True)
    forced.check()
    forced.finish(spectrum_result())
    assert read_result(tmp_path / "run") == read_result(path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"json": "a", "csv": "a"}, "--json and --csv both go to"),
        ({"json": "a", "csv": "b/../a"}, "--json and --csv both go to"),
        ({"svg": "a", "png": "a"}, "--svg and --png both go to"),
        ({"json": "run/result.json", "out": "run"}, "--json and --out both go to"),
    ],
)
def test_two_outputs_in_one_place_are_refused(
    names: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        Outputs(**{option: tmp_path / name for option, name in names.items()}).check()


def test_stdout_holds_one_of_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json and --csv both go to -"):
        Outputs(json=Path("-"), csv=Path("-")).check()
    with pytest.raises(UsageError, match="--png -: a figure goes to a file"):
        Outputs(png=Path("-")).check()
    with pytest.raises(UsageError, match="-: this output goes to a file; only --json and --csv"):
        Outputs().check(extra=[tmp_path / "a", Path("-")])
    with pytest.raises(UsageError, match="both go to"):
        Outputs(json=tmp_path / "a").check(extra=[tmp_path / "a"])


def test_a_runs_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file; name a folder"):
        Outputs(out=tmp_path / "run").check()


def test_a_figure_without_matplotlib_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "matplotlib" else ModuleSpec(name, None)

    monkeypatch.setattr(output, "find_spec", find)
    with pytest.raises(LackingError, match=r"--svg needs .* -m pip install .*matplotlib"):
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
        outputs.finish(spectrum_result(), csv_text=lambda: "a\n")
    assert (tmp_path / "r.csv").read_text() == "a\n"
    assert read_result(tmp_path / "run")["kind"] == "spectrum"
