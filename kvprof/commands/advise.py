"""``kvprof advise``: which cache to use for a model, a GPU and a context."""

import hashlib
import json
from collections import Counter
from typing import Annotated, ClassVar

import typer

from kvprof.commands.options import ModelArgument, RevisionOption
from kvprof.commands.output import FigureOptions, Outcome, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, written
from kvprof.errors import UsageError
from kvprof.gpus import read_gpus
from kvprof.methods.advice import GPUS, AdvisedGpu, Question, advised
from kvprof.methods.engine_cache import cache_layers, text_config
from kvprof.models.config_files import named_parameters, read_config_file, weight_bytes
from kvprof.results.advise import AdvisedPlan
from kvprof.sizes import format_count, parse_bytes, parse_count, parse_share

_DEFAULT_GPU = "h100-80gb"


def _read_gpu(text: str, *, what: str) -> AdvisedGpu:
    """Return a GPU of the table, or the first one here."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    if text != "here":
        raise UsageError(f"{what}: {text[:40]!r} is none of here, {', '.join(GPUS)}")
    for one in read_gpus().devices:
        if one.memory_bytes and one.peak_tb_per_s:
            return AdvisedGpu(one.name, one.memory_bytes, one.peak_tb_per_s * 1e12)
    return GPUS[_DEFAULT_GPU]


def _keeps_a_share(request: "AdviseRequest") -> str | None:
    return None if 0 < request.keep <= 1 else f"--keep {request.keep:g} is not above 0, up to 1"


class AdviseRequest(FigureOptions):
    """Say which cache to use for a model, a GPU and a context: how many users fit, at what cost.

    Examples
    --------
    kvprof advise Llama-3.1-8B
    kvprof advise meta-llama/Llama-3.1-8B --gpu a100-80gb --context 64k --users 8
    kvprof advise ./model --keep 0.995 --json advice.json
    """

    model: ModelArgument = None
    gpu: Annotated[
        AdvisedGpu,
        typer.Option("--gpu", help=f"here, or one of {', '.join(GPUS)}."),
        Parsed(_read_gpu),
        Mark.FREE,
    ] = written("here")
    context: Annotated[
        int,
        typer.Option("--context", help="Tokens of a request; k is 1,024."),
        Parsed(parse_count),
        Mark.FREE,
        Input(),
    ] = written("32k")
    users: Annotated[
        int,
        typer.Option("--users", min=1, help="Requests at a time, of the time between tokens."),
        Mark.FREE,
        Input(),
    ] = 1
    keep: Annotated[
        float,
        typer.Option("--keep", help="Share of accuracy that the interval must hold."),
        Parsed(parse_share),
        Mark.FREE,
        Input(),
    ] = written("0.99")
    weights: Annotated[
        int | None,
        typer.Option("--weights", metavar="SIZE", help="Of the weights, where nothing says it."),
        Parsed(parse_bytes),
        Mark.FREE,
    ] = None
    revision: RevisionOption = None

    rules: ClassVar[tuple[Rule, ...]] = (_keeps_a_share,)


@measuring(AdviseRequest)
def advise(request: AdviseRequest) -> Outcome:
    """Count what a request asks for; neither torch nor a model's weights are loaded."""
    model, gpu = request.model or "reference", request.gpu
    config = read_config_file(model, request.revision)
    own = text_config(config)
    layers = cache_layers(config)
    told = (
        (request.weights, "--weights")
        if request.weights is not None
        else weight_bytes(model, config, request.revision)
    )
    if told is None:
        raise UsageError(f"{model}: neither files nor its name tell the weights; give --weights")
    weights, source = told
    total, read = named_parameters(model) or (1.0, 1.0)
    question = Question(
        model=model,
        model_type=own["model_type"],
        layers=layers,
        weights=weights,
        read_weights=int(weights * read / total),
        gpu=gpu,
        context=request.context,
        users=request.users,
        biased=own["model_type"].startswith("qwen2") or bool(own.get("attention_bias")),
    )
    plans = [AdvisedPlan(**row) for row in advised(question)]
    # Users are compared within one engine: another counts, and serves, in its own way.
    here = [one for one in plans if one.engine == plans[0].engine]
    enough = [one for one in here if one.users and (one.keeps_at_least or 0) >= request.keep]
    best = max(enough, key=lambda one: one.users or 0, default=None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return Outcome(
        inputs={
            **request.inputs(),
            "model": model,
            "model_type": own["model_type"],
            "fingerprint": digest[:32],
            "weights_from": source,
            "gpu": gpu.name,
            "gpu_memory_bytes": gpu.memory,
            "gpu_bytes_per_second": gpu.bandwidth,
        },
        data={
            "plans": [one.model_dump() for one in plans],
            "best": None if best is None else best.plan,
            "weights_bytes": weights,
            "available_bytes": question.available,
            "cached_layers": len(layers),
            "layer_kinds": dict(Counter(one.kind for one in layers)),
        },
        warnings=_warnings(request, own.get("max_position_embeddings"), question),
    )


def _warnings(request: AdviseRequest, longest: object, question: Question) -> list[str]:
    found = []
    if not request.has("gpu") and request.gpu is GPUS[_DEFAULT_GPU]:
        found.append(f"no GPU here; figures are of {_DEFAULT_GPU} (--gpu names another)")
    if isinstance(longest, int) and request.context > longest:
        found.append(f"the model states a context of {format_count(longest)}")
    if any(one.reach for one in question.layers):
        tokens = format_count(2 * question.gpu.step_tokens)
        found.append(
            f"in windows vLLM keeps room for {tokens} tokens in flight of each user; more users "
            "fit while they decode"
        )
    return found
