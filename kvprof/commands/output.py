"""Where a command's result goes: options, checks before the work, and how a command ends."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import Field

from kvprof import console
from kvprof.commands.options import OUTPUT
from kvprof.commands.request import Mark, Request, command
from kvprof.environment import collect_environment
from kvprof.errors import ExitCode, FailedError, KvprofError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.records.files import (
    EVENTS_NAME,
    RESULT_NAME,
    ensure_writable,
    render_result,
    write_beside,
    write_bytes_atomic,
)
from kvprof.records.result import build_result
from kvprof.views import kinds
from kvprof.views.figure import figure_bytes, no_matplotlib

if TYPE_CHECKING:
    from kvprof.records.journal import Journal

__all__ = [
    "CsvOption",
    "FigureOptions",
    "ForceOption",
    "JsonOption",
    "OutOption",
    "Outcome",
    "OutputOptions",
    "Outputs",
    "PngOption",
    "Report",
    "SvgOption",
    "TableOptions",
    "check_folder",
    "end_without_result",
    "measuring",
    "refuse_sources",
]


def check_folder(out: Path) -> None:
    """Refuse a file, or a link to nothing, where ``--out`` names a folder."""
    for one in (out, *out.parents):
        if os.path.lexists(one) and not one.is_dir():
            what = "broken link" if one.is_symlink() else "file"
            raise UsageError(f"--out {one} is a {what}; name a folder")


def refuse_sources(files: Iterable[tuple[str, Path | None]], read: Iterable[Any]) -> None:
    """Refuse to write over what a command reads, which ``--force`` does not mean."""
    sources = set()
    for named in read:
        for one in [named] if isinstance(named, str | Path) else named or ():
            path = Path(os.path.realpath(one))
            sources.add(path)
            with suppress(OSError):  # of a name that no file can have: whoever reads it says so
                names = _OF_A_MODEL if (path / "config.json").is_file() else _OF_A_RUN
                sources |= {own for name in names for own in path.glob(name)}
    for option, file in files:
        if file and Path(os.path.realpath(file)) in sources and file.is_file():
            raise UsageError(f"{option} {file}: this command reads that file; name another")


def end_without_result(told: str) -> NoReturn:
    """End a command that was interrupted before there was anything to show or keep."""
    console.error(told)
    raise typer.Exit(ExitCode.INTERRUPTED)


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
    Path | None, _destination("--out", "DIR", "Write the run (result.json) to this folder.")
]
SvgOption = Annotated[
    Path | None, _destination("--svg", "FILE", "Draw the figure (needs the extra plot).")
]
PngOption = Annotated[
    Path | None, _destination("--png", "FILE", "Draw the figure (needs the extra plot).")
]
ForceOption = Annotated[
    bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite existing files.")
]


class OutputOptions(Request):
    """Where the result goes."""

    json_file: Annotated[JsonOption, Field(alias="json")] = None
    out: OutOption = None
    force: ForceOption = False

    def outputs(self) -> "Outputs":
        """Return the destinations."""
        more = {name: getattr(self, name, None) for name in ("csv", "svg", "png")}
        return Outputs(json=self.json_file, out=self.out, force=self.force, **more)


class TableOptions(OutputOptions):
    """Of a kind that has a CSV."""

    csv: CsvOption = None


class FigureOptions(TableOptions):
    """Of a kind that has a figure too."""

    svg: SvgOption = None
    png: PngOption = None


#: Makes what Rich prints, or None, of a result, the terminal's width and whether it has colour.
Report = Callable[[dict[str, Any], int, bool], Any]


@dataclass(frozen=True)
class Outcome:
    """What a command has measured; `Outputs.end` says what each is."""

    inputs: Mapping[str, Any]
    data: Mapping[str, Any]
    warnings: Sequence[str] = ()
    complete: bool = True
    problem: BaseException | None = None
    interrupted: bool | None = None
    lost: Sequence[str] = ()
    keep: Callable[[dict[str, Any]], Sequence[str]] | None = None
    report: Report = kinds.report
    code: ExitCode = ExitCode.DONE


Asked = TypeVar("Asked", bound=OutputOptions)


def measuring(request: type[Asked]) -> Callable[[Callable[[Asked], Outcome]], Callable[..., None]]:
    """Make a command of the function that measures: it is asked by a request, and ends by `end`.

    The kind of the result is the function's name.
    """

    def decorated(measure: Callable[[Asked], Outcome]) -> Callable[..., None]:
        @wraps(measure)
        def run(asked: Asked) -> None:
            outputs = asked.outputs()
            read = asked.files(Mark.READS).values()
            outputs.check(asked.files(Mark.WRITES), read=read)
            outcome = measure(asked)
            with graceful_interrupt():  # what was measured is written, whoever presses Ctrl-C
                outputs.end(measure.__name__, **vars(outcome))

        return command(request, run)

    return decorated


_STDOUT = Path("-")
#: What is read in a folder.
_OF_A_RUN = (RESULT_NAME, EVENTS_NAME, f"{EVENTS_NAME}.gz")
_OF_A_MODEL = ("*.safetensors", "*.gguf", "*config.json", "tokenizer.json", "*.index.json")


@dataclass(frozen=True)
class Outputs:
    """The destinations that a command was given, and how it ends.

    A command that measures ends by `end`, one that measured into a journal by `end_recorded`; both
    end by `finish`, as does one that shows a result that was there.
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

    @property
    def events(self) -> Path | None:
        """Where the events of a run go that keeps a journal; None without a folder."""
        return self.out / EVENTS_NAME if self.out is not None else None

    def check(
        self, extra: Mapping[str, Path | None] | None = None, read: Iterable[Any] = ()
    ) -> None:
        """Refuse, before any work is done, what could not be written at its end."""
        for option, path in (("--svg", self.svg), ("--png", self.png)):
            if path == _STDOUT:
                raise UsageError(f"{option} -: a figure cannot go to stdout; name a file")
            if path is not None and find_spec("matplotlib") is None:
                raise no_matplotlib(option)
        more = {option: path for option, path in (extra or {}).items() if path is not None}
        for option, path in more.items():
            if path == _STDOUT:
                raise UsageError(f"{option} -: only --json and --csv can go to stdout; name a file")
        if self.out is not None:
            check_folder(self.out)
        # Under --out both a record and its events may be named.
        files = [*self.files().items(), *more.items()]
        taken: dict[Path, str] = {}
        for option, path in files:
            key = path if path == _STDOUT else Path(os.path.realpath(path))
            if key in taken:
                raise UsageError(f"{taken[key]} and {option} both name {path}; give each its own")
            taken[key] = option
        refuse_sources(files, read)
        for _, path in files:
            if path != _STDOUT:
                ensure_writable(path, self.force)
        if self.out is not None and not self.force:
            from kvprof.records.journal import find_events

            if (found := find_events(self.out)) is not None:
                raise UsageError(f"{found} exists; --force overwrites it")

    def end(
        self,
        kind: str,
        *,
        inputs: Mapping[str, Any],
        data: Mapping[str, Any],
        warnings: Sequence[str] = (),
        complete: bool = True,
        problem: BaseException | None = None,
        interrupted: bool | None = None,
        lost: Sequence[str] = (),
        keep: Callable[[dict[str, Any]], Sequence[str]] | None = None,
        report: Report = kinds.report,
        code: ExitCode = ExitCode.DONE,
    ) -> None:
        """End a command that has measured: make its result, and `finish` with it."""
        reason = None if complete or problem is None else str(problem) or type(problem).__name__
        result = build_result(
            kind,
            environment=collect_environment(),
            inputs=inputs,
            data=data,
            warnings=warnings,
            complete=complete,
            incomplete_reason=reason,
        )
        unkept = keep(result) if keep is not None else ()
        self.finish(
            result,
            report,
            lost=[*lost, *unkept],
            problem=problem,
            interrupted=not complete if interrupted is None else interrupted,
            code=code,
        )

    def end_recorded(
        self, journal: "Journal", *, problem: BaseException | None = None, interrupted: bool
    ) -> None:
        """End a command that measured into a journal: `finish` with what its events make."""
        if not journal.measured:
            if problem is not None:
                raise problem
            end_without_result("interrupted before anything was measured; no result")
        from kvprof.records.fold import result_of

        recording = journal.recording()
        self.finish(
            result_of(recording.events, damage=recording.damage),
            lost=[said for said in (journal.failure, recording.damage) if said is not None],
            problem=problem,
            interrupted=interrupted,
        )

    def finish(
        self,
        result: dict[str, Any],
        report: Report = kinds.report,
        *,
        lost: Sequence[str] = (),
        problem: BaseException | None = None,
        interrupted: bool = False,
        code: ExitCode = ExitCode.DONE,
    ) -> None:
        """Write a result to every destination, print its report, and leave.

        The report, the CSV and the figure are those of the result's kind. A destination that fails
        (a disk that is full by now, a file that has come to exist) keeps neither the others from
        being written nor the report from being printed.
        """
        missing = list(lost)
        texts = self._write(result, missing)
        terminal = console.report_console()
        for text in texts:
            # out() writes as is: print() would wrap lines and read [brackets] as markup.
            terminal.out(text, end="", highlight=False)
        if self.report_to_stdout:
            shown = report(result, terminal.width, not terminal.no_color)
            if shown is not None:
                terminal.print(shown)
        if missing:
            said = [*missing, *([str(problem)] if problem is not None else [])]
            raise FailedError("; ".join(said)) from problem
        if problem is not None:
            raise problem
        if interrupted:
            raise typer.Exit(ExitCode.INTERRUPTED)
        if code != ExitCode.DONE:
            raise typer.Exit(code)

    def _write(self, result: dict[str, Any], missing: list[str]) -> list[str]:
        """Write every file; return what is to be on stdout."""
        texts: list[str] = []

        def put(option: str, path: Path | None, content: Callable[[], str | bytes]) -> None:
            if path is None:
                return
            try:
                made = content()
                if path == _STDOUT and isinstance(made, str):
                    texts.append(made)
                    return
                data = made.encode("utf-8") if isinstance(made, str) else made
                try:
                    write_bytes_atomic(path, data, self.force)
                except UsageError:
                    if not path.is_file() and not path.is_symlink():
                        raise
                    # It was not there when the run began.
                    other = write_beside(path, data)
                    missing.append(
                        f"{path} was created meanwhile and was not overwritten; the output is in "
                        f"{other}"
                    )
            except KvprofError as failure:
                missing.append(str(failure))
            except Exception as failure:  # what was measured is worth more than its drawing
                missing.append(f"{option} {path}: {type(failure).__name__}: {failure}")

        def text() -> str:
            return render_result(result)

        # The result first: it is what cannot be had again.
        if self.out is not None:
            put("--out", self.out / RESULT_NAME, text)
            if self.force and not missing:
                from kvprof.records.journal import remove_other_events

                try:
                    remove_other_events(self.out, result)
                except KvprofError as failure:
                    missing.append(str(failure))
        put("--json", self.json, text)
        put("--csv", self.csv, lambda: str(_require_maker(kinds.csv_of(result), "--csv")()))
        if self.svg is not None or self.png is not None:

            def draw(form: str) -> bytes:
                return figure_bytes(_require_maker(kinds.figure_of(result), f"--{form}")(), form)

            put("--svg", self.svg, lambda: draw("svg"))
            put("--png", self.png, lambda: draw("png"))
        return texts

    def files(self) -> dict[str, Path]:
        """Return where the result goes, by option."""
        named = {
            "--json": self.json,
            "--csv": self.csv,
            "--out": self.out / RESULT_NAME if self.out is not None else None,
            "--svg": self.svg,
            "--png": self.png,
        }
        return {option: path for option, path in named.items() if path is not None}


def _require_maker(make: Callable[[], Any] | None, option: str) -> Callable[[], Any]:
    if make is None:
        raise ValueError(f"this command has {option} but does not produce its output")
    return make
