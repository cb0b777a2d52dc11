"""The result of ``kvprof frontier``."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from kvprof.results.base import Compared, Figure, Interval, Key, Part, Result, Size, ends, tidy_csv
from kvprof.results.eval import Kernel

__all__ = ["STOPPED", "FrontierResult", "Method", "Point", "Target"]

#: The reason of a method whose search the user ended.
STOPPED = "interrupted"

_KL = ("mean", "p999", "worst")
_FIXED = ("full", "fp8")  # methods that are always there, and have nothing to turn


class Target(Part):
    """A share of the uncompressed model's metric that has to be kept."""

    metric: str = Field(description="accuracy (of the next token), perplexity, tasks, or a task.")
    target: float = Field(gt=0)


class Kept(Part):
    """What is kept of one metric."""

    share: Size | None = Field(description="Of perplexity, the uncompressed over the point's.")
    share_interval: Interval = Field(
        description="Paired 95 % bootstrap; null with fewer than 32 sequences or questions."
    )
    least_loss: Size | None = Field(
        None, description="The smallest loss that the sample could have shown, at 95 %."
    )


class Kl(Part):
    """Divergence from the uncompressed model per decoded token, in nats."""

    mean: Size | None = None
    p999: Size | None = None
    worst: Size | None = None


class Task(Part):
    """A task's accuracy, and whether the uncompressed model does better at it than chance."""

    accuracy: Size
    baseline: Size
    items: int = Field(ge=0)
    judges: bool = True
    difference_interval: Interval = None


class Source(Part):
    """What is kept of next-token accuracy on one text."""

    relative_accuracy: Size | None
    interval: Interval = None


class LongContext(Part):
    """What it would store of a long context, by the byte account."""

    context: int = Field(ge=1)
    bytes_per_token: Size
    rate: float = Field(le=1)


class Evaluation(Part):
    """What one evaluation found; the JSON keeps more of it, as `kvprof eval` has it."""

    accuracy: Size = Field(description="Of the next token, over decoded tokens.")
    perplexity: Size
    tasks: dict[str, Task]
    bytes_per_token: Size | None = Field(None, description="At `context` tokens, all layers.")
    decoded_tokens: int | None = Field(None, ge=0)
    kl: Kl = Kl()
    sources: dict[str, Source] = Field({}, description="By name of the text.")


class Point(Evaluation, Kept):
    """An evaluated plan; its share is of `metric`. Earlier results lack `searched` to the end."""

    rate: float = Field(
        le=1,
        description="1 - bytes(plan) / bytes(uncompressed) at `context` tokens; below 0 where a "
        "method stores more.",
    )
    rate_asked: float | None = Field(None, description="Null for a setting such as bits.")
    compression_ratio: Size = Field(description="1 / (1 - rate).")
    relative_accuracy: Size | None = Field(description="Over the uncompressed model's.")
    relative_accuracy_interval: Interval = None
    shares: dict[str, Kept] = Field({}, description="By metric of `targets`, where several.")
    searched: dict[str, Kept] | None = Field(
        None, description="On the half of the text that chose the rates; all else is of the other."
    )
    needs: list[Literal["online", "folded", "rebuilt", "restored"]] = Field(
        [],
        description="What running it takes in some layer: projections beside the model's own, "
        "weights with a basis folded in, keys (or both) rebuilt at every use, or a stored prompt "
        "restored before decoding (its bytes are those at rest).",
    )
    kernel: Kernel | None = None
    long_context: LongContext | None = None

    def kept(self, metric: str) -> Kept:
        """Return what is kept of a target's metric."""
        return self.shares.get(metric, self)


