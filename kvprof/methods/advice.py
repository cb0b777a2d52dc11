"""Which cache a model is served with: plans, how to get them, what they keep, and what fits."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.engine_cache import CacheLayer, Pool, plan_pool, token_bytes
from kvprof.methods.named import ENGINE_FORMATS

__all__ = ["GPUS", "PLANS", "AdvisedGpu", "Plan", "Question", "advised"]

_GIB = 1 << 30


@dataclass(frozen=True)
class AdvisedGpu:
    """A GPU: bytes of its memory, and bytes a second that it reads."""

    name: str
    memory: int
    bandwidth: float

    @property
    def step_tokens(self) -> int:
        """Tokens that vLLM's server schedules in a step, by default."""
        return 8192 if self.memory >= 70 * _GIB and "a100" not in self.name.lower() else 2048


def _gpu(name: str, gib: float, tb_per_s: float) -> AdvisedGpu:
    return AdvisedGpu(name, int(gib * _GIB), tb_per_s * 1e12)


#: Memory as the driver tells it, bandwidth as data sheets have it.
GPUS = {
    one.name: one
    for one in (
        _gpu("h100-80gb", 79.6, 3.35),
        _gpu("h200-141gb", 140.4, 4.8),
        _gpu("b200-180gb", 179.1, 8.0),
        _gpu("a100-80gb", 80.0, 2.04),
        _gpu("a100-40gb", 39.6, 1.56),
        _gpu("l40s-48gb", 45.0, 0.864),
        _gpu("a10-24gb", 22.5, 0.6),
        _gpu("l4-24gb", 22.5, 0.3),
        _gpu("t4-16gb", 15.0, 0.32),
        _gpu("rtx4090-24gb", 24.0, 1.01),
        _gpu("rtx5090-32gb", 31.8, 1.79),
    )
}
#: vLLM's own share of the memory, and what it takes besides weights and cache (on an H200).
_SHARE, _BESIDE = 0.92, int(1.25 * _GIB)


@dataclass(frozen=True)
class Plan:
    """A way to store the cache."""

    name: str
    engine: str  # who serves it; torch only for what nothing serves yet
    flag: str  # what asks an engine for it; empty where nothing has to
    bits: float = 16.0  # of a value with its scales, where vLLM does not plan the pages
    own: str = ""  # the method that stores so; empty where it has the plan's name
    options: tuple[str, ...] = ()  # the method's, as --option takes them
    rate: float | None = None  # the method's; None where it has one rate

    @property
    def method(self) -> str:
        """The name of the method that stores so."""
        return self.own or self.name

    @property
    def served(self) -> bool:
        """Whether an engine serves it."""
        return self.engine != "torch only"

    @property
    def exact(self) -> int:
        """How many tokens of a sequence stay at 16 bits: sinks and a window."""
        given = (one.partition("=") for one in self.options)
        return sum(int(value) for name, _, value in given if name in ("sink", "window"))

    @property
    def dtype(self) -> str:
        """What vLLM calls it."""
        return self.flag.rpartition(" ")[2] or "auto"


