"""Write a page for each command from its ``--help``, and for each method from its docstring.

    python tools/pages.py               # the pages, into docs/built, which git ignores
    python tools/pages.py --pictures    # docs/img too: drawn by kvprof, of records and a terminal

Run it in the repository's root.
"""

import argparse
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvprof.cli import COMMANDS
from kvprof.methods.named import PAPERS
from kvprof.methods.registry import COMMON_OPTIONS, METHODS, calibration_needs

# Parameters that are no options.
_GIVEN = ("inputs :", "own :", "name :")
#: Figures of docs/img by the record that they draw.
FIGURES = {"frontier-qwen-h200": "frontier-centred-qwen2.5-coder-1.5b-h200"}
#: The README's picture: the first lines of what this prints.
PICTURED, LINES = "advise Llama-3.1-8B --gpu h100-80gb --context 32k", 20
# As Rich's, without the fonts that it fetches.
_FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px/{line_height}px monospace }}
{styles}</style>
<defs>{lines}</defs><rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<g transform="translate({terminal_x}, 20)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def run(line: str, **variables: str) -> str:
    """Return what a command line of kvprof prints."""
    return subprocess.run(
        [sys.executable, "-m", "kvprof", *shlex.split(line)],
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"} | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def command_page(name: str, answers: str) -> str:
    """Return the page of a command: the question that it answers, and its help."""
    return f"# kvprof {name}\n\n{answers}\n\n```text\n{run(f'{name} --help').strip()}\n```\n"


def of_docstring(text: str) -> str:
    """Return a NumPy docstring as Markdown: what it says, and its options as a list."""
    said, _, rest = text.partition("\nParameters\n----------\n")
    options = rest.partition("\nRaises\n")[0]
    found = re.findall(r"^(\S.*)\n((?:    .*\n?|\n)*)", options, re.MULTILINE)
    kept = [(name, told) for name, told in found if not name.startswith(_GIVEN)]
    listed = "\n".join(
        f"- `{name.partition(' : ')[0]}`: {' '.join(told.split()) or name.partition(' : ')[2]}"
        for name, told in kept
    )
    said = said.removeprefix("Return ").strip()
    return re.sub(r"``(.+?)``", r"`\1`", f"{said[:1].upper()}{said[1:]}\n\n{listed}".strip())


def methods() -> dict[Callable[..., Any], list[str]]:
    """Return the names of methods by the function that makes their plans."""
    found: dict[Callable[..., Any], list[str]] = {}
    for name, made in METHODS.items():
        if name not in PAPERS:
            function = made.func if isinstance(made, functools.partial) else made
            found.setdefault(function, []).append(name)
    return found


def method_page(function: Callable[..., Any], names: list[str]) -> str:
    """Return the page of the methods that one function makes."""
    module = sys.modules[function.__module__]
    needs = calibration_needs(names[0])
    defaults = ", ".join(
        f"`{key}={value.default}`"
        for key, value in inspect.signature(METHODS[names[0]]).parameters.items()
        if value.kind is value.KEYWORD_ONLY
    )
    lines = [
        f"# {', '.join(names)}",
        re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(module.__doc__ or "")),
        of_docstring(inspect.cleandoc(function.__doc__ or "")),
        f"Defaults: {defaults or 'none'}. Common options: {', '.join(COMMON_OPTIONS)}.",
        f"Calibrated on: {needs.source if needs else 'nothing'}.",
    ]
    for paper, setting in PAPERS.items():
        if setting.method == names[0]:
            own = ", ".join(f"{key}={value}" for key, value in setting.options.items())
            lines.append(
                f"`{paper}` is the paper's own setting: {own}; {setting.tokens:,} tokens of "
                f"`{setting.source}`. {' '.join(setting.differences())}"
            )
    return "\n\n".join(lines) + "\n"


def write(folder: Path) -> list[Path]:
    """Write all pages and their index; return the pages."""
    pages = {f"command-{one.name}": command_page(one.name, one.help) for one in COMMANDS}
    pages |= {f"method-{names[0]}": method_page(made, names) for made, names in methods().items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in pages.items()}
    index = "\n".join(f"- [{title}]({name}.md)" for name, title in titles.items())
    (folder / "index.md").write_text(f"# Commands and methods\n\n{index}\n", encoding="utf-8")
    return [folder / f"{name}.md" for name in pages]


def draw(folder: Path) -> None:
    """Draw the figures of records, and what a terminal shows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in FIGURES.items():
        run(f"export records/{record}.json --to svg --output {folder / name}.svg --force")
    printed = run(PICTURED, COLUMNS="110", FORCE_COLOR="1", NO_COLOR="", COLORTERM="truecolor")
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=110, file=nowhere)
        console.print(Text(f"$ kvprof {PICTURED}", style="bold green"))
        console.print(Text.from_ansi("\n".join(printed.splitlines()[:LINES])))
        text = console.export_svg(code_format=_FRAME, unique_id="kvprof")
    (folder / "advise.svg").write_text(text, encoding="utf-8")


def main() -> None:
    """Write the pages, and on request the pictures."""
    parser = argparse.ArgumentParser(description="Write a page a command and a page a method.")
    parser.add_argument("--pictures", action="store_true", help="draw docs/img too")
    arguments = parser.parse_args()
    print(f"{len(write(Path('docs/built')))} pages in docs/built")
    if arguments.pictures:
        draw(Path("docs/img"))


if __name__ == "__main__":
    main()
