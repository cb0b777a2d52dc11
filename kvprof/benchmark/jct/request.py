"""What a run of ``bench --jct`` is asked for, and the run under way: where its events go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from kvprof.benchmark.jct.ablations import parse_variant
from kvprof.benchmark.machine import gpu_warnings
from kvprof.benchmark.methods import named_plans
from kvprof.benchmark.timing import DeviceLost
from kvprof.environment import collect_environment
from kvprof.errors import FailedError, Interrupted, KvprofError, LackingError, UsageError
from kvprof.progress import Progress
from kvprof.records.events import Event, RunStarted, Warned
from kvprof.records.journal import Journal
from kvprof.version import __version__

__all__ = ["DEFAULT_METHODS", "JctRequest", "Run", "case_name"]

DEFAULT_METHODS = ("full", "palu", "fdc")
_LEAST_REPEATS = 3
_KERNELS = ("auto", "on", "off")


def case_name(method: str, batch: int, input_len: int, output_len: int) -> str:
    """Return a case's name in its run, such as ``fdc b1 in2048 out64``."""
    return f"{method} b{batch} in{input_len} out{output_len}"


@dataclass(frozen=True)
class JctRequest:
    """What to measure."""

    model: str = "reference"  # A shape's name, `reference`, a folder, or a hub id
    mode: str = "real"  # `real` (a model generates) or `composed` (one layer's parts, put together)
    methods: tuple[str, ...] = DEFAULT_METHODS  # names of `plans` among them
    plans: tuple[str, ...] = ()  # files of saved plans; each is named by its file
    baseline: str = "full"  # the method against which differences are shown
    batches: tuple[int, ...] = (1,)  # every combination is a case
    input_lens: tuple[int, ...] = (1024,)
    output_lens: tuple[int, ...] = (64,)
    rate: float = 0.5  # of the cache's bytes, where a method's can be chosen
    rate_given: bool = False  # whether it was asked for
    ranks: str | None = None  # A file with widths, for composed runs
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0  # of inputs, weights and sampled lengths
    repeats: int | None = None
    tp: int = 1  # GPUs of tensor parallelism: the figures are one GPU's
    layers: int | None = None  # how many of a shape's layers; None for all
    trace: str | None = None  # lengths of requests; see `kvprof.serving.load.traces`
    requests: int = 200  # to sample from the trace
    kernels: str = "auto"  # of a real run; see `kvprof.runtime.compressed.compressed`
    command: tuple[str, ...] = ()  # as the user wrote it

    def __post_init__(self) -> None:
        if self.mode not in ("real", "composed"):
            raise UsageError(f"mode must be real or composed, not {self.mode!r}")
        for what, values in (
            ("--batch", self.batches),
            ("--input-len", self.input_lens),
            ("--output-len", self.output_lens),
        ):
            if not values or min(values) < 1:
                raise UsageError(f"{what} {min(values, default=0)}: use 1 or more")
        if not self.methods:
            raise UsageError("no method given; use for example --methods full,fdc")
        if self.repeats is not None and self.repeats < (_LEAST_REPEATS if self.composed else 1):
            least = _LEAST_REPEATS if self.composed else 1
            raise UsageError(f"--repeats {self.repeats}: use {least} or more for a {self.mode} run")
        if self.kernels not in _KERNELS:
            raise UsageError(f"--kernels {self.kernels!r}: use {', '.join(_KERNELS)}")
        if self.tp < 1:
            raise UsageError(f"--tp {self.tp}: use 2 or more GPUs")
        self._exclude()
        if self.composed:
            plans = named_plans(self.plans)
            for method in self.methods:
                if method not in plans:
                    parse_variant(method)

    def _exclude(self) -> None:
        """Refuse options that mean nothing together."""
        if self.composed:
            return
        alone = {
            "--tp": self.tp > 1,
            "--trace": self.trace is not None,
            "--ranks": self.ranks is not None,
        }
        if said := [option for option, given in alone.items() if given]:
            raise UsageError(
                f"{' and '.join(said)} requires a composed run: name a shape, such as --model "
                "Llama-3.1-8B, or add --composed"
            )
        if ablated := [name for name in self.methods if ":no-" in name]:
            raise UsageError(
                f"{ablated[0]} requires a composed run: name a shape or add --composed"
            )

    @property
    def composed(self) -> bool:
        """Whether one layer's parts are put together."""
        return self.mode == "composed"

    def cases(self) -> list[tuple[str, int, int, int]]:
        """Return every case: method, batch, input and output length."""
        return [
            (method, batch, given, written)
            for batch in self.batches
            for given in self.input_lens
            for written in self.output_lens
            for method in dict.fromkeys(self.methods)
        ]

    def described(self) -> dict[str, Any]:
        """Return every resolved option as JSON values; no path of this machine among them."""
        known = {
            key: value for key, value in asdict(self).items() if key not in ("command", "plans")
        }
        known["ranks"] = Path(self.ranks).name if self.ranks is not None else None
        if Path(self.model).expanduser().is_dir():
            known["model"] = Path(self.model).expanduser().resolve().name
        return known


@dataclass(eq=False)
class Run:
    """A run under way: where its events go, and what happened to its cases."""

    request: JctRequest
    journal: Journal
    progress: Progress
    should_stop: Callable[[], bool]
    device: torch.device
    extra: dict[str, Any] = field(default_factory=dict)  # of the run's last event
    started: bool = False  # whether the first event is written
    done: int = 0  # cases that were measured to their end
    problems: list[KvprofError] = field(default_factory=list)  # why others were not
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
        for text in gpu_warnings(self.device, before=True):
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
        """Let something fail for lack of memory or because it does not run, and go on."""
        try:
            yield
        except (DeviceLost, Interrupted):
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
            self._failed(name, FailedError(f"{name}: failed: {words}"))

    def _failed(self, name: str, problem: KvprofError) -> None:
        self.problems.append(problem)
        self.warn(f"not measured: {problem}", name)
