import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprof.errors import FailedError, UsageError
from kvprof.records import files
from kvprof.records.files import (
    ensure_writable,
    read_result,
    render_result,
    write_bytes_atomic,
    write_result,
    write_text_atomic,
)
from tests.records.sample import spectrum_result, stability_result

WHOLE = render_result(spectrum_result()).encode()
IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("result", [spectrum_result(), stability_result()])
def test_what_is_written_is_read_back(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    write_result(path, result)
    assert read_result(path) == result
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


@IN_ONE_FOLDER
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False)),
    name=st.text(),
    note=st.text(),
)
def test_every_float_and_every_text_survives(
    tmp_path: Path, values: list[float], name: str, note: str
) -> None:
    given = spectrum_result()["inputs"] | {"values": values, "name": name}
    result = spectrum_result(inputs=given, warnings=[note])
    write_result(tmp_path / "r.json", result, force=True)
    read = read_result(tmp_path / "r.json")
    assert read == result
    assert [repr(value) for value in read["inputs"]["values"]] == [repr(v) for v in values]


def test_a_runs_folder_is_read_as_its_result(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", spectrum_result())
    assert read_result(tmp_path)["kind"] == "spectrum"
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=r"no result\.json"):
        read_result(tmp_path / "other")


def test_rows_of_a_table_take_one_line_each() -> None:
    text = render_result(stability_result())
    assert sum('"kv_head"' in line for line in text.splitlines()) == 2
    line = next(line for line in text.splitlines() if '"kv_head": 0' in line)
    assert json.loads(line.strip().rstrip(","))["tokens"] == 1024


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_with_nan_is_never_written(bad: float, tmp_path: Path) -> None:
    result = spectrum_result()
    result["data"]["pairs"]["qk"]["mean"][0] = bad
    with pytest.raises(ValueError, match=r"JSON compliant|qk\.mean"):
        write_result(tmp_path / "r.json", result)
    assert list(tmp_path.iterdir()) == []


def test_a_result_off_the_schema_is_never_written(tmp_path: Path) -> None:
    result = spectrum_result()
    del result["data"]["pairs"]["qk"]["mean"]
    with pytest.raises(ValueError, match=r"data\.pairs\.qk"):
        write_result(tmp_path / "r.json", result)
    assert list(tmp_path.iterdir()) == []


# --- damage ---------------------------------------------------------------------------------


