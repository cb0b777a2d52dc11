"""What a run has told so far: events in, figures out. No screen, no file, no clock."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvprof.records.cases import Case, Layer, Series
from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    LoadRateFinished,
    LoadRateStarted,
    LoadSample,
    LoadServer,
    MemorySample,
    Progress,
    RunFinished,
    RunStarted,
    StepFinished,
    TelemetrySample,
    Warned,
)
from kvprof.records.fold import Fold
from kvprof.records.parts import UNATTRIBUTED
from kvprof.tui.load_figures import RateBrief, brief_from_row, brief_of

__all__ = ["CaseState", "LogLine", "RunState", "state_of"]

#: Rows that a series of a case holds at most; below it nothing is left out.
_KEPT = 2048


class CaseState(Case):
    """One case as it is looked at; every method costs the same however many events came before."""

    def __init__(self, started: CaseStarted) -> None:
        super().__init__(started, _KEPT)
        self.peak: int | None = None  # bytes of the device at most
        self.version = 0  # grows with every change, so that a screen can tell whether to draw again
        self._first_token: float | None = None

    @property
    def name(self) -> str:
        """The case's name in the run."""
        return self.started.case

    @property
    def method(self) -> str:
        """The method's name."""
        return self.started.method

    @property
    def request(self) -> tuple[int, int, int]:
        """Batch, input length and output length: cases that share it can be compared."""
        return self.started.batch, self.started.input_len, self.started.output_len

    def add(self, event: Event) -> None:
        """Take the next event of this case."""
        self.version += 1
        super().add(event)
        match event:
            case StepFinished(phase="prefill") if self._first_token is None:
                self._first_token = event.seconds
            case MemorySample() if event.peak is not None:
                self.peak = max(self.peak or 0, event.peak)

    def ttft_seconds(self) -> float | None:
        """Return the time to the first token, without instrumentation.

        Until the case has finished: of the first run of the request.
        """
        if self.finished is not None:
            return self.finished.prefill_seconds
        return self._first_token


#: Lines of the log that are kept; the file on disk has all.
LOG_LINES = 2000
_HISTORY = 256


@dataclass(frozen=True)
class LogLine:
    """One line of the log; `kind` is a word that says what it is."""

    time: float
    kind: str
    text: str


