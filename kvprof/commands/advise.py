"""``kvprof advise``: which cache to use for a model, a GPU and a context."""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kvprof.commands.options import LoadOptions, share_option
from kvprof.commands.output import Outcome, TableOptions, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, needs, written
from kvprof.environment import read_gpus
from kvprof.errors import UsageError
from kvprof.loading import loading
from kvprof.methods.advice import GPUS, PLANS, AdvisedGpu, Question, advised
from kvprof.methods.engine_cache import cache_layers, text_config
from kvprof.models.config_files import read_config_file, read_share, served_name, weight_bytes
from kvprof.results.advise import best_of
from kvprof.sizes import format_count, parse_bytes, parse_count, parse_nonzero

_DEFAULT_GPU, _DEFAULT_CONTEXT = "h100-80gb", 32_768
_GPU_HELP = f"here (this machine's first), or one of {', '.join(GPUS)}."
_CONTEXT_HELP = "Context length in tokens; k is 1,024.  [default: 32k, or the model's if shorter]"
_USERS_HELP = "Concurrent requests in the step time."
_KEEP_HELP = "Accuracy (lower end of the interval) and needles to keep."
_MINUTES_HELP = "Load the model and measure plans for about this long; a second run resumes."
_ASKED = (Mark.FREE, Input())  # the result repeats it


def _read_gpu(text: str, *, what: str) -> AdvisedGpu:
    """Return a GPU of the table, or the first one here."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    if text != "here":
        raise UsageError(f"{what}: {text[:40]!r} is unknown; use here, {', '.join(GPUS)}")
    for one in read_gpus().devices:
        if one.memory_bytes and one.peak_tb_per_s:
            return AdvisedGpu(one.name, one.memory_bytes, one.peak_tb_per_s * 1e12)
    return GPUS[_DEFAULT_GPU]


class AdviseRequest(LoadOptions, TableOptions):
    """Advise a cache format for a model, a GPU and a context: users that fit, accuracy, time.

    MODEL may also name a shape (Llama-3.1-8B). Without --minutes no weights are read.

    Examples
    --------
    kvprof advise Llama-3.1-8B
    kvprof advise meta-llama/Llama-3.1-8B --gpu a100-80gb --context 64k --users 8
    kvprof advise ./model --minutes 5 --keep 0.995 --json advice.json
    """

    gpu: Annotated[
        AdvisedGpu, typer.Option("--gpu", help=_GPU_HELP), Parsed(_read_gpu), Mark.FREE
    ] = written("here")
    context: Annotated[
        int | None, typer.Option("--context", help=_CONTEXT_HELP), Parsed(parse_count), Mark.FREE
    ] = None
    users: Annotated[int, typer.Option("--users", min=1, help=_USERS_HELP), *_ASKED] = 1
    keep: Annotated[float, share_option("--keep", _KEEP_HELP, None, parse_nonzero), *_ASKED] = 0.99
    weights: Annotated[
        int | None,
        typer.Option("--weights", metavar="SIZE", help="Weights' size, if unknown."),
        *(Parsed(parse_bytes), Mark.FREE),
    ] = None
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.1, help=_MINUTES_HELP), *_ASKED
    ] = None
    save: Annotated[
        Path | None, typer.Option("--save", help="Save the best plan of kvprof's own."), Mark.WRITES
    ] = None

    # Without --minutes no weights are read.
    rules: ClassVar[tuple[Rule, ...]] = tuple(
        needs(name, "minutes") for name in ("device", "dtype", "trust_remote_code", "save")
    )


@measuring(AdviseRequest)
def advise(request: AdviseRequest) -> Outcome:
    """Count what a request asks for; with minutes, measure what plans keep on the model."""
    until = time.monotonic() + 60 * (request.minutes or 0)
    gpu, model, warnings = request.gpu, request.model or "reference", list[str]()
    if not request.has("gpu") and gpu is GPUS[_DEFAULT_GPU]:
        warnings.append(f"no GPU found; figures are for {_DEFAULT_GPU} (choose with --gpu)")
    config = read_config_file(model, request.revision, request.gguf)
    own = text_config(config)
    layers = cache_layers(own)
    longest = own.get("max_position_embeddings")
    longest = longest if isinstance(longest, int) and longest > 1 else math.inf
    context = request.context or int(min(_DEFAULT_CONTEXT, longest))
    if context > longest:
        stated = f"the model states a context of {format_count(int(longest))}"
        warnings.append(f"{stated}; engines exceed it only where its config is overridden")
    weights, source = request.weights, "--weights"
    if weights is None:
        weights, source = weight_bytes(model, {**config, **own}, request.revision, request.gguf)
    read, users = int(weights * read_share(own)), request.users
    question = Question(served_name(model), own, layers, weights, read, gpu, context, users)
    plans = [advised(plan, question) for plan in PLANS]
    inputs, complete, lost = dict[str, Any](), True, list[str]()
    if request.minutes is not None:
        with loading():
            from kvprof.commands.advise_weights import measure
        inputs, complete, lost = measure(request, context, plans, warnings, until)
    best = best_of(plans, request.keep)
    if best is not None and 1 <= (best.users or 0) < users:
        warnings.append(f"--users {users:,} exceeds what vLLM fits at --keep {request.keep:g}")
    inputs = {
        **(request.inputs() | inputs),
        **{"model": model, "model_type": own["model_type"], "weights_from": source},
        "context": context,
        **{"gpu": gpu.name, "gpu_memory_bytes": gpu.memory, "gpu_bytes_per_second": gpu.bandwidth},
    }
    data = {
        **{"plans": [one.model_dump() for one in plans], "best": best and best.plan},
        **{"weights_bytes": weights, "available_bytes": question.available},
        "layer_kinds": Counter(one.kind for one in layers),
    }
    return Outcome(inputs, data, warnings, complete, lost=lost)
