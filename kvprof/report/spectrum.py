"""The report of ``kvprof spectrum``: how far can this cache go, in dimensions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprof.report.blocks import (
    Block,
    Column,
    Curves,
    Heading,
    HeatMap,
    Paragraph,
    Report,
    Series,
    Table,
    framed,
)
from kvprof.results.spectrum import HeadRemoval, Pair, Removal, SpectrumResult, flat, mean
from kvprof.views.numbers import number, percent, rate_text, span

__all__ = ["PAIR_NAMES", "report"]

#: What a pair's vectors are; docs/concepts.md has the formulas.
PAIR_NAMES = {
    "qk": "queries and keys of a KV head's group",
    "vo": "values with W_O",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "q_pre": "queries before RoPE",
    "k_pre": "keys before RoPE",
    "w_v": "weight of the value projection",
}

#: Verdict and heat maps show the removal rate whose dim_rate is nearest this.
_SHOWN_DIM_RATE = 0.5
_BAND = (2.5, 97.5)  # per cent of the heads

_NOTES = (
    "dim_rate: share of dimensions dropped; kvprof eval measures accuracy.",
    "Effective rank: exp of the entropy of the singular values; at least 1.",
    "CV: standard deviation over mean of heads' largest singular value.",
    "Published CV, qk: 0.48–0.59 (FDC table 3, ZACK table 6).",
    "Published CV, vo: 0.41–0.46 (FDC table 4, ZACK table 7).",
)


def report(result: SpectrumResult) -> Report:
    """Return the report."""
    data, inputs = result.data, result.inputs
    chosen = min(data.removal, key=lambda row: abs(row.dim_rate - _SHOWN_DIM_RATE), default=None)
    body: list[Block] = []
    if chosen is not None:
        body += [Heading("Removal rates"), _removal_table(data.removal)]
        body += _first_position(result, chosen)
    if data.per_query_head is not None:
        body += _per_query_head(result)
    body += [Heading("Pairs"), _pair_table(data.pairs), _curves(data.pairs)]
    if chosen is not None:
        body += _rank_maps(chosen)
    source = inputs.source_description or inputs.source or "saved moments"
    return framed(
        result,
        body,
        verdict=_verdict(data.pairs, chosen),
        subject=f"{inputs.model or 'a model'}, {inputs.tokens:,} tokens, {source}",
        cautions=[f"Note: {label}." for label in inputs.labels],
        notes=_NOTES,
        measured_with=_measured_with(result),
    )


def _verdict(pairs: dict[str, Pair], chosen: Removal | None) -> str:
    if chosen is None:
        name, pair = next(iter(pairs.items()))
        return (
            f"{name} ({PAIR_NAMES.get(name, name)}) has a mean effective rank of "
            f"{number(mean(flat(pair.effective_rank)))} of {span(pair.widths)} dimensions."
        )
    ranks = [number(mean(flat(of))) for of in (chosen.ranks_qk, chosen.ranks_vo)]
    widths = [f" of {span(pairs[name].widths)}" if name in pairs else "" for name in ("qk", "vo")]
    return (
        f"At a removal rate of {rate_text(chosen.removal_rate)}, dim_rate is "
        f"{chosen.dim_rate:.2f}: keys keep {ranks[0]}{widths[0]} dimensions and values "
        f"{ranks[1]}{widths[1]}."
    )


def _mean_of(name: str) -> Any:
    return lambda row: mean(flat(getattr(row, name)))


def _removal_table(rows: Sequence[Removal]) -> Table:
    one_digit, three = "{:.1f}".format, "{:.3f}".format
    columns = [
        Column("removal_rate", "removal rate", rate_text),
        Column(_mean_of("ranks_qk"), "qk: mean rank", one_digit),
        Column(lambda row: span(flat(row.ranks_qk)), "qk: range", goes=2),
        Column(_mean_of("ranks_vo"), "vo: mean rank", one_digit),
        Column(lambda row: span(flat(row.ranks_vo)), "vo: range", goes=2),
        Column("dim_rate", "dim_rate", three),
    ]
    if any(row.grid > 1 for row in rows):
        grid = span([row.grid for row in rows])
        columns += [
            Column("dim_rate_rounded", f"dim_rate, ranks × {grid}", three),
            Column(
                lambda row: row.dim_rate - row.dim_rate_rounded, "lost to rounding", three, goes=1
            ),
        ]
    return Table(columns, rows)


def _pair_table(pairs: dict[str, Pair]) -> Table:
    columns = [
        Column(0, "pair", words=True),
        Column(lambda row: span(row[1].widths), "dims"),
        Column(lambda row: mean(flat(row[1].effective_rank)), "effective rank", "{:.1f}".format),
        Column(lambda row: _ends(flat(row[1].effective_rank)), "range"),
        Column(lambda row: row[1].cv_of_max, "CV", lambda value: number(value, 2)),
        Column(lambda row: mean(row[1].half_energy), "energy at half of dims", percent),
        Column(lambda row: min(row[1].half_energy), "lowest head", percent),
    ]
    return Table(columns, list(pairs.items()))


def _ends(values: Sequence[float]) -> str:
    return f"{min(values):.1f}–{max(values):.1f}"


def _first_position(result: SpectrumResult, chosen: Removal) -> list[Block]:
    """Say what position 0 contributes: a first token's key is often far off the rest (a sink)."""
    first, without = result.data.first_position, chosen.dim_rate_without_first
    if not first.token_share or without is None:
        return []
    return [
        Paragraph(
            f"First positions: {first.token_share:.2%} of tokens; {first.energy_share_q:.2%} of "
            f"Q's, {first.energy_share_k:.2%} of K's, {first.energy_share_v:.2%} of V's energy. "
            f"dim_rate without them (--skip-first 1): {without:.3f}.",
            "aside",
        )
    ]