class RunState(Fold[CaseState]):
    """The fold of a run that is looked at: what an event costs does not depend on those before."""

    def __init__(self) -> None:
        super().__init__(CaseState)
        self.briefs: dict[str, RateBrief] = {}  # of a load: the rates that are over, by case
        self.current: str | None = None  # the case under way
        #: The newest word on how far the case under way is, or the whole run.
        self.progress: Progress | None = None
        self._begun: float | None = None  # of the case under way, or of what counts for the run
        self._spent = 0.0  # seconds in cases that are finished
        self._written = 0  # tokens that they wrote
        self._noted: set[tuple[str, str, str]] = set()
        self.log: deque[LogLine] = deque(maxlen=LOG_LINES)  # the newest lines
        self.logged = 0  # lines ever logged
        self.time = 0.0  # of the newest event
        self.version = 0  # events and lines so far

    def add(self, event: Event) -> None:
        """Take the next event."""
        self.version += 1
        self.time = max(self.time, event.time)
        match event:
            case TelemetrySample():
                self._telemetry(event)
            case CaseStarted():
                self._case_started(event)
            case Progress():
                self._progress(event)
            case _:
                super().add(event)
        match event:
            case Warned():
                self.write("warning", self.warnings[-1], event.time)
            case CaseFinished():
                self._case_finished(event)
            case RunStarted():
                self.write("run", f"started: {' '.join(event.command)}", event.time)
            case RunFinished():
                self._finished(event)
            case LoadServer():
                self._server_ready(event)
            case LoadRateStarted():
                self.current = event.case
                self.briefs.pop(event.case, None)
                words = f"{event.requests:,} requests in {event.seconds:.0f} s"
                self.write("rate", f"{event.case}: started, {words}", event.time)
            case LoadRateFinished():
                self._rate_finished(event)

    def write(self, kind: str, text: str, time: float | None = None) -> None:
        """Add a line to the log, at the newest event's time unless another is given."""
        self.version += 1
        self.logged += 1
        self.log.append(LogLine(self.time if time is None else time, kind, text))

    @property
    def is_load(self) -> bool:
        """Whether the run puts servers under load, rather than one request after the other."""
        return self.run is not None and self.run.kind == "load"

    @property
    def is_simulated(self) -> bool:
        """Whether the run is a load without a server."""
        return self.run is not None and self.is_load and self.run.mode == "simulated"

    @property
    def objective(self) -> dict[str, float]:
        """What a request under load must keep; see `kvprof.records.load.rate_row`."""
        wanted = self.run.inputs.get("objective") if self.run is not None else None
        if not isinstance(wanted, dict):
            return {}
        return {name: value for name, value in wanted.items() if isinstance(value, int | float)}

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
        """
        newest, begun = self.progress, self._begun
        if newest is None or begun is None or self.end is not None:
            return None
        done = newest.done + (newest.step / newest.steps if newest.steps else 0.0)
        elapsed, since = newest.time - begun, max(0.0, time - newest.time)
        if done <= 0 or elapsed <= 0:
            return None
        least, most = (
            max(0.0, elapsed / done * (units - done) - since)
            for units in (newest.least, newest.most)
        )
        case = self.cases.get(newest.case) if newest.case is not None else None
        if case is None:
            return least, most
        to_come = self._tokens_planned() - self._written - case.started.output_len

        def with_others(left: float) -> float:
            return left + max(0, to_come) * self._pace(elapsed + since + left, case)

        return with_others(least), with_others(most)

    def _pace(self, own: float, case: CaseState) -> float:
        """Return seconds per token written: of the finished cases and the one under way."""
        return (self._spent + own) / max(1, self._written + case.started.output_len)

    def _tokens_planned(self) -> int:
        """Return how many tokens all cases of the run write, each with its batch at once."""
        inputs = self.run.inputs if self.run is not None else {}
        outputs = [one for one in _listed(inputs.get("output_lens")) if isinstance(one, int)]
        names = ("methods", "batches", "input_lens")
        return sum(outputs) * math.prod(len(_listed(inputs.get(name))) for name in names)

    def _server_ready(self, event: LoadServer) -> None:
        words = [f"ready after {event.seconds:.3g} s"] if event.seconds else ["ready"]
        if event.engine is not None:
            words.append(event.engine)
        if event.cache_tokens is not None:
            words.append(f"{event.cache_tokens:,} tokens of cache")
        kind = "engine" if self.is_simulated else "server"
        self.write(kind, f"{event.method}: {', '.join(words)}", event.time)
        for name, value in event.settings.items():
            self.write("note", f"{event.method}: {name}: {value}", event.time)

    def _rate_finished(self, event: LoadRateFinished) -> None:
        if self.current == event.case:
            self.current = None
        brief = brief_of(self.load.cases[event.case], self.objective)
        self.briefs[event.case] = brief
        how = "over" if event.complete else f"abandoned: {event.reason}"
        latency = f", {brief.latency:.4g} s per token" if brief.latency is not None else ""
        self.write("rate", f"{event.case}: {how}{latency}", event.time)

    def _progress(self, event: Progress) -> None:
        before = self.progress
        if before is None or before.case != event.case:
            self._begun = event.time
        self.progress = event

    def _case_started(self, event: CaseStarted) -> None:
        super().add(event)
        self.current = event.case
        self.write("case", f"{event.case}: started", event.time)
        for what, words in event.labels.items():
            # A sweep says the same of a method at every length; once is enough.
            if (note := (event.method, what, words)) not in self._noted:
                self._noted.add(note)
                self.write("note", f"{event.method}: {what.replace('_', ' ')}: {words}", event.time)

    def _case_finished(self, event: CaseFinished) -> None:
        if self.current == event.case:
            self.current = None
        if self.progress is not None and self.progress.case == event.case:
            self._spent += event.time - (self._begun or 0.0)
            self._written += self.cases[event.case].started.output_len
            self.progress = self._begun = None
        wall = event.prefill_seconds + event.decode_seconds
        self.write("case", f"{event.case}: finished, {wall:.4g} s per request", event.time)

    def _telemetry(self, event: TelemetrySample) -> None:
        before = self.devices.setdefault(event.device, Series(_HISTORY)).last
        super().add(event)
        if event.throttled != (before.throttled if before is not None else ()):
            reasons = ", ".join(event.throttled)
            text = f"throttled: {reasons}" if reasons else "no longer throttled"
            self.write("device", f"{event.device}: {text}", event.time)

    def _finished(self, event: RunFinished) -> None:
        if event.complete:
            self.write("run", "finished", event.time)
        else:
            self.write("run", f"ended early: {event.reason or 'interrupted'}", event.time)


def _listed(values: Any) -> list[Any]:
    """Return a list of a record's inputs; a record may hold anything there."""
    return list(values) if isinstance(values, list | tuple) else []