class Method(Part):
    """A method's search; rates count where every lower tested rate meets the targets too."""

    label: str = Field(description="The method, with its own options as they were written.")
    method: str
    options: dict[str, Any] = Field(description="That the method was given.")
    sure_rate: Annotated[float | None, Compared("higher", headline=True, exact=True)] = Field(
        None, le=1, description="The lower end of `max_rate_interval`. Absent in earlier results."
    )
    max_rate: Annotated[float | None, Compared("higher", interval="max_rate_interval")] = Field(
        le=1, description="The largest tested rate whose point estimate meets each target."
    )
    max_rate_interval: Interval = Field(
        description="The largest tested rate whose whole interval meets the targets, on a sample "
        "that would have shown a loss as large; the smallest whose whole interval misses one."
    )
    max_rates: dict[str, float | None] = Field(
        description="Other targets of `metric` alone to the `max_rate` of the same points."
    )
    binding: list[str] = Field(
        [], description="Metrics of the targets missed at the smallest rate that misses any."
    )
    reason: str | None = Field(description="Why there is no `max_rate`, or points are missing.")
    points: list[Point] = Field(description="By growing rate.")

    @property
    def sure(self) -> float | None:
        """The rate that holds the targets: a headline's."""
        return self.max_rate_interval[0] if self.max_rate_interval else None

    @property
    def best(self) -> Point | None:
        """The point at the rate that holds, or else at the largest."""
        shown = self.max_rate if self.sure is None else self.sure
        return next((one for one in self.points if one.rate == shown), None)

    @property
    def furthest(self) -> float | None:
        """The rate that it may reach at most, given its intervals; None if not measured."""
        if not self.points:
            return None
        if self.label in _FIXED and len(self.points) == 1:
            return self.points[0].rate
        high = self.max_rate_interval[1] if self.max_rate_interval else None
        return 1.0 if high is None else high

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield the rates, and those of other targets."""
        key = (*key, ("method", self.label))
        yield from super().figures(key)
        for target, rate in self.max_rates.items():
            if rate is not None:
                yield Figure((*key, ("target", target)), "max_rate", rate, "higher")


class FrontierData(Part):
    """Data of `kvprof frontier`."""

    metric: str
    target: float = Field(gt=0, description="Share of `metric` that has to be kept.")
    targets: list[Target] = Field([], description="All together, the above first.")
    baseline: Evaluation = Field(description="The uncompressed model's own figures.")
    context: int = Field(ge=1, description="Tokens at which bytes are counted: the mean context.")
    dtype: str = Field(description="Of the run, and so of what rates are relative to.")
    methods: list[Method] = Field(description="As asked for; full and fp8 are always there.")

    @property
    def goals(self) -> list[Target]:
        """Every target, the first one first."""
        return self.targets or [Target(metric=self.metric, target=self.target)]


class FrontierInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    model: str
    fingerprint: str
    device: str | None = None
    gguf: dict[str, Any] | None = None
    points: int | None = None
    text: Sequence[str] = ()
    sequences: int | None = None
    seq_len: int | None = None
    tasks: Sequence[str] = ()
    task_items: int | None = None
    task_notes: Sequence[str] = ()
    protocol: str | None = None
    calibration: dict[str, dict[str, Any]] = Field({})


class FrontierResult(Result):
    """Which method keeps the fewest bytes as good.

    Its CSV has one row per tested rate; ``sure_rate`` and ``max_rate`` say which of a method's rows
    is that rate. Then come ``share_<metric>`` of further targets, and ``task_<name>``.
    """

    columns: ClassVar[tuple[str, ...]] = (
        *("label", "method", "options", "target", "metric", "targets", "context", "dtype"),
        *("rate", "rate_asked", "sure_rate", "max_rate", "binding"),
        *("compression_ratio", "bytes_per_token", "share", "needs", "kernel", "long_context"),
        *("long_rate", "long_bytes_per_token", "share_low", "share_high"),
        *("accuracy", "relative_accuracy", "relative_accuracy_low", "relative_accuracy_high"),
        *("perplexity", "baseline_perplexity", *(f"kl_{part}" for part in _KL)),
    )

    inputs: FrontierInputs
    data: FrontierData

    def to_csv(self) -> str:
        """Return the table, with columns for the targets and tasks that there are."""
        more = [f"share_{one.metric}{end}" for one in self.data.goals[1:] for end in _ENDS]
        more += [f"task_{task}{end}" for task in self.data.baseline.tasks for end in _OWN]
        return tidy_csv((*self.columns, *more), self.rows())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every tested rate."""
        data = self.data
        targets = ";".join(f"{one.metric}={one.target}" for one in data.goals)
        common = {"target": data.target, "metric": data.metric, "targets": targets}
        common |= {"context": data.context, "dtype": data.dtype}
        for method in data.methods:
            named = {"label": method.label, "method": method.method, **common}
            named["options"] = json.dumps(method.options, sort_keys=True)
            named["binding"] = ";".join(method.binding)
            for point in method.points:
                rates = {"sure_rate": method.sure, "max_rate": method.max_rate}
                found = {name: point.rate == rate for name, rate in rates.items()}
                yield {**named, **found, **self._figures(point)}

    def _figures(self, point: Point) -> dict[str, Any]:
        same = set(self.columns) & set(Point.model_fields) - {"needs", "kernel", "long_context"}
        row = {name: getattr(point, name) for name in same} | ends("share", point.share_interval)
        row |= ends("relative_accuracy", point.relative_accuracy_interval)
        row["baseline_perplexity"] = self.data.baseline.perplexity
        row |= {f"kl_{part}": getattr(point.kl, part) for part in _KL}
        if point.kernel is not None:
            row |= {"needs": ";".join(point.needs), "kernel": point.kernel.reason is None}
        if (long := point.long_context) is not None:
            row |= {"long_context": long.context, "long_rate": long.rate}
            row["long_bytes_per_token"] = long.bytes_per_token
        for one in self.data.goals[1:]:
            kept = point.kept(one.metric)
            name = f"share_{one.metric}"
            row |= {name: kept.share, **ends(name, kept.share_interval)}
        for name, task in point.tasks.items():
            row |= {f"task_{name}": task.accuracy, f"task_{name}_baseline": task.baseline}
        return row


_ENDS, _OWN = ("", "_low", "_high"), ("", "_baseline")
