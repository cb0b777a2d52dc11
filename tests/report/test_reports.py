"""What holds of every report that is made of blocks; a kind adds its made-up results here."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from kvprof.records.schema import validate_result
from kvprof.report import report_of
from kvprof.report.blocks import Chart, Facts, Heading, Notes, Paragraph
from kvprof.report.terminal import renderable
from kvprof.results import KINDS, class_of
from kvprof.views.page import render_text
from tests.report.approved import check_approved
from tests.views.synthetic import spectrum_result
from tests.views.synthetic_advise import advise_result
from tests.views.synthetic_evaluation import evaluation_result
from tests.views.synthetic_frontier import frontier_result, two_targets, with_facts
from tests.views.synthetic_generate import generate_result
from tests.views.synthetic_plan import results as plan_results
from tests.views.synthetic_sensitivity import sensitivity_result
from tests.views.synthetic_stability import SHAPES, made

_FULL = {"texts": ("prose", "code"), "harness": True, "written": True}
RESULTS: dict[str, dict[str, Any]] = {
    "advise": advise_result(),
    "advise, windows": advise_result(window=1024, warnings=("a context of 64k",)),
    "advise, no room": advise_result(weights=200 << 30),
    "advise, latents": advise_result(latent=True),
    "generate": generate_result(),
    "generate, text alone": generate_result(diff=False),
    "sensitivity": sensitivity_result(),
    "sensitivity, heads": sensitivity_result(heads=(0, 1)),
    "eval": evaluation_result(**_FULL),
    "eval, one method": evaluation_result(("full", "fp8", "kq"), tasks=()),
    "eval, many methods": evaluation_result([f"a-method-of-{n}-letters" for n in range(12)]),
    "eval, at chance": evaluation_result(at_chance=("copy",), protocol="one_pass"),
    "eval, baseline alone": evaluation_result(
        ("full",), complete=False, warnings=["a [doubt]"], protocol="teacher_forced"
    ),
    "frontier": with_facts(),
    "frontier, two targets": two_targets(),
    "frontier, interrupted": frontier_result(complete=False, tasks=False),
    "spectrum": spectrum_result(group=2),
    "spectrum, ragged": spectrum_result(heads=[4, 2, 4, 1], widths=[128, 64, 128, 256]),
    "spectrum, one dimension": spectrum_result(heads=[1], widths=[1], grid=1),
    "spectrum, large": spectrum_result(heads=[8] * 80, widths=[16] * 80),
    "spectrum, many heads": spectrum_result(heads=[64] * 4, widths=[16] * 4),
    "spectrum, no removal": spectrum_result(pairs=("k", "v")),
    "spectrum, loud": spectrum_result(
        complete=False,
        group=1,
        warnings=("interrupted after 4,096 tokens", "[bold]literal[/bold]"),
        labels=("spectra of expanded heads (MLA)",),
    ),
    **plan_results(),
    **{"stability" if name == "plain" else f"stability, {name}": made(name) for name in SHAPES},
}
_WITHOUT_FIGURE = {"stability, one dimension", "generate, text alone"}
_ANY = pytest.mark.parametrize("name", RESULTS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_at_80_columns_is_approved(kind: str) -> None:
    check_approved(kind, render_text(renderable(report_of(RESULTS[kind])), 80))


@_ANY
@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    text = render_text(renderable(report_of(RESULTS[name])), width)
    assert max(map(len, text.splitlines())) <= width


@_ANY
def test_a_terminal_without_unicode_or_colour_shows_all(name: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Console(file=stream, width=80).print(renderable(report_of(RESULTS[name])))
    text = raw.getvalue().decode("ascii")
    assert "?" not in text
    plain = render_text(renderable(report_of(RESULTS[name]), 60, False), 120, colour=True)
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 60


@_ANY
def test_a_report_is_one_verdict_tables_and_few_short_notes(name: str) -> None:
    result, report = RESULTS[name], report_of(RESULTS[name])
    validate_result(result)
    spoken = [one for one in report.blocks if isinstance(one, Paragraph)]
    assert [one.role for one in spoken].count("verdict") == 1
    first = 0 if result["complete"] else 1
    assert spoken[first].role == "verdict"
    assert (spoken[0].role == "stopped") == (not result["complete"])
    assert report.subject.endswith("(incomplete)") == (not result["complete"])
    notes = [one for one in report.blocks if isinstance(one, Notes) and not one.caution]
    assert sum(len(one.lines) for one in notes) <= 5
    assert all(len(line) <= 100 for one in notes for line in one.lines)
    warned = [
        line
        for one in report.blocks
        if isinstance(one, Notes) and one.caution
        for line in one.lines
    ]
    assert warned == list(result["warnings"])
    facts = [one for one in report.blocks if isinstance(one, Facts)][-1]
    assert facts.pairs.get("fingerprint") == result["inputs"]["fingerprint"]
    assert Heading("Measured with") in report.blocks
    # Without a CSV there is no figure.
    plain = result["kind"] == "advise" or not class_of(result["kind"]).columns
    assert isinstance(report.figure, Chart) or plain or name in _WITHOUT_FIGURE
    text = render_text(renderable(report), 120)
    assert not re.search(r"\b(nan|None|inf)\b|%%", text)
