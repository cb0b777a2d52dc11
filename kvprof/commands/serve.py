"""``kvprof serve``: vLLM's OpenAI-compatible server with a compressed cache."""

import errno
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof import console
from kvprof.commands.options import (
    AllocationOption,
    CalibrateOption,
    CalibrateTokensOption,
    ContextOption,
    DtypeOption,
    GgufOption,
    GridOption,
    MethodOptions,
    MethodOptionsOption,
    MinimumOption,
    PlanFileOption,
    RateOption,
    RemovalOption,
    RevisionOption,
    TrustOption,
    method_option,
    one_method,
)
from kvprof.errors import LackingError, UsageError
from kvprof.loading import loading
from kvprof.requirements import extra_command
from kvprof.serving.settings import LOOPBACK


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Hub id, folder, .gguf file, smollm2, or reference; with --load-format dummy "
            "also a shape's name.  [default: reference]",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM…]", help="Options passed to vllm serve."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")
    ] = 8000,
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel GPUs.")] = 1,
    load_format: Annotated[
        str | None,
        typer.Option(
            "--load-format",
            help="vLLM's load format; dummy uses random weights with a plan of the same shape.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        method_option(
            "Method: fdc, zack, kq, svd-kv or palu; quantised: fdc-8bit, kq-4bit …",
        ),
    ] = None,
    rate: RateOption = None,
    removal: RemovalOption = None,
    plan_file: PlanFileOption = None,
    calibrate: CalibrateOption = None,
    calibrate_tokens: CalibrateTokensOption = None,
    allocation: AllocationOption = None,
    grid: GridOption = None,
    minimum: MinimumOption = None,
    option: MethodOptionsOption = None,
    context: ContextOption = None,
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Serve a plan with vLLM's OpenAI-compatible API.

    Needs the extra serve. vLLM's log says how many tokens of cache fit, compressed and
    uncompressed. A GGUF file is converted to a temporary copy of its weights.

    Examples
    --------
    kvprof serve reference --plan kq.plan
    kvprof serve reference --method fdc --rate 0.5 --port 8001
    kvprof serve reference --plan kq.plan -- --max-num-seqs 64 --max-model-len 1024
    """
    name = one_method(method)
    MethodOptions(
        method=method,
        rate=rate,
        removal=removal,
        plan_file=plan_file,
        calibrate=calibrate,
        calibrate_tokens=calibrate_tokens,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        option=option,
    ).choice(name)  # refuses what contradicts itself
    spec = model or "reference"
    _refuse_port_in_use(host, port)
    if plan_file is not None:  # what is wrong with it is told before what is lacking here
        with loading():
            from kvprof.serving.active_plan import served_plan

        served_plan(str(plan_file))
    if find_spec("vllm") is None:
        raise LackingError(f"kvprof serve requires vLLM; install it with: {extra_command('serve')}")

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.vllm_server import calibrated, refuse_weightless, serve_plan

    if gguf is None:
        refuse_weightless(spec, load_format, engine or [])
    given: dict[str, Any] = {
        "--method": name,
        "--rate": rate,
        "--removal": removal,
        "--calibrate": calibrate,
        "--calibrate-tokens": calibrate_tokens,
        "--allocation": allocation,
        "--grid": grid,
        "--minimum": minimum,
        "--context": context,
        "--revision": revision,
        "--gguf": gguf,
    }
    with calibrated(spec, plan_file, given, option, trust_remote_code) as plan:
        code = serve_plan(
            spec,
            Path(plan),
            engine or [],
            host=host,
            port=port,
            dtype=dtype,
            ranks=tensor_parallel,
            load_format=load_format,
            revision=revision,
            gguf=gguf,
            trust_remote_code=trust_remote_code,
        )
    if code:
        console.note(f"the server exited with code {code}")
        raise typer.Exit(code)


def _refuse_port_in_use(host: str, port: int) -> None:
    """Say so before a plan is made and read: vLLM would, after both, with a traceback."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, TypeError, ValueError) as problem:  # the latter for what is no name
            if isinstance(problem, OSError) and problem.errno == errno.EADDRINUSE:
                said = f"--port {port} is in use; give another port"
            else:
                said = (
                    f"--host {host[:60]!r}, --port {port}: cannot listen there; 127.0.0.1 is this "
                    "machine"
                )
            raise UsageError(said) from None
