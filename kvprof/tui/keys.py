"""The keys of the view: what they are called, what they do, and where they are shown."""

from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

__all__ = ["KEYS", "SCREENS", "Key", "footer", "tabs"]

#: Name of a screen to its title, in the order of the keys 1 to 5.
SCREENS = {
    "overview": "Overview",
    "layers": "Layers",
    "balance": "Balance",
    "cache": "Cache",
    "log": "Log",
}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes
    ----------
    key : str
        As Textual calls it.
    sign : str
        As a person calls it.
    word : str
        In the footer; empty leaves it out.
    action : str
        Of the app.
    help : str
    screens : tuple of str
        Where the footer shows it; empty is everywhere.
    """

    key: str
    sign: str
    word: str
    action: str
    help: str
    screens: tuple[str, ...] = ()


#: In the order of the footer.
KEYS = (
    Key("m", "m", "method", "method", "the next method (Layers, Balance, Cache show it)"),
    Key("b", "b", "baseline", "baseline", "hold the others against the next method"),
    Key("n", "n", "request", "request(1)", "the next batch and lengths (N: the one before)"),
    Key(
        "s",
        "s",
        "sort",
        "sort",
        "parts by size, layers by the next column, SMs by load",
        ("overview", "layers", "balance"),
    ),
    Key(
        "p",
        "p",
        "small parts",
        "small_parts",
        "open or fold the parts of little time",
        ("overview",),
    ),
    Key("slash", "/", "filter", "filter", "show some layers: 0-7,12 or error>0.01", ("layers",)),
    Key("space", "space", "pause", "pause", "hold the view still; the measurement goes on"),
    Key("end", "End", "jump", "jump", "play the rest of a replay at once"),
    Key("x", "x", "save svg", "save_svg", "save this screen as an SVG file"),
    Key("e", "e", "export", "export", "write the result, as far as it is measured"),
    Key("question_mark", "?", "help", "help", "this page"),
    Key("q", "q", "quit", "leave", "leave; asks while a measurement of its own is running"),
)


def tabs(active: str) -> Text:
    """Return the line of screens; the active one is in brackets.

    What can be clicked carries the action of the app under ``press`` in its meta data.
    """
    line = Text("kvprof ", no_wrap=True, style="bold")
    for number, (name, title) in enumerate(SCREENS.items(), 1):
        chosen = name == active
        word = Text(f"[{number} {title}]" if chosen else f" {number} {title} ")
        word.stylize(Style(bold=True, reverse=True) if chosen else "")
        word.apply_meta({"press": f"show({name!r})"})
        line.append_text(word)
    return line


def footer(screen: str, *, hidden: frozenset[str], words: dict[str, str], width: int) -> Text:
    """Return the keys that do something here, on as many lines as they need.

    Parameters
    ----------
    screen : str
    hidden : frozenset of str
        Keys that do nothing now.
    words : dict of str
        Another word for a key, for example what a second press does.
    width : int
        Columns.
    """
    entries = [Text.assemble(("1–5", "bold"), " screens")]
    for key in KEYS:
        if not key.word or key.key in hidden or (key.screens and screen not in key.screens):
            continue
        entry = Text.assemble((key.sign, "bold"), f" {words.get(key.key, key.word)}")
        call = key.action if "(" in key.action else f"{key.action}()"
        entry.apply_meta({"press": call})
        entries.append(entry)
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + 2 + entry.cell_len <= width:
            lines[-1].append("  ")
            lines[-1].append_text(entry)
        else:
            lines.append(entry)
    return Text("\n").join(lines)
