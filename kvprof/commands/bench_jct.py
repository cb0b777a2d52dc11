"""``kvprof bench --jct``: where does the time of a request go? Its options, and the run."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvprof import console
from kvprof.commands.options import grouped_option, read_counts, resolve_device
from kvprof.commands.output import Outputs
from kvprof.errors import UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.records.journal import Journal
from kvprof.sizes import parse_count, read_dtype

if TYPE_CHECKING:
    from kvprof.benchmark.jct.request import JctRequest

__all__ = [
    "BaselineOption",
    "InputLenOption",
    "JctOption",
    "JctOptions",
    "KernelsOption",
    "LayersOption",
    "OutputLenOption",
    "RealOption",
    "RequestsOption",
    "TpOption",
    "TraceOption",
    "bench_jct",
    "refuse_kernel_options",
]


_GROUP = "Request latency (--jct)"
_SHARED = ("--baseline", "--requests", "--tp", "--layers")  # with --load

_option = partial(grouped_option, _GROUP)

JctOption = Annotated[
    bool, _option("--jct", text="Break down a request's latency: prefill and every decode step.")
]
InputLenOption = Annotated[
    str | None,
    _option("--input-len", metavar="LIST", text="Prompt lengths in tokens.  [default: 1k]"),
]
OutputLenOption = Annotated[
    str | None,
    _option(
        "--output-len",
        metavar="LIST",
        text="Output lengths in tokens.  [default: 64 with --real; 256 with --composed]",
    ),
]
RealOption = Annotated[
    bool | None,
    _option(
        "--real/--composed",
        text="Run a whole model (random weights for a shape), or time one layer's parts and add "
        "them up.  [default: real with weights]",
    ),
]
BaselineOption = Annotated[
    str | None, _option("--baseline", text="Compare with this method.  [default: full]")
]
TraceOption = Annotated[
    str | None,
    _option(
        "--trace", text="Sample request lengths from a paper's trace: fdc/arxiv, zack/cocktail …"
    ),
]
RequestsOption = Annotated[
    int | None,
    _option(
        "--requests",
        text="Requests to sample from --trace; with --load, requests per rate.  [default: 200]",
    ),
]
TpOption = Annotated[
    str | None,
    _option(
        "--tp",
        metavar="N",
        text="Tensor-parallel GPUs; reports one GPU's share. With --load, a list such as 2,4.",
    ),
]
LayersOption = Annotated[
    int | None, _option("--layers", text="Use only the first N layers of a shape.")
]
KernelsOption = Annotated[
    str | None,
    _option(
        "--kernels", text="kvprof's kernels with --real: auto, on (CUDA graphs on a GPU) or off."
    ),
]


@dataclass(frozen=True)
class JctOptions:
    """Options that mean something with ``--jct`` only, as they were given."""

    input_len: str | None = None
    output_len: str | None = None
    real: bool | None = None
    baseline: str | None = None
    trace: str | None = None
    requests: int | None = None
    tp: str | None = None
    layers: int | None = None
    kernels: str | None = None

    def refuse_without_jct(self) -> None:
        """Refuse them all where ``--jct`` is missing."""
        if said := self._given():
            raise UsageError(f"{' and '.join(said)} requires --jct")

    def refuse_beside_load(self, given: Mapping[str, bool]) -> None:
        """Refuse those that a load does not have, and others that mean nothing beside it."""
        said = [option for option in self._given() if option not in _SHARED]
        said += [option for option, there in given.items() if there]
        if said:
            raise UsageError(f"{' and '.join(said)} cannot be combined with --load")

    def _given(self) -> list[str]:
        given = {
            "--input-len": self.input_len is not None,
            "--output-len": self.output_len is not None,
            "--real" if self.real else "--composed": self.real is not None,
            "--baseline": self.baseline is not None,
            "--trace": self.trace is not None,
            "--requests": self.requests is not None,
            "--tp": self.tp is not None,
            "--layers": self.layers is not None,
            "--kernels": self.kernels is not None,
        }
        return [option for option, there in given.items() if there]


def refuse_kernel_options(given: Mapping[str, str | None]) -> None:
    """Refuse options of the plain benchmark, which times one attention call."""
    if said := [option for option, value in given.items() if value is not None]:
        raise UsageError(
            f"{' and '.join(said)} cannot be combined with --jct; use --input-len and --output-len"
        )


def bench_jct(asked: JctOptions, outputs: Outputs, **given: Any) -> None:
    """Measure, show and keep."""
    outputs.check({"--out": outputs.events})
    request = _request(asked, **given)
    with graceful_interrupt() as stop:
        journal, problem = _measured(request, outputs.events, outputs.force, stop)
        outputs.end_recorded(journal, problem=problem, interrupted=stop())


def _request(
    asked: JctOptions,
    *,
    model: str | None,
    methods: tuple[str, ...],
    plans: tuple[str, ...],
    batches: tuple[int, ...] | None,
    rate: float,
    rate_given: bool,
    ranks: Path | None,
    dtype: str,
    repeats: int | None,
    device: str,
    seed: int,
) -> "JctRequest":
    """Return what is asked for, with what was left open decided."""
    device = resolve_device(device)
    lengths = {"--input-len": asked.input_len, "--output-len": asked.output_len}
    if asked.trace is not None and (said := [o for o, v in lengths.items() if v is not None]):
        raise UsageError(f"{said[0]} cannot be combined with --trace")
    if asked.trace is None and asked.requests is not None:
        raise UsageError("--requests requires --trace, such as fdc/arxiv")

    # Everything from here on needs torch.
    with loading():
        from kvprof.benchmark.jct.request import DEFAULT_METHODS, JctRequest
        from kvprof.benchmark.shapes import has_weights

    name = model or "reference"
    chosen = methods or DEFAULT_METHODS
    composed = asked.real is False or (
        asked.real is None and (not has_weights(name) or _only_composed(asked, chosen))
    )
    if composed and asked.kernels is not None:
        raise UsageError("--kernels requires --real")
    baseline = asked.baseline or ("full" if "full" in chosen else chosen[0])
    if baseline not in chosen:
        raise UsageError(f"--baseline {baseline} is not among --methods {','.join(chosen)}")
    return JctRequest(
        model=name,
        mode="composed" if composed else "real",
        methods=chosen,
        plans=plans,
        baseline=baseline,
        batches=batches or (1,),
        input_lens=_counts("--input-len", asked.input_len, "1k"),
        output_lens=_counts("--output-len", asked.output_len, "256" if composed else "64"),
        rate=rate,
        rate_given=rate_given,
        ranks=str(ranks) if ranks is not None else None,
        dtype=read_dtype(dtype, device),
        device=device,
        seed=seed,
        repeats=repeats,
        tp=_one_tp(asked.tp),
        layers=asked.layers,
        trace=asked.trace,
        requests=_count("--requests", asked.requests, 200),
        kernels="auto" if asked.kernels is None else asked.kernels,
        command=_command(sys.argv[1:]),
    )


def _only_composed(asked: JctOptions, methods: Sequence[str]) -> bool:
    """Whether something is asked for that a model with weights cannot tell."""
    ablated = any(":no-" in method for method in methods)
    return asked.tp is not None or asked.trace is not None or ablated


def _one_tp(text: str | None) -> int:
    if text is None:
        return 1
    if len(found := read_counts(text, what="--tp")) > 1:
        raise UsageError(f"--tp {text[:40]}: --jct takes one number of GPUs")
    return found[0]


def _count(option: str, value: int | None, default: int) -> int:
    return default if value is None else parse_count(str(value), what=option)


def _counts(option: str, text: str | None, default: str) -> tuple[int, ...]:
    return tuple(read_counts(default if text is None else text, what=option))


def _command(arguments: Sequence[str]) -> tuple[str, ...]:
    return ("kvprof", *arguments)


def _measured(
    request: "JctRequest", path: Path | None, force: bool, stop: Any
) -> tuple[Journal, Exception | None]:
    """Run into a journal; return what went wrong instead of raising it."""
    with loading():
        from kvprof.benchmark.jct.run import run_jct

    journal = Journal(path, force=force, warn=console.warn)
    try:
        with journal:
            run_jct(request, journal, progress=console.track, should_stop=stop)
    except Exception as problem:  # whatever it is, what was measured before it is told first
        return journal, problem
    return journal, None
