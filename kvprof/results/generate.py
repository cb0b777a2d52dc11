"""The result of ``kvprof generate``."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvprof.results.base import Compared, Count, Figure, Key, Part, Result, Size

__all__ = ["Cache", "Choice", "Decoding", "Difference", "GenerateResult", "Length"]

Ended = Literal["end_of_text", "length", "interrupted"]


def _mean(kl: list[float]) -> float | None:
    return sum(kl) / len(kl) if kl else None


class Cache(Part):
    """The compressed cache at the end; the last new token never enters it."""

    tokens: int = Field(ge=1)
    measured_bytes: Annotated[Count, Compared("lower")] = Field(description="Of stored tensors.")
    account_bytes: Count = Field(description="What the plan says it stores.")
    full_bytes: Count = Field(description="Uncompressed, in the run's dtype.")
    rate: Annotated[float, Compared("higher", headline=True, exact=True)] = Field(
        le=1, description="1 - measured_bytes / full_bytes."
    )
    notes: list[str] = Field([], description="What is stored otherwise than the plan says.")

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield what can be compared."""
        yield from super().figures((*key, ("of", "cache")))


class Decoding(Part):
    """How decoding steps were launched where all layers run on kvprof's kernels on a GPU."""

    replayed_steps: int = Field(ge=0, description="As CUDA graphs.")
    graph_bytes: int = Field(ge=0, description="GPU memory of the graph, in addition to the cache.")
    reason: str | None = Field(description="Why steps cannot be captured.")


class Choice(Part):
    """What one model wrote at `position`, and how probable both find it."""

    id: int
    text: str
    compressed_probability: Size
    full_probability: Size


class Length(Part):
    """How long both texts are, in tokens, with the one that ends a text."""

    tokens: Count
    full_tokens: Count = Field(description="The uncompressed model's.")
    ratio: Size | None = Field(description="Of one prompt, so without an interval.")
    ends: bool = Field(description="Whether the text ended; where not, `tokens` is the limit.")
    full_ends: bool


class Difference(Part):
    """From the uncompressed model's text, with --diff."""

    text: str = Field(description="The uncompressed model's.")
    tokens: list[int]
    ended: Ended
    position: int | None = Field(
        ge=0, description="Of the first different new token; null when all are the same."
    )
    common_text: str
    compressed_rest: str = Field(description="From `position` on.")
    full_rest: str
    compressed_token: Choice | None
    full_token: Choice | None
    length: Length | None = None
    kl: Annotated[list[Size], Compared("lower", name="kl_mean", of=_mean)] = Field(
        description="KL divergence of the compressed model's next token from the uncompressed "
        "model's, in nats, at each step up to `position` (with it)."
    )

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield what can be compared."""
        yield from super().figures((*key, ("of", "difference")))


class GenerateData(Part):
    """Data of `kvprof generate`."""

    prompt: str = Field(description="As the model got it, the chat template applied.")
    prompt_tokens: int = Field(ge=1)
    text: str
    tokens: list[int] = Field(description="Ids of the new tokens.")
    ended: Ended
    cache: Cache | None = Field(description="Null when nothing ran.")
    decoding: Decoding | None = None
    difference: Difference | None = Field(description="Null where that run was interrupted.")


class GenerateInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    model: str
    fingerprint: str
    dtype: str
    device: str
    method: str
    gguf: dict[str, Any] | None = None


class GenerateResult(Result):
    """Text with a compressed cache, and where it departs from the model's own."""

    inputs: GenerateInputs
    data: GenerateData
