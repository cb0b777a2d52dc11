"""The report of ``kvprof sensitivity``: which parts of the cache bear less, and what follows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.views.heatmap import HeatMap
from kvprof.views.numbers import MISSING, count, interval, number, percent, rate_in_bytes
from kvprof.views.page import (
    bullets,
    ends,
    framed,
    heading,
    listed,
    paragraph,
    tidy_csv,
    weights_row,
)
from kvprof.views.tables import DataTable, columns

__all__ = ["report", "to_csv"]

_SIDES = ("keys", "values")
_NOTES = (
    "Divergence: mean KL divergence of the next token's distribution from the uncompressed "
    "model's, in nats per decoded token; 0 is no change. Each cell stores one part otherwise and "
    "all else as it is. Sums are as if cells added up; what is called measured was run as a whole.",
    "One pass per cell shows what decoding would: tokens attend to older ones as these are stored "
    "by then, or as they are within a prompt where a format is published so, and to themselves. At "
    "a rank all tokens are projected.",
    "Rates are of the measured parts' bytes, in the model's own dtype, with scales and windows.",
)


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    data, inputs = result["data"], result["inputs"]
    limit = inputs.get("limit")
    parts: list[RenderableType] = [heading("What each setting costs"), _settings_table(data)]
    parts += [heading("Divergence by layer and side"), *_maps(data)]
    if data["needed"]:
        parts += [
            heading("What each part needs"),
            paragraph(
                f"The smallest quantised form within an equal share of {number(limit)} nats.", "dim"
            ),
            _by_layer(data["needed"]),
        ]
    if data["first_tokens"]:
        parts += [heading("With the first tokens exact"), _first_tokens_table(data)]
    if data["budgets"]:
        parts += [heading("Bits and ranks handed out by cost per byte"), *_budgets(data)]
    if data["flags"]:
        parts += [heading("Flags that say the same"), *_flags(data)]
    return framed(
        result,
        parts,
        answer=" ".join(_answer(data, limit)),
        notes=_NOTES,
        measured_with=_provenance(result),
        width=width,
        colour=colour,
    )


def to_csv(result: Mapping[str, Any]) -> str:
    """Return a row per cell, and one per allocation and setting that was measured as a whole."""
    names = ("layer", "side", "kv_head", "setting", "bits", "rank", "exact_first")
    figures = ("bytes_per_token", "kl", "kl_p999", "kl_worst", "accuracy", "relative_accuracy")
    bounds = [f"{name}_{end}" for name in ("kl", "relative_accuracy") for end in ("low", "high")]
    rows = [_csv_row(row, (*names, *figures), "cell", row) for row in result["data"]["cells"]]
    for budget in result["data"]["budgets"]:
        for what, one in (("budget", budget), ("uniform", budget["uniform"])):
            if one is None:
                continue
            own = {"setting": budget["like"], "bytes_per_token": one["bytes_per_token"]}
            rows.append(_csv_row(own, ("setting", "bytes_per_token"), what, one["measured"]))
            rows[-1] |= {name: one["measured"][name] for name in figures[1:]}
    return tidy_csv(["what", *names, *figures, *bounds], rows)


def _csv_row(
    row: Mapping[str, Any], names: Sequence[str], what: str, measured: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "what": what,
        **{name: row[name] for name in names},
        **ends("kl", measured["kl_interval"]),
        **ends("relative_accuracy", measured["relative_accuracy_interval"]),
    }


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    inputs = result["inputs"]
    cells = result["data"]["cells"]
    tokens = cells[0]["decoded_tokens"] if cells else None
    return {
        "model": inputs.get("model"),
        **weights_row(inputs),
        "device": inputs.get("device"),
        "dtype": inputs.get("dtype"),
        "quantiser": inputs.get("quantiser"),
        "text": f"{', '.join(inputs.get('text', ()))}: {inputs.get('sequences')} sequences of "
        f"{count(inputs.get('seq_len'))} tokens, {count(tokens)} decoded",
        "accuracy of the uncompressed model": percent(result["data"]["baseline_accuracy"]),
        "divergence with nothing stored otherwise": number(result["data"]["noise"]),
    }


# --- The answers in words.


def _answer(data: Mapping[str, Any], limit: float | None) -> Iterator[str]:
    sides = [one for one in data["sides"] if one["more"] is not None]
    if not data["sides"]:
        yield "No setting was measured on all parts, so nothing can be compared yet."
        return
    for side in _SIDES:
        own = [one["setting"] for one in sides if one["more"] == side]
        if own:
            other = _SIDES[1 - _SIDES.index(side)]
            yield f"{side.capitalize()} are more sensitive than {other} at {listed(own)}."
    if len(sides) < len(data["sides"]):
        alike = [one["setting"] for one in data["sides"] if one["more"] is None]
        yield f"Keys and values cost about the same at {listed(alike)}."
    free = [one["setting"] for one in data["layers"] if not one["stay"]]
    if free:
        parts = "All parts" if len(data["heads"]) == data["model_layers"] else "The measured layers"
        yield f"{parts} together stay within {number(limit)} nats at {listed(free)}."
    for one in data["layers"]:
        if one["stay"]:
            layers = "layer" if len(one["stay"]) == 1 else "layers"
            yield f"At {one['setting']} {layers} {_layers(one, data)} would have to stay."
    if data["needed"]:
        yield _needed(data, limit)
    for one in data["first_tokens"]:
        if one["explained"] is not None:
            yield (
                f"An attention sink explains {percent(max(one['explained'], 0.0), 0)} of the cost "
                f"at {one['setting']}: so much less is it with {_first(one['exact_first'])} exact."
            )
    if not data["first_tokens"]:
        yield "Whether an attention sink explains the cost was not measured (--exact-first 1 does)."


def _needed(data: Mapping[str, Any], limit: float | None) -> str:
    """Say how many bits each head needs, or each layer where heads were not taken apart."""
    bits = {row["bytes_per_token"]: row["setting"] for row in data["cells"] if row["bits"]}
    widest = bits[max(bits)]
    unit = "layer" if data["needed"][0]["kv_head"] is None else "head"
    said = []
    for side in _SIDES:
        own = Counter(one["setting"] for one in data["needed"] if one["side"] == side)
        every = own.total()
        counts = [
            f"{setting if setting in bits.values() else f'more than {widest}'} in "
            f"{f'each of the {every}' if number_of == every > 1 else number_of}"
            for setting, number_of in sorted(own.items(), key=lambda item: -item[1])
        ]
        said.append(f"{side} need {listed(counts)}")
    return f"By {unit}, within an equal share of {number(limit)} nats, {said[0]}, and {said[1]}."


def _first(number_of: int) -> str:
    return "the first token" if number_of == 1 else f"the first {number_of} tokens"


def _layers(one: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Write layers, neighbours as 3–6."""
    stay: list[int] = one["stay"]
    if len(stay) == len(data["heads"]) > 1:
        return f"{_spans(stay)} (all)"
    return _spans(stay) or "none"


