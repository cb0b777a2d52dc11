"""Evaluates plans on one sample: the uncompressed model once, then each plan against it."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprof.analysis.stats import RESAMPLES, SEED
from kvprof.environment import cpu_model, package_version
from kvprof.errors import FailedError, Interrupted, UsageError
from kvprof.evaluation.data import TaskAnswer, TaskItem, TextSample, scored
from kvprof.evaluation.decode import (
    Advance,
    TaskBatch,
    TextBatch,
    Workload,
    check_steps,
    checked_answers,
    decoded_logits,
    explained_shortage,
    greedy_answers,
    last_states,
    state_logits,
    written_answers,
)
from kvprof.evaluation.scores import (
    Pair,
    TokenScores,
    answer_lengths,
    score_tokens,
    task_figures,
    text_figures,
    worst_tokens,
)
from kvprof.methods.accounting import SERVED_BYTES, bytes_at, rate
from kvprof.methods.across import read_alike
from kvprof.methods.family import MethodInputs
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.registry import plan_family
from kvprof.methods.tokens import quantises
from kvprof.models.load import LoadedModel
from kvprof.runtime.backends.route import choice
from kvprof.runtime.compressed import Compression, compressed
from kvprof.runtime.rows import remembered_rows

__all__ = [
    "EvaluationSettings",
    "Evaluator",
    "Found",
    "assembled",
    "hidden_in_one_pass",
    "needs_decoding",
    "without_intervals",
]

# --- From what the passes found to one evaluation, as JSON values.


_DEVIATION = 0.01  # of measured bytes from the account
_BEFORE = 8  # tokens shown in front of a worst one


@dataclass(frozen=True)
class EvaluationSettings:
    """How a sample is evaluated."""

    #: Text and answers step by step through the cache, which takes a hundred times as long, instead
    #: of in one pass, or few, that read what decoding would read. Plans that need it
    #: (`needs_decoding`), and answers that the model writes freely, are decoded all the same.
    decode: bool = False
    batch_size: int | None = None  # sequences at once; None by device and memory
    worst: int = 5  # tokens of largest divergence to name


@dataclass(eq=False)
class Found:
    """What one evaluation has found so far."""

    began: float = field(default_factory=time.perf_counter)
    text: list[tuple[TextBatch, TokenScores]] = field(default_factory=list)
    answers: dict[int, TaskAnswer] = field(default_factory=dict)  # by index among all questions
    measured: int = 0  # bytes of all text batches' caches, at their ends or at rest
    notes: list[str] = field(default_factory=list)  # what they stored otherwise than planned
    complete: bool = True

    def pairs(self, samples: Sequence[TextSample]) -> dict[str, Pair]:
        """Return the scores of both models, by the name of the sample."""
        pairs = {}
        for index, sample in enumerate(samples):
            own = [
                (batch.base, scores)
                for batch, scores in self.text
                if batch.sample == index and batch.base is not None
            ]
            if own:
                base, other = (TokenScores.joined(part) for part in zip(*own, strict=True))
                pairs[sample.name] = Pair(base, other)
        return pairs


def _in_brackets(notes: list[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def assembled(
    loaded: LoadedModel,
    plan: Plan,
    workload: Workload,
    samples: Sequence[TextSample],
    items: Sequence[TaskItem],
    settings: EvaluationSettings,
    *,
    found: Found,
    base_answers: dict[int, TaskAnswer],
) -> dict[str, Any]:
    """Put one evaluation together from what this plan was found to do."""
    itemsize, context = loaded.dtype.itemsize, workload.context
    pairs = found.pairs(samples)
    text = text_figures(pairs)
    own_answers = [base_answers.get(index) for index in range(len(items))]
    answers = [found.answers.get(index) for index in range(len(items))]
    tasks = task_figures(items, own_answers, answers)
    lengths = answer_lengths(items, own_answers, answers)
    by_name = {sample.name: sample for sample in samples}
    worst = worst_tokens(
        pairs,
        settings.worst,
        workload.start,
        lambda name, sequence, position: _described(loaded, by_name[name], sequence, position),
    )
    # The last token of a sequence is predicted, never fed.
    # A cache at rest is that of the prompt.
    rests = plan.across is not None and plan.across.at_rest
    seen = workload.start if rests else workload.seq_len - 1
    account = bytes_at(plan, seen, itemsize=itemsize).total
    measured = found.measured / text["sequences"]
    warnings = []
    if found.measured and abs(measured - account) > _DEVIATION * account:
        warnings.append(
            f"{plan.method}: the cache took {measured:,.0f} bytes per sequence of {seen:,} "
            f"tokens, its plan accounts for {account:,}{_in_brackets(found.notes)}; rates use the "
            "account"
        )
    return {
        "method": plan.method,
        "rate": rate(plan, context),
        "bytes_per_token": bytes_at(plan, context, itemsize=SERVED_BYTES).total / context,
        "context": context,
        **text,
        "tasks": tasks,
        "answer_lengths": lengths,
        "worst_tokens": worst,
        "protocol": "decode" if settings.decode or needs_decoding(plan) else "one_pass",
        "measured_bytes": measured or None,
        "accounted_bytes": account,
        "seconds": time.perf_counter() - found.began,
        "complete": found.complete,
        "warnings": warnings,
    }


def hidden_in_one_pass(plan: Plan) -> str | None:
    """Return in words what of a plan an ordinary pass cannot show; None where it shows all of it.

    A pass attends to its own tokens before they are quantised or evicted unless the plan reads by
    age, at the rank of the level that they have after the pass, and with a lazy plan or bases of
    its own exactly (see `kvprof.methods.plan`). lm-eval's choices are scored so.
    """
    eviction = plan.eviction
    # Others keep a window, or everything.
    whole = [x for x in plan.layers if x.sliding_window is None and not x.left_out]
    groups = [group for layer in whole for group in (*layer.keys.groups, *layer.values.groups)]
    projected = any(
        layer.keys.placement is not Placement.NONE or layer.values.projected
        for layer in plan.layers
    )
    parts = {
        "quantising": not plan.by_age and any(quantises(plan, x) for x in plan.layers),
        "evicting": eviction is not None and eviction.keep < 1 and bool(whole),
        "moving tokens down levels": any(len(set(group.ranks)) > 1 for group in groups),
        "its projections (prefill is exact)": (plan.lazy or plan.online_bases) and projected,
        "storing tokens across layers": plan.across is not None,
    }
    return " and ".join(name for name, there in parts.items() if there) or None


def needs_decoding(plan: Plan) -> bool:
    """Whether a plan's accuracy shows only through its cache.

    What a query reads of a token follows from their positions, and one pass shows it
    (`kvprof.methods.tokens.readings`); but not which tokens an evictor keeps, what ``hqq`` makes
    of a step's tokens, and what layers store together. The last takes a pass for as many tokens as
    read alike (`kvprof.methods.across.read_alike`), the others one for each token.
    """
    fitted = plan.quantiser is not None and plan.quantiser.kind == "hqq"
    return fitted or plan.eviction is not None or plan.across is not None


def without_intervals(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return the same with None for every interval: nothing was compared."""
    plain: dict[str, Any] = {}
    for key, value in evaluation.items():
        if isinstance(value, dict):
            plain[key] = without_intervals(value)
        else:
            plain[key] = None if key.endswith("interval") else value
    return plain


