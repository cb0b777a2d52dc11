"""The report of ``kvprof spectrum``: how far can this cache go, in dimensions."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.heatmap import HeatMap
from kvprof.views.numbers import number, percent, span
from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.plot import LinePlot, Series
from kvprof.views.spectrum_csv import to_csv
from kvprof.views.spectrum_data import (
    PAIR_NAMES,
    SHOWN_DIM_RATE,
    chosen_removal,
    flat,
    half_energy,
    mean,
    normalised_mean,
    rate_text,
    width_text,
    widths,
)
from kvprof.views.spectrum_figure import figure
from kvprof.views.spectrum_heads import per_query_head
from kvprof.views.tables import Column, DataTable, key_values

__all__ = ["figure", "report", "summary", "to_csv"]

_NO_ACCURACY = "Spectra say how compact the vectors are, not what accuracy it costs."
_PUBLISHED_CV = (
    "CV: standard deviation over mean of the largest singular value, over all heads. Published: "
    "0.48–0.59 for qk (FDC table 3, ZACK table 6), 0.41–0.46 for vo (FDC table 4, ZACK table 7)."
)
_EFFECTIVE_RANK = (
    "Effective rank: exp of the entropy of the singular values, 1 when one direction holds all."
)


def report(
    result: Mapping[str, Any],
    width: int | None = None,
    colour: bool = True,
    *,
    removal_rate: float | None = None,
) -> RenderableType:
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``spectrum`` (``architecture``).
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    removal_rate : float or None
        Which of the result's removal rates summary and heat maps show; by default the one whose
        ``dim_rate`` is nearest 0.5.

    Raises
    ------
    UsageError
        When `removal_rate` is not in the result.
    """
    chosen = chosen_removal(result, removal_rate)
    parts: list[RenderableType] = []
    if not result["complete"]:
        parts.append(incomplete_note())
    parts.append(paragraph(summary(result, removal_rate)))
    parts += [paragraph(f"Note: {label}.", "bold") for label in result["inputs"].get("labels", ())]
    if chosen is not None:
        parts += [heading("Removal rates"), _removal_table(result)]
        parts += _first_position(result, chosen)
    if "per_query_head" in result["data"]:
        parts += per_query_head(result["data"]["per_query_head"], result["data"]["pairs"]["qk"])
    if result["data"]["pairs"]:
        parts += [heading("Pairs"), _pair_table(result)]
        parts += [paragraph(f"{_EFFECTIVE_RANK} {_PUBLISHED_CV}", "dim")]
        parts += [Text(), _plot(result)]
    if chosen is not None:
        parts += _heat_maps(chosen, stated=removal_rate is not None)
    parts += [heading("Measured with"), key_values(_provenance(result))]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    if not result["complete"]:
        parts += [Text(), incomplete_note()]
    return Fitted(Group(*parts), width=width, colour=colour)


def summary(result: Mapping[str, Any], removal_rate: float | None = None) -> str:
    """Return one paragraph that answers how far this cache can go.

    Parameters
    ----------
    result : mapping
        Of ``kvprof spectrum``.
    removal_rate : float or None
        As for `report`.
    """
    pairs = result["data"]["pairs"]
    if not pairs:
        return "Nothing was measured."
    chosen = chosen_removal(result, removal_rate)
    if chosen is None:
        sentences = [
            f"{_capital(PAIR_NAMES.get(name, name))} ({name}) have an effective rank of "
            f"{number(mean(flat(pair['effective_rank'])))} of {width_text(pair)} dimensions."
            for name, pair in pairs.items()
        ]
        missing = " and ".join(name for name in ("qk", "vo") if name not in pairs)
        if missing:
            sentences.append(f"There is no dim_rate without {missing}.")
        return " ".join([*sentences, _NO_ACCURACY])
    rates = [row["dim_rate"] for row in result["data"]["removal"]]
    removals = [row["removal_rate"] for row in result["data"]["removal"]]
    qk, vo = flat(chosen["ranks_qk"]), flat(chosen["ranks_vo"])
    text = (
        f"Removing {rate_text(chosen['removal_rate'])} of the singular values' sum leaves "
        f"{number(mean(qk))} of {_width(pairs, 'qk')}dimensions for keys (qk) and "
        f"{number(mean(vo))} of {_width(pairs, 'vo')}for values (vo) on average: dim_rate "
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _width(pairs: Mapping[str, Any], name: str) -> str:
    # A result may carry removal rates without the pair's own spectrum.
    return f"{width_text(pairs[name])} " if name in pairs else "the "


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
            f"{mean(flat(row['ranks_qk'])):.1f}",
            f"{mean(flat(row['ranks_vo'])):.1f}",
            f"{row['dim_rate']:.3f}",
        ]
        if rounded:
            line.append(f"{row['dim_rate_rounded']:.3f}")
            line.append(f"{row['dim_rate'] - row['dim_rate_rounded']:.3f}")
        cells.append(line)
    return DataTable(columns, cells)


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
        ranks, energy = flat(pair["effective_rank"]), half_energy(pair)
        rows.append(
            (
                name,
                width_text(pair),
                f"{mean(ranks):.1f}",
                f"{min(ranks):.1f}–{max(ranks):.1f}",
                f"{pair['cv_of_max']:.2f}",
                percent(mean(energy)),
                percent(min(energy)),
            )
        )
    return DataTable(columns, rows)


def _plot(result: Mapping[str, Any]) -> RenderableType:
    curves = []
    for name, pair in result["data"]["pairs"].items():
        values = normalised_mean(pair)
        curves.append(
            Series(f"{name}: {PAIR_NAMES.get(name, name)}", range(1, len(values) + 1), values)
        )
    widest = max(max(widths(pair)) for pair in result["data"]["pairs"].values())
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


def _heat_maps(chosen: Mapping[str, Any], *, stated: bool) -> list[RenderableType]:
    every = flat(chosen["ranks_qk"]) + flat(chosen["ranks_vo"])
    why = "" if stated else f" (dim_rate {chosen['dim_rate']:.2f}, nearest {SHOWN_DIM_RATE:g})"
    at = f"at removal rate {rate_text(chosen['removal_rate'])}{why}"
    parts: list[RenderableType] = []
    for pair in ("qk", "vo"):
        parts += [
            Text(),
            HeatMap(
                chosen[f"ranks_{pair}"],
                f"Rank of {pair} by layer and head, {at}",
                low=min(every),
                high=max(every),
                write=lambda value: f"{value:.0f}",
            ),
        ]
    return parts


def _provenance(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the figures depend on, in words; what the result does not name is left out."""
    inputs = result["inputs"]
    layers = f"{inputs['layers']} layer{'s' if inputs['layers'] != 1 else ''}"
    heads = f"{layers}, {inputs['num_kv_heads']} KV heads of {inputs['head_dim']}"
    where = [str(inputs[key]) for key in ("dtype", "device") if key in inputs]
    shown = {
        "model": f"{inputs.get('model', 'a model')} ({heads}, {inputs['num_heads']} query heads)",
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
        "written": result.get("created"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None and value != ""}


def _value_weight(inputs: Mapping[str, Any]) -> str | None:
    if "vo" not in inputs["pairs"] or "value_weight_tokens" not in inputs:
        return None
    tokens = inputs["value_weight_tokens"]
    if tokens is None:
        return "the tokens seen, against W_O in vo"
    return f"{tokens:,} tokens, against W_O in vo"
