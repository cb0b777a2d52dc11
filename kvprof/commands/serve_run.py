"""The run of ``kvprof serve``: a plan, the settings, and vLLM's server as a child."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from kvprof import console
from kvprof.child import child_environment, module_command
from kvprof.errors import ExitCode
from kvprof.interrupt import raising
from kvprof.leash import Leash
from kvprof.models.locate import locate
from kvprof.models.placement import main_device, parse_dtype
from kvprof.scratch import ScratchFolder
from kvprof.serving.plugin import check_found
from kvprof.serving.served import served_plan
from kvprof.serving.settings import Setting, engine_options, engine_variables, named

__all__ = ["calibrated", "serve_plan", "server_command"]

_GRACE_SECONDS = 30.0


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
    the server starts.

    Parameters
    ----------
    model : str
    plan_file : Path or None
    given : dict
        Options of ``kvprof plan`` by name; None for those not given.
    option : sequence of str or None
        Further options of the method.
    trust_remote_code : bool
    """
    if plan_file is not None:
        yield plan_file
        return
    with ScratchFolder("serve") as folder:
        path = Path(folder) / "served.plan"
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


def server_command(
    model: str,
    engine: Sequence[str],
    settings: Sequence[Setting],
    *,
    load_format: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Return the command that runs vLLM's server; what is given to vLLM itself comes first.

    Parameters
    ----------
    model : str
        As vLLM finds it.
    engine : sequence of str
        Options for vLLM.
    settings : sequence of Setting
    load_format, revision : str, optional
    trust_remote_code : bool
    """
    words = ["serve", model, *engine]
    own = named(list(engine))
    for one in settings:
        words += [] if one.name in own else [one.name, one.value]
    for name, value in (("--load-format", load_format), ("--revision", revision)):
        words += [] if value is None else [name, value]
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
    trust_remote_code: bool,
) -> int:
    """Run the server until it ends, and return its exit code.

    Parameters
    ----------
    spec : str
        The model, as kvprof names it.
    plan : Path
    engine : sequence of str
        Options for vLLM.
    host, port, dtype, ranks, load_format, revision, trust_remote_code
        From the command line.

    Raises
    ------
    KvprofError
        For a plan that cannot be read or served, before a process is started.
    """
    check_found()
    served_plan(str(plan))
    # vLLM knows hub ids and folders; the embedded model is a folder to it.
    local = spec == "reference"
    model = str(locate(spec).folder) if local else spec
    kind = str(parse_dtype(dtype, main_device("auto"))).removeprefix("torch.")
    settings = engine_options(host=host, port=port, dtype=kind, ranks=ranks)
    if local:
        settings.append(Setting("--served-model-name", spec, "what clients call it"))
    variables = engine_variables(str(plan.resolve()))
    own = named(list(engine))
    for one in (*variables, *settings):
        if one.name not in own:
            console.note(f"{one.name} {one.value} ({one.why})")
    command = server_command(
        model,
        engine,
        settings,
        load_format=load_format,
        revision=revision,
        trust_remote_code=trust_remote_code,
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
            console.note("ending the server")
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
