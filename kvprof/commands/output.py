"""Where a command's result goes: options, checks before the work, files after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof.commands.help import OUTPUT
from kvprof.console import report_console
from kvprof.errors import FailedError, KvprofError, LackingError, UsageError
from kvprof.records.files import (
    RESULT_NAME,
    ensure_writable,
    render_result,
    write_bytes_atomic,
    write_text_atomic,
)
from kvprof.requirements import extra_command

__all__ = [
    "CsvOption",
    "ForceOption",
    "JsonOption",
    "OutOption",
    "Outputs",
    "PngOption",
    "SvgOption",
]


def _destination(option: str, metavar: str, text: str) -> Any:
    return typer.Option(
        option, metavar=metavar, help=text, show_default=False, rich_help_panel=OUTPUT
    )


JsonOption = Annotated[
    Path | None, _destination("--json", "FILE", "Write the result as JSON; - for stdout.")
]
CsvOption = Annotated[
    Path | None, _destination("--csv", "FILE", "Write the figures as CSV; - for stdout.")
]
OutOption = Annotated[
    Path | None, _destination("--out", "DIR", "Keep the run in this folder (result.json).")
]
SvgOption = Annotated[
    Path | None, _destination("--svg", "FILE", "Draw a figure (needs the extra plot).")
]
PngOption = Annotated[
    Path | None, _destination("--png", "FILE", "Draw a figure (needs the extra plot).")
]
ForceOption = Annotated[
    bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite files that exist.")
]

_STDOUT = Path("-")


@dataclass(frozen=True)
class Outputs:
    """The destinations that a command was given.

    Attributes
    ----------
    json, csv : Path or None
        Files; ``-`` is stdout.
    out : Path or None
        A run's folder.
    svg, png : Path or None
        Files for a figure.
    force : bool
        Overwrite what exists.
    """

    json: Path | None = None
    csv: Path | None = None
    out: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    force: bool = False

    @property
    def report_to_stdout(self) -> bool:
        """Whether stdout is free for the report; it is not when JSON or CSV goes there."""
        return _STDOUT not in (self.json, self.csv)

    def check(self, extra: Sequence[Path] = ()) -> None:
        """Refuse, before any work is done, what could not be written at its end.

        Parameters
        ----------
        extra : sequence of Path
            Files that the command itself will write, checked with the rest.

        Raises
        ------
        UsageError
            When a file exists (without `force`), two outputs share a destination, or one that is no
            text is to go to stdout.
        FailedError
            When a folder cannot be written to.
        LackingError
            When a figure is asked for and matplotlib is missing.
        """
        for option, path in (("--svg", self.svg), ("--png", self.png)):
            if path == _STDOUT:
                raise UsageError(f"{option} -: a figure goes to a file; only text goes to stdout")
            if path is not None and find_spec("matplotlib") is None:
                raise LackingError(
                    f"{option} needs matplotlib, which is missing: {extra_command('plot')}"
                )
        if _STDOUT in extra:
            raise UsageError("-: this output goes to a file; only --json and --csv go to stdout")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file; name a folder")
        files = [*self._files().items(), *(("the other output", path) for path in extra)]
        taken: dict[Path, str] = {}
        for option, path in files:
            key = path if path == _STDOUT else path.resolve()
            if key in taken:
                raise UsageError(f"{taken[key]} and {option} both go to {path}; give each its own")
            taken[key] = option
        for _, path in files:
            if path != _STDOUT:
                ensure_writable(path, self.force)

    def write(
        self,
        result: dict[str, Any],
        *,
        csv_text: Callable[[], str] | None = None,
        figure: Callable[[], Any] | None = None,
    ) -> None:
        """Write the result to every destination.

        One that fails (a disk that is full by now) does not keep the others from being written.

        Parameters
        ----------
        result : dict
            From `kvprof.records.result.build_result`.
        csv_text : callable, optional
            Returns the text for ``--csv``; called only when that was asked for.
        figure : callable, optional
            Returns a matplotlib figure for ``--svg`` and ``--png``.

        Raises
        ------
        FailedError
            Names every destination that could not be written.
        """
        text = render_result(result)
        failures: list[KvprofError] = []

        def put(path: Path | None, content: Callable[[], str | bytes]) -> None:
            if path is None:
                return
            made = content()
            try:
                if path == _STDOUT and isinstance(made, str):
                    # out() writes as is: print() would wrap lines and read [brackets] as markup.
                    report_console().out(made, end="", highlight=False)
                elif isinstance(made, str):
                    write_text_atomic(path, made, self.force)
                else:
                    write_bytes_atomic(path, made, self.force)
            except KvprofError as failure:
                failures.append(failure)

        # The result first: it is what cannot be had again.
        if self.out is not None:
            put(self.out / RESULT_NAME, lambda: text)
        put(self.json, lambda: text)
        if self.csv is not None:
            put(self.csv, _offered(csv_text, "--csv"))
        if self.svg is not None or self.png is not None:
            from kvprof.views.figure import figure_bytes

            drawn = _offered(figure, "--svg and --png")()
            put(self.svg, lambda: figure_bytes(drawn, "svg"))
            put(self.png, lambda: figure_bytes(drawn, "png"))
        if failures:
            raise FailedError("; ".join(str(failure) for failure in failures))

    def _files(self) -> dict[str, Path]:
        named = {
            "--json": self.json,
            "--csv": self.csv,
            "--out": self.out / RESULT_NAME if self.out is not None else None,
            "--svg": self.svg,
            "--png": self.png,
        }
        return {option: path for option, path in named.items() if path is not None}


def _offered(make: Callable[[], Any] | None, option: str) -> Callable[[], Any]:
    if make is None:
        raise ValueError(f"this command has {option} but makes nothing for it")
    return make
