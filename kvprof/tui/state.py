"""What a run has told so far: events in, figures out. No screen, no file, no clock."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvprof.records.events import (
    Balance,
    CaseFinished,
    CaseStarted,
    Event,
    LayerMeasured,
    MemorySample,
    PartSample,
    Preview,
    Progress,
    RunFinished,
    RunStarted,
    StepFinished,
    TelemetrySample,
    Warned,
)
from kvprof.tui.case_state import CaseState
from kvprof.tui.thinned import Thinned

__all__ = ["DeviceState", "LogLine", "RunState"]

#: Lines of the log that are kept; the file on disk has all.
LOG_LINES = 2000
_HISTORY = 256


@dataclass(frozen=True)
class LogLine:
    """One line of the log; `kind` is a word that says what it is."""

    time: float
    kind: str
    text: str


class DeviceState:
    """The telemetry of one device."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.throttled: tuple[str, ...] = ()
        self.history: Thinned[tuple[float, dict[str, float]]] = Thinned(_HISTORY)


class RunState:
    """Takes events in order; what an event costs does not depend on how many came before.

    Attributes
    ----------
    run : RunStarted or None
    end : RunFinished or None
    cases : dict of str to CaseState
        In the order in which they were started.
    current : str or None
        The case under way.
    progress : Progress or None
        The newest word on how far the case under way is, or the whole run.
    devices : dict of str to DeviceState
    log : deque of LogLine
        The newest lines.
    logged : int
        Lines ever logged.
    warnings : int
    time : float
        Of the newest event.
    version : int
        Events and lines so far.
    """

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.end: RunFinished | None = None
        self.cases: dict[str, CaseState] = {}
        self.current: str | None = None
        self.progress: Progress | None = None
        self._begun: float | None = None  # of the case under way, or of what counts for the run
        self._spent = 0.0  # seconds in cases that are finished
        self._written = 0  # tokens that they wrote
        self.devices: dict[str, DeviceState] = {}
        self._noted: set[tuple[str, str, str]] = set()
        self.log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self.logged = 0
        self.warnings = 0
        self.time = 0.0
        self.version = 0

    def apply(self, event: Event) -> None:
        """Take the next event."""
        self.version += 1
        self.time = max(self.time, event.time)
        match event:
            case PartSample():
                self.cases[event.case].part_sample(event)
            case StepFinished():
                self.cases[event.case].step_finished(event)
            case TelemetrySample():
                self._telemetry(event)
            case MemorySample():
                self.cases[event.case].memory_sample(event)
            case LayerMeasured():
                self.cases[event.case].layer_measured(event)
            case Balance():
                self.cases[event.case].balanced(event)
            case Warned():
                self.warnings += 1
                where = f"{event.case}: " if event.case is not None else ""
                self.write("warning", f"{where}{event.message}", event.time)
            case Progress():
                self._progress(event)
            case Preview():
                self._preview(event)
            case CaseStarted():
                self._case_started(event)
            case CaseFinished():
                self._case_finished(event)
            case RunStarted():
                self.run = event
                self.write("run", f"started: {' '.join(event.command)}", event.time)
            case RunFinished():
                self._finished(event)

    def apply_all(self, events: Iterable[Event]) -> None:
        """Take several events."""
        for event in events:
            self.apply(event)

    def write(self, kind: str, text: str, time: float | None = None) -> None:
        """Add a line to the log, at the newest event's time unless another is given."""
        self.version += 1
        self.logged += 1
        self.log.append(LogLine(self.time if time is None else time, kind, text))

    def requests(self) -> list[tuple[int, int, int]]:
        """Return (batch, input length, output length) of every request, as they were started."""
        return list(dict.fromkeys(case.request for case in self.cases.values()))

    def cases_of(self, request: tuple[int, int, int]) -> list[CaseState]:
        """Return the cases that can be held against each other."""
        return [case for case in self.cases.values() if case.request == request]

    def done(self) -> tuple[int, int]:
        """Return how many cases are finished, and how many there will be."""
        finished = sum(1 for case in self.cases.values() if case.finished is not None)
        planned = len(self.run.cases) if self.run is not None else 0
        return finished, max(planned, len(self.cases))

    def seconds_left(self, time: float) -> tuple[float, float] | None:
        """Return between how many seconds the cases under way and to come may take from a time on.

        Where figures settle early, a case takes less than it may. A case that is to come is taken
        to need as long per token that it writes; what prepares it comes on top.

        Parameters
        ----------
        time : float
            Of the run.

        Returns
        -------
        tuple of float or None
            None where nothing tells.
        """
        told, begun = self.progress, self._begun
        if told is None or begun is None or self.end is not None:
            return None
        done = told.done + (told.step / told.steps if told.steps else 0.0)
        elapsed, since = told.time - begun, max(0.0, time - told.time)
        if done <= 0 or elapsed <= 0:
            return None
        least, most = (
            max(0.0, elapsed / done * (units - done) - since) for units in (told.least, told.most)
        )
        case = self.cases.get(told.case) if told.case is not None else None
        if case is None:
            return least, most
        to_come = self._tokens_planned() - self._written - case.started.output_len
        return tuple(  # type: ignore[return-value] # two in, two out
            left + max(0, to_come) * self._pace(elapsed + since + left, case)
            for left in (least, most)
        )

    def _pace(self, own: float, case: CaseState) -> float:
        """Return seconds per token written: of the finished cases and the one under way."""
        return (self._spent + own) / max(1, self._written + case.started.output_len)

    def _tokens_planned(self) -> int:
        """Return how many tokens all cases of the run write, each with its batch at once."""
        told = self.run.inputs if self.run is not None else {}
        outputs = [one for one in _listed(told.get("output_lens")) if isinstance(one, int)]
        names = ("methods", "batches", "input_lens")
        return sum(outputs) * math.prod(len(_listed(told.get(name))) for name in names)

    def on_cpu(self) -> bool:
        """Tell whether the run measures a CPU."""
        return self.run is not None and str(self.run.inputs.get("device", "")).startswith("cpu")

    def _preview(self, event: Preview) -> None:
        if event.case not in self.cases:
            self.cases[event.case] = CaseState.seen(event)
        self.cases[event.case].previewed(event)

    def _progress(self, event: Progress) -> None:
        before = self.progress
        if before is None or before.case != event.case:
            self._begun = event.time
        self.progress = event

    def _case_started(self, event: CaseStarted) -> None:
        before, new = self.cases.get(event.case), CaseState(event)
        if before is not None and before.preview is not None:
            new.previewed(before.preview)
        self.cases[event.case] = new
        self.current = event.case
        self.write("case", f"{event.case}: started", event.time)
        for what, words in event.labels.items():
            # A sweep says the same of a method at every length; once is enough.
            if (note := (event.method, what, words)) not in self._noted:
                self._noted.add(note)
                self.write("note", f"{event.method}: {what.replace('_', ' ')}: {words}", event.time)

    def _case_finished(self, event: CaseFinished) -> None:
        self.cases[event.case].case_finished(event)
        if self.current == event.case:
            self.current = None
        if self.progress is not None and self.progress.case == event.case:
            self._spent += event.time - (self._begun or 0.0)
            self._written += self.cases[event.case].started.output_len
            self.progress = self._begun = None
        wall = event.prefill_seconds + event.decode_seconds
        self.write("case", f"{event.case}: finished, {wall:.4g} s per request", event.time)

    def _telemetry(self, event: TelemetrySample) -> None:
        device = self.devices.setdefault(event.device, DeviceState())
        device.latest = event.values
        device.history.add((event.time, event.values))
        if event.throttled != device.throttled:
            reasons = ", ".join(event.throttled)
            text = f"slowed down: {reasons}" if reasons else "no longer slowed down"
            self.write("device", f"{event.device}: {text}", event.time)
        device.throttled = event.throttled

    def _finished(self, event: RunFinished) -> None:
        self.end = event
        if event.complete:
            self.write("run", "finished: everything was measured", event.time)
        else:
            self.write("run", f"ended early: {event.reason or 'interrupted'}", event.time)


def _listed(values: Any) -> list[Any]:
    """Return a list of a record's inputs; a record may hold anything there."""
    return list(values) if isinstance(values, list | tuple) else []
