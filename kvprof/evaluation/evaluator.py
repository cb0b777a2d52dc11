"""Evaluates plans on one sample: the uncompressed model once, then each plan against it."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvprof.environment import cpu_model, package_version
from kvprof.errors import FailedError
from kvprof.evaluation.assembly import (
    EvaluationSettings,
    Found,
    assembled,
    refuse_hidden,
    without_intervals,
)
from kvprof.evaluation.data import TaskItem, TextSample
from kvprof.evaluation.decode import (
    Advance,
    TaskBatch,
    baseline_logits,
    decoded_logits,
    greedy_answers,
    single_pass_logits,
)
from kvprof.evaluation.scores import TokenScores, score_tokens
from kvprof.evaluation.workload import TextBatch, Workload, explained_shortage
from kvprof.methods.accounting import bytes_at
from kvprof.methods.family import MethodInputs
from kvprof.methods.plan import Plan
from kvprof.methods.registry import plan_family
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import Compression, compressed

__all__ = ["EvaluationSettings", "Evaluator"]

_UNCOMPRESSED = "the uncompressed model"

ShouldStop = Callable[[], bool]


def _nothing(_: int) -> None:
    """Take no notice of progress."""


def _never() -> bool:
    return False


class Evaluator:
    """Evaluates any number of plans of one model on the same text and tasks.

    Parameters
    ----------
    loaded : LoadedModel
    samples : list of TextSample
        At least one; sequences of all of them are of one length.
    items : list of TaskItem
    settings : EvaluationSettings

    Attributes
    ----------
    digest : str
        Of model, data, settings, processor and libraries: what an evaluation of a plan depends on
        besides the plan.
    context : int
        Mean number of tokens before a decoded one: the context of rates.
    steps : int
        What `advance` is told per evaluation.
    baseline_steps : int
        What `advance` is told by the baseline.

    Raises
    ------
    UsageError
        When sequences differ in length, or a question does not fit the model's context.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        samples: list[TextSample],
        items: list[TaskItem],
        settings: EvaluationSettings,
    ) -> None:
        self.loaded, self.samples, self.items, self.settings = loaded, samples, items, settings
        self.workload = Workload(loaded, samples, items, settings.batch_size)
        self.context = self.workload.context
        self.baseline_steps = self.workload.baseline_steps()
        self.steps = self.workload.steps(teacher_forced=settings.teacher_forced)
        self.digest = self._digest()
        self._baseline: dict[str, Any] | None = None
        self._answers: dict[int, bool] = {}

    def _digest(self) -> str:
        settings = asdict(self.settings)
        del settings["batch_size"]  # it changes nothing beyond rounding
        described: dict[str, Any] = {
            "model": self.loaded.fingerprint,
            "dtype": str(self.loaded.dtype),
            "machine": _machine(self.loaded.device),
            "samples": [sample.digest for sample in self.samples],
            "items": [asdict(item) for item in self.items],
            "settings": settings,
        }
        if self.settings.teacher_forced:
            described["refuses"] = True  # earlier figures hold what a single pass does not show
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def baseline(
        self, advance: Advance = _nothing, should_stop: ShouldStop = _never
    ) -> dict[str, Any]:
        """Evaluate the uncompressed model; done once.

        Text in a single pass, tasks by greedy decoding with the model's own cache.

        Parameters
        ----------
        advance : callable
            Told `baseline_steps` in all.
        should_stop : callable
            Asked after each batch; True ends it, ``complete`` is False then, and plans are
            compared on what was done.

        Returns
        -------
        dict
            As `evaluate` returns it, of the method ``full``: the baseline itself. Its divergence
            is 0 and its relative accuracy 1 by definition; intervals and ``measured_bytes`` are
            None.

        Raises
        ------
        FailedError
            When the model's logits are not finite.
        LackingError
            Out of memory.
        """
        if self._baseline is not None:
            return self._baseline
        inputs = MethodInputs(self.loaded.layout, self.loaded.fingerprint)
        plan = plan_family("full", inputs).build(0.0)
        found = Found()
        work = [*self.workload.text, *self.workload.tasks]
        for batch in _until_stopped(work, found, should_stop):
            with self._explained(_UNCOMPRESSED, plan, batch):
                if isinstance(batch, TaskBatch):
                    self._answer(batch, None, found, advance)
                    continue
                logits = baseline_logits(self.loaded, batch.ids)
                batch.base = self._scored(_UNCOMPRESSED, batch, logits.unbind(1))
                batch.logits = logits if self.workload.keeps_logits else None
            found.text.append((batch, batch.base))
            advance(self.workload.prefill_steps(self.workload.seq_len))
        self._answers = found.answers
        result = self._assembled(plan, found, found.answers)
        self._baseline = {**without_intervals(result), "worst_tokens": [], "measured_bytes": None}
        return self._baseline

    def evaluate(
        self, plan: Plan, advance: Advance = _nothing, should_stop: ShouldStop = _never
    ) -> dict[str, Any]:
        """Evaluate a plan against the uncompressed model, on the same tokens and questions.

        Parameters
        ----------
        plan : Plan
            For this model.
        advance : callable
            Told `steps` in all.
        should_stop : callable
            Asked after each batch; True ends the evaluation with what was done, and ``complete``
            is False then.

        Returns
        -------
        dict
            JSON values, as the schema of ``kvprof eval`` documents an evaluation.

        Raises
        ------
        UsageError
            When the plan does not fit the model, or is to be scored in a single pass, which does
            not show all of it.
        FailedError
            When the compressed model's logits are not finite.
        LackingError
            Out of memory; says what took it and what would fit.
        """
        if self.settings.teacher_forced:
            refuse_hidden(plan)
        self.baseline()
        work = [
            *(batch for batch in self.workload.text if batch.base is not None),
            *(task for task in self.workload.tasks if task.indices[0] in self._answers),
        ]
        found = Found()
        keeps = self.workload.keeps_logits
        # Where the uncompressed model has to run again before each batch, the context of the
        # compressed one cannot stay open.
        with compressed(self.loaded, plan) if keeps else nullcontext(None) as running:
            for batch in _until_stopped(work, found, should_stop):
                with self._explained(plan.method, plan, batch):
                    if isinstance(batch, TaskBatch):
                        with self._running(plan, running) as session:
                            self._answer(batch, session.new_cache, found, advance)
                    else:
                        self._text(plan, batch, running, found, advance)
        found.complete &= self.baseline()["complete"]
        return self._assembled(plan, found, self._answers)

    def _running(self, plan: Plan, session: Compression | None) -> Any:
        return compressed(self.loaded, plan) if session is None else nullcontext(session)

    def _text(
        self,
        plan: Plan,
        batch: TextBatch,
        running: Compression | None,
        found: Found,
        advance: Advance,
    ) -> None:
        base, work = batch.logits, self.workload
        if base is None:
            base = baseline_logits(self.loaded, batch.ids)
            advance(work.prefill_steps(work.seq_len))
        with self._running(plan, running) as session:
            cache = session.new_cache()
            if self.settings.teacher_forced:
                logits = single_pass_logits(self.loaded, batch.ids, cache)
                scores = self._scored(plan.method, batch, logits, base)
                advance(work.prefill_steps(work.seq_len))
            else:
                logits = decoded_logits(self.loaded, batch.ids, cache)
                advance(work.prefill_steps(work.start) - 1)
                scores = self._scored(plan.method, batch, logits, base, advance)
            found.measured += cache.nbytes
            found.notes = sorted({*found.notes, *session.kernel_notes})
        found.text.append((batch, scores))

    def _scored(
        self,
        what: str,
        batch: TextBatch,
        logits: Iterable[Tensor],
        base: Tensor | None = None,
        advance: Advance = _nothing,
    ) -> TokenScores:
        targets = batch.ids[:, self.workload.start :]
        scores = score_tokens(logits, targets, base, advance)
        if not scores.finite:
            raise FailedError(
                f"{what}: logits of {self.loaded.spec} are not finite; try --dtype float32"
            )
        return scores

    def _answer(
        self,
        batch: TaskBatch,
        new_cache: Callable[[], Any] | None,
        found: Found,
        advance: Advance,
    ) -> None:
        advance(self.workload.prefill_steps(batch.prompt_tokens))
        answers = greedy_answers(self.loaded, batch, new_cache, advance)
        found.answers.update(zip(batch.indices, answers, strict=True))

    def _explained(self, what: str, plan: Plan, batch: TextBatch | TaskBatch) -> Any:
        itemsize = self.loaded.dtype.itemsize
        if isinstance(batch, TaskBatch):
            rows, tokens = len(batch.items), batch.prompt_tokens + batch.answer_tokens
            logits = rows * self.loaded.vocab_size * itemsize
        else:
            rows, tokens = len(batch.ids), self.workload.seq_len
            logits = self.workload.logit_bytes(rows)
        cache = bytes_at(plan, tokens, itemsize=itemsize, batch=rows).total
        return explained_shortage(
            self.loaded, what, sequences=rows, tokens=tokens, cache=cache, logits=logits
        )

    def _assembled(self, plan: Plan, found: Found, answers: dict[int, bool]) -> dict[str, Any]:
        return assembled(
            self.loaded,
            plan,
            self.workload,
            self.samples,
            self.items,
            self.settings,
            found=found,
            base_answers=answers,
        )


def _machine(device: torch.device) -> list[str | None]:
    """Return what the last digits of a figure depend on: processor and arithmetic."""
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    return [device.type, processor, *(package_version(name) for name in ("torch", "transformers"))]


def _until_stopped(
    work: list[Any], found: Found, should_stop: ShouldStop
) -> Iterator[TextBatch | TaskBatch]:
    for number, batch in enumerate(work, 1):
        yield batch
        if number < len(work) and should_stop():
            found.complete = False
            return
