"""Which cache a model is served with: plans, how to get them, what they keep, and what fits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from kvprof.errors import UsageError
from kvprof.methods.engine_cache import CacheLayer, Pool, plan_pool, token_bytes
from kvprof.methods.named import ENGINE_FORMATS
from kvprof.results.advise import TORCH, AdvisedPlan

__all__ = ["GPUS", "PLANS", "AdvisedGpu", "Plan", "Question", "advised", "is_measured"]

_GIB = 1 << 30
#: vLLM's own share of the memory, and what it takes besides weights and cache (on an H200).
_SHARE, _BESIDE = 0.92, int(1.25 * _GIB)
#: Sinks and a window that kvprof's own leave at 16 bits, and how many tokens these are.
_OPEN, _EXACT = ("sink=4", "window=32"), 36
_UBATCH = 512  # tokens of a step in llama.cpp, for which windows keep room


@dataclass(frozen=True)
class AdvisedGpu:
    """A GPU: bytes of its memory, and bytes a second that it reads."""

    name: str
    memory: int
    bandwidth: float

    @property
    def step_tokens(self) -> int:
        """Tokens that vLLM's server schedules in a step, by default."""
        large = self.memory >= 70 * _GIB and "a100" not in self.name.lower()
        return 16384 if self.memory >= 160 * _GIB else 8192 if large else 2048


_ASSETS = files("kvprof") / "assets"
GPUS = {
    name: AdvisedGpu(name, int(gib * _GIB), tb * 1e12)
    for name, (gib, tb) in yaml.safe_load((_ASSETS / "gpus.yaml").read_text("utf-8")).items()
}


@dataclass(frozen=True)
class Plan:
    """A way to store the cache."""

    name: str
    engine: str
    dtype: str | float  # what vLLM calls it; of others the bits of a value
    method: str = ""  # kvprof's, that stores so
    flag: str = ""  # what asks an engine for it
    options: tuple[str, ...] = ()  # the method's, as --option takes them
    rate: float | None = None  # the method's; None where it has one rate
    calibrate: int = 0  # tokens of a sequence that it is calibrated on; 0 for the default
    scales: int = 0  # bytes of them by head, where the bits count none

    def token_bytes(self, layers: Sequence[CacheLayer]) -> list[float]:
        """Return what is stored of a token by layer."""
        stored = zip(layers, token_bytes(layers, self.dtype), strict=True)
        return [size + self.scales * one.heads for one, size in stored]

    def bytes(self, layers: Sequence[CacheLayer], context: int, ahead: int = 0) -> float:
        """Return the bytes of a sequence; a window has room for so many tokens ahead."""
        total = 0.0
        for layer, size in zip(layers, self.token_bytes(layers), strict=True):
            seen = min(layer.reach + ahead, context) if layer.reach else context
            exact = min(_EXACT if self.engine == TORCH else 0, seen)
            total += layer.state + size * (seen - exact) + 2 * layer.values * exact
        return total

    def pool(self, layers: Sequence[CacheLayer], step_tokens: int) -> Pool:
        """Return vLLM's pages, or of others one stretch a sequence, in blocks of a byte."""
        if isinstance(self.dtype, str):
            return plan_pool(layers, self.dtype, step_tokens=step_tokens)
        kinds = {one.kind for one in layers}
        if "latent" in kinds:
            raise UsageError(f"{self.name}: latents (MLA) are not stored in it")
        if self.engine == TORCH and kinds != {"full"}:
            raise UsageError(f"{self.name}: measured on full attention alone")
        return Pool(1, lambda context: int(self.bytes(layers, context, _UBATCH)))

    def command(self, model: str, context: int) -> str:
        """Return what serves a model so, or makes the plan."""
        if self.engine == "vLLM":
            return f"vllm serve {model} --max-model-len {context} {self.flag}".rstrip()
        if self.engine == "llama.cpp":
            file = model if model.endswith(".gguf") else "MODEL.gguf"
            return f"llama-server -m {file} -c {context} -fa on {self.flag}"
        rate = "" if self.rate is None else f" --rate {self.rate:.3f}"
        how = rate + "".join(f" --option {one}" for one in self.options)
        how += f" --calibrate-seq-len {self.calibrate}" if self.calibrate else ""
        return f"kvprof plan {model} --method {self.method}{how} --context {context} --save FILE"