# --- The state of a run of which only the result is left.


def state_of(result: dict[str, Any]) -> RunState:
    """Return the state that a finished run's events would have left."""
    state, data = RunState(), result["data"]
    if result["kind"] == "load":
        return _load_state(state, result)
    state.add(_started(result, "jct", [row["case"] for row in data["cases"]]))
    for row in data["cases"]:
        _case(state, row, data)
    for device, entry in data["telemetry"].items():
        series = dict(entry["series"])
        times = series.pop("time")
        for reason, samples in entry["throttled"].items():
            of = entry["samples"]
            state.write("device", f"{device}: throttled in {samples} of {of} samples: {reason}")
        for index, time in enumerate(times):
            values = {name: row[index] for name, row in series.items() if row[index] is not None}
            state.add(TelemetrySample(time, device, values))
    for message in result["warnings"]:
        state.add(Warned(0.0, message))
    state.add(RunFinished(state.time, result["complete"], result["incomplete_reason"]))
    return state


def _started(result: dict[str, Any], kind: str, names: list[str]) -> RunStarted:
    data = result["data"]
    return RunStarted(
        0.0,
        result["created"],
        result["kvprof_version"],
        kind,
        ("kvprof", "bench", f"--{kind}"),
        data["mode"] or "",
        result["inputs"],
        result["environment"],
        data["shape"],
        tuple(names),
        data["baseline"] or "",
    )


def _load_state(state: RunState, result: dict[str, Any]) -> RunState:
    data = result["data"]
    state.add(_started(result, "load", [row["method"] for row in data["methods"]]))
    for method in data["methods"]:
        if method["servers"]:
            state.add(
                LoadServer(
                    0.0,
                    method["method"],
                    method["ready_seconds"] or 0.0,
                    method["servers"],
                    method["engine"],
                    method["cache_tokens"],
                    method["cache_bytes"],
                    method["settings"],
                )
            )
    series = {one["case"]: one for one in data["series"]}
    for row in data["rates"]:
        case, seconds = row["case"], row["window"][1]
        state.add(LoadRateStarted(0.0, case, row["method"], row["rate"], row["requests"], seconds))
        columns = series.get(case, {"at": []})
        names = [name for name in _SAMPLED if name in columns]
        for index, at in enumerate(columns["at"]):
            values = {name: columns[name][index] for name in names}
            state.add(LoadSample(0.0, case, at, **{"sent": 0, **values}))
        state.add(LoadRateFinished(0.0, case, row["complete"], row["reason"]))
        state.briefs[case] = brief_from_row(row)
    for message in result["warnings"]:
        state.add(Warned(0.0, message))
    state.add(RunFinished(state.time, result["complete"], result["incomplete_reason"]))
    return state


_SAMPLED = ("sent", "running", "waiting", "cache", "preemptions")


def _case(state: RunState, row: dict[str, Any], data: dict[str, Any]) -> None:
    name = row["case"]

    def own(key: str) -> list[dict[str, Any]]:
        return [entry for entry in data[key] if entry["case"] == name]

    state.add(
        CaseStarted(
            0.0,
            name,
            row["method"],
            row["rate"],
            row["batch"],
            row["input_len"],
            row["output_len"],
            own("layers"),
            row["labels"],
        )
    )
    case = state.cases[name]
    for part in own("parts"):
        if part["part"] != UNATTRIBUTED:
            case.account.add_part(part["phase"], part["part"], part["seconds"])
    for layer in own("layers"):
        case.layers.setdefault(layer["layer"], Layer()).seconds = layer["seconds"]
    for step in own("steps"):
        state.add(
            StepFinished(
                0.0,
                name,
                step["phase"],
                step["step"],
                step["context"],
                step["seconds"],
                step["weight"],
            )
        )
    for sample in own("memory"):
        state.add(MemorySample(time=0.0, **sample))
    if row["jct_seconds"] is not None:
        state.add(CaseFinished(0.0, name, row["ttft_seconds"], row["decode_seconds"]))
