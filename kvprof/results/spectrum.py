"""The result of ``kvprof spectrum``."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from kvprof.results.base import Compared, Count, Figure, Key, Keyed, Part, Result, Size

__all__ = ["HeadRemoval", "Pair", "Removal", "SpectrumResult", "flat", "mean"]

ByHead = list[list[Size]]
RanksByHead = list[list[Count]]
ByDim = list[list[list[Size]]]


def flat(rows: Iterable[Iterable[float]]) -> list[float]:
    """Return ``[layer][kv_head]`` as one list."""
    return [value for row in rows for value in row]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return sum(values) / len(values) if values else None


def _mean_of_heads(ranks: ByHead) -> float | None:
    return mean(flat(ranks))


class Pair(Part):
    """The spectrum of a pair; lists are by layer, head and dimension."""

    singular_values: ByDim = Field(description="[layer][kv_head][dim], descending.")
    mean: list[Size] = Field(
        description="[dim]: over the heads that have the dimension (FDC Fig. 3)."
    )
    cv_of_max: Annotated[Size | None, Compared()] = Field(
        description="Coefficient of variation of the largest singular value over heads (FDC "
        "tables 3, 4)."
    )
    effective_rank: Annotated[ByHead, Compared(name="mean_effective_rank", of=_mean_of_heads)] = (
        Field(description="Exponential of the entropy of the normalised spectrum.")
    )
    energy_kept: ByDim = Field(
        description="Share of the squared singular values that rank dim + 1 keeps."
    )

    @property
    def widths(self) -> list[int]:
        """Each head's full rank, layer by layer."""
        return [len(head) for layer in self.singular_values for head in layer]

    @property
    def half_energy(self) -> list[float]:
        """The energy that each head keeps at half its width (rounded down, at least 1)."""
        return [head[max(1, len(head) // 2) - 1] for layer in self.energy_kept for head in layer]


class Removal(Part):
    """FDC eq. 1 at one removal rate."""

    removal_rate: Annotated[float, Keyed()] = Field(ge=0, le=1)
    dim_rate: Annotated[float, Compared("higher", headline=True, exact=True)] = Field(
        description="1 - sum(r_k + r_v) / sum(d_k + d_v)."
    )
    dim_rate_rounded: Annotated[float, Compared("higher")] = Field(
        description="The same with ranks rounded up to `grid`."
    )
    dim_rate_without_first: Annotated[float | None, Compared("higher")] = Field(
        None,
        description="`dim_rate` as if position 0 of every sequence had not been seen; absent where "
        "the moments tell no sequences.",
    )
    grid: int = Field(ge=1)
    ranks_qk: RanksByHead
    ranks_vo: RanksByHead
    rounded_ranks_qk: RanksByHead
    rounded_ranks_vo: RanksByHead


class FirstPosition(Part):
    """How much of the energy sits in position 0, where attention sinks are."""

    token_share: float = Field(
        description="Share of the tokens that are first in their sequence: an even spread's."
    )
    energy_share_q: float = Field(description="Of the squared norm of the queries, over heads.")
    energy_share_k: float
    energy_share_v: float


class HeadRemoval(Part):
    """Bases per query head at one removal rate; dimensions are a token's keys, over all layers."""

    removal_rate: float = Field(ge=0, le=1)
    grid: int = Field(ge=1)
    ranks: RanksByHead
    rounded_ranks: RanksByHead
    stored_dims: int = Field(description="Sum of `ranks`: one compressed key per query head.")
    stored_dims_rounded: int
    grouped_dims: int = Field(description="The same with one basis per KV head.")
    grouped_dims_rounded: int
    full_dims: int = Field(description="Of uncompressed keys.")


class PerQueryHead(Part):
    """With --per-query-head: qk with one basis per query head (FDC section 5.1 read literally)."""

    group: list[int] = Field(description="[layer]: query heads per KV head.")
    qk: Pair
    removal: list[HeadRemoval]

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield nothing: what it is held against is compared."""
        return iter(())


class SpectrumData(Part):
    """Data of `kvprof spectrum`."""

    removal: list[Removal] = Field(
        description="One entry per removal rate; empty unless qk and vo are both among the pairs."
    )
    pairs: Annotated[dict[str, Pair], Keyed("pair")] = Field(
        min_length=1, description="Keys: qk, vo, q, k, v, q_pre, k_pre, w_v."
    )
    first_position: FirstPosition
    per_query_head: PerQueryHead | None = None


class SpectrumInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str
    tokens: int
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    pairs: list[str]
    model: str | None = None
    source: str | None = None
    source_description: str | None = None
    positions: str | None = None
    seed: int | None = None
    prefix: str | None = None
    skip_first: int | None = None
    dtype: str | None = None
    device: str | None = None
    gguf: dict[str, Any] | None = None
    labels: Sequence[str] = ()
    value_weight_tokens: int | None = None
    paired: bool = False
    default_tokens_source: str | None = None


class SpectrumResult(Result):
    """How compact a model's Q, K and V are, head by head.

    Its CSV says in ``kind`` what a row is: ``value`` (pair, layer, kv_head, dim), ``head``,
    ``mean`` over heads, ``pair``, ``rank`` at a removal rate, and ``rate``. ``dim`` counts from 1,
    so that ``energy_kept`` is that of a rank of ``dim``; layers and heads count from 0. Rows of the
    pair ``qk_per_query_head`` have ``query_head`` instead of ``kv_head``.
    """

    columns: ClassVar[tuple[str, ...]] = (
        *("kind", "pair", "layer", "kv_head", "query_head", "dim", "removal_rate"),
        *("singular_value", "energy_kept", "effective_rank", "cv_of_max"),
        *("rank", "rank_rounded", "dim_rate", "dim_rate_rounded", "grid"),
    )

    inputs: SpectrumInputs
    data: SpectrumData

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every figure."""
        for name, pair in self.data.pairs.items():
            yield from _pair_rows(name, pair, "kv_head")
        for row in self.data.removal:
            at = {"removal_rate": row.removal_rate, "grid": row.grid}
            rates = {"dim_rate": row.dim_rate, "dim_rate_rounded": row.dim_rate_rounded}
            yield {"kind": "rate", **at, **rates}
            yield from _rank_rows("qk", "kv_head", at, row.ranks_qk, row.rounded_ranks_qk)
            yield from _rank_rows("vo", "kv_head", at, row.ranks_vo, row.rounded_ranks_vo)
        if (own := self.data.per_query_head) is not None:
            yield from _pair_rows("qk_per_query_head", own.qk, "query_head")
            for one in own.removal:
                at = {"removal_rate": one.removal_rate, "grid": one.grid}
                ranks = one.ranks, one.rounded_ranks
                yield from _rank_rows("qk_per_query_head", "query_head", at, *ranks)


def _pair_rows(name: str, pair: Pair, which: str) -> Iterator[dict[str, Any]]:
    yield {"kind": "pair", "pair": name, "cv_of_max": pair.cv_of_max}
    for dim, value in enumerate(pair.mean, start=1):
        yield {"kind": "mean", "pair": name, "dim": dim, "singular_value": value}
    for layer, heads in enumerate(pair.singular_values):
        for head, values in enumerate(heads):
            at = {"pair": name, "layer": layer, which: head}
            yield {"kind": "head", **at, "effective_rank": pair.effective_rank[layer][head]}
            kept = pair.energy_kept[layer][head]
            for dim, (value, energy) in enumerate(zip(values, kept, strict=True), start=1):
                figures = {"singular_value": value, "energy_kept": energy}
                yield {"kind": "value", **at, "dim": dim, **figures}


def _rank_rows(
    pair: str, which: str, at: dict[str, Any], ranks: RanksByHead, rounded: RanksByHead
) -> Iterator[dict[str, Any]]:
    for layer, heads in enumerate(zip(ranks, rounded, strict=True)):
        for head, (rank, up) in enumerate(zip(*heads, strict=True)):
            own = {"kind": "rank", "pair": pair, "layer": layer, which: head}
            yield {**own, **at, "rank": rank, "rank_rounded": up}
