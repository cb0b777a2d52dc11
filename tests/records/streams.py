"""Events of a run that never happened, plausible enough to look at: for folds, views and screens.

Times follow a simple model of a decode step, so that methods differ and contexts matter. Nothing
here is a measurement.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    MemorySample,
    PartSample,
    RunFinished,
    RunStarted,
    StepFinished,
    TelemetrySample,
    Warned,
)
from kvprof.records.journal import Journal
from tests.records.sample import ENVIRONMENT

HEADS = 4
HEAD_DIM = 64
INPUT_LEN = 2048
_LAYER_PARTS = ("norm", "qkv_proj", "rope", "attention", "o_proj", "mlp")
_OTHER_PARTS = ("embedding", "head", "sampling", "host")
#: Seconds of one occurrence, uncompressed and without context, in a decode step.
_BASE = {
    "norm": 4e-6, "qkv_proj": 2e-5, "rope": 3e-6, "attention": 1e-5, "o_proj": 1.2e-5, "mlp": 6e-5,
    "embedding": 5e-6, "head": 1e-4, "sampling": 2e-5, "host": 3e-4, "compress": 6e-6,
    "decompress": 5e-6, "schedule": 2e-6, "quantise": 4e-6,
}  # fmt: skip
#: Share of the dimensions that a method keeps, and the parts that it adds to a layer.
_METHODS: dict[str, tuple[float, tuple[str, ...]]] = {
    "full": (1.0, ()),
    "fp8": (0.5, ("quantise",)),
    "palu": (0.5, ("compress", "decompress")),
    "fdc": (0.5, ("compress", "schedule")),
    "kq": (0.45, ("compress", "schedule")),
    "tale": (0.3, ("compress", "decompress", "quantise")),
}


def stream(
    methods: Sequence[str] = ("full", "palu", "fdc"),
    layers: int = 4,
    steps: int = 20,
    seed: int = 0,
    inputs: Sequence[int] = (INPUT_LEN,),
) -> list[Event]:
    """Return the events of a whole run, in the order of their times.

    Parameters
    ----------
    methods : sequence of str
        A case each, per input length; known ones differ in plausible ways, others are uncompressed.
    layers, steps : int
        Of the model, and decode steps of each case.
    seed : int
    inputs : sequence of int
        Input lengths.
    """
    return _Run(methods, layers, steps, random.Random(seed), inputs).events()


def whole_first(events: Sequence[Event]) -> list[Event]:
    """Return a run's events as a real run has them: each case whole first, in parts after that."""

    def rank(event: Event) -> int:
        return 1 if isinstance(event, PartSample) else 0

    found: list[Event] = []
    own: list[Event] = []
    for event in events:
        if isinstance(event, CaseStarted | CaseFinished | RunFinished):
            found += [*sorted(own, key=rank), event]
            own = []
        else:
            own.append(event)
    return found + own


def cuts(events: Sequence[Event]) -> list[int]:
    """Return where a killed run may end: after each event that another kind follows."""
    ends = (n for n in range(1, len(events)) if events[n - 1].event != events[n].event)
    return [*ends, len(events)]


def write(path: Path, events: Sequence[Event]) -> Path:
    """Write events as a journal and return its path."""
    with Journal(path) as journal:
        for event in events:
            journal.emit(event)
    return path


def case_name(method: str, steps: int, input_len: int = INPUT_LEN) -> str:
    """Return the name that `stream` gives the case of a method."""
    return f"{method} b1 in{input_len} out{steps + 1}"


