"""What a layer computes around its attention, with random weights, as transformers' Llama has it.

The modules are transformers' own, so that a composed run is made of what a real run executes.
Weights lie in as many copies as keep them out of the device's cache, as a model's layers do.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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

from kvprof.benchmark.case import Place
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.units import Attended, Unit
from kvprof.benchmark.timing import capturing

__all__ = ["DenseParts", "llama_config", "pass_start"]

# --- What the host adds to a pass on a GPU, however little it has to launch.


# About half a millisecond, within which the host has asked for the token.
_CYCLES = 1_000_000


class _Start:
    """A clock around a captured pass, less the GPU's own time for it.

    The pass keeps the GPU busy without doing anything, for the host asks for the token while the
    GPU works: only launching the graph and bringing the token over are waited for.
    """

    note: str | None = None

    def __init__(self, place: Place) -> None:
        kept = torch.zeros(place.batch, dtype=torch.long, device=place.device)
        self._token = torch.zeros_like(kept)
        self._token.copy_(kept)
        # torch leaves these without types.
        self._begin, self._end = (
            torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda.synchronize(place.device)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            stream = torch.cuda.current_stream()
            self._begin.record(stream)
            # As `kvprof.benchmark.jct.steps` waits; torch leaves it without types too.
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
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


def pass_start(place: Place) -> Unit:
    """Return the start of a CUDA graph, and the wait for the token of every row.

    A pass that is captured has them at its two ends, though launching its many nodes takes longer
    than launching these few. A composed prompt is taken to be captured too, though the runtime
    captures steps only.

    Parameters
    ----------
    place : Place
        On a GPU.
    """
    start = _Start(place)
    return Unit("host", [start.output], ("pass", "host", place.batch), per_pass=True, timed=start)


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
    """Makes the units around attention, and keeps their weights for the next length.

    Attributes
    ----------
    model : ModelShape
    """

    model: ModelShape
    _weights: dict[tuple[object, ...], list[Tensor]] = field(default_factory=dict)

    def before(self, place: Place, attended: Attended) -> list[Unit]:
        """Return norms and residuals of a layer, its projections and RoPE."""
        units = [self._norms(place), self._projection("qkv_proj", place, attended.projections)]
        if self.model.attention.rope.kind != "none" and attended.turned != "none":
            units.append(self._rope(place, attended.turned))
        return units

    def after(self, place: Place, attended: Attended) -> list[Unit]:
        """Return the output projection and the MLP."""
        hidden = (self.model.attention.hidden_size,)
        return [
            self._projection("o_proj", place, hidden, attended.output),
            self._experts(place) if self.model.dense.experts else self._mlp(place),
        ]

    def around(self, place: Place) -> list[Unit]:
        """Return what a pass does once: embedding, angles, last norm, head, sampling, the host."""
        model = self.model
        shape, dense = model.attention, model.dense
        source, where = place.generator(21), (place.batch, place.queries)
        (table,) = self._stack(place, ((dense.vocab_size, shape.hidden_size),), 1)
        ids = torch.randint(dense.vocab_size, where, generator=source, device=place.device)
        norm = _on(LlamaRMSNorm(shape.hidden_size), place)
        hidden = place.random(source, *where, shape.hidden_size)
        last = place.random(source, place.batch, shape.hidden_size)
        logits = place.random(source, place.batch, dense.vocab_size)

        def once(part: str, run: Callable[[], Tensor]) -> Unit:
            return Unit(part, [run], ("pass", part, place.phase, *where), per_pass=True)

        units = [once("embedding", lambda: embedding(ids, table))]
        if shape.rope.kind != "none":
            angles = LlamaRotaryEmbedding(llama_config(model)).to(place.device)
            first = place.seq - 1 if place.phase == "decode" else 0
            positions = torch.arange(first, first + place.queries, device=place.device)[None]

            def turn() -> Tensor:
                cos: Tensor = angles(hidden, positions)[0]
                return cos

            units.append(once("rope", turn))
        # The embedding's table serves as the head's: of the same size, and read long before.
        return [
            *units,
            once("norm", lambda: norm(hidden)),
            once("head", lambda: linear(last, table)),
            once("sampling", lambda: logits.argmax(-1)),
            *([pass_start(place)] if place.device.type == "cuda" else []),
        ]

    def _stack(
        self, place: Place, sizes: tuple[tuple[int, ...], ...], copies: int | None = None
    ) -> list[Any]:
        """Return copies of some matrices, as tuples (a single matrix as itself)."""
        nbytes = place.dtype.itemsize * sum(math.prod(size) for size in sizes)
        count = copies or place.copies(nbytes)
        key = (sizes, count)
        if key not in self._weights:
            source = place.generator(22)
            block = place.random(source, _BLOCK).mul_(_STD)
            made: list[Tensor] = []
            for _ in range(count * len(sizes)):
                size = sizes[len(made) % len(sizes)]
                values = math.prod(size)
                flat = torch.empty(values, dtype=place.dtype, device=place.device)
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
        self, part: str, place: Place, columns: tuple[int, ...], width: int | None = None
    ) -> Unit:
        """Return linear layers side by side, as transformers runs them: one call each."""
        inputs = width or self.model.attention.hidden_size
        states = place.random(place.generator(23), place.batch, place.queries, inputs)
        stacks = self._stack(place, tuple((n, inputs) for n in columns))

        def run(weights: Tensor | tuple[Tensor, ...]) -> Callable[[], Tensor]:
            first, *others = weights if isinstance(weights, tuple) else (weights,)

            def call() -> Tensor:
                for weight in others:
                    linear(states, weight)
                return linear(states, first)

            return call

        return Unit(
            part,
            [run(weights) for weights in stacks],
            (part, columns, inputs, place.phase, place.batch, place.queries),
        )

    def _norms(self, place: Place) -> Unit:
        """Return both norms of a layer and both residuals; QK-norm too where there is one."""
        shape, source = self.model.attention, place.generator(24)
        where = (place.batch, place.queries)
        hidden, other = (place.random(source, *where, shape.hidden_size) for _ in range(2))
        norms = [_on(LlamaRMSNorm(shape.hidden_size), place) for _ in range(2)]
        heads: list[tuple[Any, Tensor]] = []
        if shape.qk_norm:
            heads = [
                (
                    _on(LlamaRMSNorm(shape.head_dim), place),
                    place.random(source, *where, count, shape.head_dim),
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

        return Unit("norm", [run], ("norm", place.phase, *where))

    def _rope(self, place: Place, turned: str) -> Unit:
        shape, source = self.model.attention, place.generator(25)

        def states(heads: int) -> Tensor:
            # As projections leave them: [batch, tokens, heads, d], seen as [batch, heads, …].
            made = place.random(source, place.batch, place.queries, heads, shape.head_dim)
            return made.transpose(1, 2)

        query, key = states(shape.num_heads), states(shape.num_kv_heads)
        cos, sin = (place.random(source, 1, place.queries, shape.head_dim) for _ in range(2))

        def both() -> Tensor:
            result: Tensor = apply_rotary_pos_emb(query, key, cos, sin)[0]
            return result

        def alone() -> Tensor:
            result: Tensor = query * cos.unsqueeze(1) + rotate_half(query) * sin.unsqueeze(1)
            return result

        return Unit(
            "rope",
            [both if turned == "both" else alone],
            ("rope", turned, place.phase, place.batch, place.queries),
        )

    def _mlp(self, place: Place) -> Unit:
        hidden, dense = self.model.attention.hidden_size, self.model.dense
        width = dense.intermediate_size
        states = place.random(place.generator(26), place.batch, place.queries, hidden)
        up, down = (width, hidden), (hidden, width)
        runs: list[Callable[[], Tensor]] = []
        for weights in self._stack(place, (up, up, down) if dense.gated else (up, down)):
            with torch.device("meta"):
                layer: Any = (
                    LlamaMLP(llama_config(self.model)) if dense.gated else _Plain(hidden, width)
                )
            for linear_layer, weight in zip(
                [one for one in layer.children() if isinstance(one, nn.Linear)],
                weights,
                strict=True,
            ):
                linear_layer.weight = nn.Parameter(weight, requires_grad=False)
            runs.append(partial(layer, states))
        return Unit("mlp", runs, ("mlp", place.phase, place.batch, place.queries))

    def _experts(self, place: Place) -> Unit:
        """Return a mixture of experts whose router spreads tokens evenly.

        Every expert that is used gets as many tokens as the others, so that shapes are fixed: what
        a router that prefers some experts would cost is not in here.
        """
        hidden, dense = self.model.attention.hidden_size, self.model.dense
        width, source = dense.intermediate_size, place.generator(27)
        tokens = place.batch * place.queries
        picked = tokens * dense.experts_per_token
        used = min(dense.experts, picked)
        states = place.random(source, used, -(-picked // used), hidden)
        rows = place.random(source, tokens, hidden)
        (router,) = self._stack(place, ((dense.experts, hidden),), 1)
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

        stacks = self._stack(place, ((used, hidden, wide), (used, width, hidden)))
        return Unit(
            "mlp",
            [run(up, down) for up, down in stacks],
            ("experts", place.phase, place.batch, place.queries),
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


def _on(module: nn.Module, place: Place) -> Any:
    return module.to(place.device, place.dtype).requires_grad_(False)
