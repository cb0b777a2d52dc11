"""The parts of a layer around its attention, with random weights, as timed calls.

The modules are transformers' own. Weights have enough copies to exceed the device's cache.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    rotate_half,
)

from kvprof.benchmark.case import Workload
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.timing import Sampler, sampler
from kvprof.runtime.tensors import Pool, capturing

__all__ = [
    "AttentionCalls",
    "DenseParts",
    "PartCall",
    "PartSeconds",
    "Runs",
    "call_sampler",
    "layer_sampler",
    "llama_config",
]

# --- A part of a layer as it is timed: a call on inputs of its own, and what times it.


#: Seconds by part.
PartSeconds = dict[str, float]

Runs = Sequence[Callable[[], Tensor]]


@dataclass(frozen=True, eq=False)
class PartCall:
    """One call, on as many copies of its inputs as keep them out of the cache."""

    part: str  # of `kvprof.records.parts.PARTS`
    runs: Runs
    key: tuple[object, ...]  # two calls with one key are the same work, which a run measures once
    per_pass: bool = False  # once per forward pass; otherwise once per layer
    #: A part that this call contains, and what runs that part alone: that time is the part's, and
    #: this call's own part is the difference.
    contained: tuple[str, Runs] | None = None
    on_host: bool = False  # work of the host, which no graph can hold: a clock is read around it
    #: The host looks at results within the call, which no graph can hold either: a clock is read
    #: around it and all that it left running. It must not be tried: a capture that fails may leave
    #: libraries' handles and their workspaces behind in no state to be used.
    waits: bool = False
    sampler: Sampler | None = None  # what times it where no clock around its call or graph does


@dataclass(frozen=True, eq=False)
class AttentionCalls:
    """A method's attention in one layer and what belongs to it."""

    #: In the order of a layer: between its projections and its output projection.
    calls: list[PartCall]
    #: Columns that Q, K and V have when they leave their projections.
    projections: tuple[int, int, int]
    output: int  # columns that the output projection takes
    rotated: str  # what RoPE turns outside these calls: `both`, `query` or `none`
    labels: dict[str, str] = field(default_factory=dict)  # what a reader must know


class _Waiting:
    """A clock around a call and all that it left running on the device."""

    note: str | None = None

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._next = 0
        for run in runs:  # compiles, and fills the libraries' plans
            self._first = run()

    def output(self) -> Tensor:
        return self._first

    def sample(self) -> float:
        run = self._runs[self._next % len(self._runs)]
        self._next += 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start


class _Sum:
    """Several calls timed one after the other."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = samplers
        self.note = next((one.note for one in samplers if one.note is not None), None)

    def output(self) -> Tensor:
        return self._samplers[-1].output()

    def sample(self) -> float:
        return sum(one.sample() for one in self._samplers)


def call_sampler(call: PartCall, device: torch.device, pool: Pool = None) -> Sampler:
    """Return what times a call where it runs; graphs with one pool share their memory."""
    if call.sampler is not None:
        return call.sampler
    if call.waits and device.type == "cuda":
        return _Waiting(call.runs)
    workload = torch.device("cpu") if call.on_host else device
    return sampler(call.runs, workload, settle=False, pool=pool)


def layer_sampler(calls: Sequence[PartCall], device: torch.device, pool: Pool = None) -> Sampler:
    """Return a timer of a whole layer: its calls in order, in one graph on a GPU."""
    apart = [call for call in calls if call.waits and device.type == "cuda"]
    others = [call for call in calls if call not in apart]
    together = sampler(_sequence(others), device, settle=False, pool=pool)
    if not apart:
        return together
    return _Sum([together, *(_Waiting(call.runs) for call in apart)])


def _sequence(calls: Sequence[PartCall]) -> list[Callable[[], Tensor]]:
    """Return a layer's calls one after the other, on each copy of their inputs in turn."""
    count = max(len(call.runs) for call in calls)

    def layer(number: int) -> Callable[[], Tensor]:
        runs = [call.runs[number % len(call.runs)] for call in calls]

        def run() -> Tensor:
            for before in runs[:-1]:
                before()
            return runs[-1]()

        return run

    return [layer(number) for number in range(count)]


# --- What the host adds to a pass, and what a layer computes around its attention.


# About half a millisecond, within which the host has asked for the token.
_CYCLES = 1_000_000


class _GraphLaunch:
    """A clock of a graph's launch and its token's copy, less the GPU's own time."""

    note: str | None = None

    def __init__(self, workload: Workload) -> None:
        kept = torch.zeros(workload.batch, dtype=torch.long, device=workload.device)
        self._token = torch.zeros_like(kept)
        self._token.copy_(kept)
        # torch leaves these without types.
        self._begin, self._end = (
            torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)
        )
        torch.cuda.synchronize(workload.device)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            stream = torch.cuda.current_stream()
            self._begin.record(stream)
            # As `kvprof.benchmark.jct.steps` waits; torch leaves it without types too.
            torch.cuda._sleep(_CYCLES)
            self._token.copy_(kept)
            self._end.record(stream)
        self.sample()

    def output(self) -> Tensor:
        return self._token

    def sample(self) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._graph.replay()
        self._token.tolist()
        seconds = time.perf_counter() - start
        return max(0.0, seconds - float(self._begin.elapsed_time(self._end)) / 1e3)


