"""Fill the tables of the documentation from committed records and from the code.

    python tools/docs_tables.py

A page marks what is filled: what stands between ``<!-- table: NAME ARGUMENT … -->`` and
``<!-- end -->`` is replaced by what `TABLES` makes of the name. So no figure is typed by hand, and
a new record shows in every page that quotes it.
"""

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, reduce
from importlib import import_module
from operator import getitem, itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

import typer

from kvprof.benchmark.shapes import shape_names
from kvprof.cli import COMMANDS, app
from kvprof.errors import ExitCode
from kvprof.kernels.compile import ARCHITECTURES, OPERATIONS, variants
from kvprof.methods.papers import PAPERS, PaperSetting
from kvprof.methods.quantisers import QUANTISERS
from kvprof.methods.registry import METHODS, calibration_needs
from kvprof.records.files import read_result, write_text_atomic
from kvprof.views.numbers import MISSING, number
from kvprof.views.recipe import check_words, model_words, verdict_words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_REGION = re.compile(r"(<!-- table: ([a-z][^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FRONTIERS = ("frontier-random", "frontier-text")
_KERNELS = "benchmarks/kernels.json"
_RETRIEVAL = ("needle", "variables", "copy")


def filled(text: str) -> str:
    """Return a page with every region as the records have it.

    Raises
    ------
    ValueError
        For a region that nothing fills, or that has no end.
    """
    opened, closed = text.count("<!-- table: "), len(_REGION.findall(text))
    if opened != closed:
        raise ValueError(f"{opened} regions begin, and {closed} of them have a name and an end")

    def fill(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        if name not in TABLES:
            raise ValueError(f"no table {name!r}: there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name](*arguments)}\n{match[4]}"

    return _REGION.sub(fill, text)


def pages() -> list[Path]:
    """Return the pages that hold regions."""
    found = sorted(DOCS.glob("*.md"))
    return [page for page in found if "<!-- table: " in page.read_text(encoding="utf-8")]


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _wrapped(words: str, indent: str = "") -> str:
    return textwrap.fill(words, 99, subsequent_indent=indent, break_on_hyphens=False)


# --- what the code says ---------------------------------------------------------------------------


def _commands() -> str:
    rows = ((f"[`{entry.name}`](#{entry.name})", entry.help) for entry in COMMANDS)
    return _rows(("command", "answers"), rows)


def _exit_codes() -> str:
    epilog = typer.main.get_command(app).epilog or ""
    said = dict(re.findall(r"(\d+) ([^,.]+)", epilog))
    codes = (str(int(code)) for code in ExitCode)
    return _rows(("exit code", "means"), ((code, said[code]) for code in codes))


def _options() -> str:
    def shown(value: Any) -> str:
        if isinstance(value, tuple):
            return ",".join(map(shown, value))
        return str(value).lower() if isinstance(value, bool | None) else str(value)

    rows = []
    for name, function in METHODS.items():
        if name in PAPERS:
            continue
        parameters = inspect.signature(function).parameters.values()
        own = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        options = ", ".join(f"`{p.name}={shown(p.default)}`" for p in own) or MISSING
        # A library that is not installed changes nothing here: a quantiser needs no calibration.
        needs = None if name in ("hqq", "quanto") else calibration_needs(name)
        rows.append((f"`{name}`", options, f"`{needs.source}`" if needs else MISSING))
    return _rows(("method", "options and what they are unless told", "calibrated on"), rows)


def _papers() -> str:
    def options(setting: PaperSetting) -> str:
        told = (f"`{key}={str(value).lower()}`" for key, value in setting.options.items())
        return ", ".join(told)

    rows = [
        (
            f"`{name}`",
            options(setting),
            f"`{setting.source}`, {setting.tokens:,}",
            " ".join(setting.differences()),
        )
        for name, setting in PAPERS.items()
    ]
    head = ("setting", "options", "calibrated on, tokens", "what is not the paper's")
    return _rows(head, rows)


def _quantisers() -> str:
    def shared(side: Any) -> str:
        unit = "columns" if side.axis == "token" else "tokens"
        return f"per {side.axis}, " + (f"{side.group} {unit}" if side.group else "the whole row")

    rows = []
    for name, (make, bits, usual) in QUANTISERS.items():
        made = make((usual,))
        outliers = f"{100 * made.outliers:g} %" if made.outliers else MISSING
        sides = shared(made.keys), shared(made.values)
        known = ", ".join(map(str, sorted(bits)))
        rows.append((f"`{name}`", known, str(usual), *sides, str(made.window or MISSING), outliers))
    head = (
        "quantiser",
        "bits",
        "on top of a method",
        "K shares a scale",
        "V shares a scale",
        "exact window",
        "outliers kept",
    )
    return _rows(head, rows)


def _variants() -> str:
    counts = dict.fromkeys(OPERATIONS, 0)
    for variant in variants():
        counts[variant.name.split()[0]] += 1
    about = {
        name: (import_module(f"kvprof.kernels.{name}").__doc__ or "").strip().split("\n")[0]
        for name in OPERATIONS
    }
    rows = [(f"`{name}`", about[name], str(count)) for name, count in counts.items()]
    targets = ", ".join(f"sm_{architecture}" for architecture in ARCHITECTURES)
    return _rows(("kernel", "does", f"forms compiled for {targets}"), rows)


def _shapes() -> str:
    return _wrapped(", ".join(f"`{name}`" for name in shape_names()) + ".")


def _literal(module: str, which: str) -> str:
    """Return a literal block of a module's documentation, as code."""
    text = inspect.getdoc(import_module(module)) or ""
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", text + "\n")
    block = blocks[1 if which == "toml" else 0]
    return f"```{which}\n{textwrap.dedent(block).strip()}\n```"


# --- what was measured ----------------------------------------------------------------------------


@cache
def _record(path: str) -> dict[str, Any]:
    return read_result(DOCS / path)


def _methods(record: str) -> dict[str, dict[str, Any]]:
    rows = _record(f"findings/{record}.json")["data"]["methods"]
    return {row["label"]: row for row in rows}


def _retrieval(point: dict[str, Any]) -> str:
    return " / ".join(f"{point['tasks'][task]['accuracy']:.2f}" for task in _RETRIEVAL)


def _rates(*labels: str) -> str:
    """Return the largest rates at the target, with random tokens and with text."""
    random, text = (_methods(record) for record in _FRONTIERS)

    def cells(label: str) -> Iterator[str]:
        yield f"`{label}`"
        for rows in (random, text):
            if label not in rows:
                yield from (MISSING, MISSING)
                continue
            row = rows[label]
            points = {point["rate"]: point for point in row["points"]}
            point = points[row["max_rate"] if row["max_rate"] is not None else min(points)]
            early = ", stopped early" if row["reason"] == "interrupted" else ""
            none = f"none; {point['rate']:.3f} keeps {point['share']:.4f}"
            yield none if row["max_rate"] is None else f"{point['rate']:.3f}{early}"
            yield _retrieval(point)

    head = ("method", "rate", "retrieval", "rate, from text", "retrieval")
    return _rows(head, (list(cells(label)) for label in labels))


def _frontier_inputs() -> str:
    record = _record(f"findings/{_FRONTIERS[0]}.json")
    inputs, data = record["inputs"], record["data"]
    gpu, baseline = record["environment"]["gpus"][0]["name"], data["baseline"]
    records = ", ".join(f"[{name}](findings/{name}.json)" for name in _FRONTIERS)
    return _wrapped(
        f"Reference model, {gpu}, {data['dtype']}, up to {record['created'][:10]}; "
        f"{inputs['sequences']} sequences of {inputs['seq_len']:,} tokens, "
        f"{baseline['decoded_tokens']:,} of them decoded and scored; rates at a context of "
        f"{data['context']} tokens; target "
        f"{100 * data['target']:g} % of the uncompressed next-token accuracy, which is "
        f"{baseline['accuracy']:.4f}. Retrieval is the share of {' / '.join(_RETRIEVAL)} questions "
        f"answered at that rate ({_retrieval(baseline)} uncompressed). Records: {records}."
    )


def _running(*records: str) -> str:
    """Return rate, share, needs, kernel and measured speed of every row, from its largest rate."""
    found: list[tuple[str, float, tuple[str, ...]]] = []
    for record in records:
        inputs = _record(f"findings/{record}.json")["inputs"]
        model, calibrations = inputs["model"], inputs["calibration"]
        for row in _methods(record).values():
            seen = calibrations.get(row["label"])
            source = f"{seen['source']}, {seen['seq_len']:,}" if seen else MISSING
            points = [one for one in row["points"] if one["rate"] == row["max_rate"]]
            # A row of no rate that keeps its targets tells what the lowest one keeps.
            point = points[0] if points else min(row["points"], key=itemgetter("rate"))
            bounds = point["relative_accuracy_interval"]
            within = f" ({bounds[0]:.3f}–{bounds[1]:.3f})" if bounds else ""
            kernel, long = point["kernel"], point["long_context"]
            speeds = (f"{one['speedup']:.2f}× ({one['batch']})" for one in row["speeds"])
            tasks = (f"{task} {one['accuracy']:.2f}" for task, one in point["tasks"].items())
            cells = (
                model,
                f"`{row['label']}`",
                source,
                f"{point['rate']:.3f}" + ("" if points else ", misses"),
                f"{point['relative_accuracy']:.3f}{within}",
                " / ".join(tasks),
                f"{long['rate']:.3f}",
                f"{long['bytes_per_token']:,.0f}",
                ", ".join(point["needs"]) or "nothing",
                "yes" if kernel["reason"] is None else f"no: {kernel['reason']}",
                ", ".join(speeds) or MISSING,
            )
            if (key := (model, -long["rate"], cells)) not in found:
                found.append(key)
    head = ("model", "method", "calibrated on", "largest rate", "share of accuracy (95 %)", "found")
    long_head = ("rate at 100k", "bytes per token", "needs", "kernel", "speed-up (batch)")
    return _rows((*head, *long_head), (cells for *_, cells in sorted(found)))


def _claims(paper: str) -> str:
    """Return what the stability records say of a paper's claims about rotations."""
    found: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted((DOCS / "findings").glob("*.json")):
        for claim in _record(f"findings/{path.name}")["data"].get("claims", ()):
            if claim["paper"].startswith(paper):
                key = claim["paper"], claim["pair"]
                found.setdefault(key, []).append((path.stem, claim))
    rows = []
    for (where, pair), claims in sorted(found.items()):
        measured = [claim["measured"] for _, claim in claims]
        costs = [claim["cost"] for _, claim in claims]
        names = sorted({name for name, _ in claims})
        rows.append(
            (
                where,
                f"`{pair}`",
                f"{claims[0][1]['threshold']:g}",
                f"{min(measured):.2f}–{max(measured):.2f}",
                f"{100 * min(costs):.1f}–{100 * max(costs):.1f} %",
                f"{sum(claim['holds'] for _, claim in claims)} of {len(claims)}",
                ", ".join(f"[{name}](findings/{name}.json)" for name in names),
            )
        )
    head = ("claim", "pair", "δ/ε below", "measured", "extra lost energy", "holds in", "records")
    return _rows(head, rows)


def _kernel_section(path: str) -> dict[str, Any]:
    section: dict[str, Any] = reduce(getitem, path.split("."), _record(_KERNELS)["data"])
    return section


def _kernels(*paths: str) -> str:
    """Return the rows of parts of kernels.json, such as ``decode`` and ``palu.rope``."""

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        return (
            f"`{row['method']}`",
            f"{row['seq']:,}",
            str(row["batch"]),
            f"{row['rate']:.3f}",
            f"{1e6 * median(row['seconds']):,.1f}",
            number(row["tb_per_s"]),
            f"{row['speedup']:.2f}×",
            f"{row['error']:.1e}",
            row["baseline"],
        )

    head = ("method", "tokens", "batch", "rate", "µs", "TB/s", "speed-up", "error", "against")
    return _rows(head, (cells(row) for path in paths for row in _kernel_section(path)["rows"]))


def _kernels_inputs() -> str:
    record = _record(_KERNELS)
    gpu, packages = (record["environment"][key] for key in ("gpus", "packages"))
    section = _kernel_section("decode")
    shape = section["shape"]
    return _wrapped(
        f"{gpu[0]['name']}, torch {packages['torch']}, Triton {packages['triton']}, "
        f"{section['rows'][0]['dtype']}, {record['created'][:10]}; one layer of {shape['name']} "
        f"({shape['num_heads']} query heads, {shape['num_kv_heads']} KV heads of "
        f"{shape['head_dim']}) unless said otherwise; the median of {record['inputs']['repeats']} "
        "samples, taken in turn with the best full-width kernel, which the last column names. "
        "Errors are against float64. Record: [kernels.json](benchmarks/kernels.json)."
    )


# --- one claim, two models ------------------------------------------------------------------------

_PRETRAINED = "smollm2"
_BOTH = ("reference", _PRETRAINED)


def _entries(model: str, profile: str) -> dict[str, dict[str, Any]]:
    """Return the ledger's entries that rest on one model alone, by recipe."""
    records = (_record(f"reproduction/{path.name}") for path in _ledger_records())
    entries = (entry for record in records for entry in record["data"]["entries"])
    return {
        entry["recipe"]: entry
        for entry in entries
        if entry["profile"] == profile and model_words(entry) == model
    }


def _ledger_records() -> list[Path]:
    return sorted((DOCS / "reproduction").glob("*.json"))


def _judged(entry: dict[str, Any] | None, measures: Iterable[str]) -> str:
    """Return a verdict with what was measured; ✗ fails, ? is open, – is no measure of its own."""
    if entry is None:
        return MISSING
    # The first line of a measure is the claim, a later one the weaker claim on the same number.
    lines = {line["measure"]: line for line in reversed(entry["lines"])}
    marks = {True: "", False: " ✗", None: " ?"}
    found = (
        f"{number(lines[name]['measured'])}{marks[lines[name]['holds']]}"
        if name in lines
        else MISSING
        for name in measures
    )
    return f"{verdict_words(entry)}: {', '.join(found)}"


def _verdicts() -> str:
    """Return every recipe that was judged on the pretrained model, beside the reference model."""
    profiles = ("smoke", "small")
    columns = [_entries(model, profile) for model in _BOTH for profile in profiles]
    pretrained = columns[len(profiles) :]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for column in pretrained for name in column}):
        # What is asked of the larger sample comes first; the smaller one asks the same of it.
        entry = next(column[name] for column in reversed(pretrained) if name in column)
        asked = "; ".join(
            f"{line['measure']} {check_words(line)}{' (weaker)' if line['direction'] else ''}"
            for line in entry["lines"]
        )
        measures = dict.fromkeys(line["measure"] for line in entry["lines"])
        key = (entry["claim"], asked, *(_judged(one.get(name), measures) for one in columns))
        rows.setdefault(key, []).append(f"{entry['paper']} {entry['item']}")
    ends = [f"{model}, {profile}" for model in _BOTH for profile in profiles]
    head = ("recipe", "claim", "asked of smollm2", *ends)
    return _rows(head, ((", ".join(items), *key) for key, items in rows.items()))


def _cell_commands() -> str:
    """Return the commands behind the pretrained model's verdicts, each with its recipes."""
    found: dict[tuple[str, str], list[str]] = {}
    for profile in ("smoke", "small"):
        for name, entry in sorted(_entries(_PRETRAINED, profile).items()):
            for cell in entry["cells"]:
                found.setdefault((profile, cell["command"]), []).append(name)
    rows = ((profile, ", ".join(of), f"`{words}`") for (profile, words), of in found.items())
    return _rows(("profile", "recipes", "command"), rows)


def _model_record(model: str, name: str) -> dict[str, Any] | None:
    path = f"findings/models/{model}-{name}.json"
    return _record(path) if (DOCS / path).is_file() else None


def _one_pass(*names: str) -> str:
    """Return what both models keep in one pass, from the evaluations of these names."""
    rows = []
    for name in names:
        found = {model: _model_record(model, name) for model in _BOTH}
        labels: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
        for model, record in found.items():
            for key, one in _evaluations(record):
                labels.setdefault(key, {})[model] = one
        for (label, rate), ones in sorted(labels.items()):
            cells = [_kept(ones.get(model)) for model in _BOTH]
            rows.append((f"`{label}`", name, f"{rate:.3f}", *(c for pair in cells for c in pair)))
    ends = [f"{model}: {what}" for model in _BOTH for what in ("share of accuracy", "perplexity")]
    return _rows(("method", "record", "rate", *ends), rows)


def _evaluations(
    record: dict[str, Any] | None,
) -> Iterator[tuple[tuple[str, float], dict[str, Any]]]:
    if record is None:
        return
    if record["kind"] == "frontier":
        for method in record["data"]["methods"]:
            for one in method["points"]:
                if one["rate"] > 0:
                    yield (method["label"], round(one["rate"], 3)), one
        return
    options = ",".join(f"{key}={value}" for key, value in record["inputs"]["options"].items())
    options = f":{options}" if options else ""
    for one in record["data"]["evaluations"]:
        if one["method"] != "full":
            yield (one["method"] + options, round(one["rate"], 3)), one


def _decoded(*names: str) -> str:
    """Return what methods keep of one model each, from the evaluations ``findings/NAME.json``."""
    rows: dict[tuple[str, str, str, float], Sequence[str]] = {}
    for name in names:
        record = _record(f"findings/{name}.json")
        model, text = record["inputs"]["model"], ", ".join(record["inputs"]["text"])
        for (label, rate), one in _evaluations(record):
            shown = one["method"] if one["method"] == "fp8" else label
            if one["method"] == "kq-wf" and "allocation=" not in shown:
                # Its default has changed; the plan says which it had.
                shown = f"{shown},allocation={one['plan']['made']['options']['allocation']}"
            tasks = [one["tasks"][task]["accuracy"] for task in _RETRIEVAL if task in one["tasks"]]
            rows[model, text, shown, rate] = (
                model,
                f"`{shown}`",
                text,
                f"{one['context']:,}",
                f"{rate:.3f}",
                f"{1 / (1 - one['rate']):.2f}×",
                *_kept(one),
                number(one["kl"]["mean"]),
                " / ".join(f"{accuracy:.2f}" for accuracy in tasks) or MISSING,
            )
    head = ("model", "method", "text", "context", "rate", "smaller", "share of accuracy (95 %)")
    head = (*head, "perplexity", "KL", "needle / variables")
    return _rows(head, (rows[key] for key in sorted(rows)))


def _answers(name: str) -> str:
    """Return right answers by task, the uncompressed model's first, from ``findings/NAME.json``."""
    full, *others = _record(f"findings/{name}.json")["data"]["evaluations"]
    rows = []
    for task, first in full["tasks"].items():
        own = [one["tasks"][task]["accuracy"] for one in others]
        found = [f"{accuracy:.2f}" if first["judges"] else "cannot judge" for accuracy in own]
        words = task.replace("_", "-")
        rows.append((f"`{words}`", f"{first['chance']:.2f}", f"{first['accuracy']:.2f}", *found))
    lengths = [one["answer_lengths"] for one in others]
    never = f"{lengths[0]['baseline_never_ended']:.2f}"
    rows += [
        ("tokens of an answer, times", MISSING, "1", *(f"{own['ratio']:.2f}" for own in lengths)),
        ("never end", MISSING, never, *(f"{own['never_ended']:.2f}" for own in lengths)),
    ]
    names = [f"`{one['method']}`, {one['rate']:.2f}" for one in others]
    return _rows(("task", "chance", "uncompressed", *names), rows)


def _uncompressed(*names: str) -> str:
    """Return what the uncompressed model answers by task and length, a column for every record."""
    full = [_record(f"findings/{name}.json")["data"]["evaluations"][0] for name in names]
    lengths = [_record(f"findings/{name}.json")["inputs"]["task_lengths"] for name in names]

    def cell(one: dict[str, Any] | None) -> str:
        if one is None:
            return MISSING
        words = f"{one['accuracy']:.2f}"
        return words if one["judges"] else f"{words}, cannot judge ({one['chance']:.2f})"

    tasks = dict.fromkeys(task for one in full for task in one["tasks"])
    rows = [
        (f"`{task.replace('_', '-')}`", *(cell(one["tasks"].get(task)) for one in full))
        for task in tasks
    ]
    return _rows(("task", *(f"{number(length)} tokens" for (length,) in lengths)), rows)


def _kept(one: dict[str, Any] | None) -> tuple[str, str]:
    if one is None:
        return MISSING, MISSING
    low, high = one["relative_accuracy_interval"]
    return (
        f"{one['relative_accuracy']:.3f} ({low:.3f}–{high:.3f})",
        f"×{number(one['perplexity_ratio'])}",
    )


def _widths() -> str:
    """Return what spectra of both models say of vectors before and after RoPE, and of W_V."""
    rows = []
    for model in _BOTH:
        records = [_model_record(model, name) for name in ("spectra", "weights")]
        found = [record for record in records if record is not None]
        dims = found[0]["inputs"]["head_dim"]
        for pair, one in (pair for record in found for pair in record["data"]["pairs"].items()):
            ranks = [rank for layer in one["effective_rank"] for rank in layer]
            half = [head[dims // 2 - 1] for layer in one["energy_kept"] for head in layer]
            most = [
                next(r for r, kept in enumerate(head, 1) if kept >= 0.99)
                for layer in one["energy_kept"]
                for head in layer
            ]
            rows.append(
                (
                    model,
                    f"`{pair}`",
                    str(dims),
                    f"{mean(ranks):.1f} ({mean(ranks) / dims:.2f})",
                    f"{100 * mean(half):.1f} %",
                    f"{mean(most):.1f} ({mean(most) / dims:.2f})",
                )
            )
    head = (
        "model",
        "of",
        "dimensions",
        "effective rank (of the width)",
        "energy at half width",
        "rank for 99 % of it (of the width)",
    )
    return _rows(head, rows)


def _rotations() -> str:
    """Return what a basis of other data costs both models, at the fewest and the most tokens."""
    rows: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for source in ("random", "prose", "calibration"):
        for model in _BOTH:
            path = source if model == "reference" else f"models/{model}-stability-{source}"
            data = _record(f"findings/{path}.json")["data"]
            for row in data["curves"]:
                noise = row["source"] != source or row["target"] == row["source"]
                if row["rank"] == data["half_ranks"][row["pair"]] and not noise:
                    key = source, row["pair"], row["target"]
                    rows.setdefault(key, {}).setdefault(model, []).append(row)

    def cells(key: tuple[str, str, str]) -> Iterator[str]:
        yield from key
        for model in _BOTH:
            curve = sorted(rows[key].get(model, ()), key=itemgetter("tokens"))
            if not curve:
                yield from [MISSING] * 3
                continue
            first, last = curve[0], curve[-1]
            yield f"{last['ratio_sign_aligned']:.2f}"
            yield from (f"{100 * one['extra_energy_loss']:.1f} %" for one in (first, last))

    found = [row for curves in rows.values() for curve in curves.values() for row in curve]
    assert {row["seed"] for row in found} == {None}, "rows of all seeds together"
    kinds = ("δ/ε", "cost at 1k tokens", "cost at 64k")
    head = (
        "basis from",
        "pair",
        "used on",
        *(f"{model}: {kind}" for model in _BOTH for kind in kinds),
    )
    return _rows(head, (tuple(cells(key)) for key in rows))


#: What fills a region, by its name.
TABLES: dict[str, Callable[..., str]] = {
    "commands": _commands, "exit-codes": _exit_codes, "options": _options,
    "papers": _papers,
    "quantisers": _quantisers, "variants": _variants, "shapes": _shapes, "literal": _literal,
    "rates": _rates, "frontier-inputs": _frontier_inputs, "claims": _claims,
    "kernels": _kernels, "kernels-inputs": _kernels_inputs,
    "verdicts": _verdicts, "cell-commands": _cell_commands, "one-pass": _one_pass,
    "widths": _widths, "rotations": _rotations, "running": _running, "decoded": _decoded,
    "answers": _answers, "uncompressed": _uncompressed,
}  # fmt: skip


def main() -> None:
    """Fill every page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (made := filled(text)) != text:
            write_text_atomic(page, made, force=True)
            print(f"{page.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
