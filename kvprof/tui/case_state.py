"""What is known of one case (a method at one batch, input and output length) so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprof.records.cases import CACHE_PARTS, quantile
from kvprof.records.events import (
    PHASES,
    Balance,
    CaseFinished,
    CaseStarted,
    LayerMeasured,
    MemorySample,
    PartSample,
    Preview,
    StepFinished,
)
from kvprof.tui.thinned import Thinned

__all__ = ["CaseState", "LayerState"]


@dataclass
class LayerState:
    """One layer of a case.

    Attributes
    ----------
    key_ranks, value_ranks : list of float
        Per KV head.
    nbytes : int or None
        Of its cache.
    error : float or None
        Relative Frobenius error of its attention.
    seconds : float or None
        What its attention and the method's own work on it cost the request; None where no part was
        timed by layer.
    """

    key_ranks: list[float] = field(default_factory=list)
    value_ranks: list[float] = field(default_factory=list)
    nbytes: int | None = None
    error: float | None = None
    seconds: float | None = None


class CaseState:
    """One case; every method costs the same however many events came before.

    Attributes
    ----------
    started : CaseStarted
    finished : CaseFinished or None
    preview : Preview or None
        What its parts may cost, while some of them are not measured.
    parts : dict
        Phase to part to seconds of the request.
    layers : dict of int to LayerState
    walked : float
        Wall time of the forward passes so far.
    steps : Thinned
        Decode steps as (context, seconds, weight).
    memory : Thinned
        Memory samples.
    peak : int or None
        Bytes of the device at most.
    balance : dict
        (phase, schedule) to the latest `Balance`.
    balances : int
        Such events so far.
    phase, context : str, int
        Where the case is.
    """

    def __init__(self, started: CaseStarted) -> None:
        self.started = started
        self.finished: CaseFinished | None = None
        self.preview: Preview | None = None
        self.parts: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
        self.layers: dict[int, LayerState] = {}
        self.walked = 0.0
        self._first_token: float | None = None
        self.steps: Thinned[tuple[int, float, float]] = Thinned()
        self.memory: Thinned[MemorySample] = Thinned()
        self.peak: int | None = None
        self.balance: dict[tuple[str, str], Balance] = {}
        self.balances = 0
        self.phase = ""
        self.context = 0
        #: Grows with every change, so that a screen can tell whether to draw again.
        self.version = 0
        for entry in started.layers:
            number = entry.get("layer")
            if isinstance(number, int):
                nbytes = entry.get("nbytes")
                self.layers[number] = LayerState(
                    key_ranks=_figures(entry.get("key_ranks")),
                    value_ranks=_figures(entry.get("value_ranks")),
                    nbytes=nbytes if isinstance(nbytes, int) else None,
                )

    @classmethod
    def seen(cls, event: Preview) -> "CaseState":
        """Return a case that was looked at, and has not started."""
        return cls(
            CaseStarted(
                event.time, event.case, event.method, None, event.batch, event.input_len,
                event.output_len,
            )
        )  # fmt: skip

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

    def part_sample(self, event: PartSample) -> None:
        """Add a timed part."""
        self.version += 1
        seconds = event.seconds * event.weight
        parts = self.parts.setdefault(event.phase, {})
        parts[event.part] = parts.get(event.part, 0.0) + seconds
        self.phase, self.context = event.phase, event.context
        if event.layer is not None and event.part in CACHE_PARTS:
            layer = self.layers.setdefault(event.layer, LayerState())
            layer.seconds = (layer.seconds or 0.0) + seconds

    def previewed(self, event: Preview) -> None:
        """Take what the first, short pass says."""
        self.version += 1
        self.preview = event

    @property
    def provisional(self) -> bool:
        """Whether some of its parts are those of the first, short pass."""
        return self.preview is not None and self.finished is None and not all(
            self.parts[phase] or not getattr(self.preview, phase) for phase in PHASES
        )  # fmt: skip

    def step_finished(self, event: StepFinished) -> None:
        """Add a forward pass."""
        self.version += 1
        self.phase, self.context = event.phase, event.context
        self.walked += event.seconds * event.weight
        if event.phase == "prefill" and self._first_token is None:
            self._first_token = event.seconds
        if event.phase == "decode":
            self.steps.add((event.context, event.seconds, event.weight))

    def layer_measured(self, event: LayerMeasured) -> None:
        """Add a layer's error and bytes."""
        self.version += 1
        layer = self.layers.setdefault(event.layer, LayerState())
        layer.error, layer.nbytes = event.error, event.nbytes

    def memory_sample(self, event: MemorySample) -> None:
        """Add bytes at a context."""
        self.version += 1
        self.memory.add(event)
        if event.peak is not None:
            self.peak = max(self.peak or 0, event.peak)

    def balanced(self, event: Balance) -> None:
        """Take the newest balance of a schedule."""
        self.version += 1
        self.balances += 1
        self.balance[event.phase, event.schedule] = event

    def case_finished(self, event: CaseFinished) -> None:
        """Take the uninstrumented wall times."""
        self.version += 1
        self.finished = event

    def part_seconds(self) -> dict[str, float]:
        """Return seconds of the request by part, both phases; unattributed once it is known.

        While nothing of a phase is measured, it is what the first, short pass says of it.
        """
        total: dict[str, float] = {}
        for phase, measured in self.parts.items():
            parts = measured
            if not parts and self.provisional:
                parts = getattr(self.preview, phase, {})
            for part, seconds in parts.items():
                total[part] = total.get(part, 0.0) + seconds
        if self.finished is not None:
            total["unattributed"] = self.jct_seconds() - sum(total.values())
        return total

    def jct_seconds(self) -> float:
        """Return the uninstrumented wall time, or the sum of the parts while there is none."""
        if self.finished is not None:
            return self.finished.prefill_seconds + self.finished.decode_seconds
        return sum(self.part_seconds().values())

    def ttft_seconds(self) -> float | None:
        """Return the time to the first token, without instrumentation.

        Until the case has finished: of the first run of the request, or what the first, short pass
        says.
        """
        if self.finished is not None:
            return self.finished.prefill_seconds
        if self._first_token is None and self.preview is not None:
            return sum(self.preview.prefill.values())
        return self._first_token

    def tbt_seconds(self) -> float | None:
        """Return the median time between tokens so far."""
        steps = list(self.steps)
        return quantile([step[1] for step in steps], [step[2] for step in steps], 0.5)

    def overhead(self) -> float | None:
        """Return what instrumentation added, as a share of the uninstrumented wall time."""
        end = self.finished
        if end is None or end.instrumented_prefill_seconds is None:
            return None
        with_it = end.instrumented_prefill_seconds + (end.instrumented_decode_seconds or 0.0)
        without = self.jct_seconds()
        return with_it / without - 1 if without > 0 else None


def _figures(values: Any) -> list[float]:
    """Return the numbers of a list; a record may hold anything there."""
    if not isinstance(values, Sequence):
        return []
    return [value for value in values if isinstance(value, int | float)]