def graph_launch(workload: Workload) -> PartCall:
    """Return the launch of a small CUDA graph and the wait for every row's token."""
    start = _GraphLaunch(workload)
    return PartCall(
        "host", [start.output], ("pass", "host", workload.batch), per_pass=True, sampler=start
    )


_STD = 0.02  # of random weights: values stay finite through a layer
_BLOCK = (
    2**20
)  # random values that a weight repeats: drawing billions takes longer than timing them


def llama_config(model: ModelShape) -> LlamaConfig:
    """Return the configuration of a Llama of this shape."""
    shape, dense = model.attention, model.dense
    return LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=dense.vocab_size,
        max_position_embeddings=shape.context or 2**20,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta or 10_000.0},
        tie_word_embeddings=False,
    )


@dataclass(eq=False)
class DenseParts:
    """Makes the calls around attention, and keeps their weights for the next length."""

    model: ModelShape
    _weights: dict[tuple[object, ...], list[Tensor]] = field(default_factory=dict)

    @cached_property
    def _config(self) -> LlamaConfig:
        """The model's, which is checked for longer than a small layer runs."""
        return llama_config(self.model)

    def before(self, workload: Workload, attention: AttentionCalls) -> list[PartCall]:
        """Return norms and residuals of a layer, its projections and RoPE."""
        calls = [
            self._norms(workload),
            self._projection("qkv_proj", workload, attention.projections),
        ]
        if self.model.attention.rope.kind != "none" and attention.rotated != "none":
            calls.append(self._rope(workload, attention.rotated))
        return calls

    def after(self, workload: Workload, attention: AttentionCalls) -> list[PartCall]:
        """Return the output projection and the MLP."""
        hidden = (self.model.attention.hidden_size,)
        return [
            self._projection("o_proj", workload, hidden, attention.output),
            self._experts(workload) if self.model.dense.experts else self._mlp(workload),
        ]

    def around(self, workload: Workload) -> list[PartCall]:
        """Return what a pass does once: embedding, angles, last norm, head, sampling, the host."""
        model = self.model
        shape, dense = model.attention, model.dense
        source, where = workload.generator(21), (workload.batch, workload.queries)
        (table,) = self._stack(workload, ((dense.vocab_size, shape.hidden_size),), 1)
        ids = torch.randint(dense.vocab_size, where, generator=source, device=workload.device)
        norm = _on(LlamaRMSNorm(shape.hidden_size), workload)
        hidden = workload.random(source, *where, shape.hidden_size)
        last = workload.random(source, workload.batch, shape.hidden_size)
        logits = workload.random(source, workload.batch, dense.vocab_size)

        def once(part: str, run: Callable[[], Tensor]) -> PartCall:
            return PartCall(part, [run], ("pass", part, workload.phase, *where), per_pass=True)

        calls = [once("embedding", lambda: embedding(ids, table))]
        if shape.rope.kind != "none":
            angles = LlamaRotaryEmbedding(self._config).to(workload.device)
            first = workload.seq - 1 if workload.phase == "decode" else 0
            positions = torch.arange(first, first + workload.queries, device=workload.device)[None]

            def turn() -> Tensor:
                cos: Tensor = angles(hidden, positions)[0]
                return cos

            calls.append(once("rope", turn))
        # The embedding's table serves as the head's: of the same size, and read long before.
        return [
            *calls,
            once("norm", lambda: norm(hidden)),
            once("head", lambda: linear(last, table)),
            once("sampling", lambda: logits.argmax(-1)),
            *([graph_launch(workload)] if workload.device.type == "cuda" else []),
        ]

    def _stack(
        self, workload: Workload, sizes: tuple[tuple[int, ...], ...], copies: int | None = None
    ) -> list[Any]:
        """Return copies of some matrices, as tuples (a single matrix as itself)."""
        nbytes = workload.dtype.itemsize * sum(math.prod(size) for size in sizes)
        count = copies or workload.copies(nbytes)
        key = (sizes, count)
        if key not in self._weights:
            source = workload.generator(22)
            block = workload.random(source, _BLOCK).mul_(_STD)
            made: list[Tensor] = []
            for _ in range(count * len(sizes)):
                size = sizes[len(made) % len(sizes)]
                values = math.prod(size)
                flat = torch.empty(values, dtype=workload.dtype, device=workload.device)
                whole = values // _BLOCK * _BLOCK
                flat[:whole].view(-1, _BLOCK).copy_(block.expand(whole // _BLOCK, -1))
                flat[whole:].copy_(block[: values - whole])
                made.append(flat.view(size))
            self._weights[key] = made
        made = self._weights[key]
        if len(sizes) == 1:
            return list(made)
        return [tuple(made[at : at + len(sizes)]) for at in range(0, len(made), len(sizes))]

    def _projection(
        self, part: str, workload: Workload, columns: tuple[int, ...], width: int | None = None
    ) -> PartCall:
        """Return linear layers side by side, as transformers runs them: one call each."""
        inputs = width or self.model.attention.hidden_size
        states = workload.random(workload.generator(23), workload.batch, workload.queries, inputs)
        stacks = self._stack(workload, tuple((n, inputs) for n in columns))

        def run(weights: Tensor | tuple[Tensor, ...]) -> Callable[[], Tensor]:
            first, *others = weights if isinstance(weights, tuple) else (weights,)

            def call() -> Tensor:
                for weight in others:
                    linear(states, weight)
                return linear(states, first)

            return call

        return PartCall(
            part,
            [run(weights) for weights in stacks],
            (part, columns, inputs, workload.phase, workload.batch, workload.queries),
        )

    def _norms(self, workload: Workload) -> PartCall:
        """Return both norms of a layer and both residuals; QK-norm too where there is one."""
        shape, source = self.model.attention, workload.generator(24)
        where = (workload.batch, workload.queries)
        hidden, other = (workload.random(source, *where, shape.hidden_size) for _ in range(2))
        norms = [_on(LlamaRMSNorm(shape.hidden_size), workload) for _ in range(2)]
        heads: list[tuple[Any, Tensor]] = []
        if shape.qk_norm:
            heads = [
                (
                    _on(LlamaRMSNorm(shape.head_dim), workload),
                    workload.random(source, *where, count, shape.head_dim),
                )
                for count in (shape.num_heads, shape.num_kv_heads)
            ]

        def run() -> Tensor:
            for norm, states in heads:
                norm(states)
            result = hidden
            for norm in norms:
                result = norm(hidden + other)
            return result

        return PartCall("norm", [run], ("norm", workload.phase, *where))

    def _rope(self, workload: Workload, turned: str) -> PartCall:
        shape, source = self.model.attention, workload.generator(25)

        def states(heads: int) -> Tensor:
            # As projections leave them: [batch, tokens, heads, d], seen as [batch, heads, …].
            made = workload.random(source, workload.batch, workload.queries, heads, shape.head_dim)
            return made.transpose(1, 2)

        query, key = states(shape.num_heads), states(shape.num_kv_heads)
        cos, sin = (workload.random(source, 1, workload.queries, shape.head_dim) for _ in range(2))

        def both() -> Tensor:
            result: Tensor = apply_rotary_pos_emb(query, key, cos, sin)[0]
            return result

        def alone() -> Tensor:
            result: Tensor = query * cos.unsqueeze(1) + rotate_half(query) * sin.unsqueeze(1)
            return result

        return PartCall(
            "rope",
            [both if turned == "both" else alone],
            ("rope", turned, workload.phase, workload.batch, workload.queries),
        )

    def _mlp(self, workload: Workload) -> PartCall:
        hidden, dense = self.model.attention.hidden_size, self.model.dense
        width = dense.intermediate_size
        states = workload.random(workload.generator(26), workload.batch, workload.queries, hidden)
        up, down = (width, hidden), (hidden, width)
        runs: list[Callable[[], Tensor]] = []
        for weights in self._stack(workload, (up, up, down) if dense.gated else (up, down)):
            with torch.device("meta"):
                layer: Any = LlamaMLP(self._config) if dense.gated else _Plain(hidden, width)
            for linear_layer, weight in zip(
                [one for one in layer.children() if isinstance(one, nn.Linear)],
                weights,
                strict=True,
            ):
                linear_layer.weight = nn.Parameter(weight, requires_grad=False)
            runs.append(partial(layer, states))
        return PartCall("mlp", runs, ("mlp", workload.phase, workload.batch, workload.queries))

    def _experts(self, workload: Workload) -> PartCall:
        """Return a mixture of experts whose router spreads tokens evenly."""
        hidden, dense = self.model.attention.hidden_size, self.model.dense
        width, source = dense.intermediate_size, workload.generator(27)
        tokens = workload.batch * workload.queries
        picked = tokens * dense.experts_per_token
        used = min(dense.experts, picked)
        states = workload.random(source, used, -(-picked // used), hidden)
        rows = workload.random(source, tokens, hidden)
        (router,) = self._stack(workload, ((dense.experts, hidden),), 1)
        wide = width * (2 if dense.gated else 1)

        def run(up: Tensor, down: Tensor) -> Callable[[], Tensor]:
            def call() -> Tensor:
                linear(rows, router).topk(dense.experts_per_token, dim=-1).values.softmax(-1)
                made = torch.bmm(states, up)
                if dense.gated:
                    gate, value = made.chunk(2, dim=-1)
                    return torch.bmm(silu(gate) * value, down)
                return torch.bmm(gelu(made), down)

            return call

        stacks = self._stack(workload, ((used, hidden, wide), (used, width, hidden)))
        return PartCall(
            "mlp",
            [run(up, down) for up, down in stacks],
            ("experts", workload.phase, workload.batch, workload.queries),
        )


class _Plain(nn.Module):
    """An MLP of two matrices."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.down(gelu(self.up(states)))
        return result


def _on(module: nn.Module, workload: Workload) -> Any:
    return module.to(workload.device, workload.dtype).requires_grad_(False)
