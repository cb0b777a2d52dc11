"""vLLM's server for a plan: what it folds and writes, its settings, and the child process."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from kvprof import console
from kvprof.benchmark.shape_plans import Bare
from kvprof.benchmark.shapes import has_weights, layout_of, load_shape
from kvprof.child import Leash, child_environment, module_command
from kvprof.errors import ExitCode, UsageError
from kvprof.interrupt import raising
from kvprof.methods.named import options_in
from kvprof.methods.plan_files import save_plan
from kvprof.models.locate import locate
from kvprof.models.placement import main_device, parse_dtype
from kvprof.serving.active_plan import longest_graph, served_plan
from kvprof.serving.plugin import check_found
from kvprof.serving.refusals import check_method, check_servable
from kvprof.serving.settings import Setting, engine_options, engine_variables, load_format_of, named
from kvprof.serving.shapes import drawn_plan, shape_folder, words_for_shape
from kvprof.serving.unpacked import unpacked

__all__ = ["calibrated", "refuse_weightless", "serve_plan", "server_command"]

_GRACE_SECONDS = 30.0
_RATE = 0.5
_OPTIONS = ("--allocation", "--grid", "--minimum")


@contextmanager
def calibrated(
    model: str,
    plan_file: Path | None,
    given: dict[str, Any],
    option: Sequence[str] | None,
    trust_remote_code: bool,
) -> Iterator[Path]:
    """Give the file of the plan; one that a method makes lies there while the body runs.

    It is calibrated by ``kvprof plan`` in a process of its own, so that the GPU is free again when
    the server starts; for a shape without weights it is drawn.
    """
    if plan_file is not None:
        yield plan_file
        return
    with TemporaryDirectory(prefix="kvprof-serve-") as folder:
        path = Path(folder) / "served.plan"
        if given.get("--gguf") is None and not has_weights(model):
            _draw(model, path, given, option or ())
            yield path
            return
        words = ["plan", model, "--servable", "--save", str(path)]
        for name, value in given.items():
            words += [] if value is None else [name, str(value)]
        for entry in option or ():
            words += ["--option", entry]
        if trust_remote_code:
            words.append("--trust-remote-code")
        with console.status("calibrating the plan"):
            made = subprocess.run(
                module_command("kvprof", *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
                check=False,
            )
        if made.returncode:
            raise typer.Exit(made.returncode)
        yield path


def refuse_weightless(model: str, load_format: str | None, engine: Sequence[str]) -> None:
    """Refuse to serve a shape that has no weights, unless random ones are asked for."""
    if not has_weights(model) and "dummy" not in (load_format, load_format_of(engine)):
        raise UsageError(
            f"{model} is a shape without weights; --load-format dummy serves random ones"
        )


def _draw(model: str, path: Path, given: dict[str, Any], option: Sequence[str]) -> None:
    """Write a plan for the random weights of a shape."""
    taken = ("--method", "--rate", *_OPTIONS)
    if said := [name for name, value in given.items() if value is not None and name not in taken]:
        raise UsageError(
            f"{' and '.join(said)} cannot be combined with {model}, a shape without weights; give "
            "--rate only"
        )
    own = [f"{name[2:]}={given[name]}" for name in _OPTIONS if given[name] is not None]
    options = ",".join((*own, *option))
    shape = load_shape(model)
    check_method(
        Bare(layout_of(shape), shape.name), given["--method"], **options_in((*own, *option))
    )
    method = given["--method"] + (f":{options}" if options else "")
    rate = given["--rate"]
    drawn = drawn_plan(method, shape, _RATE if rate is None else rate, alone=rate is not None)
    check_servable(drawn.plan)
    save_plan(drawn.plan, path)
    console.note(f"{model} is a shape without weights: the plan has {drawn.source}")
    for warning in drawn.warnings:
        console.warn(warning)


def server_command(
    model: str,
    engine: Sequence[str],
    settings: Sequence[Setting],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Return the command that runs vLLM's server; what is given to vLLM itself comes first."""
    words = ["serve", model, *engine]
    own = named(list(engine))
    for one in settings:
        words += [] if one.name in own else [one.name, one.value]
    words += [] if revision is None else ["--revision", revision]
    if trust_remote_code:
        words.append("--trust-remote-code")
    return module_command("kvprof.serving.server", *words)


def serve_plan(
    spec: str,
    plan: Path,
    engine: Sequence[str],
    *,
    host: str,
    port: int,
    dtype: str,
    ranks: int,
    load_format: str | None,
    revision: str | None,
    gguf: str | None,
    trust_remote_code: bool,
) -> int:
    """Run the server until it ends, and return its exit code."""
    check_found()
    # Refused before a process is started.
    read = served_plan(str(plan))
    kind = parse_dtype(dtype, main_device("auto"))
    words = str(kind).removeprefix("torch.")
    given = [*engine, *([] if load_format is None else ["--load-format", load_format])]
    settings = engine_options(
        host=host,
        port=port,
        dtype=words,
        ranks=ranks,
        longest_graph=longest_graph(read),
        chosen=read.quantiser is not None,
        given=given,
    )
    # vLLM knows hub ids and folders; the embedded model, a GGUF file's and a shape are folders to
    # it.
    local = spec == "reference"
    with (
        unpacked(spec, kind, engine, revision=revision, gguf=gguf) as written,
        shape_folder(str(locate(spec).folder) if local else spec) as found,
    ):
        model = found if written is None else str(written.folder)
        if model != spec:
            settings.append(Setting("--served-model-name", spec, "its name for clients"))
        if written is not None:
            revision = None
            if load_format_of(given) != "dummy":
                plan = written.plan_of(plan)
        elif not has_weights(spec):
            given += words_for_shape(model, given)
        variables = engine_variables(str(plan.resolve()))
        own = named(given)
        for one in (*variables, *settings):
            if one.name not in own:
                console.note(f"{one.name} {one.value} ({one.why})")
        command = server_command(
            model, given, settings, revision=revision, trust_remote_code=trust_remote_code
        )
        environment = child_environment()
        environment.update({one.name: one.value for one in variables})
        return _until_it_ends(command, environment)


def _until_it_ends(command: Sequence[str], environment: dict[str, str]) -> int:
    leash = Leash()
    with raising():
        process = leash.start(command, stdin=subprocess.DEVNULL, env=environment)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            console.note("stopping the server")
            return int(ExitCode.INTERRUPTED)
        finally:
            _end(process)
            leash.close()
    return code if code >= 0 else 128 - code


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