#: What plans keep on the models that records measure.
_KEPT = json.loads((_ASSETS / "advise-kept.json").read_text("utf-8"))
_BITS = {"q8_0": 8.5, "q4_0": 4.5}  # of llama.cpp's formats, scales counted
_KQ = ("allocation=output", *_OPEN)
PLANS = (
    Plan("16 bits", "vLLM", "auto"),
    *(
        Plan(name, engine, _BITS.get(name, flag.split()[-1]), name, flag)
        for name, (engine, flag) in ENGINE_FORMATS.items()
        if any(row["plan"] == name for row in _KEPT)
    ),
    Plan("hadamard 3/2", TORCH, 2.5, "hadamard-int3", options=("bits=k3v2", *_OPEN), scales=8),
    Plan("kq-wf 4x", TORCH, 4.0, "kq-wf", "", ("kinds=8", *_KQ), 0.75, calibrate=16384),
    Plan("kq-wf 7x", TORCH, 16 / 7, "kq-wf", "", ("centre=true", *_KQ), 1 - 1 / 7),
)


@dataclass(frozen=True)
class Question:
    """What is asked: a model's layers and weights, on a GPU, at a context."""

    model: str
    config: Mapping[str, Any]  # of the decoder
    layers: Sequence[CacheLayer]
    weights: int  # bytes of all
    read_weights: int  # bytes of those that a step reads
    gpu: AdvisedGpu
    context: int
    users: int

    @property
    def available(self) -> int:
        """Bytes that are left for the cache."""
        return int(self.gpu.memory * _SHARE) - self.weights - _BESIDE


def advised(plan: Plan, question: Question) -> AdvisedPlan:
    """Return what a plan takes of a model, and what fits; of one that is refused, why."""
    layers, context = question.layers, question.context
    command = plan.command(question.model, context)
    row: dict[str, Any] = {"plan": plan.name, "engine": plan.engine, "command": command}
    try:
        pool = plan.pool(layers, question.gpu.step_tokens)
    except UsageError as problem:
        return AdvisedPlan(**row, refused=str(problem))
    values = sum(one.values for one in layers)
    read, full = plan.bytes(layers, context), PLANS[0].bytes(layers, context)
    return AdvisedPlan(
        **(_keeps(plan, question) | row),
        bits=8 * sum(plan.token_bytes(layers)) / values if values else None,
        bytes_per_token=pool.blocks(context) * pool.block_bytes / context,
        attention_speedup=full / read,
        step_seconds=(question.read_weights + question.users * read) / question.gpu.bandwidth,
        users=pool.users(max(question.available, 0), context),
    )


def _keeps(plan: Plan, question: Question) -> dict[str, Any]:
    """Return what a plan keeps of the model, else of the nearest that was measured."""
    if plan is PLANS[0]:
        return {"keeps": 1.0, "keeps_at_least": 1.0, "measured_here": True}
    known = [row for row in _KEPT if row["plan"] == plan.name]
    here = [row for row in known if is_measured(row, question.model)]
    kind = question.config["model_type"]
    # Apart from the family, a bias of the keys decides what casts lose.
    biased = kind.startswith("qwen2") or bool(question.config.get("attention_bias"))
    nearest: dict[str, Any] = min(
        here or known,
        key=lambda row: (row["model_type"] != kind, (row["model_type"] == "qwen2") != biased),
    )
    least = min(row["keeps_interval"][0] for row in here or known)
    finds = (row["needles"][0] / row["needles"][1] for row in here or known if row["needles"])
    lowest = {"keeps_at_least": least, "finds_at_least": min(finds, default=None)}
    return nearest | lowest | {"measured_here": bool(here)}


def is_measured(row: Mapping[str, Any], model: str) -> bool:
    """Tell whether a name is that of a row's model, of which the instructed form was measured."""
    name, known = model.rpartition("/")[2].lower(), row["measured_on"].lower()
    return name.startswith(f"{known}-instruct") or name == f"{known}.gguf"
