"""``kvprof bench``: time attention over compressed caches, a request, or a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.commands.bench_jct import (
    BaselineOption,
    InputLenOption,
    JctOption,
    JctOptions,
    KernelsOption,
    LayersOption,
    OutputLenOption,
    RealOption,
    RequestsOption,
    TpOption,
    TraceOption,
    bench_jct,
    refuse_kernel_options,
)
from kvprof.commands.bench_load import bench_load
from kvprof.commands.bench_load_options import (
    ArrivalsOption,
    EngineOption,
    KeyOption,
    LengthsOption,
    LoadOption,
    LoadOptions,
    MemoryOption,
    RatesOption,
    RefineOption,
    ReplicasOption,
    RouterOption,
    SecondsOption,
    ServedModelOption,
    SimulateOption,
    SloOption,
    TimeoutOption,
    TokenizerOption,
    UrlOption,
)
from kvprof.commands.options import (
    MODEL,
    GgufOption,
    joined,
    method_option,
    read_counts,
    resolve_device,
    share_option,
)
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    PngOption,
    SvgOption,
    refuse_sources,
)
from kvprof.errors import FailedError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import BENCHED, check_names, method_entries
from kvprof.serving.load.server import served_by_engine
from kvprof.sizes import check_rate, read_dtype

if TYPE_CHECKING:
    from kvprof.benchmark.request import BenchRequest

_RATE = 0.5


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="SHAPE|PATH",
            help="Name of a model's shape, or folder with a config.json or GGUF file; needs no "
            "weights.  [default: Llama-3.1-8B; reference with --jct]",
            show_default=False,
        ),
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option(
            "--seq",
            metavar="LIST",
            help="Context lengths in tokens, such as 4k,32k.  [default: 100k]",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="LIST",
            help="Batch sizes.  [default: 1,8 on a GPU; 1 on a CPU]",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        share_option(
            "--rate", "Compression rate: share of the cache's bytes saved.  [default: 0.5]"
        ),
    ] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(
            "--ranks",
            metavar="FILE|PLAN",
            help="Ranks per KV head: JSON [[K, V], …], or a saved plan.  [default: the reference "
            "model's, resampled]",
            show_default=False,
        ),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase", metavar="LIST", help="decode, prefill or both.  [default: decode,prefill]"
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        method_option(
            "Methods, comma-separated; palu:heads=1 sets an option, fdc-4bit:rate=0.75 a "
            "rate; also uniform and palu-folded.  "
            "[default: full,fp8,fdc,kq,palu,tale; full,palu,fdc with --jct; full,fp8,fdc with "
            "--load]",
        ),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Saved plan to time; without --methods, compared with uncompressed; repeatable.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            rich_help_panel=MODEL,
            help="bfloat16, float16, float32, or auto: BF16 on a GPU, float32 on a CPU.",
        ),
    ] = "auto",
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            help="Samples per row, 3 or more.  [default: 30 on a GPU; 7 on a CPU]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", rich_help_panel=MODEL, help="auto, cpu, cuda or cuda:1.")
    ] = "auto",
    gguf: GgufOption = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            rich_help_panel=MODEL,
            min=0,
            help="Seed of the random inputs.  [default: 0]",
            show_default=False,
        ),
    ] = None,
    jct: JctOption = False,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    real: RealOption = None,
    baseline: BaselineOption = None,
    trace: TraceOption = None,
    requests: RequestsOption = None,
    tp: TpOption = None,
    layers: LayersOption = None,
    kernels: KernelsOption = None,
    load: LoadOption = False,
    lengths: LengthsOption = None,
    tokenizer: TokenizerOption = None,
    arrivals: ArrivalsOption = None,
    rates: RatesOption = None,
    seconds: SecondsOption = None,
    slo: SloOption = None,
    memory: MemoryOption = None,
    replicas: ReplicasOption = None,
    router: RouterOption = None,
    refine: RefineOption = None,
    url: UrlOption = None,
    served_model: ServedModelOption = None,
    key_env: KeyOption = None,
    timeout: TimeoutOption = None,
    simulate: SimulateOption = False,
    engine: EngineOption = None,
    json: JsonOption = None,
    csv: CsvOption = None,
    svg: SvgOption = None,
    png: PngOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Time attention over compressed caches against the fastest uncompressed kernel.

    With --jct, break down the latency of a whole request. With --load, find the request rate that
    a server of each method sustains.

    Examples
    --------
    kvprof bench --seq 100k
    kvprof bench --model Qwen3-8B --seq 4k,32k --methods full,fp8,fdc,uniform
    kvprof bench --model reference --seq 4k --methods full,zack-8bit,kq:grid=32
    kvprof bench --jct --model Llama-3.1-8B --input-len 8k,32k --output-len 256
    kvprof bench --jct --methods full,palu,fdc --out jct-run   # the reference model
    kvprof bench --load --url http://127.0.0.1:8000 --lengths arxiv --slo ttft=2s,tpot=50ms
    kvprof bench --load --simulate --lengths arxiv --methods full,fp8,fdc   # needs no GPU
    """
    outputs = Outputs(json=json, csv=csv, out=out, svg=svg, png=png, force=force)
    written = [*outputs.files().items(), ("--out", outputs.events)]
    refuse_sources(written, [model, plan, trace, lengths])
    batches = tuple(read_counts(batch, what="--batch")) if batch is not None else None
    check_rate(rate)
    asked = JctOptions(
        input_len=input_len,
        output_len=output_len,
        real=real,
        baseline=baseline,
        trace=trace,
        requests=requests,
        tp=tp,
        layers=layers,
        kernels=kernels,
    )
    sent = LoadOptions(
        lengths=lengths,
        tokenizer=tokenizer,
        arrivals=arrivals,
        rates=rates,
        seconds=seconds,
        slo=slo,
        url=url,
        served_model=served_model,
        key_env=key_env,
        memory=memory,
        replicas=replicas,
        router=router,
        refine=refine,
        timeout=timeout,
        simulate=simulate or None,
        engine=engine,
    )
    named, plans = _entries(joined(methods), plan, load=load), tuple(map(str, plan or ()))
    if load:
        asked.refuse_beside_load(
            {
                "--jct": jct,
                "--seq": seq is not None,
                "--batch": batch is not None,
                "--ranks": ranks is not None,
                "--phase": phase is not None,
                "--dtype": dtype != "auto",
                "--device": device != "auto",
                "--repeats": repeats is not None,
            }
        )
        bench_load(
            sent,
            outputs,
            model=_file_of(model, gguf),
            methods=named,
            plans=tuple(plan or ()),
            rate=rate,
            baseline=baseline,
            requests=requests,
            tp=tp,
            layers=layers,
            seed=seed,
        )
        return
    sent.refuse_without_load()
    model = _file_of(model, gguf)
    if jct:
        refuse_kernel_options({"--seq": seq, "--phase": phase})
        bench_jct(
            asked,
            outputs,
            model=model,
            methods=named,
            plans=plans,
            batches=batches,
            rate=_RATE if rate is None else rate,
            rate_given=rate is not None,
            ranks=ranks,
            dtype=dtype,
            repeats=repeats,
            device=device,
            seed=seed or 0,
        )
        return
    asked.refuse_without_jct()
    outputs.check()
    seqs = tuple(read_counts("100k" if seq is None else seq, what="--seq"))
    resolved = resolve_device(device)

    # Everything from here on needs torch.
    with loading():
        from kvprof.benchmark.request import DEFAULT_METHODS, BenchRequest
        from kvprof.benchmark.run import run_bench
        from kvprof.commands.planning import calibration_interrupts

    request = BenchRequest(
        shape="Llama-3.1-8B" if model is None else model,
        seqs=seqs,
        batches=batches or ((1,) if resolved == "cpu" else (1, 8)),
        rate=_RATE if rate is None else rate,
        rate_given=rate is not None,
        ranks=ranks,
        phases=_split_names(phase or "decode,prefill", "--phase"),
        methods=named or DEFAULT_METHODS,
        plans=plans,
        dtype=read_dtype(dtype, resolved),
        repeats=repeats,
        device=resolved,
        seed=seed or 0,
    )
    with graceful_interrupt() as stop:
        with calibration_interrupts():
            data, warnings = run_bench(request, progress=console.track, should_stop=stop)
        stopped = data.get("stopped")
        complete = stopped is None and not stop()
        outputs.end(
            "bench",
            inputs=_inputs(request, data),
            data=data,
            warnings=warnings,
            complete=complete,
            problem=FailedError(stopped) if stopped is not None else None,
        )


