"""``kvprof bench``: how fast attention over a compressed cache is, against the best full width."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    PngOption,
    SvgOption,
)
from kvprof.environment import collect_environment
from kvprof.errors import ExitCode, FailedError, LackingError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.records.result import build_result
from kvprof.sizes import parse_counts

if TYPE_CHECKING:
    from kvprof.benchmark.request import BenchRequest

_DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16",
    "float32": "float32", "fp32": "float32",
}  # fmt: skip
_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")


def bench(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="SHAPE|PATH",
            help="A model's shape by name, or a folder with a config.json; no weights are needed.",
        ),
    ] = "Llama-3.1-8B",
    seq: Annotated[
        str, typer.Option("--seq", metavar="LIST", help="Contexts in tokens: 4k,32k,100k.")
    ] = "100k",
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="LIST",
            help="Sequences at once. Default 1,8 on a GPU and 1 on a CPU.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option("--rate", help="Share of the cache's bytes to save.")
    ] = 0.5,
    ranks: Annotated[
        Path | None,
        typer.Option(
            "--ranks",
            metavar="FILE|PLAN",
            help="Widths of the KV heads: JSON [[K, V], …], or a saved plan. Default: the "
            "reference model's, resampled to the shape.",
            show_default=False,
        ),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase",
            metavar="LIST",
            help="decode, prefill. Default: both on a CPU; decode on a GPU, where prefill over "
            "unlike widths is unproven.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="LIST",
            help="Also uniform, palu-folded, kq-8bit …, palu:group=1, tale:bits=none.",
        ),
    ] = "full,fp8,fdc,kq,palu,tale,fdc-4bit",
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            metavar="LIST",
            help="How work is cut: equal, lpt (decode), rows (prefill), or all to compare them.",
        ),
    ] = "equal",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="auto (bf16 on a GPU, float32 on a CPU), bfloat16, float16, float32."
        ),
    ] = "auto",
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            help="Samples per row, 3 or more. Default 30 on a GPU, 7 on a CPU.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random inputs.")] = 0,
    json: JsonOption = None,
    csv: CsvOption = None,
    svg: SvgOption = None,
    png: PngOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Time attention over compressed caches against the best full-width kernel on this machine."""
    outputs = Outputs(json=json, csv=csv, out=out, svg=svg, png=png, force=force)
    outputs.check()
    seqs = tuple(parse_counts(seq, what="--seq"))
    batches = tuple(parse_counts(batch, what="--batch")) if batch is not None else None
    if not 0 <= rate < 1:
        raise UsageError(f"--rate {rate:g} is no share to save; write 0.5 to halve the bytes")
    named = _device(device)

    # Everything from here on needs torch.
    from kvprof.benchmark.request import SCHEDULES, BenchRequest
    from kvprof.benchmark.run import run_bench

    request = BenchRequest(
        shape=model,
        seqs=seqs,
        batches=batches or ((1,) if named == "cpu" else (1, 8)),
        rate=rate,
        ranks=ranks,
        phases=_phases(phase, named),
        methods=_listed(methods, "--methods"),
        schedules=SCHEDULES if schedule == "all" else _listed(schedule, "--schedule"),
        dtype=_dtype(dtype, named),
        repeats=repeats,
        device=named,
        seed=seed,
    )
    _check_schedules(request)
    with graceful_interrupt() as stop:
        data, warnings = run_bench(request, progress=console.track, should_stop=stop)
        stopped = data.get("stopped")
        complete = stopped is None and not stop()
        result = build_result(
            "bench",
            environment=collect_environment(),
            inputs=_inputs(request, data),
            data=data,
            warnings=warnings,
            complete=complete,
            incomplete_reason=stopped,
        )
        _show(result, outputs)
    if stopped is not None:
        raise FailedError(stopped)
    if not complete:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _listed(text: str, option: str) -> tuple[str, ...]:
    """Return the names that an option joins by commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{option} {text!r} names nothing; kvprof bench --help shows what to name")
    return names


def _phases(text: str | None, device: str) -> tuple[str, ...]:
    if text is not None:
        return _listed(text, "--phase")
    return ("decode", "prefill") if device == "cpu" else ("decode",)


def _dtype(name: str, device: str) -> str:
    if name == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    if name not in _DTYPES:
        raise UsageError(f"--dtype: {name!r} is none of auto, bfloat16, float16, float32")
    return _DTYPES[name]


def _device(name: str) -> str:
    """Return ``cpu`` or ``cuda:N``, and say what to do where there is no such GPU."""
    match = _DEVICE.fullmatch(name)
    if match is None and name != "auto":
        raise UsageError(f"--device: {name!r} is none of auto, cpu, cuda, cuda:1")
    if name == "cpu":
        return name
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(match[1] or 0) if match is not None else 0
    if index < gpus:
        return f"cuda:{index}"
    if match is None:
        return "cpu"
    instead = f"the last one is cuda:{gpus - 1}" if gpus else "--device cpu measures the CPU"
    raise LackingError(
        f"--device {name}: torch sees {gpus or 'no'} CUDA GPU{'' if gpus == 1 else 's'} here; "
        f"{instead}, and kvprof doctor shows what this machine has"
    )


def _check_schedules(request: "BenchRequest") -> None:
    """Refuse schedules that would change nothing: no phase of the run, or no CPU, knows them."""
    from kvprof.benchmark.request import SCHEDULES
    from kvprof.benchmark.schedules import kernel_schedules

    asked = f"--schedule {','.join(request.schedules)}"
    known = {
        phase: [name for name in kernel_schedules(phase) if name in SCHEDULES]
        for phase in request.phases
    }
    if not any(set(request.schedules) & set(names) for names in known.values()):
        offers = "; ".join(f"{phase} has {', '.join(names)}" for phase, names in known.items())
        raise UsageError(f"{asked} cuts nothing here: {offers}")
    if request.device == "cpu" and len(request.schedules) == 1 and request.schedules != ("equal",):
        raise UsageError(
            f"{asked} changes nothing on a CPU, whose threads share work in another way; "
            "--schedule all predicts what each would do on a GPU"
        )


def _inputs(request: "BenchRequest", data: dict[str, Any]) -> dict[str, Any]:
    """Return every resolved input, so that a reader can repeat the run; no path among them."""
    return {
        "model": data["shape"]["name"],
        "seqs": list(request.seqs),
        "batches": list(request.batches),
        "rate": request.rate,
        "ranks": Path(request.ranks).name if request.ranks is not None else None,
        "phases": list(request.phases),
        "methods": list(request.methods),
        "schedules": list(request.schedules),
        "dtype": request.dtype,
        "repeats": request.repeats,
        "device": request.device,
        "seed": request.seed,
    }


def _show(result: dict[str, Any], outputs: Outputs) -> None:
    from kvprof.views import bench as view

    outputs.write(result, csv_text=lambda: view.to_csv(result), figure=lambda: view.figure(result))
    if outputs.report_to_stdout:
        terminal = console.report_console()
        terminal.print(view.report(result, terminal.width, colour=not terminal.no_color))
