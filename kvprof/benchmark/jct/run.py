"""``run_jct``: every case of a request, as events in a journal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from triton.errors import TritonError

from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.machine import all_threads, gpu_doubts
from kvprof.benchmark.timing import DeviceLost, Interrupted
from kvprof.environment import collect_environment
from kvprof.errors import FailedError, KvprofError, LackingError
from kvprof.models.placement import main_device
from kvprof.moments.calibrator import CalibrationInterrupted
from kvprof.moments.options import Progress, silent
from kvprof.records.events import Event, RunFinished, RunStarted, Warned
from kvprof.records.journal import Journal
from kvprof.version import __version__

__all__ = ["JctRequest", "Run", "run_jct"]

_INTERRUPTED = "interrupted"


@dataclass(eq=False)
class Run:
    """A run under way: where its events go, and what happened to its cases.

    Attributes
    ----------
    request : JctRequest
    journal : Journal
    progress : Progress
    should_stop : callable
    device : torch.device
    extra : dict
        Of the run's last event.
    started : bool
        Whether the first event is written.
    done : int
        Cases that were measured to their end.
    problems : list of KvprofError
        Why others were not.
    """

    request: JctRequest
    journal: Journal
    progress: Progress
    should_stop: Callable[[], bool]
    device: torch.device
    extra: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    done: int = 0
    problems: list[KvprofError] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def emit(self, event: Event) -> None:
        """Write an event."""
        self.journal.emit(event)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return self.journal.now()

    def warn(self, text: str, case: str | None = None) -> None:
        """Say once what makes figures doubtful."""
        if text not in self._said:
            self._said.add(text)
            self.emit(Warned(self.now(), text, case))

    def start(self, cases: list[str], shape: dict[str, Any]) -> None:
        """Tell what will be measured."""
        request = self.request
        self.started = True
        baseline = request.baseline if request.baseline in request.methods else request.methods[0]
        self.emit(
            RunStarted(
                self.now(),
                datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                __version__,
                "jct",
                request.command,
                request.mode,
                {**request.described(), "device": str(self.device)},
                collect_environment(),
                shape,
                tuple(cases),
                baseline,
            )
        )
        for text in gpu_doubts(self.device, before=True):
            self.warn(text)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Let one case fail, and count it when it does not; see `spared`."""
        before = len(self.problems)
        with self.spared(name):
            yield
        if len(self.problems) == before:
            self.done += 1

    @contextmanager
    def spared(self, name: str) -> Iterator[None]:
        """Let something fail for lack of memory or because it does not run, and go on.

        Raises
        ------
        DeviceLost
            When nothing more can run on the GPU in this process.
        """
        try:
            yield
        except (DeviceLost, Interrupted, CalibrationInterrupted):
            raise
        except KvprofError as problem:
            self._failed(name, problem)
        except (MemoryError, torch.OutOfMemoryError):
            self._failed(name, LackingError(f"{name}: not enough memory on {self.device}"))
        except (RuntimeError, TritonError) as problem:
            words = " ".join(str(problem).split())[:160] or type(problem).__name__
            if "CUDA error" in words or "illegal memory access" in words:
                raise DeviceLost(f"{name}: {words}") from problem
            if "not enough memory" in words:
                self._failed(name, LackingError(f"{name}: not enough memory on {self.device}"))
                return
            self._failed(name, FailedError(f"{name}: it failed: {words}"))

    def _failed(self, name: str, problem: KvprofError) -> None:
        self.problems.append(problem)
        self.warn(f"not measured: {problem}", name)


def run_jct(
    request: JctRequest,
    journal: Journal,
    *,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Measure every case of a request and write what happens as events.

    The last event says whether all was measured. What was measured stays in the journal however the
    run ends.

    Parameters
    ----------
    request : JctRequest
    journal : Journal
        Entered.
    progress : Progress
        Shows how far the cases are.
    should_stop : callable
        Asked between samples and forward passes; True ends the run.

    Raises
    ------
    UsageError, LackingError, FailedError
        When nothing can be measured, before the first event or with the reason in the last one; and
        FailedError when the GPU stops (what was measured before is in the journal).
    """
    device = main_device(request.device)
    run = Run(request, journal, progress, should_stop, device)
    if request.composed:
        from kvprof.benchmark.jct.composed_run import run_composed as measure
    else:
        from kvprof.benchmark.jct.real_run import run_real as measure
    reason: str | None = None
    lost: KvprofError | None = None
    with all_threads():
        try:
            measure(run)
        except KvprofError as problem:
            if not run.started:
                raise
            reason, lost = str(problem), problem
        except (Interrupted, CalibrationInterrupted):
            reason = _INTERRUPTED
        except DeviceLost as stopped:
            reason = f"the GPU stopped ({stopped}); what comes after it was not measured"
            lost = FailedError(reason)
    if not run.started:  # it ended while the model was being loaded
        if lost is not None:
            raise lost
        return
    if reason is None and should_stop():
        reason = _INTERRUPTED
    if reason is None and run.problems:
        reason = (
            "nothing could be measured"
            if not run.done
            else f"{len(run.problems)} of {len(run.problems) + run.done} cases were not measured"
        )
        reason += f": {run.problems[0]}"
    for text in gpu_doubts(device, before=False) if lost is None else []:
        run.warn(text)
    journal.emit(RunFinished(journal.now(), reason is None, reason, run.extra))
    if lost is not None:
        raise lost
    if run.problems and not run.done:
        raise run.problems[0]