def _curves(pairs: dict[str, Pair]) -> Curves:
    widest = max(max(pair.widths) for pair in pairs.values())
    # Quarters of the width are the ranks that people think in.
    quarters = sorted({1, *(widest * part // 4 for part in (1, 2, 3, 4))})
    return Curves(
        [_series(name, pair) for name, pair in pairs.items()],
        "Singular values by dimension, mean over heads and layers",
        "dimension",
        "relative to the first",
        log_y=True,
        x_ticks=quarters,
    )


def _series(name: str, pair: Pair) -> Series:
    """Return a pair's mean and the band of 95 % of its heads, over the mean's first value."""
    label = f"{name}: {PAIR_NAMES.get(name, name)}"
    if not pair.mean or pair.mean[0] <= 0:
        return Series(label, (), ())
    heads = [head for layer in pair.singular_values for head in layer]
    stacked = np.full((len(heads), len(pair.mean)), np.nan)
    for row, values in zip(stacked, heads, strict=True):
        row[: len(values)] = np.asarray(values, dtype=np.float64) / pair.mean[0]
    low, high = np.nanpercentile(stacked, _BAND, axis=0)
    relative = [value / pair.mean[0] for value in pair.mean]
    return Series(label, range(1, len(relative) + 1), relative, low.tolist(), high.tolist())


def _rank_maps(chosen: Removal) -> list[Block]:
    every = [*flat(chosen.ranks_qk), *flat(chosen.ranks_vo)]
    at = f"removal rate {rate_text(chosen.removal_rate)}, dim_rate {chosen.dim_rate:.2f}"
    return [
        HeatMap(
            ranks,
            f"Rank of {pair} by layer and head, {at}",
            low=min(every),
            high=max(every),
            show="{:.0f}".format,
        )
        for pair, ranks in (("qk", chosen.ranks_qk), ("vo", chosen.ranks_vo))
    ]


def _per_query_head(result: SpectrumResult) -> list[Block]:
    """Compare a basis per query head (FDC §5.1 read literally) with one per KV head."""
    own = result.data.per_query_head
    assert own is not None
    title = Heading("One basis of qk per query head")
    if set(own.group) == {1}:
        return [title, Paragraph("Each KV head has one query head, so both bases are equal.")]
    grouped = result.data.pairs["qk"]
    ranks = [number(mean(flat(pair.effective_rank))) for pair in (own.qk, grouped)]
    said = (
        f"Effective rank: {ranks[0]} per query head, {ranks[1]} per KV head. A basis per query "
        f"head stores {span(sorted(set(own.group)))} compressed keys per KV head and token."
    )
    return (
        [title, Paragraph(said), _head_table(own.removal)]
        if own.removal
        else [title, Paragraph(said)]
    )


def _head_table(rows: Sequence[HeadRemoval]) -> Table:
    times, count = "{:.2f}×".format, "{:,}".format
    columns = [
        Column("removal_rate", "removal rate", rate_text),
        Column(_mean_of("ranks"), "mean rank per query head", "{:.1f}".format),
        Column("stored_dims", "dims stored", count),
        Column("grouped_dims", "grouped bases", count),
        Column("full_dims", "uncompressed", count),
        Column(lambda row: row.stored_dims / row.grouped_dims, "of grouped", times),
        Column(lambda row: row.stored_dims / row.full_dims, "of uncompressed", times),
    ]
    if any(row.grid > 1 for row in rows):
        grid = span([row.grid for row in rows])
        columns += [
            Column("stored_dims_rounded", f"dims in multiples of {grid}", count, goes=1),
            Column("grouped_dims_rounded", f"grouped, multiples of {grid}", count, goes=2),
        ]
    return Table(columns, rows)


def _measured_with(result: SpectrumResult) -> dict[str, Any]:
    inputs = result.inputs
    layers = f"{inputs.layers} layer{'s' if inputs.layers != 1 else ''}"
    heads = f"{layers}, {inputs.num_kv_heads} KV heads of {inputs.head_dim}"
    weighted = f"{inputs.value_weight_tokens or inputs.tokens:,} tokens"
    return {
        "model": f"{inputs.model or 'a model'} ({heads}, {inputs.num_heads} query heads)",
        "source": inputs.source_description or inputs.source,
        "tokens": f"{inputs.tokens:,}",
        "positions": inputs.positions,
        "seed": inputs.seed,
        "prefix": inputs.prefix,
        "left out": f"first {inputs.skip_first} tokens" if inputs.skip_first else None,
        "weight of V": f"{weighted}, in vo" if "vo" in inputs.pairs else None,
        "qk": "C_q + G·C_k, paired per query head" if inputs.paired else None,
        "default tokens": inputs.default_tokens_source,
    }
