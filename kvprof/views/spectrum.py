"""Report, CSV and figure of ``kvprof spectrum``: how far can this cache go, in dimensions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from kvprof.views.figure import draw_curves, draw_map, new_figure, titled
from kvprof.views.heatmap import rank_maps
from kvprof.views.numbers import number, percent, rate_text, span
from kvprof.views.page import capitalised, framed, heading, paragraph, tidy_csv, weights_row
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import Column, DataTable

__all__ = ["COLUMNS", "PAIR_NAMES", "figure", "report", "summary", "to_csv"]

#: What a pair's vectors are, in words; docs/concepts.md has the formulas.
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

#: Summary, heat maps and figure show the removal rate whose dim_rate is nearest this.
_SHOWN_DIM_RATE = 0.5

Result = Mapping[str, Any]

_NO_ACCURACY = "Spectra say how compact the vectors are, not what accuracy it costs."
_PUBLISHED_CV = (
    "CV: standard deviation over mean of the largest singular value, over all heads. Published: "
    "0.48–0.59 for qk (FDC table 3, ZACK table 6), 0.41–0.46 for vo (FDC table 4, ZACK table 7)."
)
_EFFECTIVE_RANK = (
    "Effective rank: exp of the entropy of the singular values, 1 when one direction holds all."
)


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    chosen = _chosen_removal(result)
    parts: list[RenderableType] = [paragraph(summary(result))]
    parts += [paragraph(f"Note: {label}.", "bold") for label in result["inputs"].get("labels", ())]
    if chosen is not None:
        parts += [heading("Removal rates"), _removal_table(result)]
        parts += _first_position(result, chosen)
    if "per_query_head" in result["data"]:
        parts += _per_query_head(result["data"]["per_query_head"], result["data"]["pairs"]["qk"])
    if result["data"]["pairs"]:
        parts += [heading("Pairs"), _pair_table(result)]
        parts += [paragraph(f"{_EFFECTIVE_RANK} {_PUBLISHED_CV}", "dim")]
        parts += [Text(), _plot(result)]
    if chosen is not None:
        parts += _heat_maps(chosen)
    return framed(
        result,
        parts,
        measured_with=_provenance(result),
        spaced=False,
        width=width,
        colour=colour,
    )


def summary(result: Mapping[str, Any]) -> str:
    """Return one paragraph that answers how far this cache can go."""
    pairs = result["data"]["pairs"]
    if not pairs:
        return "Nothing was measured."
    chosen = _chosen_removal(result)
    if chosen is None:
        sentences = [
            f"{capitalised(PAIR_NAMES.get(name, name))} ({name}) have an effective rank of "
            f"{number(_mean(_flat(pair['effective_rank'])))} of {_width_text(pair)} dimensions."
            for name, pair in pairs.items()
        ]
        missing = " and ".join(name for name in ("qk", "vo") if name not in pairs)
        if missing:
            sentences.append(f"There is no dim_rate without {missing}.")
        return " ".join([*sentences, _NO_ACCURACY])
    rates = [row["dim_rate"] for row in result["data"]["removal"]]
    removals = [row["removal_rate"] for row in result["data"]["removal"]]
    qk, vo = _flat(chosen["ranks_qk"]), _flat(chosen["ranks_vo"])
    text = (
        f"Removing {rate_text(chosen['removal_rate'])} of the singular values' sum leaves "
        f"{number(_mean(qk))} of {_width(pairs, 'qk')}dimensions for keys (qk) and "
        f"{number(_mean(vo))} of {_width(pairs, 'vo')}for values (vo) on average: dim_rate "
        f"{chosen['dim_rate']:.2f}"
    )
    if chosen["grid"] > 1:
        text += (
            f", or {chosen['dim_rate_rounded']:.2f} with ranks rounded up to multiples of "
            f"{chosen['grid']}"
        )
    text += f". Over the heads, ranks are {span(qk)} for keys and {span(vo)} for values. "
    if len(rates) > 1:
        text += (
            f"Between removal rates of {rate_text(min(removals))} and "
            f"{rate_text(max(removals))} dim_rate goes from {min(rates):.2f} to {max(rates):.2f}. "
        )
    return text + _NO_ACCURACY


def _width(pairs: Mapping[str, Any], name: str) -> str:
    # A result may carry removal rates without the pair's own spectrum.
    return f"{_width_text(pairs[name])} " if name in pairs else "the "


def _first_position(result: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[RenderableType]:
    """Say what position 0 contributes: a first token's key is often far off the rest (a sink)."""
    first = result["data"].get("first_position")
    if not first or not first["token_share"] or "dim_rate_without_first" not in chosen:
        return []
    shares = ", ".join(
        f"{first[f'energy_share_{key}']:.2%} of {name}"
        for key, name in (("q", "Q"), ("k", "K"), ("v", "V"))
    )
    return [
        paragraph(
            f"The first position of each sequence is {first['token_share']:.2%} of the "
            f"tokens and holds {shares} (energy). Without it (--skip-first 1) dim_rate at removal "
            f"rate {rate_text(chosen['removal_rate'])} "
            f"{_instead(chosen['dim_rate_without_first'], chosen['dim_rate'])}.",
            "dim",
        )
    ]


