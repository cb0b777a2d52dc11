import errno
import json
import os

import pytest

from kvprof.errors import FailedError
from kvprof.records.files import write_beside
from kvprof.tui.session import recorded_result
from tests.records.streams import stream, write


def test_nothing_is_ever_overwritten(tmp_path):
    (tmp_path / "kvprof-log.svg").write_text("mine")
    second = write_beside(tmp_path / "kvprof-log.svg", b"two")
    third = write_beside(tmp_path / "kvprof-log.svg", b"three")
    assert (second.name, third.name) == ("kvprof-log-2.svg", "kvprof-log-3.svg")
    assert (tmp_path / "kvprof-log.svg").read_text() == "mine"
    assert second.read_text() == "two"


def test_what_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(FailedError, match="No space"):
        write_beside(tmp_path / "x.svg", b"text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_an_export_is_as_complete_as_the_run(tmp_path, share):
    events = stream(("full", "fdc"))
    record = write(tmp_path / "events.jsonl", events[: int(len(events) * share)])
    result = json.loads(recorded_result(record, None))
    assert result["kind"] == "jct"
    assert result["complete"] is (share == 1.0)
    assert len(result["data"]["cases"]) == (1 if share < 1 else 2)


def test_before_the_first_event_there_is_nothing_to_export(tmp_path):
    with pytest.raises(FailedError, match="no results"):
        recorded_result(tmp_path / "events.jsonl", None)
