import copy
import io
import math
import re
from functools import cache

import numpy as np
import pytest
from rich.console import Console

from kvprof.analysis import stability_data as analysis
from kvprof.views.page import render_text
from kvprof.views.stability import (
    NOISE_FLOOR,
    cost_rank,
    curves_of,
    head_costs,
    report,
    verdict,
    worst,
)

from .synthetic_stability import SHAPES, SMALL, averages, made, stability_result


@cache
def shown(name="plain", width=80):
    """Return the report of a shape, drawn once."""
    return render_text(report(made(name)), width)


def in_one_line(text):
    """Return a report as one line, for sentences that may wrap anywhere."""
    return re.sub(r"\s+", " ", text)


def joined(result, width=100):
    return in_one_line(render_text(report(result), width))


@pytest.fixture(params=SHAPES)
def result(request):
    return made(request.param)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("width", [40, 120])  # of 80 ASCII is
def test_widths_are_respected(name, width):
    assert max(map(len, shown(name, width).splitlines())) <= width


def test_no_escape_code_without_colour(result):
    assert "\x1b" not in render_text(report(result, colour=False), 80, colour=True)


def test_ascii_terminal(result):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Console(file=stream, width=80).print(report(result))
    text = raw.getvalue().decode("ascii")
    # The one question that the report asks.
    assert text.count("?") == 1
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", SHAPES)
def test_no_figure_is_python(name):
    assert not re.search(r"\b(nan|None|inf)\b|%%", shown(name, 120))


@pytest.mark.parametrize("name", SHAPES)
def test_every_target_and_every_claim_appears(name):
    result, text = made(name), in_one_line(shown(name, 120))
    for row in averages(result):
        assert f"{row['pair']}: {row['source']} against {row['target']}" in text
    for claim in result["data"]["claims"]:
        assert claim["paper"] in text
        assert claim["verdict"][:15] in text
    assert text.count("0.0034") == sum(c["threshold"] == 0.0034 for c in result["data"]["claims"])


def test_the_noise_floor_has_the_name_that_the_analysis_gives_it():
    assert NOISE_FLOOR == analysis.NOISE_FLOOR
    assert [curve.noise for curve in curves_of(made())["qk"]] == [False, False, False, True]


def section(text, title):
    lines = text.splitlines()
    start = lines.index(title)
    return lines[start : start + lines[start:].index("")]


def figures(line):
    """Return the numbers in the columns of a table's line behind its name."""
    return [float(text.replace(",", "")) for text in re.findall(r"-?[\d,]*\.?\d+", line)]


@pytest.mark.parametrize(("pair", "target"), [("qk", "code"), ("vo", "tasks"), ("vo", NOISE_FLOOR)])
def test_table_of_ranks_is_the_data(pair, target):
    result = made()
    name = f"{target} (noise floor)" if target == NOISE_FLOOR else target
    text = render_text(report(result), 120)
    lines = section(text, f"{pair}: random against {name}, 16k tokens")[3:]
    rows = averages(result, pair=pair, target=target, tokens=16384)
    error = "extra_score_error" if pair == "qk" else "extra_output_error"
    keys = ("subspace_distance", "principal_angle", "extra_energy_loss", error)
    scales = (1.0, 180 / math.pi, 100.0, 100.0)
    assert len(lines) == 2 * len(rows) == 8
    for row, first, second in zip(rows, lines[::2], lines[1::2], strict=True):
        head = [row["rank"]]
        if row["removal_rate"] is not None:
            head.append(100 * row["removal_rate"])
        expected = [row[key] * scale for key, scale in zip(keys, scales, strict=True)]
        assert figures(first) == pytest.approx([*head, *expected], rel=0.006, abs=0.051)
        spread = [end * s for k, s in zip(keys, scales, strict=True) for end in row["spread"][k]]
        found = figures(re.sub(r"(\d)–", r"\1 ", second.replace("2.5–97.5 %", "")))
        assert found == pytest.approx(spread, rel=0.006, abs=0.051)


def test_table_of_ratios_is_the_data():
    result = made()
    lines = render_text(report(result), 120).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("random against code "))
    row = averages(result, pair="qk", target="code", tokens=16384)[0]
    keys = ("ratio", "ratio_sign_aligned", "ratio_cluster_aligned")
    assert figures(lines[at])[-3:] == pytest.approx([row[key] for key in keys], rel=0.006)
    found = figures(re.sub(r"(\d)–", r"\1 ", lines[at + 1]))[-6:]
    assert found == pytest.approx([end for k in keys for end in row["spread"][k]], rel=0.006)


def test_clusters_are_counted_in_columns():
    result = made()
    entry = next(
        e
        for e in result["data"]["clusters"]
        if (e["pair"], e["target"], e["tokens"]) == ("qk", "code", 16384)
    )
    # 3 clusters of one and 2 of two, 1 of five: 12 columns.
    entry["sizes"] = {"1": 3, "2": 2, "5": 1}
    text = render_text(report(result), 120)
    table = [line for line in text.splitlines() if line.startswith("share of columns")]
    assert re.split(r" {2,}", table[0])[1:-1] == ["aligned alone", "by 2", "by 3–4", "by 5"]
    line = [line for line in text.splitlines() if line.startswith("random against code")][1]
    assert figures(line) == [25.0, 33.3, 0.0, 41.7, 5]


def test_without_seeds_to_compare_there_are_no_clusters():
    text = shown("moments")
    assert "No clusters were aligned" in text
    assert "share of columns" not in text


