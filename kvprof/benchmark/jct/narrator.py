"""The events that tell of a real run's steps, their parts and the cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from kvprof.benchmark.jct.instrument import OTHERS
from kvprof.benchmark.jct.passes import Pass, step_seconds
from kvprof.benchmark.jct.sampling import Sampling
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.tokens import segments
from kvprof.models.load import LoadedModel
from kvprof.records.events import Event, MemorySample, PartSample, Progress, StepFinished
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.clock import REST

__all__ = ["Narrator", "layer_facts", "level_tokens", "memory_sample", "peak_bytes", "told"]

# --- What is known of a case before and beside its times: ranks, bytes, levels, peak memory.


def layer_facts(plan: Plan, tokens: int, *, itemsize: int, batch: int) -> list[dict[str, Any]]:
    """Return what `kvprof.records.events.CaseStarted` tells of each layer.

    Heads that share a latent have an equal part of its columns each.

    Parameters
    ----------
    plan : Plan
    tokens : int
        In the cache at the end of the request.
    itemsize : int
        Bytes of a value in the model's dtype.
    batch : int
    """
    found = []
    for index, layer in enumerate(plan.layers):
        alone = replace(plan, layers=(layer,))
        found.append(
            {
                "layer": index,
                "key_ranks": _by_head(layer.keys.groups),
                "value_ranks": _by_head(layer.values.groups),
                "nbytes": bytes_at(alone, tokens, itemsize=itemsize, batch=batch).total,
            }
        )
    return found


def _by_head(groups: tuple[HeadGroup, ...]) -> list[float]:
    return [
        group.rank if group.heads == 1 else group.rank / group.heads
        for group in groups
        for _ in range(group.heads)
    ]


def level_tokens(plan: Plan, tokens: int) -> dict[str, int]:
    """Return how many of a sequence's tokens are stored at each level; empty without levels.

    Those of the first layer without a sliding window. Levels are counted from the lowest; sinks
    are apart, and so is what is not quantised yet.

    Parameters
    ----------
    plan : Plan
    tokens : int
        Seen so far.
    """
    layer = next((x for x in plan.layers if x.sliding_window is None), None)
    if layer is None or len(plan.levels.shares) == 1:
        return {}
    found: dict[str, int] = {}
    for segment in segments(plan, layer, tokens):
        name = f"level {segment.level}"
        if segment.start == 0 and plan.levels.sink:
            name = "sinks"
        elif plan.quantiser is not None and not segment.quantised:
            name += ", full precision"
        found[name] = found.get(name, 0) + segment.tokens
    return found


def peak_bytes(device: torch.device) -> int:
    """Return a GPU's most allocated bytes since they were last reset, or a CPU's resident ones."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def memory_sample(
    time: float,
    case: str,
    plan: Plan,
    cache: CompressedCache,
    context: int,
    *,
    batch: int,
    itemsize: int,
    peak: int,
) -> MemorySample:
    """Return what a cache holds at a context.

    Parameters
    ----------
    time, case, context, peak
        As in the event.
    plan, cache
    batch, itemsize : int
        Sequences, and bytes of a value at full width.
    """
    return MemorySample(
        time,
        case,
        context,
        cache.nbytes,
        cache.allocated_bytes,
        full_bytes(plan, context, itemsize=itemsize, batch=batch),
        peak,
        level_tokens(plan, context),
    )


_MEMORY_SAMPLES = 9
_DOUBTFUL = 0.1  # of the GPU's time


