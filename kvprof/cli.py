"""The command line: names the commands, and loads a command's module only when it runs."""

import atexit
import errno
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from kvprof import console, interrupt
from kvprof.child import child_environment, die_with_parent
from kvprof.errors import ExitCode, KvprofError, UsageError, no_memory, options_named, usage_message
from kvprof.version import __version__

__all__ = ["COMMANDS", "CommandEntry", "app", "main"]


@dataclass(frozen=True)
class CommandEntry:
    """A command and where it lives: ``kvprof.commands.<name>``, in the function of that name."""

    name: str
    help: str


#: Every command there is, in the order of ``kvprof --help``.
COMMANDS = (
    CommandEntry(
        "advise", "Which cache format fits this model, GPU and context, and how many users?"
    ),
    CommandEntry("spectrum", "How compact are Q, K and V? Singular values and ranks per head."),
    CommandEntry("stability", "Does a rotation calibrated offline suit real data?"),
    CommandEntry("sensitivity", "Which layers and heads tolerate lower precision?"),
    CommandEntry("plan", "What does a method store, fold into weights and run online?"),
    CommandEntry("eval", "What does a compressed cache cost in accuracy?"),
    CommandEntry("frontier", "How far does each method go before accuracy falls below a target?"),
    CommandEntry("generate", "Generate text with a compressed cache, and show where it differs."),
    CommandEntry("serve", "Serve a plan with vLLM's OpenAI-compatible API."),
    CommandEntry("bench", "Is attention over a compressed cache faster on this machine?"),
    CommandEntry("show", "Show a recorded result, or list the runs that kvprof tui recorded."),
    CommandEntry("compare", "What got better or worse between results, and is it significant?"),
    CommandEntry("export", "Export a result as CSV, Markdown, HTML, SVG or a Perfetto trace."),
    CommandEntry("tui", "Watch a measurement live, or replay a recorded one."),
    CommandEntry("recipe", "Does a paper's table or figure hold here?"),
    CommandEntry("doctor", "What does this machine have, and which commands can it run?"),
)

# The base of everything that a wrong command line raises. Older versions of Typer take it from
# click, newer ones bring their own; BadParameter is exported by both.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