def _described(
    loaded: LoadedModel, sample: TextSample, sequence: int, position: int
) -> dict[str, Any]:
    """Name a token: its id, its text and the text in front of it, where there is a tokenizer."""
    ids = sample.ids[sequence].tolist()
    described: dict[str, Any] = {"token": ids[position], "text": None, "before": None}
    try:
        tokenizer = loaded.tokenizer()
    except UsageError:  # ids from a file, of a model without a tokenizer
        return described
    before = ids[max(0, position - _BEFORE) : position]
    return described | {
        "text": tokenizer.decode([ids[position]]),
        "before": tokenizer.decode(before),
    }


_UNCOMPRESSED = "the uncompressed model"

ShouldStop = Callable[[], bool]


# --- The uncompressed model once, then each plan against it.


def _nothing(_: int) -> None:
    """Take no notice of progress."""


def _never() -> bool:
    return False


class Evaluator:
    """Evaluates any number of plans of one model on the same text and tasks."""

    def __init__(
        self,
        loaded: LoadedModel,
        samples: list[TextSample],
        items: list[TaskItem],
        settings: EvaluationSettings,
    ) -> None:
        #: At least one; sequences of all of them are of one length.
        self.loaded, self.samples, self.items, self.settings = loaded, samples, items, settings
        self.workload = Workload(loaded, samples, items, settings.batch_size)
        #: Mean number of tokens before a decoded one: the context of rates.
        self.context = self.workload.context
        #: What `advance` counts for the baseline.
        self.baseline_steps = self.workload.baseline_steps(decode=settings.decode)
        #: Of model, data, settings, processor and libraries: what an evaluation of a plan depends
        #: on besides the plan.
        self.digest = self._digest()
        self._baseline: dict[str, Any] | None = None
        self._answers: dict[int, TaskAnswer] = {}

    def steps(self, plan: Plan | None = None) -> int:
        """Return what `advance` counts for one evaluation, of most plans or of one."""
        decode = self.settings.decode or (plan is not None and needs_decoding(plan))
        return self.workload.steps(decode=decode)

    def _digest(self) -> str:
        settings = asdict(self.settings) | {"resamples": RESAMPLES, "seed": SEED}
        del settings["batch_size"]  # it changes nothing beyond rounding
        described: dict[str, Any] = {
            "model": self.loaded.fingerprint,
            "dtype": str(self.loaded.dtype),
            "machine": _machine(self.loaded.device),
            "samples": [sample.digest for sample in self.samples],
            "items": [asdict(item) for item in self.items],
            "settings": settings,
            "kernels": choice(None),  # they round elsewhere
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def baseline(
        self, advance: Advance = _nothing, should_stop: ShouldStop = _never
    ) -> dict[str, Any]:
        """Evaluate the uncompressed model; done once.

        Text in a single pass; answers as `EvaluationSettings` say, with the model's own cache.
        """
        if self._baseline is not None:
            return self._baseline
        inputs = MethodInputs(self.loaded.layout, self.loaded.fingerprint)
        plan = plan_family("full", inputs).build(0.0)
        found = Found()
        work = [*self.workload.text, *self.workload.tasks]

        def run(batch: TextBatch | TaskBatch) -> None:
            with self._explained(_UNCOMPRESSED, plan, batch):
                if isinstance(batch, TaskBatch):
                    self._answer(batch, None, not self.settings.decode, found, advance)
                    return
                batch.states = last_states(self.loaded, batch.ids)
                logits = state_logits(self.loaded, batch.states)
                batch.base = self._scored(_UNCOMPRESSED, batch, logits)
            found.text.append((batch, batch.base))
            advance(self.workload.prefill_steps(self.workload.seq_len))

        _run(work, run, found, should_stop)
        self._answers = found.answers
        result = self._assembled(plan, found, found.answers)
        self._baseline = {**without_intervals(result), "worst_tokens": [], "measured_bytes": None}
        return self._baseline

    def evaluate(
        self, plan: Plan, advance: Advance = _nothing, should_stop: ShouldStop = _never
    ) -> dict[str, Any]:
        """Evaluate a plan against the uncompressed model, on the same tokens and questions."""
        return self._assembled(plan, self.found(plan, advance, should_stop), self._answers)

    def found(
        self, plan: Plan, advance: Advance = _nothing, should_stop: ShouldStop = _never
    ) -> Found:
        """Return what `evaluate` puts together: the scores of every token and answer."""
        self.baseline()
        work = [
            *(batch for batch in self.workload.text if batch.base is not None),
            *(task for task in self.workload.tasks if task.indices[0] in self._answers),
        ]
        found = Found()
        one_pass = not (self.settings.decode or needs_decoding(plan))
        if not one_pass and self.workload.text:
            check_steps(self.loaded, self.workload.seq_len)
        sessions: list[tuple[bool, Compression]] = []
        with remembered_rows(), ExitStack() as stack:

            def session(prompted: bool) -> Compression:
                """Keep one context open as long as it serves."""
                if not sessions or sessions[0][0] is not prompted:
                    stack.close()
                    sessions[:] = [(prompted, stack.enter_context(self._running(plan, prompted)))]
                return sessions[0][1]

            def run(batch: TextBatch | TaskBatch) -> None:
                with self._explained(plan.method, plan, batch):
                    if isinstance(batch, TaskBatch):
                        running = session(one_pass and not batch.written)
                        if running.prompt is not None:
                            running.prompt = batch.prompt_tokens
                        self._answer(batch, running.new_cache, one_pass, found, advance)
                        return
                    self._text(plan, batch, session(one_pass), one_pass, found, advance)

            _run(work, run, found, should_stop)
        found.complete &= self.baseline()["complete"]
        return found

    def _running(self, plan: Plan, one_pass: bool) -> Any:
        prompt = self.workload.start if one_pass else None
        return compressed(self.loaded, plan, prompt=prompt)

    def _text(
        self,
        plan: Plan,
        batch: TextBatch,
        session: Compression,
        one_pass: bool,
        found: Found,
        advance: Advance,
    ) -> None:
        work = self.workload
        base = state_logits(self.loaded, batch.states)
        if one_pass:
            session.prompt = work.start
            logits = state_logits(self.loaded, last_states(self.loaded, batch.ids))
            scores = self._scored(plan.method, batch, logits, base)
            advance(work.prefill_steps(work.seq_len))
        else:
            cache = session.new_cache()
            runs = None
            if plan.across is not None and not self.settings.decode:
                runs = read_alike(plan.across, plan.levels.sink, work.start, work.seq_len - 1)
            logits = decoded_logits(self.loaded, batch.ids, cache, runs)
            advance(work.prefill_steps(work.start) - 1)
            scores = self._scored(plan.method, batch, logits, base, advance)
            found.measured += cache.nbytes if cache.rest_bytes is None else cache.rest_bytes
        found.notes = sorted({*found.notes, *session.kernel_notes})
        found.text.append((batch, scores))

    def _scored(
        self,
        what: str,
        batch: TextBatch,
        logits: Iterable[Tensor],
        base: Iterable[Tensor] | None = None,
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
        one_pass: bool,
        found: Found,
        advance: Advance,
    ) -> None:
        if not batch.written:
            if one_pass:
                right = checked_answers(self.loaded, batch)
                advance(self.workload.task_steps(batch, decode=False))
            else:
                advance(self.workload.prefill_steps(batch.prompt_tokens))
                right = greedy_answers(self.loaded, batch, new_cache, advance)
            answers = [TaskAnswer(float(one), one) for one in right]
        else:
            advance(self.workload.prefill_steps(batch.prompt_tokens))
            decode = self.loaded.tokenizer().decode
            answers = []
            written = written_answers(self.loaded, batch, new_cache, advance)
            for item, (tokens, ended) in zip(batch.items, written, strict=True):
                score = scored(item, decode(tokens, skip_special_tokens=True))
                answers.append(TaskAnswer(score, score == 1, len(tokens), ended))
        found.answers.update(zip(batch.indices, answers, strict=True))

    def _explained(self, what: str, plan: Plan, batch: TextBatch | TaskBatch) -> Any:
        itemsize = self.loaded.dtype.itemsize
        if isinstance(batch, TaskBatch):
            rows, tokens = len(batch.items), batch.prompt_tokens + batch.answer_tokens
        else:
            rows, tokens = len(batch.ids), self.workload.seq_len
        cache = bytes_at(plan, tokens, itemsize=itemsize, batch=rows).total
        return explained_shortage(self.loaded, what, sequences=rows, tokens=tokens, cache=cache)

    def _assembled(
        self, plan: Plan, found: Found, answers: dict[int, TaskAnswer]
    ) -> dict[str, Any]:
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


def _run(work: list[Any], do: Callable[[Any], None], found: Found, should_stop: ShouldStop) -> None:
    """Do the work batch by batch; one that is broken off is left out, and raises where first."""
    for number, batch in enumerate(work, 1):
        try:
            do(batch)
        except Interrupted:
            if number == 1:
                raise
            found.complete = False
            return
        if number < len(work) and should_stop():
            found.complete = False
            return
