"""The record of a run: written line by line, read whatever became of the run."""

import errno
import gzip
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.records.events import CaseStarted, RunStarted, TelemetrySample, event_line
from kvprof.records.journal import EVENTS_NAME, Follower, Journal, find_events, read_events
from tests.records.streams import stream, write

EVENTS = stream(methods=("full", "fdc"), layers=2, steps=4)
#: So many events from the start, the last of them is the first that was measured.
MEASURED = 1 + next(
    place
    for place, event in enumerate(EVENTS)
    if not isinstance(event, RunStarted | CaseStarted | TelemetrySample)
)


def sample(time: float) -> TelemetrySample:
    return TelemetrySample(time=time, device="cpu", values={"load": 0.5})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = read_events(write(tmp_path / "run" / EVENTS_NAME, EVENTS))
    assert found.events == EVENTS
    assert (found.damage, found.finished) == (None, True)


def test_every_event_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    with Journal(tmp_path / EVENTS_NAME) as journal:
        for count, event in enumerate(EVENTS[:5], start=1):
            journal.emit(event)
            assert len(read_events(journal.path).events) == count
    assert not read_events(journal.path).finished


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with Journal(tmp_path / EVENTS_NAME) as journal:
        journal.emit(EVENTS[0])

        def emit(thread: int) -> None:
            for count in range(200):
                journal.emit(sample(thread + count / 1000))

        threads = [threading.Thread(target=emit, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_events(journal.path)
    assert found.damage is None
    assert sorted(event.time for event in found.events[1:]) == sorted(
        thread + count / 1000 for thread in range(4) for count in range(200)
    )


def test_a_record_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    path = write(tmp_path / EVENTS_NAME, EVENTS)
    with pytest.raises(UsageError, match="--force"), Journal(path):
        pass
    assert read_events(path).events == EVENTS
    with Journal(path, force=True) as journal:
        for event in EVENTS[:MEASURED]:
            journal.emit(event)
    assert read_events(path).events == EVENTS[:MEASURED]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ends", [True, False])
def test_a_forced_run_that_measures_nothing_leaves_the_earlier_record(
    tmp_path: Path, ends: bool
) -> None:
    path = write(tmp_path / EVENTS_NAME, EVENTS)
    before = path.read_bytes()
    unmeasured = [*EVENTS[: MEASURED - 1], *([EVENTS[-1]] if ends else [])]
    with Journal(path, force=True) as journal:
        for event in unmeasured:
            journal.emit(event)
            assert path.read_bytes() == before  # nothing of the two runs mixes
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert not journal.measured
    assert journal.recording().events == unmeasured


def test_a_full_disk_costs_no_event(tmp_path: Path) -> None:
    """What no longer fits stays in memory, and is written at the end where that goes by then."""
    resource = pytest.importorskip("resource")
    path = tmp_path / EVENTS_NAME
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said: list[str] = []
    try:
        for later in ("full", "free"):
            path.unlink(missing_ok=True)
            said.clear()
            with Journal(path, warn=said.append) as journal:
                for event in EVENTS[:MEASURED]:
                    journal.emit(event)
                # In the middle of the next line.
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
                for event in EVENTS[MEASURED:]:
                    journal.emit(event)
                assert read_events(path).events == EVENTS[:MEASURED]  # whole lines, and no more
                if later == "free":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert len(said) == 1
            assert f"cannot write {path}" in said[0]
            assert journal.recording().events == EVENTS
            assert (journal.failure is None) is (later == "free")
            found = read_events(path)
            assert found.events == (EVENTS if later == "free" else EVENTS[:MEASURED])
            assert found.damage is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("fits", [0, 1, MEASURED - 1, MEASURED])
def test_what_a_full_disk_has_kept_is_told_as_it_is(tmp_path: Path, fits: int) -> None:
    """A file without a line of what was measured is none, and is not left behind."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "run" / EVENTS_NAME
    sizes = [len(line) for line in write(tmp_path / "all", EVENTS).read_bytes().splitlines(True)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Journal(path) as journal:
            resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes[:fits]) + 1, hard))
            for event in EVENTS:
                journal.emit(event)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert journal.failure is not None
    assert ("no measurement" in journal.failure) is (fits < MEASURED)
    assert ("measurements until then" in journal.failure) is (fits == MEASURED)
    assert path.parent.exists() is (fits == MEASURED)
    if fits == MEASURED:
        assert read_events(path).events == EVENTS[:fits]


def test_a_disk_that_takes_lines_and_does_not_keep_them_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with Journal(tmp_path / EVENTS_NAME) as journal:
        journal.emit(EVENTS[0])
    assert journal.failure is not None
    assert "No space left on device" in journal.failure


def test_a_folder_that_goes_while_it_measures_comes_back_with_every_event(tmp_path: Path) -> None:
    path = tmp_path / "run" / EVENTS_NAME
    with Journal(path) as journal:
        for event in EVENTS:
            journal.emit(event)
            if event is EVENTS[3]:
                shutil.rmtree(path.parent)
    assert journal.failure is None
    assert read_events(path).events == EVENTS


def test_a_record_that_another_run_took_is_told_and_left(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_NAME
    with Journal(path) as journal:
        for event in EVENTS:
            journal.emit(event)
        other = write(tmp_path / "other.jsonl", EVENTS[:3])
        other.replace(path)
    assert journal.failure is not None
    assert "replaced by another run" in journal.failure
    assert read_events(path).events == EVENTS[:3]
    assert journal.recording().events == EVENTS


def test_events_can_be_kept_in_memory_alone() -> None:
    with Journal(None) as journal:
        for event in EVENTS:
            journal.emit(event)
    assert (journal.failure, journal.recording().events) == (None, EVENTS)


def test_no_number_that_is_none_gets_into_the_record(tmp_path: Path) -> None:
    with Journal(tmp_path / EVENTS_NAME) as journal:
        journal.emit(EVENTS[0])
        with pytest.raises(ValueError, match="nan"):
            journal.emit(sample(float("nan")))
    assert read_events(journal.path).events == EVENTS[:1]


def _line(**changes: object) -> bytes:
    return json.dumps(event_line(EVENTS[0]) | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"event": "step", "ti', "line 3 is damaged or cut off"),
        (b"\xff\xfe\n", "line 3 is not text"),
        (b"[1, 2]\n", "line 3 is not an event but a JSON list"),
        (b'{"event": "party", "time": 1}\n', "'party'"),
        (b'{"event": "telemetry", "time": 1}\n', "line 3 has a telemetry event without device"),
        (
            b'{"event": "telemetry", "time": "soon", "device": "cpu", "values": {}}\n',
            "time: 'soon'",
        ),
        (
            b'{"event": "telemetry", "time": 1, "device": "cpu", "values": {"load": null}}\n',
            "invalid values",
        ),
        (
            b'{"event": "telemetry", "time": NaN, "device": "cpu", "values": {}}\n',
            "line 3 has NaN",
        ),
        (b"[" * 200_000 + b"\n", "line 3 is nested too deeply"),
        (
            b'{"event": "step", "time": 1, "case": "x", "phase": "decode", "step": 1,'
            b' "context": 1, "seconds": 1}\n',
            "line 3 is of case 'x', which was never started",
        ),
        (
            b'{"event": "load_request", "time": 1, "case": "x", "number": 0, "arrival": 0,'
            b' "sent": 0, "prompt": 1, "output": 1, "first": 1, "last": 1, "tokens": 1,'
            b' "server": 1000000000000}\n',
            "server: 1000000000000",
        ),
    ],
)
def test_a_record_is_read_up_to_its_damage(tmp_path: Path, line: bytes, said: str) -> None:
    path = write(tmp_path / EVENTS_NAME, EVENTS[:2])
    with path.open("ab") as file:
        file.write(line)
        file.write(json.dumps(event_line(sample(2.0))).encode() + b"\n")
    found = read_events(path)
    assert found.events == EVENTS[:2]
    assert found.damage is not None
    assert said in found.damage


def test_nothing_follows_the_end_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / EVENTS_NAME, [*EVENTS, sample(99.0)])
    found = read_events(path)
    assert found.events == EVENTS
    assert found.damage == f"line {len(EVENTS) + 1} comes after the run's end"


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_compressed_record_that_is_cut_off_is_read_as_far_as_it_goes(
    tmp_path: Path, cut: int
) -> None:
    whole = write(tmp_path / EVENTS_NAME, EVENTS).read_bytes()
    zipped = tmp_path / "cut.jsonl.gz"
    zipped.write_bytes(gzip.compress(whole)[:-cut])
    found = read_events(zipped)
    assert found.events == EVENTS[: len(found.events)]
    assert found.damage is not None


def test_keys_of_a_newer_minor_version_do_not_hurt(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_NAME
    path.write_bytes(_line(mood="good"))
    assert read_events(path).events == [EVENTS[0]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_line(format="kvprof-events/7"), "newer kvprof .*kvprof-events/7.*upgrade"),
        (_line(format="kvprof-events/4"), "earlier kvprof .*kvprof-events/4"),
        (_line(format="other/1"), "not a recorded kvprof run"),
        (b'{"tokens": [1, 2]}\n', "not a recorded kvprof run"),
        (b"not JSON\n", "line 1 is damaged"),
        (b"\x00\x01\x02", "not a recorded kvprof run"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / EVENTS_NAME
    path.write_bytes(content)
    with pytest.raises(FailedError, match=said):
        read_events(path)
    if content.endswith(b"\n"):  # else the rest of the line may still come
        with pytest.raises(FailedError, match=said):
            Follower(path).poll()


def test_a_missing_record_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_events(tmp_path / "gone")
    with pytest.raises(UsageError, match="is a folder"):
        read_events(tmp_path)


def test_events_are_found_in_a_folder_compressed_or_not(tmp_path: Path) -> None:
    assert find_events(tmp_path) is None
    zipped = tmp_path / f"{EVENTS_NAME}.gz"
    zipped.write_bytes(gzip.compress(write(tmp_path / EVENTS_NAME, EVENTS).read_bytes()))
    assert find_events(tmp_path) == tmp_path / EVENTS_NAME
    (tmp_path / EVENTS_NAME).unlink()
    assert find_events(tmp_path) == zipped
    assert read_events(zipped).events == EVENTS


def test_followers_see_whole_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_NAME
    first, second = Follower(path), Follower(path)
    assert first.poll() == []  # not there yet
    with Journal(path) as journal:
        journal.emit(EVENTS[0])
        assert first.poll() == EVENTS[:1]
        assert first.poll() == []
        journal.emit(EVENTS[1])
        journal.emit(EVENTS[2])
        assert first.poll() == EVENTS[1:3]
        assert second.poll(at_most=2) == EVENTS[:2]
        assert second.poll() == EVENTS[2:3]
        for event in EVENTS[3:]:
            journal.emit(event)
    assert first.poll() + second.poll() == 2 * EVENTS[3:]
    assert first.finished
    assert first.poll() == []


def test_a_follower_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_NAME
    line = _line()
    follower = Follower(path)
    with path.open("wb", buffering=0) as file:
        file.write(line[:30])
        assert follower.poll() == []
        file.write(line[30:-1])
        assert follower.poll() == []
        file.write(line[-1:])
        assert follower.poll() == EVENTS[:1]


def test_a_follower_stops_at_damage_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / EVENTS_NAME, EVENTS[:2])
    with path.open("ab") as file:
        file.write(b"{}\n")
    follower = Follower(path)
    assert follower.poll() == EVENTS[:2]
    assert follower.damage is not None
    assert "line 3" in follower.damage
    assert follower.poll() == []


def test_a_follower_notices_another_run_in_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / EVENTS_NAME, EVENTS[:2])
    follower = Follower(path)
    follower.poll()
    other = write(tmp_path / "other.jsonl", EVENTS)
    other.replace(path)
    with pytest.raises(FailedError, match="replaced by another run"):
        follower.poll()


def test_a_recording_that_ships_is_followed_to_its_end(tmp_path: Path) -> None:
    zipped = tmp_path / f"{EVENTS_NAME}.gz"
    zipped.write_bytes(gzip.compress(write(tmp_path / EVENTS_NAME, EVENTS).read_bytes()))
    follower = Follower(zipped)
    assert follower.poll() == EVENTS
    assert follower.finished


def test_the_clock_of_a_run_starts_with_its_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / EVENTS_NAME) as journal:
        first = journal.now()
        assert 0 <= first < 5
        assert journal.now() >= first


def test_what_is_carried_over_replaces_the_earlier_record_when_all_of_it_is_written(
    tmp_path: Path,
) -> None:
    """Killed on the way, the old file is there as it was; nothing of half of it ever is."""
    path = write(tmp_path / EVENTS_NAME, stream())
    before = path.read_bytes()
    with Journal(path, force=True) as journal:
        with journal.carrying_over():
            for event in stream():
                journal.emit(event)
                assert path.read_bytes() == before
        assert read_events(path).events == stream()
        assert path.read_bytes() == b"".join(journal._lines)
    assert [one.name for one in tmp_path.iterdir()] == [EVENTS_NAME]


def test_a_carrying_over_that_fails_leaves_the_earlier_record(tmp_path: Path) -> None:
    path = write(tmp_path / EVENTS_NAME, stream()[:9])
    before = path.read_bytes()

    def carried() -> None:
        with Journal(path, force=True) as journal, journal.carrying_over():
            for event in stream():
                journal.emit(event)
            raise KeyError

    with pytest.raises(KeyError):
        carried()
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [EVENTS_NAME]
