"""The result of ``kvprof plan``."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from kvprof.results.base import Compared, Count, Figure, Key, Keyed, Part, Result, Size
from kvprof.results.eval import Kernel

__all__ = ["Comparison", "MovedRow", "Plan", "PlanInputs", "PlanResult", "Transfer"]

Positive = Annotated[int, Field(ge=1)]


class Ranks(Part):
    """Per side [layer][group of KV heads]."""

    keys: list[list[int]]
    values: list[list[int]]

    def sides(self) -> dict[str, list[list[int]]]:
        """Return keys' and values' by the side's name."""
        return {"keys": self.keys, "values": self.values}


class Bytes(Part):
    """Of one sequence's cache, by part."""

    keys: Count
    values: Count
    scales: Count
    zeros: Count
    outliers: Count
    window: Count
    sinks: Count
    eviction: Count
    bases: Count
    total: Count
    full: Count = Field(description="Of the model's own cache, at 16 bits.")


class Latent(Part):
    """What several layers keep together."""

    side: str = Field(pattern="^(keys|values)$")
    layers: Positive
    width: Positive
    kept: Count


class Levels(Part):
    """Token levels (TALE), lowest first."""

    shares: list[float]
    sink: Count
    least_ranks: Ranks


class Rounding(Part):
    """Ranks before and after rounding up to the grid, of the lowest token level."""

    knob: str | None
    value: float | None
    grid: int | None
    minimum: int | None
    requested: Ranks
    stored: Ranks
    requested_rate: float
    bytes_lost: int = Field(description="What the rounding costs, at `context`.")


class Weights(Part):
    """What the plan adds to the weights, in bytes."""

    online: int
    folded: int = Field(description="Growth of the projections, counted at their ranks.")
    kept_twice: int
    total: int
    running: int = Field(
        description="The same as it lies in memory: input projections keep their width."
    )


class Plan(Part):
    """One plan. What has a default is absent in results of earlier versions."""

    method: Annotated[str, Keyed()]
    context: Annotated[Positive, Keyed()] = Field(
        description="Tokens per sequence at which bytes are counted."
    )
    fingerprint: str
    bytes: Bytes
    bytes_per_token: Size
    rate: Annotated[float, Compared("higher", headline=True, exact=True)] = Field(
        le=1, description="1 - bytes(plan) / bytes(uncompressed)."
    )
    compression_ratio: Size
    dim_rate: Annotated[float, Compared("higher", exact=True)] = Field(
        description="Dimensions only (FDC)."
    )
    paper_rate: float = Field(
        description="As the papers count: no scales, windows or sinks. Not bytes."
    )
    ranks: Ranks = Field(
        description="Of the top token level; where columns have bits of their own, how many do."
    )
    across: list[Latent] | None = Field(
        None, description="What several layers keep together, latent by latent; null where none do."
    )
    bits: Ranks | None = Field(
        None,
        description="Of a value, where heads have unlike ones; the run's dtype where it is not "
        "quantised. Null where all of a side have the same, or columns have their own.",
    )
    kinds: Count = Field(
        0,
        description="Distinct ranks, or bits by column, of K and V of heads that a basis touches.",
    )
    levels: Levels | None
    folded: dict[str, Positive] = Field(
        description="Weight to the number of layers in which a basis is folded into it."
    )
    online: dict[str, Positive] = Field(
        description="What runs in addition to the model's own work, to the number of layers."
    )
    rounding: Rounding | None = Field(
        description="Null where a method has no ranks, or the plan was read from a file."
    )
    weights: Weights | None = Field(description="Null without a model.")
    kernel: Kernel | None = Field(None, description="Absent without a model.")
    sentences: list[str] = Field(description="What is done, in words.")
    made: dict[str, Any] = Field(description="How the plan was made.")

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield the rates, and the bytes of each part."""
        yield from super().figures(key)
        for part, size in self.bytes:
            own = ("method", self.method), ("context", self.context), ("bytes", part)
            yield Figure((*key, *own), "bytes", size)


class Difference(Part):
    """A place where two plans differ."""

    path: str
    this: Any
    other: Any


class Comparison(Part):
    """Where the plan and another one differ (--compare)."""

    file: str
    method: str
    rate: float = Field(le=1)
    bytes: Bytes
    differences: list[Difference]


class Missing(Part):
    """A method of which nothing can be said, and why."""

    label: str
    reason: str


class Speed(Part):
    """A link."""

    link: str
    bytes_per_s: float = Field(gt=0, description="Of one direction.")
    nominal: bool = Field(description="Of a standard; otherwise it is what the user said.")


class At(Part):
    """A context."""

    context: Positive
    over_model_context: bool


class Moved(Part):
    """What moving the cache of a context takes."""

    context: Annotated[Positive, Keyed()]
    bytes: Annotated[Count, Compared("lower", headline=True, exact=True)] = Field(
        description="Of one sequence's cache."
    )
    rate: float = Field(le=1, description="1 - bytes / bytes(uncompressed), at this context.")
    seconds: list[Size] = Field(
        description="Over each of `links`, in their order: bytes over speed, without latency and "
        "packing."
    )


class MovedRow(Part):
    """What moving a method's caches takes."""

    label: Annotated[str, Keyed()]
    method: str
    rate: float = Field(le=1, description="In bytes, at `rate_context`, in `dtype`.")
    rate_context: int
    at: list[Moved] = Field(description="One entry per context.")


class Transfer(Part):
    """What moving a context's cache takes (--transfer)."""

    dtype: str = Field(description="In which the cache is counted.")
    model_context: int | None
    links: list[Speed]
    contexts: list[At]
    rows: list[MovedRow]
    missing: list[Missing]


class PlanData(Part):
    """Data of `kvprof plan`."""

    plan: Plan | None = Field(description="One plan; null for --transfer.")
    comparison: Comparison | None
    transfer: Transfer | None = None

    @model_validator(mode="after")
    def _is_not_of_fit(self) -> "PlanData":
        if self.plan is None and self.transfer is None:
            raise ValueError("it tells what fits, which kvprof advise does now")
        return self


class PlanInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    device: str | None = None
    gguf: dict[str, Any] | None = None
    plan_file: str | None = None
    saved: str | None = None
    describe: bool = False


class PlanResult(Result):
    """What a plan stores and runs, and what moving a cache takes."""

    inputs: PlanInputs
    data: PlanData