_UBATCH = 512  # tokens of a step in llama.cpp, for which windows keep room
_TORCH = "torch only"
_OPEN = ("sink=4", "window=32")
_VLLM = (
    *("fp8_e4m3", "int8_per_token_head", "int4_per_token_head", "turboquant_k8v4"),
    *("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
PLANS = (
    Plan("16 bits", "vLLM", ""),
    *(Plan(name, *ENGINE_FORMATS[name]) for name in _VLLM),
    Plan("q8_0", *ENGINE_FORMATS["q8_0"], bits=8.5),
    Plan("hadamard 4/4", _TORCH, "", 4.25, "hadamard-int4", _OPEN),
    Plan("hadamard 3/2", _TORCH, "", 2.75, "hadamard-int3", ("bits=k3v2", *_OPEN)),
    Plan(
        *("kq-wf 7x", _TORCH, "", 16 / 7, "kq-wf"),
        ("allocation=output", "centre=true", *_OPEN),
        rate=1 - 1 / 7,
    ),
)


@dataclass(frozen=True)
class Question:
    """What is asked: a model's layers and weights, on a GPU, at a context."""

    model: str
    model_type: str
    layers: Sequence[CacheLayer]
    weights: int  # bytes of all
    read_weights: int  # bytes of those that a step reads
    gpu: AdvisedGpu
    context: int
    users: int
    biased: bool = False  # whether keys have a bias, which decides what casts lose

    @property
    def available(self) -> int:
        """Bytes that are left for the cache."""
        return int(self.gpu.memory * _SHARE) - self.weights - _BESIDE

    @property
    def contexts(self) -> list[int]:
        """Contexts at which users are counted, the asked one among them."""
        return sorted({*(1024 << step for step in range(8)), self.context})


@cache
def _accuracy_rows() -> list[dict[str, Any]]:
    text = (files("kvprof") / "assets" / "advise-kept.json").read_text("utf-8")
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _normalised_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removesuffix(".gguf"))


def _nearest(plan: Plan, question: Question) -> Mapping[str, Any] | None:
    """Return what is known of a plan: of the model, else of its kind, else of heads as wide."""
    width = max((one.width for one in question.layers), default=0)

    def distance(row: Mapping[str, Any]) -> tuple[bool, bool, bool, int]:
        return (
            _normalised_name(row["model"]) != _normalised_name(question.model),
            row["model_type"] != question.model_type,
            (row["model_type"] == "qwen2") != question.biased,
            abs(row["head_dim"] - width),
        )

    return min(
        (row for row in _accuracy_rows() if row["plan"] == plan.name), key=distance, default=None
    )


def _values(layer: CacheLayer) -> int:
    return layer.heads * layer.width * (1 if layer.kind == "latent" else 2)


def _visible_tokens(layer: CacheLayer, context: int) -> int:
    return min(layer.reach, context) if layer.reach else context


@dataclass(frozen=True)
class _Stored:
    """A plan that no engine pages: one stretch a sequence."""

    plan: Plan
    layers: Sequence[CacheLayer]

    def bytes(self, context: int) -> int:
        """Return the bytes of a sequence."""
        return int(sum(self.layer_bytes(one, context) for one in self.layers))

    def layer_bytes(self, layer: CacheLayer, context: int) -> float:
        """Return the bytes of a layer."""
        seen = min(_visible_tokens(layer, context) + (_UBATCH if layer.reach else 0), context)
        exact = min(self.plan.exact, seen)
        bits = self.plan.bits * (seen - exact) + 16 * exact
        return layer.state + _values(layer) * bits / 8

    def users(self, available: int, context: int) -> float:
        """Return how many sequences fit."""
        return available / self.bytes(context)


def _refused(plan: Plan, layers: Sequence[CacheLayer]) -> str | None:
    kinds = {one.kind for one in layers}
    if plan.engine == "vLLM":
        return None
    if "latent" in kinds:
        return f"{plan.name}: latents (MLA) are not stored in it"
    if plan.engine == _TORCH and kinds - {"full"}:
        return f"{plan.name}: measured on full attention alone"
    return None


def advised(question: Question) -> list[dict[str, Any]]:
    """Return a row of each plan, as `kvprof.results.advise.AdvisedPlan`; one refused says why."""
    return [_row(plan, question) for plan in PLANS]


def _row(plan: Plan, question: Question) -> dict[str, Any]:
    row: dict[str, Any] = {"plan": plan.name, "engine": plan.engine, "served": plan.served}
    row |= {"command": _command(plan, question), "depth": "config only", "refused": None}
    try:
        if refused := _refused(plan, question.layers):
            raise UsageError(refused)
        stored: Pool | _Stored = (
            plan_pool(question.layers, plan.dtype, step_tokens=question.gpu.step_tokens)
            if plan.engine == "vLLM"
            else _Stored(plan, question.layers)
        )
    except UsageError as problem:
        return row | {"refused": str(problem)}
    context, available = question.context, max(question.available, 0)
    values = sum(map(_values, question.layers))
    read, full = (_read(one, question, context) for one in (plan, PLANS[0]))
    known = _nearest(plan, question)
    row |= {
        "bits": 8 * sum(_token(plan, question.layers)) / values if values else None,
        "bytes_per_token": stored.bytes(context) / context,
        "attention_speedup": full / read if read else None,
        "step_seconds": (question.read_weights + question.users * read) / question.gpu.bandwidth,
        "users": stored.users(available, context),
        "users_at": [[at, stored.users(available, at)] for at in question.contexts],
    }
    if plan is PLANS[0]:
        return row | {"keeps": 1.0, "keeps_at_least": 1.0, "measured_here": True}
    if known is None:
        return row
    here = _normalised_name(known["model"]) == _normalised_name(question.model)
    all_of = [one for one in _accuracy_rows() if one["plan"] == plan.name]
    return row | {
        "keeps": known["keeps"],
        "keeps_interval": known["interval"],
        "keeps_tokens": known["tokens"],
        "keeps_at_least": min(one["interval"][0] for one in ([known] if here else all_of)),
        "needles": known["needles"],
        "measured_on": known["model"],
        "measured_here": here,
        "record": known["record"],
    }


def _token(plan: Plan, layers: Sequence[CacheLayer]) -> list[float]:
    """Return what each layer stores of a token, in bytes; none of a state."""
    kept = [one for one in layers if one.kind != "state"]
    if plan.engine != "vLLM":
        return [_values(one) * plan.bits / 8 for one in kept]
    return [float(one) for one in token_bytes(layers, plan.dtype)]


def _read(plan: Plan, question: Question, context: int) -> float:
    """Return the bytes of the cache that a decoding step reads of a sequence."""
    kept = [one for one in question.layers if one.kind != "state"]
    states = sum(one.state for one in question.layers)
    tokens = zip(kept, _token(plan, question.layers), strict=True)
    read = sum(size * _visible_tokens(layer, context) for layer, size in tokens)
    exact = sum(
        _values(one) * (16 - plan.bits) / 8 * min(plan.exact, _visible_tokens(one, context))
        for one in kept
    )
    return states + read + exact


def _command(plan: Plan, question: Question) -> str:
    model, context = question.model, question.context
    if plan.engine == "vLLM":
        return f"vllm serve {model} --max-model-len {context} {plan.flag}".rstrip()
    if plan.engine == "llama.cpp":
        file = model if model.endswith(".gguf") else "MODEL.gguf"
        return f"llama-server -m {file} -c {context} -fa on {plan.flag}"
    rate = "" if plan.rate is None else f" --rate {plan.rate:.3f}"
    options = "".join(f" --option {one}" for one in plan.options)
    return (
        f"kvprof plan {model} --method {plan.method}{rate}{options} --context {context} --save FILE"
    )
