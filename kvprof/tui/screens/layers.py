"""Layers: what each layer costs and keeps, as a table, with a map of the ranks by head."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Vertical, VerticalScroll
from textual.widgets import Input, Static

from kvprof.tui.case_state import CaseState
from kvprof.tui.drawings.layers import LayerTable, layer_head
from kvprof.tui.layer_rows import LayerFilter, LayerRow, layer_rows
from kvprof.tui.screens.base import RunScreen
from kvprof.tui.words import request_words, share
from kvprof.views.heatmap import HeatMap

__all__ = ["LayersScreen"]

_UNTIMED = "no layer was timed on its own: a composed run takes the times of one for all"


class LayersScreen(RunScreen):
    """The chosen method's layers."""

    called = "layers"
    AUTO_FOCUS = "#rows"

    def __init__(self) -> None:
        super().__init__()
        self._wrong = ""  # with the filter as it is written

    def compose_body(self) -> ComposeResult:
        """Return the widgets, from top to bottom."""
        yield Static(id="layers-top")
        yield Input(placeholder="0-7,12  or  error>0.01  or  k<64,ms>=2", id="filter")
        with Container(id="layer-body"):
            with Vertical(id="table"):
                yield Static(id="head")
                with VerticalScroll(id="rows"):
                    yield Static(id="lines")
            with VerticalScroll(id="maps"):
                yield Static(id="keys-map")
                yield Static(id="values-map")

    def draw(self) -> None:
        """Fill the widgets."""
        app, choice = self.live, self.live.choice
        case = choice.shown_case(app.session.state)
        chosen = (
            case.name if case is not None else None,
            case.version if case is not None else 0,
            choice.sort,
            choice.descending,
            choice.layers,
            app.dark,
        )
        rows = (
            layer_rows(case, sort=choice.sort, descending=choice.descending, shown=choice.layers)
            if case is not None
            else []
        )
        untimed = case is not None and case.finished is not None and not _timed(case)
        top = (*chosen[:1], *chosen[2:], untimed)
        self.put("layers-top", top, lambda: self._top(case, rows, untimed))
        self.put("head", chosen[2:4], lambda: layer_head(choice.sort, choice.descending))
        self.put("lines", chosen, lambda: LayerTable(rows))
        in_order = sorted(rows, key=lambda row: row.layer)
        shown = (chosen[0], tuple(row.layer for row in in_order), app.dark)
        self.put("keys-map", shown, lambda: _map("Rank of keys", in_order, keys=True))
        self.put("values-map", shown, lambda: _map("Rank of values", in_order, keys=False))

    def ask_filter(self) -> None:
        """Open the line in which a filter is written."""
        self._wrong = ""
        entry = self.query_one("#filter", Input)
        entry.value = self.live.choice.layers.text
        entry.add_class("shown")
        entry.focus()
        self.refresh_all()

    def footer_text(self) -> Text | None:
        """Return what Enter and Escape do while a filter is written."""
        if not self.query("#filter.shown"):
            return None
        if self._wrong:
            return Text(f"! {self._wrong}", style=self.live.ink.bad(), overflow="fold")
        keep, drop = ("Enter", "bold"), ("Esc", "bold")
        return Text.assemble(keep, " keep the filter  ", drop, " all layers")

    @on(Input.Changed, "#filter")
    def _typed(self, event: Input.Changed) -> None:
        """Apply a filter as it is written; while it is no filter, the last one stays."""
        try:
            self.live.choice.layers = LayerFilter.parse(event.value)
            self._wrong = ""
        except ValueError as wrong:
            self._wrong = str(wrong)
        self.refresh_all()

    @on(Input.Submitted, "#filter")
    def _entered(self) -> None:
        if not self._wrong:
            self._close_filter()

    def key_escape(self) -> None:
        """Show all layers again."""
        self.live.choice.layers = LayerFilter()
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("shown")
        self.query_one("#rows").focus()
        self.refresh_all()

    def _top(self, case: CaseState | None, rows: Sequence[LayerRow], untimed: bool) -> Text:
        choice = self.live.choice
        title = Text("Layers", style="bold", overflow="fold")
        if case is None:
            return title.append(" · no case was started yet", style="not bold")
        words = [case.method, request_words(case.request)]
        if case.started.rate:
            words.append(f"saves {share(case.started.rate)}")
        if choice.layers.text:
            words.append(f"filter {choice.layers.text}: {len(rows)} of {len(case.layers)}")
        title.append(f" · {' · '.join(words)}", style="not bold")
        if not case.layers:
            title.append("\nthis run does not tell layers apart", style="not bold italic")
        elif untimed:
            title.append(f"\n{_UNTIMED}", style="not bold italic")
        return title


def _timed(case: CaseState) -> bool:
    return any(layer.seconds is not None for layer in case.layers.values())


def _map(title: str, rows: Sequence[LayerRow], *, keys: bool) -> RenderableType:
    values = [row.key_ranks if keys else row.value_ranks for row in rows]
    kept = [(row, own) for row, own in zip(rows, values, strict=True) if own]
    if not kept:
        return Text()
    return HeatMap(
        [own for _, own in kept],
        title,
        write=lambda value: f"{value:.0f}",
        layers=[str(row.layer) for row, _ in kept],
    )