# What a write fails with where nothing is wrong with kvprof: the disk is full, the quota used up, a
# limit of the shell's (ulimit -f) reached, the device or the terminal gone.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# The name itself is wrong, rather than what is there.
_NO_SUCH_NAME = (errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class _LazyCommand(TyperCommand):
    """Stands for a command until somebody wants more of it than its name."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Load the command; from here on the context's command is the real one."""
        return self._load().make_context(info_name, args, parent=parent, **extra)

    def _load(self) -> Any:
        assert self.name is not None
        return _made_of(getattr(import_module(f"kvprof.commands.{self.name}"), self.name))


@cache  # Typer makes a parser of every option, for as long as many a command runs
def _made_of(function: Any) -> Any:
    if isinstance(function, typer.Typer):  # a command with commands of its own
        return _checked(typer.main.get_command(function))
    from kvprof.commands.options import Command

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(function.__name__, cls=Command)(function)
    return _checked(typer.main.get_command(alone))


def _checked(command: Any) -> Any:
    """Let a command, and those below it, refuse a model that cannot be had before torch loads."""
    read = command.make_context

    def make_context(info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        context = read(info_name, args, parent=parent, **extra)
        given = context.params
        named = any(parameter.opts[0] == "model" for parameter in context.command.params)
        named = named and context.info_name != "advise"  # it takes a shape, or a config alone
        # Random weights may be of a shape, whose name no hub knows.
        if named and given.get("model") is not None and given.get("load_format") != "dummy":
            from kvprof.models.hub import check_reachable

            check_reachable(given["model"], given.get("revision"), given.get("gguf"))
        return context

    command.make_context = make_context
    for below in getattr(command, "commands", {}).values():
        _checked(below)
    return command


_EXAMPLES = (
    "kvprof spectrum                 # of the model that ships; downloads nothing",
    "kvprof plan --method kq --rate 30%",
    "kvprof eval --method kq --rate 0.2",
    "kvprof tui --demo               # a request's time on an H200, part by part",
    "kvprof COMMAND --help           # options in groups, and examples",
)


class _Group(TyperGroup):
    """The top level: knows every command by name, and turns every error into one line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for entry in COMMANDS:
            self.add_command(
                _LazyCommand(entry.name, help=entry.help, short_help=entry.help, callback=None)
            )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write where to begin, and what else comes last."""
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in _EXAMPLES))
        super().format_epilog(ctx, formatter)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Read the options before the command's name."""
        with _errors_in_a_line(debug=False):
            return super().make_context(info_name, args, parent=parent, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; of one that went say what to use instead."""
        if args[0] not in self.commands and (instead := _instead(args[0])):
            raise UsageError(instead)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; whatever it raises ends here, as a line and an exit code."""
        with _errors_in_a_line(debug=ctx.params["debug"]), interrupt.raising():
            die_with_parent()
            return super().invoke(ctx)


app = typer.Typer(
    name="kvprof",
    cls=_Group,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 3 missing package or device, 4 "
    "claim or limit not met, 130 interrupted (Ctrl-C, SIGTERM or SIGHUP).",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.report_console().out(f"kvprof {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _top(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="KVPROF_DEBUG", help="Show the traceback of an error."),
    ] = False,
) -> None:
    """Profile the compression of KV caches: how far can a cache go, and what does it cost?"""
    if ctx.invoked_subcommand is None:
        console.report_console().out(ctx.get_help(), highlight=False)


@contextmanager
def _errors_in_a_line(*, debug: bool) -> Iterator[None]:
    """Let the body run; whatever it raises is told in a line and becomes an exit code."""
    with options_named():
        try:
            try:
                yield
            finally:
                # Now, so that a full disk or a closed pipe behind stdout is noticed and told.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except BaseException as problem:  # what panics in Rust is no Exception
            raise typer.Exit(_explain(problem, debug=debug)) from problem


def _explain(problem: BaseException, *, debug: bool) -> ExitCode:
    """Say on stderr in one line what went wrong, and return the exit code it stands for."""
    if _is_interrupt(problem):
        console.error("interrupted; unwritten results are lost")
        return ExitCode.INTERRUPTED
    if isinstance(problem, BrokenPipeError):  # whoever read our output has left
        return ExitCode.FAILED
    if debug:
        console.note("".join(traceback.format_exception(problem)))
    if no_memory(problem):
        console.error(
            f"out of memory: {str(problem) or 'an allocation failed'}; try smaller batches, "
            "shorter sequences or another --device"
        )
        return ExitCode.LACKING
    if isinstance(problem, KvprofError):
        console.error(str(problem))
        return problem.exit_code
    if isinstance(problem, _CommandLineError):
        console.error(_usage_line(problem))
        return ExitCode.USAGE
    if isinstance(problem, OSError) and problem.errno in _FULL:
        console.error(f"{os.strerror(problem.errno)}: {problem.filename or 'writing the output'}")
        return ExitCode.FAILED
    if isinstance(problem, ModuleNotFoundError) and not (problem.name or "").startswith("kvprof"):
        console.error(f"missing Python package for {problem.name!r}: pip install it")
        return ExitCode.LACKING
    if isinstance(problem, OSError) and problem.strerror and problem.filename is not None:
        # Whatever file it was, the user named it or can do something about it.
        name = os.fsdecode(problem.filename) if isinstance(problem.filename, str | bytes) else ""
        console.error(f"{name}: {problem.strerror}")
        return ExitCode.USAGE if problem.errno in _NO_SUCH_NAME else ExitCode.FAILED
    hint = "" if debug else "; kvprof --debug COMMAND or KVPROF_DEBUG=1 shows the traceback"
    console.error(f"internal error: {type(problem).__name__}: {problem}{hint}")
    return ExitCode.FAILED


def _usage_line(problem: Any) -> str:
    path = problem.ctx.command_path if getattr(problem, "ctx", None) else "kvprof"
    name = getattr(problem, "option_name", None)
    if name is not None and (instead := _instead(f"{path.removeprefix('kvprof ')} {name}")):
        return instead
    return f"{usage_message(problem)} (see {path} --help)"


def _instead(name: str) -> str | None:
    """Return what to use instead of a command or an option that went."""
    from kvprof.commands.options import GONE

    return f"{name} was removed: {GONE[name]}" if name in GONE else None


def _is_interrupt(problem: BaseException) -> bool:
    """Recognise Ctrl-C, also where it met an import and was made another error of."""
    seen: BaseException | None = problem
    while seen is not None and not isinstance(seen, KeyboardInterrupt | KvprofError):
        seen = seen.__cause__
    return isinstance(seen, KeyboardInterrupt)


def main() -> None:
    """Run the command line."""
    # Processes that libraries start take no code from the working folder.
    os.environ.update(child_environment())
    os.environ.pop("MPLBACKEND", None)  # figures are files
    try:
        app(prog_name="kvprof")
    except SystemExit as end:
        if isinstance(end.code, int):  # else Python prints it
            _leave(end.code)
        raise


def _leave(code: int) -> NoReturn:
    """End as Python does, but for taking apart what goes with the process: seconds with torch."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python's own end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # told already, or closed
            stream.flush()
    os._exit(code)
