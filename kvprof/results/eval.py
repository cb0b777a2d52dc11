"""The result of ``kvprof eval``."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from kvprof.analysis.stats import binomial_interval
from kvprof.results.base import Compared, Figure, Interval, Key, Keyed, Part, Result, Size, ends

__all__ = ["AnswerLengths", "EvalResult", "Evaluation", "HarnessRow", "Kernel", "Share", "Task"]


class Share(Part):
    """Answers to some questions."""

    accuracy: Size = Field(description="Mean score of a question, 0 to 1.")
    baseline: Size = Field(description="The uncompressed model's.")
    items: int = Field(ge=0, description="Questions that both answered.")


class Task(Share):
    """Answers to a task's questions."""

    scoring: Literal["tokens", "strings", "number"] = Field(
        "tokens",
        description="What scores 1: every token of the answer; all strings asked for (RULER's "
        "string_match_all; of some their share); the number asked for as the last one.",
    )
    chance: Size = Field(0.0, description="Mean score of picking among the prompt's strings.")
    judges: bool = Field(
        True,
        description="Whether the uncompressed model does better than chance (one-sided binomial "
        "test at 5 %); where not, the task enters no mean.",
    )
    exact_match: Size | None = Field(None, description="Share of questions wholly right.")
    baseline_exact_match: Size | None = None
    difference_interval: Interval = Field(
        description="Of `accuracy` - `baseline`, paired bootstrap; null with fewer than 32."
    )
    by_depth: dict[str, Share] = Field(
        description="Where the statement asked for stands, 0 at the start, 1 before the question."
    )
    by_length: dict[str, Share] = Field(
        description="Tokens of prompt and answer: the reference model's of embedded tasks, the "
        "model's own of generated ones."
    )

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield the accuracy, unless the task judges nothing."""
        if self.judges:
            bounds = binomial_interval(self.accuracy, self.items) if self.items else None
            yield Figure(
                key, "task_accuracy", self.accuracy, "higher", interval=bounds, headline=True
            )


class Lengths(Part):
    """How long the answers are that were written to the end of text, or to the limit."""

    prompts: int = Field(ge=0)
    limit: int | None = Field(None, description="Tokens that could be written; of one task.")
    tokens: Size = Field(description="Mean number, with the end of text; a cut answer's limit.")
    baseline_tokens: Size = Field(description="The uncompressed model's to the same prompts.")
    ratio: Annotated[Size, Compared("lower", interval="ratio_interval")]
    ratio_interval: Interval = Field(description="Paired bootstrap; null with fewer than 32.")
    never_ended: Size = Field(description="Share of the answers that did not end in the limit.")
    baseline_never_ended: Size
    never_ended_interval: Interval = Field(description="Of the difference.")


class AnswerLengths(Lengths):
    """Of all tasks together."""

    by_task: dict[str, Lengths]

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield the ratio, which is of the answers."""
        return super().figures((*key, ("of", "answers")))


class Kl(Part):
    """KL(uncompressed || compressed) of the next-token distribution in nats, by decoded token."""

    mean: Annotated[Size, Compared("lower", name="kl_mean")]
    p999: Size = Field(description="The 99.9th percentile.")
    worst: Size = Field(description="The largest.")


class Accuracy(Part):
    """What a text has, and all together; of decoded tokens."""

    accuracy: Size = Field(description="Share of decoded tokens that were the likeliest.")
    baseline_accuracy: Size = Field(description="Of the uncompressed model, on the same tokens.")
    relative_accuracy: Annotated[
        Size | None, Compared("higher", headline=True, interval="relative_accuracy_interval")
    ] = Field(description="`accuracy` / `baseline_accuracy`; null where the latter is 0.")
    perplexity: Size
    baseline_perplexity: Size


class Source(Accuracy):
    """A text."""

    interval: Interval = Field(description="Of `relative_accuracy`.")
    kl_mean: Size
    sequences: int = Field(ge=0)
    tokens: int = Field(ge=0, description="Decoded ones.")


class WorstToken(Part):
    """A decoded token of large divergence."""

    source: str
    sequence: int = Field(description="Which of the source's sequences, from 0.")
    position: int = Field(description="Of the token in it, from 0.")
    token: int = Field(description="Its id.")
    text: str | None = Field(description="Null without a tokenizer, like `before`.")
    before: str | None = Field(description="The eight tokens before it.")
    kl: Size
    probability: Size = Field(description="That the compressed model gave it.")
    baseline_probability: Size = Field(description="That the uncompressed model gave it.")


