"""What one view looks at: the state, where its events come from, and the measurement behind it."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError, KvprofError
from kvprof.records.files import render_result, what_was_read
from kvprof.records.fold import result_of
from kvprof.records.journal import read_events
from kvprof.tui.figures import clock, duration
from kvprof.tui.sources import Source
from kvprof.tui.state import RunState
from kvprof.tui.worker import Worker

__all__ = ["Session", "recorded_result"]


def recorded_result(record: Path | None, result: dict[str, Any] | None) -> str:
    """Return the result of a run as its file's text: what is on disk now, incomplete or not."""
    if record is None:
        assert result is not None
        return render_result(result)
    if not record.exists():
        raise FailedError("no results to export yet")
    recording = read_events(record)
    return render_result(result_of(recording.events, damage=recording.damage))


_CHUNK = 100  # events between two chances to answer a key
_QUIET = 5.0  # seconds without an event that are worth saying


@dataclass
class Session:
    """A run as it is looked at."""

    name: str  # what the user named it
    source: Source
    record: Path | None = None  # the file of events; None for a result without them
    result: dict[str, Any] | None = None
    worker: Worker | None = None  # the measurement, when the view started it
    state: RunState = field(default_factory=RunState)
    problem: str | None = None  # why no more events are read
    failure: str | None = None  # how the measurement failed
    paused: bool = False  # the view, never the measurement
    caught_up: bool = False  # whether everything that is there was read
    said: str = ""  # what the measurement said last
    _ended: bool = False
    _begun: float = field(default_factory=time.monotonic)

    def advance(self) -> bool:
        """Take the next events; return whether there were any."""
        self._listen()
        if self.paused or self.problem is not None:
            self.source.pause()
            return False
        try:
            events = self.source.poll(_CHUNK)
        except KvprofError as problem:
            self._stop_reading(str(problem))
            return False
        try:
            with what_was_read(self.name):
                self.state.add_all(events)
        except KvprofError as problem:
            self._stop_reading(str(problem))
            return False
        if self.source.damage is not None:
            self._stop_reading(f"{self.source.damage}; showing what precedes it")
        if not events:
            self.caught_up = True
        return bool(events)

    @property
    def measuring(self) -> bool:
        """Whether a measurement of the view's own is running."""
        return self.worker is not None and self.worker.running

    @property
    def exit_code(self) -> int:
        """The exit code of the view: the measurement's own when it has ended, else 0."""
        code = self.worker.exit_code if self.worker is not None else None
        return code or 0

    def banner(self) -> str | None:
        """Return what must be read before any figure, or None."""
        return self.failure or self.problem

    def status(self) -> str:
        """Return in a few words how far the run is."""
        if self.paused:
            return "‖ paused"
        if self.failure is not None:
            return "✖ the measurement failed"
        if self.problem is not None:
            return "✖ cannot read further"
        state = self.state
        if state.end is not None:
            return "■ finished" if state.end.complete else "■ ended early"
        if self.source.playing:
            return f"► replay · {clock(state.time)}"
        if self.worker is not None and self.worker.stopping and self.measuring:
            return "● stopping after the current step"
        if self.worker is not None and not self.measuring and self.caught_up:
            return "■ ended early"
        if state.run is None:
            return "○ waiting for the first event" if self.record is not None else "■ a result"
        age = (self.source.age() or 0.0) if self.caught_up else 0.0
        if age > _QUIET and not self.measuring:
            # Between two cases a plan is made or a kernel compiled, which is no event.
            preparing = "waiting for a server" if state.is_load else "preparing a case"
            doing = "stuck" if state.current is not None else preparing
            if state.is_simulated:  # a rate is worked out before any of it is told
                doing = "simulating"
            return f"○ no event for {clock(age)}: {doing}, or killed"
        return f"● {self._doing()} · {clock(state.time + age)}"

    def progress(self) -> str:
        """Return how far the measurement is, and what it says where it does not tell."""
        state = self.state
        if state.end is not None or self.banner() is not None or state.run is None:
            return self._saying()
        newest = state.progress
        if newest is None:
            return self._saying()
        words = []
        if newest.done < newest.most:
            sure = newest.least == newest.most or newest.done >= newest.least
            of = f"{newest.most}" if sure else f"{newest.least}–{newest.most}"
            words.append(f"{newest.unit} {newest.done + 1} of {of}")
        if newest.step:
            words.append(f"step {newest.step:,} of {newest.steps:,}")
        case = state.cases.get(state.current or "")
        first = case.ttft_seconds() if case is not None else None
        if first is not None:
            words.append(f"first token {duration(first)}")
        if (left := state.seconds_left(self._now())) is not None:
            low, high = (clock(seconds) for seconds in left)
            words.append(f"about {low if low == high else f'{low}–{high}'} left")
        return " · ".join(words)

    def _saying(self) -> str:
        # Loading and calibrating take minutes, and are no events.
        over = self.state.end is not None or (self.worker is not None and not self.measuring)
        if self.said and not over:
            return f"measurement: {self.said}"
        if self.measuring and self.state.run is None:
            waited = clock(time.monotonic() - self._begun)
            return f"starting: loading torch · {waited}"
        return ""

    def _now(self) -> float:
        """Return the time of the run that the view shows."""
        live = self.caught_up and not self.paused and not self.source.playing
        return self.state.time + ((self.source.age() or 0.0) if live else 0.0)

    def _doing(self) -> str:
        if self.state.is_load:
            return self.state.current or "preparing the next rate"
        done, planned = self.state.done()
        if self.state.current is not None:
            return f"measuring case {done + 1} of {planned}"
        return f"preparing case {done + 1} of {planned}" if done < planned else "finishing"

    def _stop_reading(self, why: str) -> None:
        self.problem = why
        self.state.write("damage", why)

    def _listen(self) -> None:
        """Take what the measurement says on stderr, and notice its end."""
        worker = self.worker
        if worker is None or self._ended:
            return
        ended = not worker.running  # before its last words are read
        for line in worker.new_messages():
            self.state.write("says", line)
            self.said = line
        if not ended:
            return
        self._ended = True
        code = worker.exit_code or 0
        self.state.version += 1
        if code and not worker.stopping:
            words = f"the measurement exited with code {code}: {worker.last_words()}"
            self.failure = words
            self.state.write("failed", words)