def _spans(indices: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ", ".join(
        f"{one[0]}–{one[-1]}" if len(one) > 2 else ", ".join(map(str, one)) for one in spans
    )


# --- Tables and maps.


def _plain(data: Mapping[str, Any], setting: str, first: int = 0) -> list[Mapping[str, Any]]:
    return [
        row for row in data["cells"] if row["setting"] == setting and row["exact_first"] == first
    ]


def _settings_table(data: Mapping[str, Any]) -> DataTable:
    stay = {one["setting"]: one for one in data["layers"]}
    rows = []
    for one in data["sides"]:
        own = _plain(data, one["setting"])
        worst = max(own, key=lambda row: row["kl"], default=None)
        rows.append(
            (
                one["setting"],
                number(one["keys"]),
                number(one["values"]),
                number(one["ratio"]),
                _layers(stay[one["setting"]], data) if one["setting"] in stay else MISSING,
                MISSING if worst is None else _part(worst),
                MISSING if worst is None else number(worst["kl"]),
                MISSING if worst is None else percent(worst["relative_accuracy"]),
            )
        )
    heads = columns("setting", figures=("keys", "values", "keys / values"))
    heads += columns("layers that stay", "worst part")
    heads += columns(figures=("its cost", "accuracy kept"))
    return DataTable(heads, rows)


def _part(row: Mapping[str, Any]) -> str:
    head = "" if row["kv_head"] is None else f" head {row['kv_head']}"
    return f"layer {row['layer']} {row['side']}{head}"


def _maps(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    kinds = dict.fromkeys((row["setting"], row["exact_first"]) for row in data["cells"])
    for setting, first in kinds:
        rows = _plain(data, setting, first)
        exact = f", {_first(first)} exact" if first else ""
        layers = sorted({row["layer"] for row in data["cells"]})
        names = [str(layer) for layer in layers]
        by_part = {(row["layer"], row["side"], row["kv_head"]): row["kl"] for row in rows}
        if any(row["kv_head"] is None for row in rows):
            values = [[by_part.get((x, side, None)) for side in _SIDES] for x in layers]
            yield Text()
            title = f"{setting}{exact}: nats"
            yield HeatMap(values, title, layers=names, columns="side", names=_SIDES, log=True)
            continue
        known = [row["kl"] for row in rows]
        for side in _SIDES:
            heads = 1 + max(row["kv_head"] for row in data["cells"])
            by_head = [[by_part.get((x, side, head)) for head in range(heads)] for x in layers]
            yield Text()
            yield HeatMap(
                by_head,
                f"{setting}{exact}, {side}: nats",
                low=min(known),
                high=max(known),
                layers=names,
                log=True,
            )


def _by_layer(choices: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return what keys and values of each layer take, its heads one after the other."""
    found: dict[int, dict[str, list[str]]] = {}
    for one in choices:
        sides = found.setdefault(one["layer"], {side: [] for side in _SIDES})
        sides[one["side"]].append(one["setting"])
    rows = [
        (str(layer), *(", ".join(_runs(sides[side])) or MISSING for side in _SIDES))
        for layer, sides in sorted(found.items())
    ]
    return DataTable(columns("layer", *_SIDES), rows)


def _runs(settings: Sequence[str]) -> list[str]:
    """Write equal neighbours once: ``heads 0–2: 4 bits``; a single entry stands alone."""
    if len(settings) < 2 or len(set(settings)) == 1:
        return list(settings[:1])
    found = []
    start = 0
    for head in range(1, len(settings) + 1):
        if head == len(settings) or settings[head] != settings[start]:
            span = f"{start}" if head - start == 1 else f"{start}–{head - 1}"
            found.append(f"{span}: {settings[start]}")
            start = head
    return found


def _first_tokens_table(data: Mapping[str, Any]) -> DataTable:
    rows = [
        (
            one["setting"],
            str(one["exact_first"]),
            number(one["kl"]),
            number(one["kl_exact"]),
            percent(one["explained"]),
            *(percent(one["explained_by_side"][side]) for side in _SIDES),
        )
        for one in data["first_tokens"]
    ]
    figures = ("exact", "cost", "cost then", "explained", "of keys", "of values")
    return DataTable(columns("setting", figures=figures), rows)


def _budgets(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = []
    for one in data["budgets"]:
        if one["uniform"] is not None:
            rows.append((f"all at {one['like']}", *_whole(one["uniform"])))
        rows.append((_mixture(one).lower(), *_whole(one)))
    heads = columns("allocation", figures=("rate", "sum of cells"))
    yield DataTable([*heads, *columns(figures=("measured", "accuracy kept"))], rows)
    yield Text()
    yield paragraph(
        f"A mixture is a plan: --rate and --save keep it.{_not_mixed(data)}",
        "dim",
    )
    for one in data["budgets"]:
        if len({choice["setting"] for choice in one["choices"]}) == 1:
            continue
        yield Text()
        yield Text(_mixture(one), style="bold")
        yield _by_layer(one["choices"])


def _mixture(one: Mapping[str, Any]) -> str:
    if one["like"] is None:
        return f"Mixed, at the rate asked for ({percent(one['rate_asked'])})"
    return f"Mixed, at most the bytes of {one['like']}"


def _not_mixed(data: Mapping[str, Any]) -> str:
    """Say which settings are in no mixture together, though they were measured."""
    bits = {row["setting"] for row in data["cells"] if row["bits"] is not None}
    if "fp8" not in bits or len(bits) == 1:
        return ""
    return " None has FP8 beside bits of a quantiser: they are two arithmetics, and a plan has one."


def _whole(one: Mapping[str, Any]) -> tuple[str, ...]:
    measured = one["measured"]
    return (
        rate_in_bytes(one["rate"]),
        number(one["predicted_kl"]),
        interval(measured["kl"], measured["kl_interval"]),
        percent(measured["relative_accuracy"]),
    )


def _flags(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    for one in data["flags"]:
        measured = one["measured"]
        yield Text(f"{one['program']}: {one['flags']}", style="bold", overflow="fold")
        yield bullets(
            [
                f"Says: {one['says']}. Measured as a whole: {number(measured['kl'])} nats, "
                f"{percent(measured['relative_accuracy'])} of the accuracy.",
                f"Does not say: {one['unsaid']}.",
            ]
        )
