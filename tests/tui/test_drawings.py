"""What is drawn, at every width, with and without colour."""

import io
import math

import pytest
from rich.console import Console

from kvprof.records.events import CaseStarted, MemorySample, TelemetrySample
from kvprof.records.parts import PARTS, UNTIMED, part_of
from kvprof.tui.drawings import (
    CacheBars,
    LayerTable,
    Levels,
    Telemetry,
    layer_head,
    part_table,
    spark,
    stacked_bars,
)
from kvprof.tui.figures import Choice, LayerFilter, bars, layer_rows, shown_parts
from kvprof.tui.frame import KEYS, LOAD_SCREENS, REQUEST_SCREENS, SCREENS, footer, tabs, text_lines
from kvprof.tui.state import RunState
from kvprof.views.bars import Ink
from kvprof.views.plot import HeatMap
from tests.records.streams import stream

WIDTHS = (60, 80, 120, 200)


def drawn(content, width=100):
    """Return the lines that a screen would be filled with."""
    return [line.plain for line in text_lines(content, Console(file=io.StringIO()), width)]


def state_of(events):
    state = RunState()
    state.add_all(events)
    return state


@pytest.fixture(scope="module")
def state():
    return state_of(stream(("full", "palu", "fdc", "tale"), layers=6, steps=12))


def table(state, choice=None, width=100):
    choice = choice or Choice()
    cases, base = choice.shown_cases(state), choice.baseline_case(state)
    parts = shown_parts(state, choice)
    return drawn(part_table(cases, parts, base, choice.shown_case(state), Ink()), width)


