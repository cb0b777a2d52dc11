"""Times every n-th step of an engine in parts; the plug-in loads it only when asked to.

Steps that read prompts and steps that only decode are counted apart: the first are few. A step in a
CUDA graph cannot be told apart from outside, so a sampled one runs without, where the engine lets
it, and the one behind it is timed as a whole, as it is served. On a GPU times are of events in its
stream, read when it has passed them: nothing waits for them. On a CPU the host's clock tells.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from kvprof.runtime.clock import REST, Clock, EventClock, WallClock, timing
from kvprof.serving.sampled import SampledStep, StepWriter

__all__ = ["StepSampler", "contents", "on_gpu"]

#: Steps whose times the device has not told yet: more wait for nothing but a device that hangs.
_MOST_PENDING = 64


class StepSampler:
    """Samples the steps of one process.

    Parameters
    ----------
    every : int
    writer : StepWriter or None
        None where another rank, which does the same, writes them down.
    on_gpu : bool

    Attributes
    ----------
    in_parts : bool
        Whether the step under way is timed in parts, for which it must not be a graph.
    """

    def __init__(self, every: int, writer: StepWriter | None, *, on_gpu: bool) -> None:
        self.in_parts = False
        self._every = every
        self._on_gpu = on_gpu
        self._writer = writer
        self._counts = {True: 0, False: 0}
        self._pending: list[tuple[Clock, float, tuple[int, int, int]]] = []
        self._free: list[Clock] = []

    def step(
        self, run: Callable[[], Any], what: Callable[[], tuple[int, int, int]], *, reads: bool
    ) -> Any:
        """Run a step, timed if it is one of every `every`.

        Parameters
        ----------
        run : callable
        reads : bool
            Whether it reads a prompt.
        what : callable
            Asked behind it: sequences that decode, the tokens that they hold, tokens of prompts.
        """
        self._collect()
        self._counts[reads] += 1
        since = self._counts[reads] % self._every  # 0 is in parts, 1 the one behind it, as a whole
        if since > 1 or len(self._pending) >= _MOST_PENDING:
            return run()
        clock = self._free.pop() if self._free else self._clock()
        self.in_parts = since == 0
        clock.muted = not self.in_parts
        try:
            with timing(clock):
                found = run()
        finally:
            self.in_parts = False
        self._pending.append((clock, monotonic(), what()))
        self._collect()
        return found

    def _clock(self) -> Clock:
        return EventClock(watched=True) if self._on_gpu else WallClock()

    def _collect(self) -> None:
        """Write down the steps that the device has passed."""
        while self._pending and self._pending[0][0].passed():
            clock, end, (decodes, context, prefill) = self._pending.pop(0)
            stretches = clock.read()
            self._free.append(clock)
            if self._writer is None or not decodes + prefill:
                continue
            parts: dict[str, float] = {}
            for one in stretches:
                if one.part != REST:
                    parts[one.part] = parts.get(one.part, 0.0) + one.seconds
            seconds = sum(one.seconds for one in stretches)
            waited = sum(one.seconds for one in stretches if not one.exact) if parts else 0.0
            self._writer.write(SampledStep(end, seconds, decodes, context, prefill, parts, waited))


def contents(runner: Any, scheduled: Any) -> tuple[int, int, int]:
    """Return what a step of vLLM's model runner held.

    Parameters
    ----------
    runner : GPUModelRunner
        Behind the step.
    scheduled : SchedulerOutput

    Returns
    -------
    (int, int, int)
        Sequences that decode, the tokens that they hold together, and tokens of prompts.
    """
    decodes = context = prefill = 0
    # The second runner keeps a step's batch until its tokens are sampled.
    batch: Any = getattr(runner, "input_batch", None)
    if batch is None:
        if (state := runner.execute_model_state) is None:
            return 0, 0, 0  # nothing was scheduled
        batch = state.input_batch
        before = batch.num_computed_tokens_np
    else:
        before = batch.num_computed_tokens_cpu
    for row, name in enumerate(batch.req_ids):
        new = scheduled.num_scheduled_tokens.get(name, 0)
        if new == 1:
            decodes += 1
            context += int(before[row]) + 1
        else:
            prefill += new
    return decodes, context, prefill


def on_gpu(runner: Any) -> bool:
    """Whether a runner's device has a stream of its own."""
    return torch.device(runner.device).type == "cuda"
