"""Which cache a model is served with: plans, how to get them, what they keep, and what fits."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.engine_cache import CacheLayer, Pool, plan_pool, token_bytes
from kvprof.methods.named import ENGINE_FORMATS
from kvprof.results.advise import CONFIG, AdvisedPlan

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


#: GiB as the driver tells them, TB/s as data sheets have them.
_GPUS = {
    "h100-80gb": (79.6, 3.35),
    "h200-141gb": (140.4, 4.8),
    "b200-180gb": (179.1, 8.0),
    "a100-80gb": (80.0, 2.04),
    "a100-40gb": (39.6, 1.56),
    "l40s-48gb": (45.0, 0.864),
    "a10-24gb": (22.5, 0.6),
    "l4-24gb": (22.5, 0.3),
    "t4-16gb": (15.0, 0.32),
    "rtx4090-24gb": (24.0, 1.01),
    "rtx5090-32gb": (31.8, 1.79),
}
GPUS = {name: AdvisedGpu(name, int(gib * _GIB), tb * 1e12) for name, (gib, tb) in _GPUS.items()}
#: vLLM's own share of the memory, and what it takes besides weights and cache (on an H200).
_SHARE, _BESIDE = 0.92, int(1.25 * _GIB)
_CONTEXTS = [1024 << step for step in range(8)]  # at which users are counted, besides the asked one


@dataclass(frozen=True)
class Plan:
    """A way to store the cache."""

    name: str
    engine: str  # who serves it; torch only for what nothing serves yet
    flag: str = ""  # what asks an engine for it; empty where nothing has to
    bits: float = 16.0  # of a value with its scales, where vLLM does not plan the pages
    own: str = ""  # the method that stores so; empty where it has the plan's name
    options: tuple[str, ...] = ()  # the method's, as --option takes them
    rate: float | None = None  # the method's; None where it has one rate

    @property
    def method(self) -> str:
        """The name of the method that stores so."""
        return self.own or self.name

    @property
    def exact(self) -> int:
        """How many tokens of a sequence stay at 16 bits: sinks and a window."""
        given = (one.partition("=") for one in self.options)
        return sum(int(value) for name, _, value in given if name in ("sink", "window"))

    @property
    def dtype(self) -> str:
        """What vLLM calls it."""
        return self.flag.rpartition(" ")[2] or "auto"

    def token_bytes(self, layers: Sequence[CacheLayer]) -> Sequence[float]:
        """Return what each layer stores of a token."""
        if self.engine == "vLLM":
            return token_bytes(layers, self.dtype)
        return [one.values * self.bits / 8 for one in layers]

    def bytes(self, layers: Sequence[CacheLayer], context: int, ahead: int = 0) -> float:
        """Return the bytes of a sequence; a window has room for so many tokens ahead."""
        total = 0.0
        for layer, size in zip(layers, self.token_bytes(layers), strict=True):
            seen = min(layer.reach + ahead, context) if layer.reach else context
            exact = min(self.exact, seen)
            total += layer.state + size * (seen - exact) + 2 * layer.values * exact
        return total


_UBATCH = 512  # tokens of a step in llama.cpp, for which windows keep room
_TORCH = "torch only"
_OPEN = ("sink=4", "window=32")
_VLLM = [name for name, (engine, _) in ENGINE_FORMATS.items() if engine == "vLLM"]
_VLLM.remove("fp8_e5m2")  # no record measures it
_KQ = ("allocation=output", "centre=true", *_OPEN)
PLANS = (
    Plan("16 bits", "vLLM"),
    *(Plan(name, *ENGINE_FORMATS[name]) for name in _VLLM),
    Plan("q8_0", *ENGINE_FORMATS["q8_0"], bits=8.5),
    Plan("q4_0", *ENGINE_FORMATS["q4_0"], bits=4.5),
    Plan("hadamard 4/4", _TORCH, "", 4.25, "hadamard-int4", _OPEN),
    Plan("hadamard 3/2", _TORCH, "", 2.75, "hadamard-int3", ("bits=k3v2", *_OPEN)),
    Plan("kq-wf 7x", _TORCH, "", 16 / 7, "kq-wf", _KQ, rate=1 - 1 / 7),
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


def _pool(plan: Plan, question: Question) -> Pool:
    """Return how a plan is stored: vLLM's pages, or one stretch a sequence, in blocks of a byte."""
    layers, kinds = question.layers, {one.kind for one in question.layers}
    if plan.engine == "vLLM":
        return plan_pool(layers, plan.dtype, step_tokens=question.gpu.step_tokens)
    if "latent" in kinds:
        raise UsageError(f"{plan.name}: latents (MLA) are not stored in it")
    if plan.engine == _TORCH and kinds != {"full"}:
        raise UsageError(f"{plan.name}: measured on full attention alone")
    return Pool(1, lambda context: int(plan.bytes(layers, context, _UBATCH)))


def advised(question: Question) -> list[AdvisedPlan]:
    """Return a row of each plan; one that is refused says why."""
    return [_row(plan, question) for plan in PLANS]


def _row(plan: Plan, question: Question) -> AdvisedPlan:
    row: dict[str, Any] = {
        **{"plan": plan.name, "engine": plan.engine, "served": plan.engine != _TORCH},
        **{"command": _command(plan, question), "depth": CONFIG, "refused": None},
    }
    try:
        pool = _pool(plan, question)
    except UsageError as problem:
        return AdvisedPlan(**row | {"refused": str(problem)})
    layers, context, available = question.layers, question.context, max(question.available, 0)
    values = sum(one.values for one in layers)
    read, full = plan.bytes(layers, context), PLANS[0].bytes(layers, context)
    return AdvisedPlan(
        **_keeps(plan, question) | row,
        bits=8 * sum(plan.token_bytes(layers)) / values if values else None,
        bytes_per_token=pool.bytes(context) / context,
        attention_speedup=full / read,
        step_seconds=(question.read_weights + question.users * read) / question.gpu.bandwidth,
        users=pool.users(available, context),
        users_at=[[at, pool.users(available, at)] for at in sorted({*_CONTEXTS, context})],
    )


@cache
def _accuracy_rows() -> list[dict[str, Any]]:
    text = (files("kvprof") / "assets" / "advise-kept.json").read_text("utf-8")
    return list(json.loads(text))


def _normalised_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removesuffix(".gguf"))


def _keeps(plan: Plan, question: Question) -> dict[str, Any]:
    """Return what a plan keeps of the model, else of its kind, else of heads as wide."""
    if plan is PLANS[0]:
        return {"keeps": 1.0, "keeps_at_least": 1.0, "measured_here": True}
    width = max(one.width for one in question.layers)
    known = [row for row in _accuracy_rows() if row["plan"] == plan.name]

    def distance(row: dict[str, Any]) -> tuple[bool, bool, bool, int]:
        return (
            _normalised_name(row["measured_on"]) != _normalised_name(question.model),
            row["model_type"] != question.model_type,
            (row["model_type"] == "qwen2") != question.biased,
            abs(row["head_dim"] - width),
        )

    nearest = min(known, key=distance)
    here = _normalised_name(nearest["measured_on"]) == _normalised_name(question.model)
    least = min(row["keeps_interval"][0] for row in ([nearest] if here else known))
    return nearest | {"keeps_at_least": least, "measured_here": here}


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
