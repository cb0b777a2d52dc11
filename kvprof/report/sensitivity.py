"""The report of ``kvprof sensitivity``: which parts of the cache tolerate lower precision?"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvprof.report.blocks import (
    Block,
    Column,
    Heading,
    HeatMap,
    Paragraph,
    Report,
    Table,
    framed,
)
from kvprof.results.sensitivity import (
    SIDES,
    Budget,
    Cell,
    Choice,
    Flags,
    SensitivityData,
    SensitivityResult,
)
from kvprof.views.numbers import MISSING, count, interval, number, percent, rate_in_bytes
from kvprof.views.page import listed

__all__ = ["report"]

_NOTES = (
    "Divergence: mean next-token KL divergence from the uncompressed model, in nats.",
    "A cell compresses one part and leaves everything else uncompressed.",
    "Measured: all parts together, since cells do not add up exactly.",
    "Decoded tokens attend to older ones as stored; ranks project the prompt too.",
    "Rates: of the measured parts' bytes, scales and windows included.",
)


def report(result: SensitivityResult) -> Report:
    """Return the report."""
    data, inputs = result.data, result.inputs
    limit = number(inputs.limit)
    body: list[Block] = [Heading("What each setting costs"), _settings(data)]
    body += [Heading("Divergence by layer and side"), *_maps(data)]
    if data.needed:
        share = f"The fewest bits within an equal share of {limit} nats."
        body += [Heading("What each part needs"), Paragraph(share, "aside"), *_needed(data)]
    if data.first_tokens:
        body += [Heading("With the first tokens uncompressed"), _first_tokens(data)]
    if data.budgets:
        body += [Heading("Bits and ranks by cost per byte"), *_budgets(data)]
    for one in data.flags:
        body += _flags(one)
    decoded = data.cells[0].decoded_tokens if data.cells else None
    text = f"{', '.join(inputs.text)}: {inputs.sequences} sequences of {count(inputs.seq_len)}"
    return framed(
        result,
        body,
        verdict=_verdict(data, limit),
        subject=f"{inputs.model}, {', '.join(inputs.text)}",
        notes=_NOTES,
        measured_with={
            "model": inputs.model,
            "quantiser": inputs.quantiser,
            "text": f"{text} tokens, {count(decoded)} decoded",
            "accuracy, uncompressed": percent(data.baseline_accuracy),
            "divergence, uncompressed": number(data.noise),
        },
    )


def _verdict(data: SensitivityData, limit: str) -> str:
    if not data.sides:
        return "No setting was measured on all parts, so nothing can be compared."
    said = []
    for side, other in (SIDES, SIDES[::-1]):
        if own := [one.setting for one in data.sides if one.more == side]:
            said.append(f"{side} are more sensitive than {other} at {listed(own)}")
    if alike := [one.setting for one in data.sides if one.more is None]:
        said.append(f"keys and values cost about the same at {listed(alike)}")
    if free := [one.setting for one in data.layers if not one.stay]:
        whole = len(data.heads) == data.model_layers
        parts = "all parts" if whole else "the measured layers"
        said.append(f"{parts} together stay within {limit} nats at {listed(free)}")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}."


# --- Tables and maps.


def _settings(data: SensitivityData) -> Table:
    stay = {one.setting: one.stay for one in data.layers}
    worst = {
        one.setting: max(data.plain(one.setting), key=lambda cell: cell.kl, default=None)
        for one in data.sides
    }

    def of_worst(show: Callable[[Cell], str]) -> Callable[[Any], str]:
        return lambda row: MISSING if (cell := worst[row.setting]) is None else show(cell)

    columns = [
        Column("setting", "setting", words=True),
        Column("keys", "keys", number),
        Column("values", "values", number),
        Column("ratio", "keys / values", number),
        Column(
            lambda row: _layers(stay.get(row.setting), data),
            "layers to leave uncompressed",
            words=True,
        ),
        Column(of_worst(_part), "worst part", words=True),
        Column(of_worst(lambda cell: number(cell.kl)), "cost"),
        Column(of_worst(lambda cell: percent(cell.relative_accuracy)), "accuracy kept"),
    ]
    return Table(columns, data.sides)


def _part(cell: Cell) -> str:
    head = "" if cell.kv_head is None else f" head {cell.kv_head}"
    return f"layer {cell.layer} {cell.side}{head}"


def _layers(stay: Sequence[int] | None, data: SensitivityData) -> str:
    """Write layers, neighbours as 3–6."""
    if stay is None:
        return MISSING
    spans: list[list[int]] = []
    for index in stay:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    text = ", ".join(
        f"{one[0]}–{one[-1]}" if len(one) > 2 else ", ".join(map(str, one)) for one in spans
    )
    return f"{text} (all)" if len(stay) == len(data.heads) > 1 else text or "none"


def _maps(data: SensitivityData) -> Iterator[HeatMap]:
    layers = sorted({cell.layer for cell in data.cells})
    names = [str(layer) for layer in layers]
    for setting, first in dict.fromkeys((cell.setting, cell.exact_first) for cell in data.cells):
        cells = data.plain(setting, first)
        of = {(cell.layer, cell.side, cell.kv_head): cell.kl for cell in cells}
        exact = f", first {first} uncompressed" if first else ""
        if any(cell.kv_head is None for cell in cells):
            values = [[of.get((x, side, None)) for side in SIDES] for x in layers]
            title = f"{setting}{exact}: nats"
            yield HeatMap(values, title, layers=names, columns="side", names=SIDES, log=True)
            continue
        low, high = min(of.values()), max(of.values())
        heads = range(1 + max(cell.kv_head or 0 for cell in data.cells))
        for side in SIDES:
            values = [[of.get((x, side, head)) for head in heads] for x in layers]
            title = f"{setting}{exact}, {side}: nats"
            yield HeatMap(values, title, low, high, layers=names, log=True)


def _needed(data: SensitivityData) -> list[Block]:
    """Return how many parts need which setting, and each layer's."""
    quantised = {cell.bytes_per_token: cell.setting for cell in data.cells if cell.bits}
    counts = {
        side: Counter(one.setting for one in data.needed if one.side == side) for side in SIDES
    }
    order = [quantised[size] for size in sorted(quantised)]
    settings = [*dict.fromkeys(order), *dict.fromkeys(one.setting for one in data.needed)]
    rows = [name for name in dict.fromkeys(settings) if any(of[name] for of in counts.values())]
    unit = "layers" if data.needed[0].kv_head is None else "heads"
    columns = [
        Column(
            lambda name: name if name in order else f"more than {order[-1]}", "needs", words=True
        ),
        Column(lambda name: counts["keys"][name], f"keys of {unit}"),
        Column(lambda name: counts["values"][name], f"values of {unit}"),
    ]
    return [Table(columns, rows), Paragraph(""), _by_layer(data.needed)]