def test_costs_are_read_at_the_rank_that_the_result_names():
    result = copy.deepcopy(made("ragged"))
    assert cost_rank(result, "qk") == 4  # as near half of 16 as 12 is; the study takes the lower
    del result["data"]["half_ranks"]
    assert cost_rank(result, "qk") == 12  # an older result does not say
    result["data"]["half_ranks"] = {"qk": 4, "vo": 12}
    assert cost_rank(result, "qk") == 4
    final = averages(result, pair="qk", target="prose", tokens=16384, rank=4)
    assert curves_of(result)["qk"][0].cost == final[0]["extra_energy_loss"]
    assert "qk: extra lost energy at rank 4" in render_text(report(result), 80)


def test_heat_map_is_the_mean_over_seeds_of_the_worst_target():
    result = made("ragged")
    top = worst(curves_of(result)["qk"])
    assert top.target == "tasks"
    values = head_costs(top, 4, 16384)
    assert [len(row) for row in values] == [3, 1]
    for layer, row in enumerate(values):
        for head, value in enumerate(row):
            rank = 4
            own = [
                r["extra_energy_loss"]
                for r in result["data"]["curves"]
                if (r["pair"], r["target"], r["tokens"]) == ("qk", "tasks", 16384)
                and (r["layer"], r["kv_head"], r["rank"]) == (layer, head, rank)
                and r["removal_rate"] is None
            ]
            assert len(own) == 3
            assert value == pytest.approx(np.mean(own))
    lines = render_text(report(result), 120).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("qk: extra lost energy by"))
    assert "against tasks (the worst), 16k tokens, rank 4" in lines[at]
    assert figures(lines[at + 4])[1] == pytest.approx(100 * values[1][0], rel=0.05)


def test_plots_need_a_sweep():
    assert "by number of tokens" not in shown("one count")
    text = shown()
    assert text.count("by number of tokens") == 6


def test_lengths_are_told_apart():
    result = made("lengths")
    row = result["data"]["lengths"][0]
    line = next(
        line
        for line in render_text(report(result), 100).splitlines()
        if line.startswith(f"{row['pair']} against {row['target']} ")
    )
    expected = [512, 100 * row["cost_same_length"], 2048, 100 * row["cost"]]
    assert figures(line) == pytest.approx(expected, rel=0.006)
    assert "sequences of 512" in joined(result)
    assert "Length of the sequences" not in shown()


def test_a_claim_that_cannot_be_judged():
    result = stability_result(**{**SMALL, "counts": (1024, 2048)})
    claim = result["data"]["claims"][-1]
    assert claim["measured"] is None
    lines = [line for line in render_text(report(result), 160).splitlines() if "cannot be" in line]
    assert re.search(r"0\.005 +– +cannot be judged: needs", lines[0])


@pytest.mark.parametrize("target", ["prose", "letters", "c"])
def test_what_is_like_random_tokens_never_costs_surely_more_than_another_seed(target):
    """Its tokens are only drawn anew: with few of them its cost lies above or below the floor."""
    shape = {**SMALL, "counts": (256, 512), "targets": (target,)}
    alike = verdict(stability_result(**{**shape, "apart": 0.0}))[0]
    assert alike.count("it cannot be told, another seed costs as much as another source") == 2
    other = verdict(stability_result(**{**shape, "apart": 1.0}))[0]
    assert other.count(f"no, not for {target}") == 2
    # A source without a seed, such as a text, beside a floor that has several.
    for apart, said in ((0.0, "it cannot be told"), (1.0, f"no, not for {target}")):
        result = stability_result(**{**shape, "apart": apart})
        rows = [one for one in result["data"]["curves"] if one["target"] == target]
        for row in rows:
            row["seed"] = None
        assert verdict(result)[0].count(said) == 2


def test_figures_that_are_null_are_not_shown_as_zero():
    result = made()
    for row in result["data"]["curves"]:
        for key in ("extra_energy_loss", "subspace_distance", "principal_angle", "ratio"):
            row[key] = None
        row["ratio_sign_aligned"] = row["extra_score_error"] = row["extra_output_error"] = None
        if row["layer"] is None:
            row["spread"] = {}
    text = render_text(report(result), 120)
    assert "it cannot be told, no cost was measured" in text
    assert re.search(r"^8 +– +– +– +–$", text, re.MULTILINE)
    assert "nothing to plot" in text


def test_an_incomplete_run_is_loud():
    text = shown("loud")
    assert text.startswith("INCOMPLETE:")
    assert text.count("INCOMPLETE:") == 2
    assert "- [bold]literal[/bold]" in text
    assert "INCOMPLETE" not in shown()


def test_nothing_compared_at_all():
    result = made()
    result["data"] |= {"curves": [], "claims": [], "recommendation": None, "clusters": []}
    assert "Nothing was compared." in render_text(report(result), 80)


def test_only_curves_claims_and_recommendation():
    result = made()
    result["data"] = {key: result["data"][key] for key in ("curves", "claims", "recommendation")}
    assert "Is the rotation a property" in render_text(report(result), 80)


def test_footer_names_what_the_figures_depend_on():
    text = joined(made("lengths"))
    for piece in (
        "fingerprint ab12cd34ef56",
        "random, 1k, 4k, 16k tokens in sequences of 512",
        "prose, code, tasks; 16k tokens in sequences of 2,048",
        "seeds 0, 1, 2",
        "ranks 4, 8",
        "float32 on cpu",
    ):
        assert piece in text
    assert "none loaded, saved moments" in joined(made("moments"))
