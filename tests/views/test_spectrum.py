import io
import re

import pytest
from rich.console import Console

from kvprof.views.page import render_text
from kvprof.views.spectrum import report, summary

from .synthetic import spectrum_result

SHAPES = {
    "plain": {},
    "ragged": {"heads": [4, 2, 4, 1], "widths": [128, 64, 128, 256]},
    "one layer": {"heads": [2], "widths": [16]},
    "one dimension": {"heads": [1], "widths": [1], "grid": 1},
    "large": {"heads": [8] * 80, "widths": [64] * 80},
    "many heads": {"heads": [64] * 4, "widths": [64] * 4},
    "no removal": {"pairs": ("k", "v")},
    "one pair": {"pairs": ("qk",)},
    "no grid": {"grid": 1},
    "per query head": {"group": 4},
    "per query head, ragged": {"heads": [2, 1], "widths": [64, 128], "group": 2, "grid": 1},
    "one query head": {"group": 1},
    "loud": {
        "complete": False,
        "warnings": ("stopped by Ctrl-C after 4,096 of 8,192 tokens", "[bold]literal[/bold]"),
        "labels": ("spectra of expanded heads (MLA)",),
    },
}


@pytest.fixture(scope="module", params=SHAPES)
def result(request):
    return spectrum_result(**SHAPES[request.param])


@pytest.mark.parametrize("width", [40, 120])  # those between are below
def test_widths_are_respected(result, width):
    assert max(map(len, render_text(report(result), width).splitlines())) <= width


def test_ascii_terminal(result):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Console(file=stream, width=80).print(report(result))
    text = raw.getvalue().decode("ascii")
    assert "?" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_width_and_colour_arguments(result):
    text = render_text(report(result, 60, False), 120, colour=True)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 60


def section(text, name):
    lines = text.splitlines()
    start = lines.index(name) + 1
    return lines[start : start + lines[start:].index("") if "" in lines[start:] else None]


def test_table_of_removal_rates_is_the_data():
    result = spectrum_result()
    lines = section(render_text(report(result), 80), "Removal rates")
    rows = [line.split() for line in lines if re.match(r" +\d+ %", line)]
    assert len(rows) == len(result["data"]["removal"])
    for cells, row in zip(rows, result["data"]["removal"], strict=True):
        qk = [rank for layer in row["ranks_qk"] for rank in layer]
        vo = [rank for layer in row["ranks_vo"] for rank in layer]
        lost = row["dim_rate"] - row["dim_rate_rounded"]
        expected = [100 * row["removal_rate"], sum(qk) / len(qk), sum(vo) / len(vo)]
        expected += [row["dim_rate"], row["dim_rate_rounded"], lost]
        found = [float(cell) for cell in cells if cell != "%"]
        for value, figure in zip(found, expected, strict=True):
            digits = 1 if figure > 1 else 3
            assert value == pytest.approx(figure, abs=0.51 * 10**-digits)


def test_table_of_pairs_is_the_data():
    result = spectrum_result()
    lines = section(render_text(report(result), 100), "Pairs")
    rows = {line.split()[0]: line.split() for line in lines if re.match(r"(qk|vo|k|v) +\d", line)}
    assert list(rows) == list(result["data"]["pairs"])
    for name, pair in result["data"]["pairs"].items():
        ranks = [rank for layer in pair["effective_rank"] for rank in layer]
        half = [head[63] for layer in pair["energy_kept"] for head in layer]
        _, dims, mean, span, cv, energy, least = (cell for cell in rows[name] if cell != "%")
        assert int(dims) == 128
        assert float(mean) == pytest.approx(sum(ranks) / len(ranks), abs=0.051)
        low, high = map(float, span.split("–"))
        assert (low, high) == pytest.approx((min(ranks), max(ranks)), abs=0.051)
        assert float(cv) == pytest.approx(pair["cv_of_max"], abs=0.0051)
        assert float(energy) == pytest.approx(100 * sum(half) / len(half), abs=0.051)
        assert float(least) == pytest.approx(100 * min(half), abs=0.051)