def _by_layer(choices: Sequence[Choice], title: str = "") -> Table:
    """Return what keys and values of each layer take, its heads one after the other."""
    found: dict[int, dict[str, list[str]]] = {}
    for one in choices:
        sides = found.setdefault(one.layer, {side: [] for side in SIDES})
        sides[one.side].append(one.setting)
    rows = [(layer, *(_runs(sides[side]) for side in SIDES)) for layer, sides in found.items()]
    columns = [Column(i, name, words=True) for i, name in enumerate(("layer", *SIDES))]
    return Table(columns, sorted(rows), title)


def _runs(settings: Sequence[str]) -> str:
    """Write equal neighbours once: ``0–2: 4 bits``; where all are equal, that alone."""
    if len(set(settings)) < 2:
        return settings[0] if settings else MISSING
    found, start = [], 0
    for head in range(1, len(settings) + 1):
        if head == len(settings) or settings[head] != settings[start]:
            span = f"{start}" if head - start == 1 else f"{start}–{head - 1}"
            found.append(f"{span}: {settings[start]}")
            start = head
    return ", ".join(found)


def _first_tokens(data: SensitivityData) -> Table:
    columns = [
        Column("setting", "setting", words=True),
        Column("exact_first", "first tokens"),
        Column("kl", "cost", number),
        Column("kl_exact", "first uncompressed", number),
        Column("explained", "explained by first tokens", percent),
        Column(lambda row: row.explained_by_side.keys, "of keys", percent),
        Column(lambda row: row.explained_by_side.values, "of values", percent),
    ]
    return Table(columns, data.first_tokens)


def _budgets(data: SensitivityData) -> Iterator[Block]:
    rows: list[tuple[str, Any]] = []
    for one in data.budgets:
        if one.uniform is not None:
            rows.append((f"all at {one.like}", one.uniform))
        rows.append((_mixture(one), one))
    columns = [
        Column(0, "allocation", words=True),
        Column(lambda row: row[1].rate, "rate", rate_in_bytes),
        Column(lambda row: row[1].predicted_kl, "sum of cells", number),
        Column(lambda row: _kl(row[1]), "measured"),
        Column(lambda row: row[1].measured.relative_accuracy, "accuracy kept", percent),
    ]
    yield Table(columns, rows)
    bits = {cell.setting for cell in data.cells if cell.bits is not None}
    apart = "" if "fp8" not in bits or len(bits) == 1 else " A plan has FP8 or a quantiser's bits."
    yield Paragraph(f"--rate and --save write the mixture as a plan.{apart}", "aside")
    for one in data.budgets:
        if len({choice.setting for choice in one.choices}) > 1:
            yield Paragraph("")
            yield _by_layer(one.choices, _mixture(one))


def _mixture(one: Budget) -> str:
    if one.like is None:
        return f"mixed, at rate {percent(one.rate_asked)}"
    return f"mixed, at most the bytes of {one.like}"


def _kl(one: Any) -> str:
    return interval(one.measured.kl, one.measured.kl_interval)


def _flags(one: Flags) -> list[Block]:
    kept = percent(one.measured.relative_accuracy)
    return [
        Heading(f"{one.program}: {one.flags}"),
        Paragraph(f"Meaning: {one.says}. Measured: {_kl(one)} nats, {kept} of the accuracy."),
        Paragraph(f"Limits: {one.unsaid}."),
    ]
