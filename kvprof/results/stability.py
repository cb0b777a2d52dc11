"""The result of ``kvprof stability``."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from kvprof.results.base import Compared, Figure, Key, Keyed, Part, Result, Size, ends

__all__ = ["NOISE_FLOOR", "Claim", "CurvePoint", "Lengths", "StabilityResult", "Step"]

#: Name of the target that is the same kind of random tokens with another seed.
NOISE_FLOOR = "random, another seed"

_FIGURES = (
    *("ratio", "ratio_sign_aligned", "ratio_cluster_aligned", "subspace_distance"),
    *("principal_angle", "extra_energy_loss", "extra_score_error", "extra_output_error"),
)
_Cost = Annotated[float | None, Compared("lower", headline=True, exact=True)]


class CurvePoint(Part):
    """A row of a curve: of one head and seed, or an average, whose `layer` and `kv_head` are null.

    An average has `heads_and_seeds` and a `spread`.
    """

    pair: Annotated[str, Keyed()]
    source: Annotated[str, Keyed()]
    target: Annotated[str, Keyed()]
    tokens: Annotated[int, Keyed()]
    seq_len_source: Annotated[int | None, Keyed()]
    seq_len_target: Annotated[int | None, Keyed()]
    removal_rate: Annotated[float | None, Keyed()]
    rank: Annotated[int | float, Keyed()]  # a whole one stays one
    seed: int | None
    layer: int | None
    kv_head: int | None
    ratio: Size | None = Field(description="Mean |dR| over mean |R|, unaligned.")
    ratio_sign_aligned: Annotated[Size | None, Compared("lower", exact=True)]
    ratio_cluster_aligned: Size | None
    subspace_distance: Size | None
    principal_angle: Size | None = Field(description="The largest one, in radians.")
    extra_energy_loss: _Cost
    extra_score_error: _Cost
    extra_output_error: _Cost
    own_energy_loss: float | None = Field(
        None, description="The dataset's own; absent in results of before 2026-11-21."
    )
    spread: dict[str, list[float]] = Field(
        {}, description="2.5 and 97.5 percentiles over heads and seeds, per figure with a value."
    )
    heads_and_seeds: int | None = Field(None, ge=1, description="Rows that were averaged.")

    @property
    def average(self) -> bool:
        """Whether it is over heads and seeds."""
        return self.layer is None

    @property
    def error(self) -> float | None:
        """The error of the product that the pair belongs to: of the scores, or of the outputs."""
        scores = self.pair in ("qk", "k")
        return self.extra_score_error if scores else self.extra_output_error

    @model_validator(mode="after")
    def _is_whole(self) -> "CurvePoint":
        missing = {"heads_and_seeds", "spread"} - self.model_fields_set
        if self.average and missing:
            raise ValueError(f"an average lacks {' and '.join(sorted(missing))}")
        return self

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield an average's figures; single heads are thousands."""
        if self.average and self.seed is None:
            yield from super().figures(key)


class Claim(Part):
    """A paper's statement; null where the sweep cannot judge it."""

    claim: Annotated[str, Keyed()] = Field(description="The paper's statement in our words.")
    paper: str = Field(description="With the section, table or figure.")
    pair: Annotated[str, Keyed()]
    target: Annotated[str, Keyed()] = Field(
        description="A dataset, or several joined by `and` where the claim is about their average."
    )
    tokens: Annotated[int | None, Keyed()] = Field(description="Token count that decided.")
    threshold: float | str | None = Field(description="`measured` must be below it.")
    measured: Annotated[float | str | None, Compared(interval="interval")] = Field(
        description="Mean |dR| over mean |R| after sign alignment."
    )
    interval: list[float] | None = Field(description="95 % bootstrap over heads.")
    cost: float | None = Field(description="Mean extra lost energy, at the rank of `half_ranks`.")
    holds: bool | None = Field(description="By the paper's metric.")
    verdict: str


class Step(Part):
    """How much of the cost a step of the sweep removed."""

    start: int = Field(alias="from")
    to: int
    cost_before: float
    cost_after: float
    removed_per_doubling: float


class PairAdvice(Part):
    """After how many tokens a pair's cost stops falling."""

    tokens: int
    stopped_falling: bool
    threshold: float
    evidence: list[Step]


class Recommendation(Part):
    """How many tokens to calibrate with."""

    tokens: int
    stopped_falling: bool
    pairs: dict[str, PairAdvice]


class Clusters(Part):
    """How many columns cluster alignment turned together."""

    pair: str
    target: str
    tokens: int
    sizes: dict[str, int] = Field(description="Size of a cluster to the number of clusters.")


class Lengths(Part):
    """What of a cost comes from the length of sequences."""

    pair: str
    target: str
    tokens: int
    seq_len_source: int | None
    seq_len_target: int | None
    cost_same_length: float = Field(
        description="Mean extra lost energy on the dataset at the source's length."
    )
    cost: float = Field(description="The same at the dataset's own length.")


class UnrelatedRatio(Part):
    """Mean |dR| over mean |R| of two unrelated (Haar random) rotations."""

    unaligned: float
    sign_aligned: float


class StabilityData(Part):
    """Data of `kvprof stability`."""

    curves: list[CurvePoint]
    claims: list[Claim]
    recommendation: Recommendation | None = Field(description="Null where the sweep is too short.")
    clusters: list[Clusters] = Field(description="Empty without two seeds.")
    lengths: list[Lengths] = Field(
        description="Empty unless source and datasets differ in length by more than two."
    )
    unrelated_ratio: UnrelatedRatio
    negligible_cost: float = Field(
        description="Extra lost energy up to which a basis costs nothing."
    )
    half_ranks: dict[str, int] = Field(
        description="Pair to the tested rank nearest half the width, at which its cost is read."
    )


class StabilityInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    model: str | None
    fingerprint: str
    source: str
    targets: list[str]
    seeds: list[int | None]
    seq_len: int
    target_seq_len: int
    target_tokens: int
    ranks: list[int]
    removal: list[float]
    dtype: str | None = None
    device: str | None = None
    gguf: dict[str, Any] | None = None


class StabilityResult(Result):
    """Whether a basis found on some tokens holds on others.

    A row of its CSV without ``layer`` and ``kv_head`` is an average over heads and seeds; it alone
    has ``heads_and_seeds`` and, for every figure, ``<figure>_low`` and ``<figure>_high`` (2.5 and
    97.5 percentiles). Angles are in radians, losses and errors are shares.
    """

    columns: ClassVar[tuple[str, ...]] = (
        *("pair", "source", "target", "tokens", "seq_len_source", "seq_len_target", "seed"),
        *("layer", "kv_head", "rank", "removal_rate", *_FIGURES),
        *("own_energy_loss", "heads_and_seeds"),
        *(f"{figure}_{end}" for figure in _FIGURES for end in ("low", "high")),
    )

    inputs: StabilityInputs
    data: StabilityData

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the points of every curve."""
        for point in self.data.curves:
            row = point.model_dump(exclude={"spread"})
            for figure, bounds in point.spread.items():
                row |= ends(figure, bounds)
            yield row