class Narrator:
    """Makes events of steps.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
    case : str
    ids : Tensor
        ``[batch, input_len]``.
    sampling : Sampling
    on_gpu : bool
        What no mark names is then nobody's, and `host` what the GPU waited.
    emit, now : callable
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        case: str,
        ids: Tensor,
        sampling: Sampling,
        on_gpu: bool,
        emit: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self._loaded, self._plan, self._case = loaded, plan, case
        self._batch, self._input_len = ids.shape
        self._sampling, self._on_gpu = sampling, on_gpu
        self._emit, self._now = emit, now
        self._peak = 0
        self._told: dict[int, float] = {}  # by step, seconds of its parts
        places = np.linspace(0, sampling.steps, min(_MEMORY_SAMPLES, sampling.steps + 1))
        self._memory_at = {round(place) for place in places}

    def progress(self, done: int, least: int, most: int, step: int, steps: int) -> None:
        """Tell how many runs of the request there were, and how far the next one is."""
        self._emit(Progress(self._now(), self._case, "pass", done, least, most, step, steps))

    def step(self, number: int, step: Step) -> None:
        """Tell a step that ran without marks."""
        context = self._input_len + number
        event = StepFinished(self._now(), self._case, _phase(number), number, context, step.seconds)
        self._emit(event)

    def parts(self, number: int, passes: Sequence[Pass]) -> None:
        """Tell the parts of a step, unless they are told: those of its median run.

        Every part's own median would add up to less than any run took, because noise hits one part
        here and another one there.
        """
        known = [one.parts[number] for one in passes if number in one.parts]
        if not known or number in self._told:
            return
        middle = sorted(known, key=lambda parts: sum(parts.values()))[(len(known) - 1) // 2]
        self._told[number] = sum(middle.values())
        for key, seconds in middle.items():
            if told(key, self._on_gpu):
                self._part(number, key, seconds)

    def rest(self, plain: Sequence[Pass], timed: Sequence[Pass]) -> None:
        """Tell all parts that are not told yet; on a GPU also what it waited.

        A step's wait is its time without marks less the GPU's time with them. Where noise makes
        that negative the phase's other steps give way: cut off at 0 each, waits would add up to
        more than the phase has.
        """
        for number in sorted({number for one in timed for number in one.parts}):
            self.parts(number, timed)
        whole = [one for one in plain if one.ended is not None]
        if not self._on_gpu or not whole:
            return
        walls = step_seconds(whole)
        gaps = {number: walls[number] - busy for number, busy in sorted(self._told.items())}
        for phase in ("prefill", "decode"):
            own = {number: gap for number, gap in gaps.items() if _phase(number) == phase}
            total = sum(gap * self._sampling.told(number) for number, gap in own.items())
            positive = sum(max(0.0, gap) * self._sampling.told(n) for n, gap in own.items())
            share = max(0.0, total) / positive if positive else 0.0
            for number, gap in own.items():
                self._part(number, (REST, None), share * max(0.0, gap))

    def named(self, one: Pass) -> float:
        """Return what the parts of one run cost the request; on a GPU without waiting."""
        return sum(
            seconds * self._weight(number, key)
            for number, parts in one.parts.items()
            for key, seconds in parts.items()
            if told(key, self._on_gpu)
        )

    def _weight(self, number: int, key: tuple[str, int | None]) -> float:
        sampling = self._sampling
        if key == (REST, None):  # known of every step
            return float(sampling.told(number))
        each = sampling.weight if key[1] is not None else sampling.outside_weight
        return sampling.told(number) * each(number)

    def _part(self, number: int, key: tuple[str, int | None], seconds: float) -> None:
        part, layer = key
        event = PartSample(
            self._now(),
            self._case,
            _phase(number),
            part,
            seconds,
            number,
            self._input_len + number,
            layer,
            self._weight(number, key),
        )
        self._emit(event)

    def memory(self, number: int, runner: Runner) -> None:
        """Tell the cache's bytes after some of the steps."""
        if number not in self._memory_at:
            return
        assert runner.cache is not None
        self._peak = max(self._peak, peak_bytes(self._loaded.device))
        event = memory_sample(
            self._now(),
            self._case,
            self._plan,
            runner.cache,
            self._input_len + number,
            batch=self._batch,
            itemsize=self._loaded.dtype.itemsize,
            peak=self._peak,
        )
        self._emit(event)

    @staticmethod
    def doubt(timed: Sequence[Pass]) -> str | None:
        """Return why parts timed on a GPU may be too long; None where nothing speaks for it."""
        busy, doubtful = sum(one.timed for one in timed), sum(one.doubtful for one in timed)
        if doubtful <= _DOUBTFUL * busy:
            return None
        return (
            f"{doubtful / busy:.0%} of the time of its parts was measured while the GPU may have "
            "waited for the host, which asks it for values within a step: waiting that should be "
            "in host is in these parts"
        )


def _phase(number: int) -> str:
    return "decode" if number else "prefill"


def told(key: tuple[str, int | None], on_gpu: bool) -> bool:
    """Whether a stretch is a part: not the layers that others stand for, nor a GPU's waiting."""
    return key[0] != OTHERS and not (on_gpu and key[0] == REST)
