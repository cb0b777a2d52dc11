"""``kvprof advise``: which cache to use for a model, a GPU and a context."""

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kvprof.commands.options import LoadOptions
from kvprof.commands.output import FigureOptions, Outcome, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, needs, written
from kvprof.environment import read_gpus
from kvprof.errors import KvprofError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.advice import GPUS, AdvisedGpu, Question, advised
from kvprof.methods.engine_cache import cache_layers, text_config
from kvprof.models.config_files import (
    named_parameters,
    read_config_file,
    served_name,
    weight_bytes,
)
from kvprof.results.advise import AdvisedPlan, best_of
from kvprof.sizes import format_count, parse_bytes, parse_count, parse_share

_DEFAULT_GPU = "h100-80gb"


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


#: Options that say how weights are read, or what is done with what they show.
_OF_WEIGHTS = ("device", "dtype", "trust_remote_code", "save")


def _keeps_a_share(request: "AdviseRequest") -> str | None:
    return None if 0 < request.keep <= 1 else f"--keep {request.keep:g} is not in (0, 1]"


class AdviseRequest(LoadOptions, FigureOptions):
    """Advise a cache format for a model, a GPU and a context: users that fit, accuracy, time.

    MODEL may also name a shape (Llama-3.1-8B). Without --minutes no weights are read.

    Examples
    --------
    kvprof advise Llama-3.1-8B
    kvprof advise meta-llama/Llama-3.1-8B --gpu a100-80gb --context 64k --users 8
    kvprof advise ./model --minutes 5 --keep 0.995 --json advice.json
    """

    gpu: Annotated[
        AdvisedGpu,
        typer.Option("--gpu", help=f"here (this machine's first), or one of {', '.join(GPUS)}."),
        Parsed(_read_gpu),
        Mark.FREE,
    ] = written("here")
    context: Annotated[
        int,
        typer.Option("--context", help="Context length in tokens; k is 1,024."),
        Parsed(parse_count),
        Mark.FREE,
        Input(),
    ] = written("32k")
    users: Annotated[
        int,
        typer.Option("--users", min=1, help="Concurrent requests in the step time."),
        Mark.FREE,
        Input(),
    ] = 1
    keep: Annotated[
        float,
        typer.Option("--keep", help="Accuracy to keep: lower end of the interval."),
        Parsed(parse_share),
        Mark.FREE,
        Input(),
    ] = written("0.99")
    weights: Annotated[
        int | None,
        typer.Option("--weights", metavar="SIZE", help="Weights' size, if unknown."),
        Parsed(parse_bytes),
        Mark.FREE,
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.1,
            help="Load the model and measure plans for this long; a second run resumes.",
        ),
        Mark.FREE,
        Input(),
    ] = None
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Save the best plan of kvprof's own."),
        Mark.WRITES,
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        _keeps_a_share,
        *(needs(name, "minutes") for name in _OF_WEIGHTS),
    )


@measuring(AdviseRequest)
def advise(request: AdviseRequest) -> Outcome:
    """Count what a request asks for; with minutes, measure what plans keep on the model."""
    began, gpu, model = time.monotonic(), request.gpu, request.model or "reference"
    config = read_config_file(model, request.revision, request.gguf)
    own = text_config(config)
    layers = cache_layers(config)
    told = (
        (request.weights, "--weights")
        if request.weights is not None
        else weight_bytes(model, config, request.revision, request.gguf)
    )
    if told is None:
        raise UsageError(f"{model}: the size of its weights is unknown; give --weights")
    weights, source = told
    total, read = named_parameters(model) or (1.0, 1.0)
    question = Question(
        model=served_name(model),
        model_type=own["model_type"],
        layers=layers,
        weights=weights,
        read_weights=int(weights * read / total),
        gpu=gpu,
        context=request.context,
        users=request.users,
        biased=own["model_type"].startswith("qwen2") or bool(own.get("attention_bias")),
    )
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    plans = [AdvisedPlan(**row) for row in advised(question)]
    found = _Found(plans, {"fingerprint": digest[:32]})
    if request.minutes is not None:
        found = _measure(request, plans, began + 60 * request.minutes)
    best = best_of(found.plans, request.keep)
    return Outcome(
        inputs={
            **request.inputs(),
            "model": model,
            "model_type": own["model_type"],
            "weights_from": source,
            "gpu": gpu.name,
            "gpu_memory_bytes": gpu.memory,
            "gpu_bytes_per_second": gpu.bandwidth,
            **found.inputs,
        },
        data={
            "plans": [one.model_dump() for one in found.plans],
            "best": None if best is None else best.plan,
            "saved": found.saved,
            "weights_bytes": weights,
            "available_bytes": question.available,
            "cached_layers": len(layers),
            "layer_kinds": dict(Counter(one.kind for one in layers)),
        },
        warnings=[
            *_warnings(request, own.get("max_position_embeddings"), question),
            *found.warnings,
        ],
        complete=found.complete,
        lost=found.lost,
    )


@dataclass
class _Found:
    """Plans as the config has them, or as they were measured."""

    plans: list[AdvisedPlan]
    inputs: dict[str, Any]
    saved: str | None = None
    warnings: list[str] = field(default_factory=list)
    complete: bool = True
    lost: list[str] = field(default_factory=list)


def _measure(request: AdviseRequest, plans: list[AdvisedPlan], until: float) -> _Found:
    """Measure plans on the model, and save the best of kvprof's own where that is asked for."""
    with loading():
        from kvprof.commands.advise_weights import Measuring, load
        from kvprof.methods.plan_files import save_plan
    sample = load(request)
    with graceful_interrupt() as stop:
        run = Measuring(request, sample, plans, until, stop)
        run.run()
    warnings = [*sample.warnings, *run.warnings]
    found = _Found(run.rows, run.inputs(), None, warnings, complete=not stop.requested)
    if request.save is not None:
        try:
            found.saved, plan = run.best_own()
            save_plan(plan, request.save, force=request.force)
            found.inputs["saved"] = str(request.save)
        except KvprofError as problem:
            found.lost.append(f"--save {request.save}: {problem}")
    return found


def _warnings(request: AdviseRequest, longest: object, question: Question) -> list[str]:
    found = []
    if not request.has("gpu") and request.gpu is GPUS[_DEFAULT_GPU]:
        found.append(f"no GPU found; figures are for {_DEFAULT_GPU} (choose with --gpu)")
    if isinstance(longest, int) and request.context > longest:
        found.append(f"the model states a context of {format_count(longest)}")
    if any(one.reach for one in question.layers):
        tokens = format_count(2 * question.gpu.step_tokens)
        found.append(
            f"in sliding windows vLLM reserves {tokens} tokens in flight for each user; more "
            "users fit during decode"
        )
    return found
