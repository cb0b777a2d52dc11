"""The result of ``kvprof advise``."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from kvprof.results.base import Compared, Count, Interval, Keyed, Part, Result, Size, ends

__all__ = ["TORCH", "AdviseResult", "AdvisedPlan", "best_of"]

TORCH = "torch only"


class AdvisedPlan(Part):
    """A way to store the cache; null where it is refused, or not known."""

    plan: Annotated[str, Keyed()]
    engine: str = Field(description="vLLM, llama.cpp, or torch only: nothing serves it yet.")
    command: str
    refused: str | None = Field(None, description="Why this model's cache is not stored so.")
    bits: Size | None = Field(None, description="Of a value, with its scales.")
    bytes_per_token: Annotated[Size | None, Compared("lower", headline=True, exact=True)] = Field(
        None, description="As allocated at the context, pages and states counted."
    )
    keeps: Annotated[Size | None, Compared("higher", headline=True, interval="keeps_interval")] = (
        Field(None, description="Share of the uncompressed accuracy.")
    )
    keeps_interval: Interval = None
    keeps_tokens: Count | None = None
    needles: list[int] | None = Field(None, description="Found, and asked for.")
    keeps_at_least: Size | None = Field(None, description="Lower end: own, or the lowest known.")
    finds_at_least: Annotated[Size | None, Compared("higher")] = Field(
        None, description="Of needles that the model finds, the share: own, or the lowest known."
    )
    measured_on: str | None = Field(None, description="The nearest model that was measured.")
    measured_here: bool = Field(False, description="Whether that is this model.")
    record: str | None = Field(None, description="Of that measurement; null where it is new.")
    attention_speedup: Size | None = Field(None, description="Upper bound, by bytes read.")
    step_seconds: Annotated[Size | None, Compared("lower", headline=True, exact=True)] = Field(
        None, description="Lower bound, by bytes read."
    )
    users: Annotated[Size | None, Compared("higher", headline=True, exact=True)] = Field(
        None, description="Sequences of the context that fit at a time."
    )


def best_of(plans: Sequence[AdvisedPlan], keep: float) -> AdvisedPlan | None:
    """Return the plan that keeps and finds enough and fits most users, of the first's engine."""
    # Another engine counts, and serves, in its own way.
    own = (one for one in plans if one.engine == plans[0].engine and one.users)
    enough = (one for one in own if (one.keeps_at_least or 0) >= keep)
    found = (one for one in enough if one.finds_at_least is None or one.finds_at_least >= keep)
    return max(found, key=lambda one: one.users or 0, default=None)


class AdviseData(Part):
    """Data of `kvprof advise`."""

    plans: list[AdvisedPlan] = Field(description="The first is uncompressed.")
    best: str | None = Field(description="Of vLLM's that keep enough, the one for most users.")
    weights_bytes: Count
    available_bytes: int = Field(description="For the cache; below 0 where weights do not fit.")
    layer_kinds: dict[str, int] = Field(description="How many layers of a kind have a cache.")


class AdviseInputs(Part):
    """What was asked."""

    model_config = ConfigDict(extra="allow")

    model: str
    model_type: str
    fingerprint: str | None = Field(None, description="Of the weights, where they were read.")
    text: list[str] | None = None
    sequences: int | None = None
    seq_len: int | None = None
    task_items: int = 0
    task_lengths: list[int] | None = Field(None, description="Of needles, in tokens.")
    saved: str | None = Field(None, description="File of the best plan of kvprof's own.")
    weights_from: str
    gpu: str
    gpu_memory_bytes: Count
    gpu_bytes_per_second: Size
    context: Count
    users: Count
    keep: Size


_SPLIT = {"keeps_interval", "needles"}  # two columns each


class AdviseResult(Result):
    """Which cache fits a model, a GPU and a context; a row of its CSV is a plan."""

    columns: ClassVar[tuple[str, ...]] = (
        *(name for name in AdvisedPlan.model_fields if name not in _SPLIT),
        *("keeps_low", "keeps_high", "needles_found", "needles_asked"),
    )
    inputs: AdviseInputs
    data: AdviseData

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the plans."""
        for plan in self.data.plans:
            found, asked = plan.needles or (None, None)
            needles = {"needles_found": found, "needles_asked": asked}
            own = plan.model_dump(exclude=_SPLIT)
            yield {**own, **ends("keeps", plan.keeps_interval), **needles}
