"""What a case's events add up to, and its rows in the data of a ``jct`` result.

`Account` says where the time of a request went. The fold, the live view and the reports of a result
all ask it, so that they cannot say different things of one run.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvprof.analysis.stats import weighted_quantile
from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    MemorySample,
    PartSample,
    StepFinished,
)
from kvprof.records.parts import CACHE_PARTS, PARTS, UNATTRIBUTED, UNTIMED, ordered_parts

__all__ = [
    "MOST_UNATTRIBUTED",
    "Account",
    "Case",
    "Layer",
    "Series",
    "accounts",
    "case_row",
    "layer_rows",
    "mean",
    "part_rows",
    "part_times",
    "step_rows",
]

#: Share of a request's time by which its parts may miss it, either way, until a reader is warned.
MOST_UNATTRIBUTED = 0.1
_NOTED = 0.02  # of a request's time: parts that miss it by more are told beside its bar


def mean(values: Sequence[float] | None) -> float | None:
    """Return the mean; None where there are no values."""
    return sum(values) / len(values) if values else None


@dataclass
class Account:
    """Where the time of a request went, as far as it was measured."""

    #: (phase, part) to seconds of the request; never `unattributed`, which follows from them.
    parts: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Phase to the wall time of its passes so far.
    walked: dict[str, float] = field(default_factory=dict)
    #: Phase to its uninstrumented wall time; None until the request was measured to its end.
    walls: dict[str, float] | None = None

    def add(self, event: PartSample | StepFinished | CaseFinished) -> None:
        """Take the next event that tells times of the case."""
        match event:
            case PartSample():
                self.add_part(event.phase, event.part, event.seconds * event.weight)
            case StepFinished():
                self.add_pass(event.phase, event.seconds * event.weight)
            case CaseFinished():
                self.walls = {"prefill": event.prefill_seconds, "decode": event.decode_seconds}

    def add_part(self, phase: str, part: str, seconds: float) -> None:
        """Count time of a part."""
        self.parts[phase, part] = self.parts.get((phase, part), 0.0) + seconds

    def add_pass(self, phase: str, seconds: float) -> None:
        """Count wall time of passes."""
        self.walked[phase] = self.walked.get(phase, 0.0) + seconds

    @property
    def jct(self) -> float | None:
        """Seconds of the request, uninstrumented; None until it was measured to its end."""
        return None if self.walls is None else sum(self.walls.values())

    @property
    def seconds(self) -> float:
        """Seconds of the request, or those that were measured of it so far.

        A real run is timed as a whole first and in parts after that, a composed one the other way
        round: of each phase the longer of the two counts.
        """
        if self.walls is not None:
            return sum(self.walls.values())
        named = self._named()
        phases = {*self.walked, *named}
        return sum(max(self.walked.get(one, 0.0), named.get(one, 0.0)) for one in phases)

    def costs(self) -> dict[tuple[str, str], float]:
        """Return seconds per phase and part, with what no part explains once that is known."""
        costs = dict(self.parts)
        named = self._named()
        for phase, wall in (self.walls or {}).items():
            if wall or phase in named:
                costs[phase, UNATTRIBUTED] = wall - named.get(phase, 0.0)
        order = {part: place for place, part in enumerate(PARTS)}
        ranked = sorted(
            costs, key=lambda key: (key[0] != "prefill", order.get(key[1], len(order)), key[1])
        )
        return {key: costs[key] for key in ranked}

    def by_part(self) -> dict[str, float]:
        """Return seconds per part over both phases, as `ordered_parts` orders them."""
        total: dict[str, float] = {}
        for (_, part), seconds in self.costs().items():
            total[part] = total.get(part, 0.0) + seconds
        return {part: total[part] for part in ordered_parts(total)}

    def unattributed_share(self) -> float | None:
        """Return the share of the time that no part explains; negative where parts exceed it."""
        return sum(self._gaps().values()) / self.jct if self.jct else None

    def excess_share(self) -> float | None:
        """Return by how much the parts of a phase exceed its time, as a share of the request's.

        Phase by phase: what is too much in one would hide what is missing in the other.
        """
        if not self.jct:
            return None
        return sum(max(0.0, -gap) for gap in self._gaps().values()) / self.jct

    def adds_up(self) -> bool:
        """Tell whether the parts are parts of the time, so that they have shares of it."""
        excess = self.excess_share()
        if excess is None:  # not timed to its end, or no time passed, of which nothing is a part
            return self.walls is None or not any(self.parts.values())
        return excess <= MOST_UNATTRIBUTED

    def share(self, seconds: float) -> float | None:
        """Return the share of the time that `seconds` of a part are; None where there is none."""
        return seconds / self.seconds if self.seconds and self.adds_up() else None

    def stack(self) -> dict[str, float]:
        """Return what a bar of the request is made of: seconds by part, none of them negative.

        Time that was measured and is in no part yet follows as `UNTIMED`; a request whose parts do
        not add up is that alone.
        """
        if not self.adds_up():
            return {UNTIMED: self.seconds}
        found = {part: seconds for part, seconds in self.by_part().items() if seconds > 0}
        rest = self.seconds - sum(found.values())
        if self.walls is None and rest > 0:
            found[UNTIMED] = rest
        return found

    def misfit(self) -> str | None:
        """Return in a few words, for beside a bar, by how much its parts miss it; or None."""
        unnamed, excess = self.unattributed_share(), self.excess_share()
        if unnamed is None or excess is None:
            return None
        if excess > _NOTED:
            named = self._named()
            over = [phase for phase, gap in self._gaps().items() if gap < 0]
            whole = all(phase in over or not wall for phase, wall in (self.walls or {}).items())
            wall = sum(wall for phase, wall in (self.walls or {}).items() if whole or phase in over)
            of = "" if whole else f" of {' and '.join(over)}"
            if not wall:
                return f"parts{of} without a time"
            sums = sum(seconds for phase, seconds in named.items() if whole or phase in over)
            return f"parts{of} sum to {100 * sums / wall:.0f} % of it"
        if unnamed > MOST_UNATTRIBUTED:
            return f"{100 * unnamed:.0f} % in no part"
        return None

    def caveat(self) -> str | None:
        """Return in words why the shares of the parts are doubtful, or why there are none."""
        if not self.adds_up():
            return f"{self.misfit()}: they do not add up, and have no shares"
        unnamed = self.unattributed_share()
        if unnamed is not None and unnamed > MOST_UNATTRIBUTED:
            return f"{100 * unnamed:.1f} % of its time has no part; its shares are doubtful"
        return None

    def _named(self) -> dict[str, float]:
        named: dict[str, float] = {}
        for (phase, _), seconds in self.parts.items():
            named[phase] = named.get(phase, 0.0) + seconds
        return named

    def _gaps(self) -> dict[str, float]:
        """Return the time of each phase that no part explains."""
        named = self._named()
        return {
            phase: (self.walls or {}).get(phase, 0.0) - named.get(phase, 0.0)
            for phase in dict.fromkeys([*(self.walls or {}), *named])
        }


def part_times(accounts: Iterable[Account]) -> list[tuple[str, list[float | None]]]:
    """Return a row per part that any account has: its seconds in each, None where it has none."""
    columns = [account.by_part() for account in accounts]
    parts = ordered_parts(part for column in columns for part in column)
    return [(part, [column.get(part) for column in columns]) for part in parts]


def accounts(data: Mapping[str, Any]) -> dict[str, Account]:
    """Return the account of every case of a result, from its rows."""
    found: dict[str, Account] = {}
    for case in data["cases"]:
        own = found[case["case"]] = Account()
        if case["jct_seconds"] is not None:
            prefill = case["ttft_seconds"] or 0.0
            own.walls = {"prefill": prefill, "decode": case["jct_seconds"] - prefill}
            if case["decode_seconds"] is not None:
                own.walls["decode"] = case["decode_seconds"]
    for row in data["parts"]:
        if row["case"] in found and row["part"] != UNATTRIBUTED:
            found[row["case"]].add_part(row["phase"], row["part"], row["seconds"])
    for row in data["steps"]:
        if row["case"] in found:
            found[row["case"]].add_pass(row["phase"], row["seconds"] * row["weight"])
    return found


_Row = TypeVar("_Row")


class Series(Generic[_Row]):
    """Rows in the order in which they came: all of them, or so many that memory stays bounded.

    A bounded series keeps every row up to `most`, then every second one, then every fourth. Adding
    costs the same however long it is (amortised).

    Parameters
    ----------
    most : int or None
        Rows to hold, 2 or more; None holds all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = math.inf if most is None else most
        self._rows: list[_Row] = []
        self._last: _Row | None = None
        self.stride = 1
        self.count = 0

    def add(self, row: _Row) -> None:
        """Append a row."""
        if self.count % self.stride == 0:
            self._rows.append(row)
            if len(self._rows) >= self._most:
                self._rows = self._rows[::2]
                self.stride *= 2
        self.count += 1
        self._last = row

    @property
    def last(self) -> _Row | None:
        """The newest row, kept or not."""
        return self._last

    def __iter__(self) -> Iterator[_Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass
class Layer:
    """What is known of one layer of a case."""

    #: Per KV head, as the case's first event states them: a list of numbers, None, or whatever a
    #: strange record holds.
    key_ranks: Any = None
    value_ranks: Any = None
    nbytes: int | None = None  # of its cache
    #: What its attention and the method's own work on it cost the request; None where no part was
    #: timed by layer.
    seconds: float | None = None


class Case:
    """What the events of one case add up to so far.

    Parameters
    ----------
    started : CaseStarted
    most : int or None
        Rows that a series of it holds; None holds all, as a result needs it.

    Attributes
    ----------
    started : CaseStarted
    finished : CaseFinished or None
    account : Account
        Where the time of the request went so far.
    layers : dict of int to Layer
        Those that were stated or timed.
    steps : Series of StepFinished
        Of as many runs as are known: those of several take the place of a single one's.
    memory : Series of MemorySample
    """

    def __init__(self, started: CaseStarted, most: int | None = None) -> None:
        self.started = started
        self.finished: CaseFinished | None = None
        self.account = Account()
        self.layers: dict[int, Layer] = {}
        self._most = most
        self.steps: Series[StepFinished] = Series(most)
        self.memory: Series[MemorySample] = Series(most)
        for stated in started.layers:
            if isinstance(number := stated.get("layer"), int):
                self.layers[number] = Layer(
                    stated.get("key_ranks"), stated.get("value_ranks"), stated.get("nbytes")
                )

    def add(self, event: Event) -> None:
        """Take the next event of this case."""
        known = self.steps.last
        if isinstance(event, StepFinished) and known is not None and event.runs > known.runs:
            self.steps = Series(self._most)
            self.account.walked.clear()
        if isinstance(event, PartSample | StepFinished | CaseFinished):
            self.account.add(event)
        match event:
            case PartSample():
                if event.layer is not None and event.part in CACHE_PARTS:
                    layer = self.layers.setdefault(event.layer, Layer())
                    layer.seconds = (layer.seconds or 0.0) + event.seconds * event.weight
            case StepFinished():
                self.steps.add(event)
            case MemorySample():
                self.memory.add(event)
            case CaseFinished():
                self.finished = event

    def itl_seconds(self, share: float = 0.5) -> float | None:
        """Return the time between tokens that `share` of the decode steps so far do not exceed."""
        decode = [step for step in self.steps if step.phase == "decode"]
        seconds = [step.seconds for step in decode]
        return weighted_quantile(seconds, [step.weight for step in decode], share)


def case_row(case: Case) -> dict[str, Any]:
    """Return the case's row of ``data.cases``."""
    started, done, account = case.started, case.finished, case.account
    tokens = started.batch * started.output_len
    energy = done.energy_joules if done is not None else None
    prefill = done.prefill_interval if done is not None else None
    decoding = done.decode_interval if done is not None else None
    # A neighbour that is there for one phase is there for the other: ends add up.
    whole = (
        [a + b for a, b in zip(prefill, decoding, strict=True)] if prefill and decoding else None
    )
    return {
        "case": started.case,
        "method": started.method,
        "rate": started.rate,
        "batch": started.batch,
        "input_len": started.input_len,
        "output_len": started.output_len,
        "jct_seconds": account.jct,
        "jct_seconds_interval": whole,
        "ttft_seconds": done.prefill_seconds if done is not None else None,
        "ttft_seconds_interval": prefill,
        "decode_seconds": done.decode_seconds if done is not None else None,
        "decode_seconds_interval": decoding,
        "itl_seconds": case.itl_seconds(),
        "itl_p99_seconds": case.itl_seconds(0.99),
        "measured_seconds": account.seconds,
        "unattributed_share": account.unattributed_share(),
        "excess_share": account.excess_share(),
        "energy_per_token_joules": energy / tokens if energy is not None and tokens else None,
        "labels": started.labels,
        "complete": done is not None,
    }


def part_rows(case: Case) -> Iterable[dict[str, Any]]:
    """Return the case's rows of ``data.parts``."""
    started, account = case.started, case.account
    apart = set(re.findall(r"\w+", started.labels.get("by_difference", "")))
    for (phase, part), seconds in account.costs().items():
        yield {
            "case": started.case,
            "method": started.method,
            "batch": started.batch,
            "input_len": started.input_len,
            "output_len": started.output_len,
            "phase": phase,
            "part": part,
            "seconds": seconds,
            "share": account.share(seconds),
            "by_difference": part in apart,
        }


def step_rows(case: Case) -> Iterable[dict[str, Any]]:
    """Return the case's rows of ``data.steps``."""
    for step in case.steps:
        yield {
            "case": step.case,
            "phase": step.phase,
            "step": step.step,
            "context": step.context,
            "seconds": step.seconds,
            "weight": step.weight,
        }


def layer_rows(case: Case) -> Iterable[dict[str, Any]]:
    """Return the case's rows of ``data.layers``: what was said of each layer, and its time."""
    for number, layer in sorted(case.layers.items()):
        yield {"case": case.started.case, "layer": number, **vars(layer)}