def test_summary_answers_with_the_figures_of_the_rate_shown():
    result = spectrum_result()
    row = min(result["data"]["removal"], key=lambda r: abs(r["dim_rate"] - 0.5))
    text = summary(result)
    assert text.startswith(f"Removing {100 * row['removal_rate']:g} % of the singular values' sum")
    assert f"dim_rate {row['dim_rate']:.2f}, or {row['dim_rate_rounded']:.2f} with" in text
    assert text.endswith("not what accuracy it costs.")


def test_heat_map_shows_the_rate_nearest_half():
    result = spectrum_result()
    row = min(result["data"]["removal"], key=lambda r: abs(r["dim_rate"] - 0.5))
    why = f"dim_rate {row['dim_rate']:.2f}, nearest 0.5"
    at = f"removal rate {100 * row['removal_rate']:g} % ({why})"
    lines = render_text(report(result), 100).splitlines()
    for pair in ("qk", "vo"):
        start = lines.index(f"Rank of {pair} by layer and head, at {at}")
        for layer, ranks in enumerate(row[f"ranks_{pair}"]):
            cells = re.findall(r"\d+", lines[start + 3 + layer])
            assert [int(cell) for cell in cells] == [layer, *ranks]


def test_pairs_without_rates_say_what_is_missing():
    assert "There is no dim_rate without qk and vo." in summary(spectrum_result(pairs=("k", "v")))
    text = render_text(report(spectrum_result(pairs=("qk",))), 80)
    assert "no dim_rate without vo" in text.replace("\n", " ")
    assert "Rank of" not in text


def test_an_incomplete_run_is_loud():
    result = spectrum_result(**SHAPES["loud"])
    text = render_text(report(result), 80)
    assert text.startswith("INCOMPLETE:")
    assert text.count("INCOMPLETE:") == 2
    assert "- stopped by Ctrl-C after 4,096 of 8,192 tokens" in text
    assert "- [bold]literal[/bold]" in text
    assert "spectra of expanded heads (MLA)" in text
    assert "INCOMPLETE" not in render_text(report(spectrum_result()), 80)


def test_nothing_measured_at_all():
    result = spectrum_result(complete=False)
    result["data"] = {"pairs": {}, "removal": []}
    text = render_text(report(result), 80)
    assert "Nothing was measured." in text


def test_footer_names_what_the_figures_depend_on():
    text = render_text(report(spectrum_result()), 80)
    for piece in ("ab12cd34ef56", "8,192 random tokens, seed 0", "0–2047", "float32 on cpu"):
        assert piece in text


def test_all_zero_spectrum_is_drawn_as_nothing():
    result = spectrum_result(pairs=("k",))
    pair = result["data"]["pairs"]["k"]
    pair["mean"] = [0.0] * 128
    assert "nothing to plot" in render_text(report(result), 80)


def test_bases_per_query_head_are_weighed_against_grouped_ones():
    result = spectrum_result(group=4)
    lines = section(render_text(report(result), 120), "One basis of qk per query head")
    assert "4 per KV head and token instead of one" in " ".join(" ".join(lines).split())
    rows = [line.split() for line in lines if re.match(r" +\d+ %", line)]
    data = result["data"]["per_query_head"]
    assert len(rows) == len(data["removal"])
    for cells, row in zip(rows, data["removal"], strict=True):
        found = [float(cell.rstrip("×").replace(",", "")) for cell in cells if cell != "%"]
        ranks = [rank for layer in row["ranks"] for rank in layer]
        exact = [100 * row["removal_rate"], sum(ranks) / len(ranks), row["stored_dims"]]
        exact += [row["grouped_dims"], row["full_dims"], row["stored_dims"] / row["grouped_dims"]]
        exact += [row["stored_dims"] / row["full_dims"], row["stored_dims_rounded"]]
        exact += [row["grouped_dims_rounded"]]
        assert found == pytest.approx(exact, abs=0.051)
    assert "One basis" not in render_text(report(spectrum_result()), 80)


def test_one_query_head_per_kv_head_is_one_sentence():
    text = render_text(report(spectrum_result(group=1)), 80)
    assert "Every KV head has one query head here, so both bases are the same." in text
    assert "with grouped bases" not in text
