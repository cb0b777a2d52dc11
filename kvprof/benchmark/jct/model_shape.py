"""A whole model's shape: attention's, and what is computed around it."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvprof.benchmark.shapes import Shape, decoder_config, load_shape
from kvprof.errors import UsageError

__all__ = ["Dense", "ModelShape", "load_model_shape"]


@dataclass(frozen=True)
class Dense:
    """What is computed per token without looking at any other."""

    intermediate_size: int  # of the MLP, or of one expert
    vocab_size: int
    gated: bool = True  # three matrices instead of two
    experts: int = 0  # 0 for an MLP without experts
    experts_per_token: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A shape that a request can be composed for."""

    attention: Shape
    dense: Dense
    tp: int = 1  # GPUs among which heads, MLP and vocabulary are divided; both are one GPU's part

    @property
    def name(self) -> str:
        """As the user knows it."""
        return self.attention.name

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.attention.layers

    def described(self) -> dict[str, Any]:
        """Return the shape as JSON values."""
        return {**self.attention.described(), **asdict(self.dense), "tp": self.tp}

    def of_layers(self, layers: int | None) -> "ModelShape":
        """Return a model of the first `layers` layers; all for None."""
        if layers is None:
            return self
        if not 1 <= layers <= self.layers:
            raise UsageError(f"--layers {layers}: {self.name} takes 1 to {self.layers} layers")
        return replace(self, attention=replace(self.attention, layers=layers))

    def per_gpu(self, tp: int) -> "ModelShape":
        """Return one GPU's part under tensor parallelism."""
        if tp == 1:
            return self
        attention, dense = self.attention, self.dense
        for what, count in (
            ("KV heads", attention.num_kv_heads),
            ("query heads", attention.num_heads),
            ("MLP columns", dense.intermediate_size),
            ("vocabulary entries", dense.vocab_size),
        ):
            if count % tp:
                fits = [n for n in range(2, attention.num_kv_heads + 1) if self._divides(n)]
                known = f"use {', '.join(map(str, fits))}" if fits else "no other number works"
                raise UsageError(
                    f"--tp {tp}: {count:,} {what} of {self.name} are not divisible by {tp}; {known}"
                )
        return ModelShape(
            replace(
                attention,
                num_heads=attention.num_heads // tp,
                num_kv_heads=attention.num_kv_heads // tp,
            ),
            replace(
                dense,
                intermediate_size=dense.intermediate_size // tp,
                vocab_size=dense.vocab_size // tp,
            ),
            tp,
        )

    def _divides(self, tp: int) -> bool:
        sizes = (
            self.attention.num_kv_heads,
            self.attention.num_heads,
            self.dense.intermediate_size,
            self.dense.vocab_size,
        )
        return all(size % tp == 0 for size in sizes)

    def weight_values(self, key_columns: int, value_columns: int, output_columns: int) -> int:
        """Return how many weights one GPU holds."""
        attention, dense = self.attention, self.dense
        hidden = attention.hidden_size
        queries = attention.num_heads * attention.head_dim
        mlp = hidden * dense.intermediate_size * (3 if dense.gated else 2) * max(1, dense.experts)
        layer = hidden * (queries + key_columns + value_columns + output_columns) + mlp
        return attention.layers * layer + 2 * dense.vocab_size * hidden


@cache
def _shipped() -> dict[str, Any]:
    text = (files("kvprof") / "assets" / "shapes" / "dense.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def load_model_shape(name: str | Path) -> ModelShape:
    """Return the shape of a whole model; names are those of `benchmark.shapes.load_shape`."""
    shape = load_shape(name)
    known = _shipped().get(shape.name)
    return ModelShape(shape, Dense(**known) if known is not None else _of_config(shape))


def _of_config(shape: Shape) -> Dense:
    """Read what a model's own ``config.json`` says."""
    config = decoder_config(shape)

    def first(*names: str) -> int | None:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    experts = first("num_local_experts", "num_experts", "n_routed_experts") or 0
    own = ("moe_intermediate_size",) if experts else ()
    width = first(*own, "intermediate_size", "ffn_dim", "n_inner")
    if width is None:
        raise UsageError(f"{shape.name}: its config lacks the MLP's width (intermediate_size)")
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    return Dense(
        width,
        int(config.vocab_size),
        gated=activation is not None and str(config.model_type) not in _PLAIN,
        experts=experts,
        experts_per_token=(first("num_experts_per_tok", "experts_per_token") or 1)
        if experts
        else 0,
    )


# Model types whose MLP has two matrices though they name an activation as gated ones do.
_PLAIN = ("gpt_neox", "starcoder2", "stablelm_alpha", "phi", "nemotron", "persimmon", "falcon")