class _Run:
    def __init__(
        self,
        methods: Sequence[str],
        layers: int,
        steps: int,
        chance: random.Random,
        inputs: Sequence[int],
    ) -> None:
        self.methods, self.layers, self.steps = methods, layers, steps
        self.chance, self.inputs = chance, inputs
        self.now = 0.0

    def events(self) -> list[Event]:
        events: list[Event] = [self._started()]
        for input_len in self.inputs:
            for method in self.methods:
                events += self._case(method, input_len)
        extra = {"requests": None}
        return [*events, RunFinished(time=self.now, complete=True, extra=extra)]

    def _started(self) -> RunStarted:
        return RunStarted(
            time=0.0,
            created="2025-11-21T12:00:00Z",
            kvprof_version="0.1.0",
            kind="jct",
            command=("kvprof", "bench", "--jct", "--methods", ",".join(self.methods)),
            mode="real",
            inputs={"model": "reference", "device": "cpu", "seed": 0},
            environment=ENVIRONMENT,
            shape={
                "name": "reference",
                "layers": self.layers,
                "num_heads": 2 * HEADS,
                "num_kv_heads": HEADS,
                "head_dim": HEAD_DIM,
            },
            cases=tuple(
                case_name(method, self.steps, input_len)
                for input_len in self.inputs
                for method in self.methods
            ),
            baseline=self.methods[0],
        )

    def _case(self, method: str, input_len: int) -> Iterator[Event]:
        kept, added = _METHODS.get(method, (1.0, ()))
        case = case_name(method, self.steps, input_len)
        yield CaseStarted(
            time=self.now,
            case=case,
            method=method,
            rate=1 - kept,
            batch=1,
            input_len=input_len,
            output_len=self.steps + 1,
            layers=[self._layer(layer, kept, input_len) for layer in range(self.layers)],
            labels={"by_difference": "decompress"} if "decompress" in added else {},
        )
        if method == "fdc":
            yield Warned(time=self.now, case=case, message="the first step was slow and is kept")
        walls = {"prefill": 0.0, "decode": 0.0}
        for step in range(self.steps + 1):
            phase = "prefill" if step == 0 else "decode"
            before = self.now
            yield from self._pass(case, phase, step, input_len + step, kept, added)
            walls[phase] += self.now - before
        yield CaseFinished(
            time=self.now,
            case=case,
            prefill_seconds=walls["prefill"] * 0.99,
            decode_seconds=walls["decode"] * 0.99,
            energy_joules=80.0 * sum(walls.values()),
        )

    def _layer(self, layer: int, kept: float, input_len: int) -> dict[str, object]:
        def ranks(shift: int) -> list[int]:
            if kept == 1:
                return [HEAD_DIM] * HEADS
            # Later layers keep more, and no two heads alike.
            width = kept * HEAD_DIM * (0.8 + 0.4 * layer / max(1, self.layers - 1))
            return [max(4, round(width) + 2 * (head - 1) + shift) for head in range(HEADS)]

        return {
            "layer": layer,
            "key_ranks": ranks(-4),
            "value_ranks": ranks(4),
            "nbytes": round(self._full_bytes(input_len) * kept / self.layers),
        }

    def _full_bytes(self, context: int) -> int:
        return 2 * 2 * self.layers * HEADS * HEAD_DIM * context

    def _pass(
        self, case: str, phase: str, step: int, context: int, kept: float, added: tuple[str, ...]
    ) -> Iterator[Event]:
        wall = 0.0
        for layer, part in [
            *((layer, part) for layer in range(self.layers) for part in (*_LAYER_PARTS, *added)),
            *((None, part) for part in _OTHER_PARTS),
        ]:
            seconds = self._seconds(part, phase, context, kept)
            wall += seconds
            yield PartSample(
                time=self.now + wall,
                case=case,
                phase=phase,
                part=part,
                seconds=seconds,
                step=step,
                context=context,
                layer=layer,
            )
        wall *= 1.02  # what nothing has timed
        self.now += wall
        yield StepFinished(
            time=self.now, case=case, phase=phase, step=step, context=context, seconds=wall
        )
        if step % 5 == 0:
            logical = round(self._full_bytes(context) * kept)
            yield MemorySample(
                time=self.now,
                case=case,
                context=context,
                logical=logical,
                allocated=round(logical * 1.1),
                full_width=self._full_bytes(context),
                peak=2**28 + logical,
                levels={"full": context // 8, "half": context // 2} if "tale" in case else {},
            )
            values = {"memory_bytes": 2.0**28 + logical, "load": 0.5 + 0.1 * self.chance.random()}
            yield TelemetrySample(time=self.now, device="cpu", values=values)

    def _seconds(self, part: str, phase: str, context: int, kept: float) -> float:
        seconds = _BASE[part]
        if part in ("attention", "decompress"):
            seconds += 4e-8 * context * (kept if part == "attention" else 0.4)
        if phase == "prefill":
            seconds *= 20 if part not in ("head", "sampling", "host") else 1
        return seconds * self.chance.uniform(0.95, 1.05)