def _instead(without: float, rate: float) -> str:
    if f"{without:.3f}" == f"{rate:.3f}":
        return f"would be the same, {rate:.3f}"
    return f"would be {without:.3f} instead of {rate:.3f}"


def _plot(result: Mapping[str, Any]) -> RenderableType:
    curves = []
    for name, pair in result["data"]["pairs"].items():
        values = _normalised_mean(pair)
        curves.append(
            Series(f"{name}: {PAIR_NAMES.get(name, name)}", range(1, len(values) + 1), values)
        )
    widest = max(max(_widths(pair)) for pair in result["data"]["pairs"].values())
    # Quarters of the width are the ranks that people think in.
    quarters = sorted({1, *(widest * part // 4 for part in (1, 2, 3, 4))})
    return LinePlot(
        curves,
        "Singular values by dimension, mean over heads and layers",
        "dimension",
        "relative to the first",
        log_y=True,
        x_ticks=quarters,
    )


def _heat_maps(chosen: Mapping[str, Any]) -> list[RenderableType]:
    why = f"dim_rate {chosen['dim_rate']:.2f}, nearest {_SHOWN_DIM_RATE:g}"
    at = f"at removal rate {rate_text(chosen['removal_rate'])} ({why})"
    return rank_maps(
        {
            f"Rank of {pair} by layer and head, {at}": chosen[f"ranks_{pair}"]
            for pair in ("qk", "vo")
        }
    )


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the figures depend on, in words; None for what the result does not name."""
    inputs = result["inputs"]
    layers = f"{inputs['layers']} layer{'s' if inputs['layers'] != 1 else ''}"
    heads = f"{layers}, {inputs['num_kv_heads']} KV heads of {inputs['head_dim']}"
    where = [str(inputs[key]) for key in ("dtype", "device") if key in inputs]
    shown = {
        "model": f"{inputs.get('model', 'a model')} ({heads}, {inputs['num_heads']} query heads)",
        **weights_row(inputs),
        "fingerprint": inputs["fingerprint"],
        "source": inputs.get("source_description") or inputs.get("source"),
        "tokens": f"{inputs['tokens']:,}",
        "positions": inputs.get("positions"),
        "seed": inputs.get("seed"),
        "starts with": inputs.get("prefix"),
        "left out": f"first {inputs['skip_first']} tokens" if inputs.get("skip_first") else None,
        "dtype": " on ".join(where),
        "weight of V": _value_weight(inputs),
        "qk": "C_q + G·C_k, paired per query head" if inputs.get("paired") else None,
        "default tokens": inputs.get("default_tokens_source"),
    }
    return {name: None if value == "" else value for name, value in shown.items()}


def _value_weight(inputs: Mapping[str, Any]) -> str | None:
    if "vo" not in inputs["pairs"] or "value_weight_tokens" not in inputs:
        return None
    tokens = inputs["value_weight_tokens"]
    if tokens is None:
        return "the tokens seen, against W_O in vo"
    return f"{tokens:,} tokens, against W_O in vo"


# --- What a pair's rows hold.


def _flat(rows: Iterable[Iterable[float]]) -> list[float]:
    """Return ``[layer][kv_head]`` as one list."""
    return [value for row in rows for value in row]


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def _heads_of(pair: Result, key: str) -> list[list[float]]:
    """Return ``[layer][kv_head][dim]`` of a pair as one list of heads."""
    return [head for layer in pair[key] for head in layer]


def _widths(pair: Result) -> list[int]:
    """Return each head's full width, layer by layer."""
    return [len(head) for head in _heads_of(pair, "singular_values")]


def _width_text(pair: Result) -> str:
    """Return the full width in words: ``128``, or ``64–128`` when layers differ."""
    every = _widths(pair)
    low, high = min(every), max(every)
    return f"{low}" if low == high else f"{low}–{high}"


def _half_energy(pair: Result) -> list[float]:
    """Return the energy that each head keeps at half its width (rounded down, at least 1)."""
    return [head[max(1, len(head) // 2) - 1] for head in _heads_of(pair, "energy_kept")]


def _normalised_mean(pair: Result) -> list[float]:
    """Return the mean curve divided by its first value; empty when that is zero."""
    curve = pair["mean"]
    return [value / curve[0] for value in curve] if curve and curve[0] > 0 else []


def _chosen_removal(result: Result) -> Result | None:
    """Return the entry of ``data.removal`` that heat maps and summary show."""
    rows: Sequence[Result] = result["data"].get("removal") or ()
    return min(rows, key=lambda row: abs(row["dim_rate"] - _SHOWN_DIM_RATE), default=None)


# --- The tables: each removal rate, each pair.


def _removal_table(result: Mapping[str, Any]) -> RenderableType:
    rows: Sequence[Mapping[str, Any]] = result["data"]["removal"]
    rounded = any(row["grid"] > 1 for row in rows)
    columns = [
        Column("removal rate"),
        Column("mean rank of qk"),
        Column("mean rank of vo"),
        Column("dim_rate"),
    ]
    if rounded:
        grid = span([row["grid"] for row in rows])
        columns += [Column(f"dim_rate in multiples of {grid}"), Column("lost to rounding")]
    cells = []
    for row in rows:
        line = [
            rate_text(row["removal_rate"]),
            f"{_mean(_flat(row['ranks_qk'])):.1f}",
            f"{_mean(_flat(row['ranks_vo'])):.1f}",
            f"{row['dim_rate']:.3f}",
        ]
        if rounded:
            line.append(f"{row['dim_rate_rounded']:.3f}")
            line.append(f"{row['dim_rate'] - row['dim_rate_rounded']:.3f}")
        cells.append(line)
    return DataTable(columns, cells)


def _pair_table(result: Mapping[str, Any]) -> RenderableType:
    columns = (
        Column("pair", words=True),
        Column("dims"),
        Column("effective rank"),
        Column("over heads"),
        Column("CV of the largest"),
        Column("energy at half width"),
        Column("its least"),
    )
    rows = []
    for name, pair in result["data"]["pairs"].items():
        ranks, energy = _flat(pair["effective_rank"]), _half_energy(pair)
        rows.append(
            (
                name,
                _width_text(pair),
                f"{_mean(ranks):.1f}",
                f"{min(ranks):.1f}–{max(ranks):.1f}",
                f"{pair['cv_of_max']:.2f}",
                percent(_mean(energy)),
                percent(min(energy)),
            )
        )
    return DataTable(columns, rows)


# --- What one basis per query head would store, beside one per KV head.


def _per_query_head(data: Mapping[str, Any], grouped: Mapping[str, Any]) -> list[RenderableType]:
    """Return the report's part about bases per query head (FDC §5.1 read literally)."""
    parts: list[RenderableType] = [heading("One basis of qk per query head")]
    if set(data["group"]) == {1}:
        return [
            *parts,
            paragraph("Every KV head has one query head here, so both bases are the same."),
        ]
    own, shared = _flat(data["qk"]["effective_rank"]), _flat(grouped["effective_rank"])
    times = span(sorted(set(data["group"])))
    parts.append(
        paragraph(
            f"A basis per query head has an effective rank of {number(_mean(own))}, one per KV "
            f"head {number(_mean(shared))}. But each would have to store its own compressed key: "
            f"{times} per KV head and token instead of one. Dimensions below are those of keys per "
            "token, over all layers."
        )
    )
    if not data["removal"]:
        return parts
    rounded = any(row["grid"] > 1 for row in data["removal"])
    columns = [
        Column("removal rate"),
        Column("mean rank per query head"),
        Column("dims stored"),
        Column("with grouped bases"),
        Column("at full width"),
        Column("of grouped"),
        Column("of full"),
    ]
    if rounded:
        grid = span([row["grid"] for row in data["removal"]])
        columns += [Column(f"dims in multiples of {grid}"), Column("grouped, likewise")]
    cells = []
    for row in data["removal"]:
        stored, full = row["stored_dims"], row["full_dims"]
        line = [
            rate_text(row["removal_rate"]),
            f"{_mean(_flat(row['ranks'])):.1f}",
            f"{stored:,}",
            f"{row['grouped_dims']:,}",
            f"{full:,}",
            f"{stored / row['grouped_dims']:.2f}×",
            f"{stored / full:.2f}×",
        ]
        if rounded:
            line += [f"{row['stored_dims_rounded']:,}", f"{row['grouped_dims_rounded']:,}"]
        cells.append(line)
    return [*parts, DataTable(columns, cells)]


# --- A spectrum result as one tidy table.

#: Columns of the table; a row leaves empty what does not apply to its `kind`.
COLUMNS = (
    "kind",
    "pair",
    "layer",
    "kv_head",
    "query_head",
    "dim",
    "removal_rate",
    "singular_value",
    "energy_kept",
    "effective_rank",
    "cv_of_max",
    "rank",
    "rank_rounded",
    "dim_rate",
    "dim_rate_rounded",
    "grid",
)

_OWN = "qk_per_query_head"


def to_csv(result: Mapping[str, Any]) -> str:
    """Return every figure of a spectrum result in one table that pandas reads as it is.

    Each row says in ``kind`` what it is:

    ======== ================================================= ==================================
    kind     identified by                                     holds
    ======== ================================================= ==================================
    value    pair, layer, kv_head, dim                         singular_value, energy_kept
    head     pair, layer, kv_head                              effective_rank
    mean     pair, dim                                         singular_value (mean over heads)
    pair     pair                                              cv_of_max
    rank     pair, layer, kv_head, removal_rate                rank, rank_rounded, grid
    rate     removal_rate                                      dim_rate, dim_rate_rounded, grid
    ======== ================================================= ==================================

    ``dim`` counts from 1, so that ``energy_kept`` is that of a rank of ``dim``; ``layer``,
    ``kv_head`` and ``query_head`` count from 0. Floats are written in full (`repr`). Rows of the
    pair ``qk_per_query_head`` have ``query_head`` instead of ``kv_head``.
    """
    data = result["data"]
    rows = chain(_pair_rows(data["pairs"]), _removal_rows(data.get("removal") or ()))
    if "per_query_head" in data:
        rows = chain(rows, _query_head_rows(data["per_query_head"]))
    return tidy_csv(COLUMNS, rows)


def _query_head_rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _pair_rows({_OWN: data["qk"]}, which="query_head")
    for row in data["removal"]:
        yield from _rank_rows(row, "", _OWN, "query_head")


def _pair_rows(pairs: Mapping[str, Any], *, which: str = "kv_head") -> Iterator[dict[str, Any]]:
    for name, pair in pairs.items():
        yield {"kind": "pair", "pair": name, "cv_of_max": pair["cv_of_max"]}
        for dim, value in enumerate(pair["mean"], start=1):
            yield {"kind": "mean", "pair": name, "dim": dim, "singular_value": value}
        for layer, heads in enumerate(pair["singular_values"]):
            for head, values in enumerate(heads):
                at = {"pair": name, "layer": layer, which: head}
                effective = pair["effective_rank"][layer][head]
                yield {"kind": "head", **at, "effective_rank": effective}
                energies = pair["energy_kept"][layer][head]
                for dim, (value, energy) in enumerate(zip(values, energies, strict=True), start=1):
                    yield {
                        "kind": "value",
                        **at,
                        "dim": dim,
                        "singular_value": value,
                        "energy_kept": energy,
                    }


def _removal_rows(removal: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in removal:
        at = {"removal_rate": row["removal_rate"], "grid": row["grid"]}
        yield {
            "kind": "rate",
            **at,
            "dim_rate": row["dim_rate"],
            "dim_rate_rounded": row["dim_rate_rounded"],
        }
        for pair in ("qk", "vo"):
            yield from _rank_rows(row, f"_{pair}", pair, "kv_head")


def _rank_rows(row: Mapping[str, Any], of: str, pair: str, which: str) -> Iterator[dict[str, Any]]:
    """Return what is left of each head at a removal rate."""
    at = {"removal_rate": row["removal_rate"], "grid": row["grid"]}
    for layer, heads in enumerate(zip(row[f"ranks{of}"], row[f"rounded_ranks{of}"], strict=True)):
        for head, (rank, rounded) in enumerate(zip(*heads, strict=True)):
            own = {"kind": "rank", "pair": pair, "layer": layer, which: head, **at}
            yield {**own, "rank": rank, "rank_rounded": rounded}


# --- The figure: mean curves with bands over heads, and the map of ranks.

_BAND = (2.5, 97.5)  # per cent of the heads


def figure(result: Mapping[str, Any]) -> Any:
    """Return the curves (FDC Fig. 3, ZACK Fig. 5, 10) beside maps of the ranks of qk and vo.

    Mean, and the band that holds 95 % of the heads, are divided by the mean's first value.
    """
    chosen = _chosen_removal(result)
    layers = 0 if chosen is None else len(chosen["ranks_qk"])
    # One row of a map needs 0.09 inches to be seen.
    drawing = new_figure(5.0 if chosen is None else 10.5, max(3.6, 0.09 * layers + 1.0))
    columns = 1 if chosen is None else 3
    axes = np.atleast_1d(
        drawing.subplots(1, columns, width_ratios=[2.0, 1.0, 1.0][:columns], squeeze=True)
    )
    draw_curves(
        axes[0],
        [_curve(name, pair) for name, pair in result["data"]["pairs"].items()],
        title=_title(result),
        x_label="dimension",
        y_label="singular value relative to the mean's first",
        log_y=True,
    )
    if chosen is not None:
        every = _flat(chosen["ranks_qk"]) + _flat(chosen["ranks_vo"])
        at = rate_text(chosen["removal_rate"])
        for where, pair in ((axes[1], "qk"), (axes[2], "vo")):
            image = draw_map(
                where,
                chosen[f"ranks_{pair}"],
                title=f"rank of {pair} at {at} removed",
                low=min(every),
                high=max(every),
            )
        drawing.colorbar(image, ax=list(axes[1:]), label="rank")
    return drawing


def _title(result: Mapping[str, Any]) -> str:
    inputs = result["inputs"]
    source = inputs.get("source_description") or f"{inputs['tokens']:,} tokens, {inputs['source']}"
    return titled(result, f"{inputs['model']}, {source}")


def _curve(name: str, pair: Mapping[str, Any]) -> Series:
    mean = _normalised_mean(pair)
    heads = _heads_of(pair, "singular_values")
    columns = range(1, len(mean) + 1)
    if not mean:
        return Series(name, columns, mean)
    stacked = np.full((len(heads), len(mean)), np.nan)
    for row, values in zip(stacked, heads, strict=True):
        row[: len(values)] = np.asarray(values, dtype=np.float64) / pair["mean"][0]
    low, high = np.nanpercentile(stacked, _BAND, axis=0)
    return Series(name, columns, mean, low.tolist(), high.tolist())