@IN_ONE_FOLDER
@given(length=st.integers(0, len(WHOLE.rstrip()) - 1))
def test_a_file_cut_off_anywhere_is_told_in_one_line(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(FailedError) as caught:
        read_result(path)
    line = str(caught.value)
    assert "cut.json" in line
    assert "\n" not in line
    assert "empty" in line or ("cut off" in line and "column" in line)


@IN_ONE_FOLDER
@given(offset=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_told_but_never_a_traceback(
    tmp_path: Path, offset: int, byte: int
) -> None:
    path = tmp_path / "flipped.json"
    path.write_bytes(WHOLE[:offset] + bytes([byte]) + WHOLE[offset + 1 :])
    said = ""
    try:
        assert read_result(path)["schema"] == "kvprof/1"
    except FailedError as problem:
        said = str(problem)
    assert "\n" not in said
    assert len(said) < 500 + len(str(path))


def test_the_place_where_a_file_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{\n "schema": "kvprof/1",\n "kind": ')
    with pytest.raises(FailedError, match="line 3, column 10"):
        read_result(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\x89PNG\r\n\x1a\n", "not text"),
        (b"[1, 2]", "not a kvprof result"),
        (b'{"kind": "spectrum"}', "not a kvprof result"),
        (b'{"schema": 1}', "not a kvprof result"),
        (b'{"schema": "lm-eval/3"}', "not a kvprof result"),
        (b'{"schema": "kvprof/"}', "not a kvprof result"),
        (b'{"schema": "kvprof/0"}', "not a kvprof result"),
        (b'{"schema": "kvprof/2", "kind": "spectrum"}', "newer kvprof .* upgrade"),
        (b'{"schema": "kvprof/10"}', "newer kvprof"),
        (b'{"schema": "kvprof/1", "kind": "dance"}', "'dance' .* upgrade"),
        (b'{"schema": "kvprof/1", "kind": "spectrum"}', "does not match the schema"),
        (b'{"schema": "kvprof/1", "kind": 3}', "does not match the schema"),
        (b'{"schema": "kvprof/1", "x": NaN}', "NaN"),
        (b'{"schema": "kvprof/1", "x": 1e999}', "1e999"),
        (b'{"schema": "kvprof/1", "x": ' + b"1" * 5000 + b"}", "a number of 5,000 digits"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(FailedError, match=said) as caught:
        read_result(path)
    assert "\n" not in str(caught.value)


# --- writing --------------------------------------------------------------------------------


def test_an_existing_file_stays_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_text("old")
    for refused in (ensure_writable, lambda p: write_text_atomic(p, "new")):
        with pytest.raises(UsageError, match=r"r\.txt exists; --force"):
            refused(path)
    assert path.read_text() == "old"
    ensure_writable(path, force=True)
    write_text_atomic(path, "new", force=True)
    assert path.read_text() == "new"


def test_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "a" / "b" / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    for refused in (ensure_writable, lambda p: write_bytes_atomic(p, b"")):
        with pytest.raises(UsageError, match="is a folder"):
            refused(tmp_path)


def test_a_folder_that_cannot_be_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "r.json", tmp_path / "file" / "deep" / "r.json"):
        with pytest.raises(FailedError, match=r"cannot write .*r\.json: a part of the path"):
            ensure_writable(path)
    with pytest.raises(FailedError, match="cannot write"):
        ensure_writable(tmp_path / "new" / ("x" * 300))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(FailedError, match=r"cannot write .*: Permission denied"):
        ensure_writable(folder / "r.json")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_file_system_that_takes_no_files_is_told() -> None:
    with pytest.raises(FailedError, match=r"cannot write /proc/self/r\.json"):
        ensure_writable(Path("/proc/self/r.json"))


def test_a_full_disk_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.txt"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FailedError, match=r"cannot write .*r\.txt: No space left on device"):
        write_text_atomic(path, "new", force=True)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_in_the_middle_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomic(tmp_path / "r.txt", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_sees_the_old_or_the_new_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_text("o" * 1_000_000)
    watch = (
        "import pathlib, sys\n"
        "path, seen = pathlib.Path(sys.argv[1]), set()\n"
        "print('ready', flush=True)\n"
        "while 'n' not in seen:\n"
        "    text = path.read_text()\n"
        "    assert len(text) == 1_000_000 and len(set(text)) == 1\n"
        "    seen.add(text[0])\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", watch, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for _ in range(20):
        write_text_atomic(path, "o" * 1_000_000, force=True)
    write_text_atomic(path, "n" * 1_000_000, force=True)
    assert reader.wait(timeout=30) == 0


def test_files_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "r.txt", "text")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "r.txt").stat().st_mode) == 0o640


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "target.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("target.txt")
    write_text_atomic(tmp_path / "link.txt", "new", force=True)
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "target.txt").read_text() == "new"


def test_a_pipe_is_written_to_in_place(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        path = Path(f"/dev/fd/{writing}")
        ensure_writable(path)
        write_text_atomic(path, "through")
        assert os.read(reading, 100) == b"through"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_pipe_that_nobody_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    ensure_writable(tmp_path / "pipe")
    with pytest.raises(FailedError, match="nobody reads from this pipe"):
        write_text_atomic(tmp_path / "pipe", "lost")


def test_a_pipe_whose_reader_comes_late_gets_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "much " * 100_000  # more than a pipe holds
    got: list[str] = []
    reader = threading.Timer(0.3, lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text_atomic(tmp_path / "pipe", text)
    reader.join()
    assert got == [text]


@pytest.mark.parametrize("name", ["circle", "circle/result.json"])
def test_a_circle_of_links_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for write in (ensure_writable, lambda path: write_text_atomic(path, "x")):
        with pytest.raises(FailedError, match=r"cannot write .*symbolic links"):
            write(tmp_path / name)


@pytest.mark.parametrize("name", ["9" * 5000, "kvprof/" + "9" * 5000, "kvprof/²"])
def test_a_schema_that_is_no_name_is_one_short_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"schema": name}))
    with pytest.raises(FailedError, match="not a kvprof result") as told:
        read_result(path)
    assert len(str(told.value)) < len(str(path)) + 200


@pytest.mark.parametrize("name", ["link", "link/result.json"])
def test_a_link_to_nothing_is_followed_by_force_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for write in (ensure_writable, lambda path: write_text_atomic(path, "x")):
        with pytest.raises(UsageError) as told:
            write(tmp_path / name)
        assert str(tmp_path / name) in str(told.value)
    assert not (tmp_path / "elsewhere").exists()
    write_text_atomic(tmp_path / name, "x", force=True)
    assert (tmp_path / name).read_text() == "x"
