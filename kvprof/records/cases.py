"""What a case's events add up to, and its rows in the data of a ``jct`` result."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvprof.records.events import (
    PARTS,
    Balance,
    CaseFinished,
    CaseStarted,
    Event,
    LayerMeasured,
    MemorySample,
    PartSample,
    StepFinished,
)

__all__ = ["CACHE_PARTS", "Case", "case_row", "layer_rows", "part_rows", "quantile", "step_rows"]

#: Parts that work on the cache: what a layer's own time is the sum of.
CACHE_PARTS = (
    "attention", "decompress", "compress", "quantise", "evict", "basis", "merge", "schedule",
)  # fmt: skip


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float | None:
    """Return the smallest value at or below which at least `share` of the weight lies.

    Parameters
    ----------
    values, weights : sequence of float
        Equally long; weights are not negative.
    share : float
        0.5 for the median.
    """
    if not values:
        return None
    if len(set(weights)) == 1 and share == 0.5:
        return median(values)
    ordered = sorted(zip(values, weights, strict=True))
    wanted = share * sum(weights)
    below = 0.0
    for value, weight in ordered:
        below += weight
        # A sum of weights falls short of itself by rounding.
        if below >= wanted * (1 - 1e-12):
            return value
    return ordered[-1][0]


@dataclass
class Case:
    """What the events of one case add up to so far."""

    started: CaseStarted
    finished: CaseFinished | None = None
    parts: dict[tuple[str, str], float] = field(default_factory=dict)
    layer_seconds: dict[int, float] = field(default_factory=dict)
    measured: dict[int, LayerMeasured] = field(default_factory=dict)
    steps: list[StepFinished] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    balance: list[Balance] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take the next event of this case."""
        match event:
            case PartSample():
                cost = event.seconds * event.weight
                key = event.phase, event.part
                self.parts[key] = self.parts.get(key, 0.0) + cost
                if event.layer is not None and event.part in CACHE_PARTS:
                    known = self.layer_seconds.get(event.layer, 0.0)
                    self.layer_seconds[event.layer] = known + cost
            case StepFinished():
                self.steps.append(event)
            case LayerMeasured():
                self.measured[event.layer] = event
            case MemorySample():
                self.memory.append(event)
            case Balance():
                self.balance.append(event)
            case CaseFinished():
                self.finished = event

    @property
    def jct(self) -> float | None:
        """Seconds of the request, uninstrumented; None until the case has finished."""
        done = self.finished
        return None if done is None else done.prefill_seconds + done.decode_seconds

    @property
    def instrumented(self) -> float | None:
        """Seconds of the same request with every part timed."""
        done = self.finished
        if done is None or done.instrumented_prefill_seconds is None:
            return None
        return done.instrumented_prefill_seconds + (done.instrumented_decode_seconds or 0.0)

    def costs(self) -> dict[tuple[str, str], float]:
        """Seconds per phase and part, with what no part explains once the wall times are known."""
        costs = dict(self.parts)
        if self.finished is not None:
            walls = (
                ("prefill", self.finished.prefill_seconds),
                ("decode", self.finished.decode_seconds),
            )
            for phase, wall in walls:
                named = sum(cost for (where, _), cost in self.parts.items() if where == phase)
                if wall or named:
                    costs[phase, "unattributed"] = wall - named
        order = {part: place for place, part in enumerate(PARTS)}
        ranked = sorted(
            costs, key=lambda key: (key[0] != "prefill", order.get(key[1], len(order)), key[1])
        )
        return {key: costs[key] for key in ranked}

    def unattributed_share(self) -> float | None:
        """Share of the case's time that no part explains; negative where parts exceed it."""
        if not self.jct:
            return None
        return sum(cost for (_, part), cost in self.costs().items() if part == "unattributed") / (
            self.jct
        )


def case_row(case: Case) -> dict[str, Any]:
    """Return the case's row of ``data.cases``."""
    started, done = case.started, case.finished
    decode = [step for step in case.steps if step.phase == "decode"]
    seconds, weights = [step.seconds for step in decode], [step.weight for step in decode]
    tokens = started.batch * started.output_len
    energy = done.energy_joules if done is not None else None
    instrumented = case.instrumented
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
        "jct_seconds": case.jct,
        "jct_seconds_interval": whole,
        "ttft_seconds": done.prefill_seconds if done is not None else None,
        "ttft_seconds_interval": prefill,
        "decode_seconds": done.decode_seconds if done is not None else None,
        "decode_seconds_interval": decoding,
        "tbt_seconds": quantile(seconds, weights, 0.5),
        "tbt_p99_seconds": quantile(seconds, weights, 0.99),
        "instrumented_seconds": instrumented,
        "overhead": instrumented / case.jct - 1 if instrumented is not None and case.jct else None,
        "decode_overhead": _decode_overhead(done),
        "unattributed_share": case.unattributed_share(),
        "energy_per_token_joules": energy / tokens if energy is not None and tokens else None,
        "labels": started.labels,
        "complete": done is not None,
    }


def _decode_overhead(done: CaseFinished | None) -> float | None:
    if done is None or done.instrumented_decode_seconds is None or not done.decode_seconds:
        return None
    return done.instrumented_decode_seconds / done.decode_seconds - 1


def part_rows(case: Case) -> Iterable[dict[str, Any]]:
    """Return the case's rows of ``data.parts``."""
    started, costs = case.started, case.costs()
    # Of a case that never ended, the share is of what it measured: no other whole is known.
    whole = case.jct or sum(costs.values())
    apart = set(re.findall(r"\w+", started.labels.get("by_difference", "")))
    for (phase, part), seconds in costs.items():
        yield {
            "case": started.case,
            "method": started.method,
            "batch": started.batch,
            "input_len": started.input_len,
            "output_len": started.output_len,
            "phase": phase,
            "part": part,
            "seconds": seconds,
            "share": seconds / whole if whole else None,
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
    """Return the case's rows of ``data.layers``: what was said of each layer, and measured."""
    described = {
        one["layer"]: one for one in case.started.layers if isinstance(one.get("layer"), int)
    }
    for layer in sorted({*described, *case.measured, *case.layer_seconds}):
        stated = described.get(layer, {})
        measured = case.measured.get(layer)
        yield {
            "case": case.started.case,
            "layer": layer,
            "key_ranks": stated.get("key_ranks"),
            "value_ranks": stated.get("value_ranks"),
            "nbytes": measured.nbytes if measured is not None else stated.get("nbytes"),
            "error": measured.error if measured is not None else None,
            "seconds": case.layer_seconds.get(layer),
        }
