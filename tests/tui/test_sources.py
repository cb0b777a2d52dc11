import gzip
import os
import time

import pytest

from kvprof.records.journal import Journal
from kvprof.tui.sources import Live, Replay
from tests.records.streams import stream, write


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def record(tmp_path):
    return write(tmp_path / "events.jsonl", stream(("full",), steps=10))


def take(source):
    found = []
    while events := source.poll(100):
        found += events
    return found


class TestLive:
    def test_it_begins_before_the_file_does(self, tmp_path):
        events = stream(("full",), steps=2)
        source = Live(tmp_path / "events.jsonl")
        assert source.poll(10) == []
        assert source.age() is None
        with Journal(tmp_path / "events.jsonl") as journal:
            journal.emit(events[0])
            assert source.poll(10) == [events[0]]
            for event in events[1:]:
                journal.emit(event)
        assert take(source) == events[1:]

    def test_a_file_of_an_earlier_run_is_not_read(self, record):
        wanted = []
        source = Live(record, wanted=lambda: bool(wanted))
        assert source.poll(10) == []
        wanted.append(True)
        assert len(source.poll(10)) == 10

    def test_it_says_since_when_nothing_came(self, record):
        old = time.time() - 90
        os.utime(record, (old, old))
        assert Live(record).age() == pytest.approx(90, abs=5)


class TestReplay:
    def test_events_come_at_their_own_times(self, record):
        events, clock = stream(("full",), steps=10), Clock()
        source = Replay(record, 2.0, clock)
        assert take(source) == [event for event in events if event.time == 0]
        half = events[len(events) // 2].time
        clock.now += half / 2  # twice as fast
        found = take(source)
        assert found[-1].time <= half + 1e-9
        assert found[-1].time == pytest.approx(half, rel=0.01)
        assert source.playing
        clock.now += 1000
        take(source)
        assert not source.playing

    def test_a_jump_plays_the_rest_at_once(self, record):
        source = Replay(record, 1.0, Clock())
        first = take(source)
        source.jump()
        assert not source.playing
        assert first + take(source) == stream(("full",), steps=10)

    def test_no_time_passes_in_a_pause(self, record):
        clock = Clock()
        source = Replay(record, 1.0, clock)
        take(source)
        source.pause()
        clock.now += 1000
        assert source.poll(100) == []
        clock.now += 1000
        assert source.poll(100) != []

    def test_damage_is_told_after_what_comes_before_it(self, record):
        lines = record.read_bytes().splitlines(keepends=True)
        record.write_bytes(b"".join(lines[:20]) + b"{nonsense\n" + b"".join(lines[20:]))
        source = Replay(record, 1.0, Clock())
        first = source.poll(1)
        assert source.damage is None
        source.jump()
        assert len(first + take(source)) == 20
        assert "line 21" in source.damage

    def test_a_compressed_recording_plays(self, record, tmp_path):
        path = tmp_path / "events.jsonl.gz"
        path.write_bytes(gzip.compress(record.read_bytes()))
        source = Replay(path, 1.0, Clock())
        source.jump()
        assert take(source) == stream(("full",), steps=10)