class Kernel(Part):
    """Whether kvprof's kernels run the plan, on this run's device and in its dtype."""

    layers: int = Field(ge=0)
    of: int = Field(ge=1)
    reason: str | None = Field(description="Why not the first of the others; null for all.")


class PlanFacts(Part):
    """What a reader wants to know of a plan beyond its rate."""

    dim_rate: float = Field(description="FDC's rate: dimensions only.")
    paper_rate: float = Field(description="As the papers count: no scales, windows or sinks.")
    kernel: Kernel | None = None
    made: dict[str, Any] = Field(description="How the plan was made.")


class Evaluation(Accuracy):
    """A method's figures, all on the tokens and questions of the uncompressed model."""

    method: Annotated[str, Keyed()]
    rate: Annotated[float, Compared("higher")] = Field(
        le=1, description="1 - bytes(plan) / bytes(uncompressed), all counted, at `context` tokens."
    )
    bytes_per_token: Annotated[Size, Compared("lower", headline=True, exact=True)] = Field(
        description="Of the account, over all layers, one sequence."
    )
    context: int = Field(ge=0, description="In tokens.")
    relative_accuracy_interval: Interval = Field(
        description="Paired 95 % bootstrap over each source's sequences; null with fewer than 32."
    )
    perplexity_ratio: Annotated[
        Size, Compared("lower", headline=True, interval="perplexity_ratio_interval")
    ] = Field(description="`perplexity` / `baseline_perplexity`.")
    perplexity_ratio_interval: Interval
    kl: Kl
    sources: dict[str, Source] = Field(description="By name of the text.")
    tasks: Annotated[dict[str, Task], Keyed("task")] = Field(description="By name.")
    answer_lengths: AnswerLengths | None = None
    worst_tokens: list[WorstToken] = Field(description="The worst first.")
    decoded_tokens: int = Field(ge=0)
    sequences: int = Field(ge=0, description="Of all sources.")
    protocol: Literal["decode", "one_pass", "teacher_forced"] = Field(
        description="How the second half of each sequence was scored: step by step, or in one pass "
        "that reads what decoding would read (of teacher_forced, that does not show quantisers)."
    )
    measured_bytes: Size | None = Field(
        description="What the cache held per sequence at its end; in one pass, its prompt at rest."
    )
    accounted_bytes: int = Field(ge=0, description="What the plan's account says of it.")
    seconds: Size = Field(description="Wall time, the calibration not counted.")
    complete: bool = Field(description="False where the run was stopped.")
    warnings: list[str]
    plan: PlanFacts | None = Field(None, description="Null for the uncompressed model itself.")

    @property
    def bits(self) -> float:
        """Return the bits a value takes, with its scales: rates are of 16."""
        return 16 * (1 - self.rate)


class HarnessRow(Part):
    """A figure of lm-evaluation-harness."""

    method: str
    task: str
    metric: str = Field(description="With the harness's filter in parentheses, where it has one.")
    value: float
    stderr: Size | None = Field(description="The harness's own standard error; not paired.")
    items: int | None = Field(ge=0, description="Questions that were asked.")
    single_pass: bool = Field(False, description="Whether no cache was read, at least in part.")


class Harness(Part):
    """What lm-evaluation-harness found."""

    tasks: list[str]
    limit: int | None = Field(description="Questions of each task, at most.")
    include: str | None = Field(description="Name of the folder with the user's own tasks.")
    batch_size: int
    version: str = Field(description="Of lm-eval.")
    protocol: str = Field(description="How the harness runs a model, in words.")
    rows: list[HarnessRow]


class EvalData(Part):
    """Data of `kvprof eval`."""

    dtype: str = Field(description="Of the run, and so of the cache that rates are relative to.")
    context: int = Field(description="Mean tokens before a decoded one: rates are counted there.")
    evaluations: list[Evaluation] = Field(description="`full`, `fp8`, then what was asked for.")
    harness: Harness | None = Field(description="Null unless `--harness` was given.")


class EvalInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    model: str
    fingerprint: str
    dtype: str
    device: str
    text: list[str]
    sequences: int
    seq_len: int
    tasks: list[str]
    task_items: int
    protocol: str
    methods: Sequence[str] = ()
    task_lengths: Sequence[int] = ()
    task_notes: Sequence[str] = ()
    plan: str | None = None
    gguf: dict[str, Any] | None = None


class EvalResult(Result):
    """What a compressed cache costs in accuracy.

    ``scope`` of its CSV is ``all`` (every text together), ``text``, ``task``, ``task_depth``,
    ``task_length``, ``answers`` (the length of those that were written, of all tasks or one) or
    ``harness``; ``name`` says which. ``baseline`` is the uncompressed model's figure, ``low`` and
    ``high`` the ends of the 95 % interval, ``count`` the tokens or questions behind a figure.
    """

    columns: ClassVar[tuple[str, ...]] = (
        *("method", "rate", "bits", "bytes_per_token", "context", "protocol", "scope", "name"),
        *("metric", "value", "baseline", "low", "high", "count", "dtype"),
    )

    inputs: EvalInputs
    data: EvalData

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every figure, one to a row."""
        for one in self.data.evaluations:
            known = {name: getattr(one, name) for name in self.columns[:6]}
            for row in (*_text_rows(one), *_task_rows(one), *_answer_rows(one)):
                yield {**known, **row, "dtype": self.data.dtype}
        for found in self.data.harness.rows if self.data.harness is not None else ():
            row = _row(("harness", found.task, found.items), found.metric, found.value)
            yield {"method": found.method, "protocol": "harness", **row}


def _row(
    at: tuple[str, str, int | None],
    metric: str,
    value: float | None,
    baseline: float | None = None,
    bounds: Interval = None,
) -> dict[str, Any]:
    found = dict(zip(("scope", "name", "count"), at, strict=True))
    return {**found, "metric": metric, "value": value, "baseline": baseline, **ends("", bounds)}


def _text_rows(one: Evaluation) -> Iterator[dict[str, Any]]:
    every = "all", "", one.decoded_tokens
    yield from _accuracy_rows(every, one, one.relative_accuracy_interval)
    ratio = one.perplexity_ratio, None, one.perplexity_ratio_interval
    yield _row(every, "perplexity_ratio", *ratio)
    for name, value in one.kl.model_dump().items():
        yield _row(every, f"kl_{name}", value)
    for name, found in one.sources.items():
        at = "text", name, found.tokens
        yield from _accuracy_rows(at, found, found.interval)
        yield _row(at, "kl_mean", found.kl_mean)


def _accuracy_rows(
    at: tuple[str, str, int], found: Accuracy, interval: Interval
) -> Iterator[dict[str, Any]]:
    yield _row(at, "accuracy", found.accuracy, found.baseline_accuracy)
    yield _row(at, "relative_accuracy", found.relative_accuracy, None, interval)
    yield _row(at, "perplexity", found.perplexity, found.baseline_perplexity)


def _task_rows(one: Evaluation) -> Iterator[dict[str, Any]]:
    for task, found in one.tasks.items():
        at = "task", task, found.items
        yield _row(at, "accuracy", found.accuracy, found.baseline)
        difference = found.accuracy - found.baseline
        yield _row(at, "difference", difference, None, found.difference_interval)
        if found.exact_match is not None:
            yield _row(at, "exact_match", found.exact_match, found.baseline_exact_match)
            yield _row(at, "chance", found.chance)
            yield _row(at, "judges", int(found.judges))
        for by, shares in (("depth", found.by_depth), ("length", found.by_length)):
            for place, share in shares.items():
                at = f"task_{by}", f"{task} {place}", share.items
                yield _row(at, "accuracy", share.accuracy, share.baseline)


def _answer_rows(one: Evaluation) -> Iterator[dict[str, Any]]:
    every = one.answer_lengths
    for name, found in {"": every, **every.by_task}.items() if every is not None else ():
        at = "answers", name, found.prompts
        yield _row(at, "tokens", found.tokens, found.baseline_tokens)
        yield _row(at, "ratio", found.ratio, None, found.ratio_interval)
        never, base = found.never_ended, found.baseline_never_ended
        yield _row(at, "never_ended", never, base)
        yield _row(at, "never_ended_difference", never - base, None, found.never_ended_interval)