def _file_of(model: str | None, gguf: str | None) -> str | None:
    """Return the GGUF file that was asked for of a model; without one, the model as named."""
    if gguf is None:
        return model
    if model is None:
        raise UsageError(f"--gguf {gguf} requires --model with its folder or hub id")
    from kvprof.models.locate import gguf_file

    return str(gguf_file(model, gguf))


def _split_names(text: str, option: str) -> tuple[str, ...]:
    """Return the names that an option joins by commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{option} {text!r} is empty (see kvprof bench --help)")
    return names


def _entries(methods: str | None, plans: list[Path] | None, *, load: bool) -> tuple[str, ...]:
    """Return what is measured: methods with their options, then saved plans by name.

    Plans alone are compared with the uncompressed cache; empty where nothing was asked for. A load
    also has the types of cache that its engine names.
    """
    entries = method_entries(methods) if methods is not None else []
    # Now, while torch is not loaded yet.
    names = [name for _, name, _ in entries if not (load and served_by_engine(name) is not None)]
    check_names(names, more=BENCHED)
    named = [label for label, _, _ in entries]
    files = [file.name for file in plans or []]
    if twice := [name for name in files if name in named or files.count(name) > 1]:
        raise UsageError(f"--plan: two methods are named {twice[0]}; rename the file")
    alone = ["full"] if files and methods is None else []
    return tuple(dict.fromkeys([*alone, *named, *files]))


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
        "dtype": request.dtype,
        "repeats": request.repeats,
        "device": request.device,
        "seed": request.seed,
    }
