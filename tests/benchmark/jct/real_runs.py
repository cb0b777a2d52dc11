"""Small real runs, and their events in order."""

from collections.abc import Callable
from typing import Any

import torch

from kvprof.benchmark.jct.real import measure_real
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import CaseFinished, Event
from tests.models.tiny import token_ids

PROMPT, NEW = 20, 7


class Ticks:
    """A clock of a run that counts how often it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return float(self.reads)


def measured(
    model: LoadedModel,
    plan: Plan,
    *,
    batch: int = 2,
    stop_after: int | None = None,
    emit: Callable[[Event], None] | None = None,
    **options: Any,
) -> tuple[CaseFinished | None, list[Event]]:
    """Measure a request of `PROMPT` tokens in and `NEW` out; stop after so many passes."""
    events: list[Event] = []
    passes = 0

    def should_stop() -> bool:
        nonlocal passes
        passes += 1
        return stop_after is not None and passes >= stop_after

    settings: dict[str, Any] = {
        "case": "a case",
        "input_ids": token_ids(batch, PROMPT),
        "output_len": NEW,
        "repeats": 1,
        "now": Ticks(),
        "should_stop": should_stop,
        **options,
    }
    done = measure_real(model, plan, emit=emit or events.append, **settings)
    return done, events


def of(events: list[Event], kind: str) -> list[Any]:
    """Return the events of one type."""
    return [event for event in events if event.event == kind]


def seconds_by(events: list[Event], *names: str) -> dict[Any, float]:
    """Add up what parts cost the request, by some of their attributes."""
    found: dict[Any, float] = {}
    for event in of(events, "part"):
        key = tuple(getattr(event, name) for name in names)
        found[key] = found.get(key, 0.0) + event.seconds * event.weight
    return found


def traces(model: LoadedModel) -> list[Any]:
    """Return what a measurement could leave behind in a model."""
    modules = list(model.model.modules())
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
        for module in modules
    ]
    attention = model.model.get_submodule(model.layout.layers[0].attention)
    space = type(attention).forward.__globals__
    rotations = {name: value for name, value in space.items() if "rotary" in name}
    with torch.no_grad():
        logits = model.model(token_ids(1, 9), use_cache=False).logits
    return [hooks, rotations, logits]
