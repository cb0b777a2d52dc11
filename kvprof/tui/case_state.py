"""What is known of one case (a method at one batch, input and output length) so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprof.records.cases import CACHE_PARTS, Account, quantile
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
    measured : Account
        Where the time of the request went so far.
    preview : Preview or None
        What its parts may cost, while some of them are not measured.
    layers : dict of int to LayerState
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
        self.measured = Account()
        self.preview: Preview | None = None
        self.layers: dict[int, LayerState] = {}
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
        self.measured.add(event)
        self.phase, self.context = event.phase, event.context
        if event.layer is not None and event.part in CACHE_PARTS:
            layer = self.layers.setdefault(event.layer, LayerState())
            layer.seconds = (layer.seconds or 0.0) + event.seconds * event.weight

    def previewed(self, event: Preview) -> None:
        """Take what the first, short pass says."""
        self.version += 1
        self.preview = event

    @property
    def provisional(self) -> bool:
        """Whether some of its parts are those of the first, short pass."""
        return self.preview is not None and self.finished is None and any(
            getattr(self.preview, phase) for phase in self._unmeasured()
        )  # fmt: skip

    @property
    def account(self) -> Account:
        """Where the time went; of a phase without measured parts, by the first, short pass."""
        if not self.provisional:
            return self.measured
        mixed = Account(dict(self.measured.parts), dict(self.measured.walked))
        for phase in self._unmeasured():
            for part, seconds in getattr(self.preview, phase).items():
                mixed.add_part(phase, part, seconds)
        return mixed

    def _unmeasured(self) -> list[str]:
        named = {phase for phase, _ in self.measured.parts}
        return [phase for phase in PHASES if phase not in named]

    def step_finished(self, event: StepFinished) -> None:
        """Add a forward pass."""
        self.version += 1
        self.phase, self.context = event.phase, event.context
        self.measured.add(event)
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
        self.measured.add(event)

    def part_seconds(self) -> dict[str, float]:
        """Return seconds of the request by part, both phases; unattributed once it is known."""
        return self.account.by_part()

    def jct_seconds(self) -> float:
        """Return the uninstrumented wall time, or what was measured while there is none."""
        return self.account.seconds

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
