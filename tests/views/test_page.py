import io

import pytest
from rich.console import Console
from rich.text import Text

from kvprof.views.page import Fitted, bullets, flow, render_text, to_ascii, wrap

# Characters that reports use, each of which has a stand-in of the same width.
USED = "–—·…§≤≥≈∞σ┌┐└┘├┤┬┴┼─│"


def test_ascii_stand_ins_keep_the_width():
    assert to_ascii(USED).isascii()
    assert len(to_ascii(USED)) == len(USED)
    assert "?" not in to_ascii(USED)


def test_a_terminal_without_unicode_gets_ascii():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=60)
    console.print(Fitted(Text("ranks 24–60 … σ ☃")))
    assert raw.getvalue() == b"ranks 24-60 . s ?\n"


@pytest.mark.parametrize("no_colour", [False, True])
def test_colour_false_leaves_no_escape_code(no_colour):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, no_color=no_colour, _environ={})
    console.print(Fitted(Text("bold", style="bold red"), colour=False))
    assert out.getvalue() == "bold\n"


def test_the_narrower_of_page_and_console_wins():
    text = Text("word " * 40)
    assert max(map(len, render_text(Fitted(text, width=30), 80).splitlines())) <= 30
    assert max(map(len, render_text(Fitted(text, width=99), 40).splitlines())) <= 40


def test_bullets_hang():
    lines = render_text(bullets(["one two three four five six", "seven"]), 14).splitlines()
    assert lines == ["- one two", "  three four", "  five six", "- seven"]


def test_flow_breaks_between_entries_only():
    entries = [Text("a a"), Text("b b"), Text("c c")]
    assert [line.plain for line in flow(entries, 9)] == ["a a   b b", "c c"]
    assert [line.plain for line in wrap(Text("abcdef"), 4)] == ["abcd", "ef"]
