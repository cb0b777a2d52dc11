"""Events of a run into its result: pure functions, the same for a live view and a file."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Generic, TypeVar

from kvprof.errors import FailedError
from kvprof.records.cases import Case, Series, case_row, layer_rows, part_rows, step_rows
from kvprof.records.events import (
    CaseStarted,
    Event,
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadSample,
    LoadServer,
    Progress,
    RunFinished,
    RunStarted,
    TelemetrySample,
    Warned,
)
from kvprof.records.load import LoadFold
from kvprof.records.result import RECORD_DAMAGED, RECORD_ENDS, build_result

__all__ = ["Fold", "fold", "result_of"]

_Case = TypeVar("_Case", bound=Case)
_SERIES = 1000  # telemetry samples that a result keeps per device
_RUNNING = f"{RECORD_ENDS}: it was killed, or is still running"


def fold(events: Iterable[Event]) -> dict[str, Any]:
    """Return the `data` of the result that events become; see ``schema/jct.json``."""
    folding = Fold(Case)
    folding.add_all(events)
    return folding.data()


def result_of(events: Iterable[Event], *, damage: str | None = None) -> dict[str, Any]:
    """Return the whole result that events become, marked incomplete when they end early."""
    folding = Fold(Case)
    folding.add_all(events)
    return folding.result(damage)


class Fold(Generic[_Case]):
    """Takes events one by one; what it holds and returns depends on nothing but them.

    The live view's state is one as well, with what only those who look on want to know.
    """

    def __init__(self, begin: Callable[[CaseStarted], _Case]) -> None:
        self._begin = begin
        self.run: RunStarted | None = None
        self.end: RunFinished | None = None
        self.cases: dict[str, _Case] = {}
        self.devices: dict[str, Series[TelemetrySample]] = {}
        self.warnings: list[str] = []
        self.load = LoadFold()

    def add(self, event: Event) -> None:
        """Take the next event of the journal."""
        match event:
            case RunStarted():
                self.run = event
            case RunFinished():
                self.end = event
            case Progress():
                pass  # for who looks on: nothing of a result
            case CaseStarted():
                self.cases[event.case] = self._begin(event)
            case (
                LoadServer() | LoadRateStarted() | LoadRequest() | LoadSample() | LoadRateFinished()
            ):
                self.load.add(event)
            case TelemetrySample():
                self.devices.setdefault(event.device, Series()).add(event)
            case Warned():
                where = "" if event.case is None else f"{event.case}: "
                self.warnings.append(where + event.message)
            case _:
                self.cases[getattr(event, "case")].add(event)  # noqa: B009 - only cases' are left

    def add_all(self, events: Iterable[Event]) -> None:
        """Take several events."""
        for event in events:
            self.add(event)

    def data(self) -> dict[str, Any]:
        """Return the `data` of the result; see ``schema/jct.json`` and ``schema/load.json``."""
        if self.run is not None and self.run.kind == "load":
            extra = self.end.extra if self.end is not None else {}
            return {**self.load.data(self.run), "telemetry": self._devices(), **extra}
        cases = list(self.cases.values())
        extra = self.end.extra if self.end is not None else {}
        return {
            "requests": None,
            **extra,
            "mode": self.run.mode if self.run else None,
            "shape": self.run.shape if self.run else {},
            "baseline": self.run.baseline if self.run else None,
            "cases": [case_row(case) for case in cases],
            "parts": [row for case in cases for row in part_rows(case)],
            "steps": [row for case in cases for row in step_rows(case)],
            "layers": [row for case in cases for row in layer_rows(case)],
            "memory": [
                {
                    "case": sample.case,
                    "context": sample.context,
                    "logical": sample.logical,
                    "allocated": sample.allocated,
                    "full_width": sample.full_width,
                    "peak": sample.peak,
                    "levels": sample.levels,
                }
                for case in cases
                for sample in case.memory
            ],
            "telemetry": self._devices(),
        }

    def _devices(self) -> dict[str, Any]:
        return {device: _telemetry(list(samples)) for device, samples in self.devices.items()}

    def result(self, damage: str | None = None) -> dict[str, Any]:
        """Return the whole result; see `result_of`."""
        started, ended = self.run, self.end
        if started is None:
            raise FailedError("the record has no event yet; try again when the run has started")
        try:
            created = datetime.fromisoformat(started.created)
            created.astimezone(UTC)
        except (ValueError, OverflowError):  # no date, or one at the very ends of the calendar
            raise FailedError(
                f"the record's first event has an invalid time: {started.created!r}"
            ) from None
        complete = ended is not None and ended.complete and damage is None
        reason = None
        if not complete:
            reason = ended.reason if ended is not None else _RUNNING
            if damage is not None:
                reason = f"{RECORD_DAMAGED}: {damage}"
        result = build_result(
            started.kind,
            environment=started.environment,
            inputs=started.inputs,
            data=self.data(),
            warnings=[*self.warnings, *self._caveats()],
            complete=complete,
            created=created,
            incomplete_reason=reason,
        )
        return result | {"kvprof_version": started.kvprof_version}

    def _caveats(self) -> list[str]:
        said = [(name, case.account.caveat()) for name, case in self.cases.items()]
        found = [f"{name}: {caveat}" for name, caveat in said if caveat is not None]
        return [*found, *self.load.caveats()]


def _telemetry(samples: Sequence[TelemetrySample]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for sample in samples for name in sample.values))
    values: dict[str, Any] = {}
    for name in names:
        known = [sample.values[name] for sample in samples if name in sample.values]
        values[name] = {"median": median(known), "least": min(known), "most": max(known)}
    reasons: dict[str, int] = {}
    for sample in samples:
        for reason in sample.throttled:
            reasons[reason] = reasons.get(reason, 0) + 1
    kept = samples[:: -(-len(samples) // _SERIES)]
    return {
        "samples": len(samples),
        "values": values,
        "throttled": reasons,
        "series": {
            "time": [sample.time for sample in kept],
            **{name: [sample.values.get(name) for sample in kept] for name in names},
        },
    }