def everything(state, ink):
    choice = Choice()
    case = choice.shown_case(state)
    rows = layer_rows(case, sort="layer", descending=False, shown=LayerFilter())
    return {
        "bars": stacked_bars(bars(state, choice), ink),
        "parts": part_table(
            choice.shown_cases(state),
            shown_parts(state, choice),
            choice.baseline_case(state),
            case,
            ink,
        ),
        "telemetry": Telemetry(state.devices, ink),
        "cache": CacheBars(choice.shown_cases(state), case, "device peak"),
        "levels": Levels("tale", {"full": 12, "half": 88}),
        "layers": LayerTable(rows),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_screen(state, width):
    for name, content in everything(state, Ink()).items():
        if name == "layers" and width < 64:
            continue  # its columns stand side by side or not at all; the screen scrolls
        assert max(map(len, drawn(content, width))) <= width, name


def test_colour_only_adds(state):
    """Without colour every figure and every glyph is the same, and nothing has a colour."""
    for name, content in everything(state, Ink(colour=False)).items():
        assert drawn(content) == drawn(everything(state, Ink())[name]), name
        for line in text_lines(content, Console(file=io.StringIO()), 100):
            assert all("#" not in str(span.style) for span in line.spans), (name, line.spans)


def test_every_part_has_a_fill_and_colours_of_its_own():
    fills = [part_of(part).fill for part in PARTS]
    assert len(set(fills)) == len(PARTS)
    assert all(len(sign) == 1 for sign in fills)
    # A newer kvprof's part looks like none of these, and not like time that is in no part.
    assert part_of("speculation").name == "speculation"
    assert part_of("speculation").fill not in {*fills, part_of(UNTIMED).fill}
    for dark in (True, False):
        assert len({Ink(dark).part(part) for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize(("dark", "ground"), [(True, "#121212"), (False, "#e0e0e0")])
def test_colours_can_be_read_on_their_ground(dark, ground):
    """WCAG's contrast for text: 4.5 to 1."""

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for part in PARTS:
        low, high = sorted((luminance(ground), luminance(Ink(dark).part(part))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, part


def test_a_colour_has_one_meaning():
    """Verdicts and curves look like no part and like none of each other: CIE 1976, in Lab."""

    def lab(colour):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        ]
        rows = ((0.434, 0.376, 0.190), (0.213, 0.715, 0.072), (0.018, 0.109, 0.873))
        x, y, z = (sum(a * b for a, b in zip(row, linear, strict=True)) ** (1 / 3) for row in rows)
        return 116 * y - 16, 500 * (x - y), 200 * (y - z)

    for dark in (True, False):
        ink = Ink(dark)
        signs = [ink.good(), ink.bad(), ink.warn(), *filter(None, ink.curves(6))]
        parts = [ink.part(part) for part in PARTS]
        for index, sign in enumerate(signs):
            for other in (*parts, *signs[:index]):
                assert math.dist(lab(sign), lab(other)) > 18, (dark, sign, other)
        for index, part in enumerate(parts):
            assert all(math.dist(lab(part), lab(other)) > 5 for other in parts[:index]), part


class TestBars:
    def test_lengths_are_times_on_one_scale(self, state):
        lines = drawn(stacked_bars(bars(state, Choice()), Ink()), 120)
        figures = {bar.case.method: bar.seconds for bar in bars(state, Choice())}
        lengths = {}
        for line, method in zip(lines, figures, strict=False):
            body = line[8:-18].rstrip()
            lengths[method] = len(body)
            assert method in line
        per_column = {method: figures[method] / lengths[method] for method in figures}
        assert max(per_column.values()) < 1.05 * min(per_column.values())

    def test_the_words_say_what_the_colour_says(self, state):
        lines = drawn(stacked_bars(bars(state, Choice()), Ink()), 120)
        assert lines[0].endswith("baseline")
        assert "−" in lines[2].split("  ")[-1]
        assert lines[3].startswith("› tale")

    def test_a_wide_segment_carries_its_parts_name(self, state):
        assert " attention " in drawn(stacked_bars(bars(state, Choice()), Ink()), 200)[0]

    def test_an_unfinished_case_says_so(self):
        events = stream(("full", "fdc"))
        lines = drawn(stacked_bars(bars(state_of(events[:200]), Choice()), Ink()), 100)
        assert lines[0].rstrip().endswith("so far")

    def test_a_case_without_any_time_is_drawn(self):
        state = state_of(stream(("full",))[:2])
        assert "0 s so far" in drawn(stacked_bars(bars(state, Choice()), Ink()), 80)[0]

    def test_a_click_chooses_the_method(self, state):
        content = stacked_bars(bars(state, Choice()), Ink())
        line = text_lines(content, Console(file=io.StringIO()), 100)[1]
        assert any(
            getattr(s.style, "meta", {}).get("press") == "method('palu')" for s in line.spans
        )


class TestPartTable:
    def test_shares_are_of_the_methods_own_time(self, state):
        line = next(line for line in table(state, width=120) if "attention" in line)
        case = Choice().shown_cases(state)[0]
        share = 100 * case.account.by_part()["attention"] / case.account.seconds
        assert f"{share:.1f} %" in line

    def test_what_does_not_fit_is_counted_and_the_baseline_stays(self, state):
        lines = table(state, Choice(method="fdc"), width=60)
        assert "full" in lines[0]
        assert "fdc" in lines[0]
        assert "palu" not in lines[0]
        assert any("2 more: m shows the next method" in line for line in lines)

    def test_small_parts_stand_together_and_nothing_is_lost(self, state):
        lines = table(state, width=120)
        assert any("small part" in line for line in lines)
        named = [line.split()[1] for line in lines if line[:1] not in (" ", "─", "")]
        assert "attention" in named
        assert "unattributed" in named

    def test_differences_are_only_shown_between_finished_cases(self):
        events = stream(("full", "fdc"))
        lines = table(state_of(events[: len(events) - 40]), width=100)
        completion = next(line for line in lines if "completion" in line)
        assert "%" not in completion


class TestCache:
    def test_shares_are_of_full_width(self):
        state = RunState()
        state.add(CaseStarted(0.0, "c", "fdc", 0.5, 1, 8, 8))
        state.add(MemorySample(0.0, "c", 1024, 2**20, 3 * 2**19, 2**21, peak=2**30))
        lines = drawn(CacheBars([state.cases["c"]], None, "device peak"), 80)
        assert "at 1k tokens" in lines[0]
        assert "device peak 1.0 GiB" in lines[0]
        assert "50 %" in lines[1]
        assert "75 %" in lines[2]
        assert lines[1].count("█") * 2 == pytest.approx(lines[3].count("░"), abs=1)

    def test_a_peak_that_was_not_measured_is_not_named(self):
        state = RunState()
        state.add(CaseStarted(0.0, "c", "fdc", 0.5, 1, 8, 8))
        state.add(MemorySample(0.0, "c", 1024, 2**20, 2**20, 2**21))
        lines = drawn(CacheBars([state.cases["c"]], None, "device peak"), 80)
        assert lines[0].strip() == "fdc · at 1k tokens"

    def test_levels_add_up(self):
        lines = drawn(Levels("tale", {"full": 100, "half": 300, "none": 0}), 84)
        assert lines[1].strip() == "█" * 20 + "▓" * 60
        assert "25 %" in lines[2]
        assert "0 tokens" in lines[4]

    def test_no_level_holds_anything(self):
        assert "no token" in drawn(Levels("tale", {"full": 0}))[1]


class TestTelemetry:
    def line(self, values, reasons=(), width=100):
        state = RunState()
        state.add(TelemetrySample(0.0, "gpu 0", values, reasons))
        return drawn(Telemetry(state.devices, Ink()), width)[0]

    def test_a_cpus_load_is_of_the_machine_and_its_memory_of_the_process(self):
        state = RunState()
        state.add(TelemetrySample(0.0, "cpu", {"memory_bytes": 2.0**30, "utilisation": 0.37}))
        line = drawn(Telemetry(state.devices, Ink()), 100)[0]
        assert "37 % of all cores busy" in line
        assert "1.0 GiB in this process" in line

    def test_slowing_down_comes_first(self):
        line = self.line({"power_w": 700.0}, ("power cap",))
        assert line.index("throttled: power cap") < line.index("700 W")

    def test_what_does_not_fit_is_left_out_whole(self):
        line = self.line({"power_w": 700.0, "temperature_c": 61.0, "sm_mhz": 1980.0}, width=24)
        assert line.endswith("W") or line.endswith("°C")

    def test_a_history_runs_from_its_lowest_to_its_highest(self):
        assert spark([1.0, 2.0, 3.0], 16) == "▁▅█"
        assert spark([2.0] * 40, 4) == "▄▄▄▄"
        assert spark([], 4) == ""


class TestLayers:
    def test_ranks_are_written_as_their_mean_and_range(self, state):
        case = Choice().shown_case(state)
        rows = layer_rows(case, sort="layer", descending=False, shown=LayerFilter())
        low, high = min(rows[0].key_ranks), max(rows[0].key_ranks)
        assert f"({low}–{high})" in drawn(LayerTable(rows), 80)[0]

    def test_the_order_is_shown_above_its_column(self):
        assert layer_head("ms", True).plain.count("▼") == 1
        assert "ms ▼" in layer_head("ms", True).plain
        assert "bytes ▲" in layer_head("bytes", False).plain


class TestKeys:
    @pytest.mark.parametrize("width", WIDTHS)
    def test_the_footer_wraps_between_keys(self, width):
        shown = footer("layers", hidden=frozenset(), words={}, width=width)
        assert max(len(line) for line in shown.plain.split("\n")) <= width
        for key in KEYS:
            here = not key.screens or "layers" in key.screens
            assert (f"{key.sign} {key.word}" in shown.plain) == here

    def test_keys_that_do_nothing_are_left_out(self):
        plain = footer("cache", hidden=frozenset({"n"}), words={}, width=200).plain
        assert "request" not in plain
        assert "filter" not in plain

    def test_the_active_tab_is_in_brackets(self):
        for screens in (REQUEST_SCREENS, LOAD_SCREENS):
            for name in screens:
                assert f" {SCREENS[name]}]" in tabs(name, screens).plain
                assert all(SCREENS[other] in tabs(name, screens).plain for other in screens)


def test_lines_of_a_renderable_are_what_rich_would_print():
    content = HeatMap([[1.0, 2.0], [3.0, 4.0]], "a title")
    console = Console(file=io.StringIO(), width=40)
    console.print(content)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line.rstrip() for line in drawn(content, 40)] == printed
