"""One-layer models in float64, what methods are given for them, and the vectors behind it."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvprof.methods.family import MethodInputs
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.models.projections import output_slices
from kvprof.moments.collect import CollectOptions, capture, collect_moments, model_tokens, run_batch
from kvprof.sources.grammar import parse_source
from kvprof.sources.windows import batches, windows
from tests.methods.models import FINE
from tests.models.tiny import tiny

Array = NDArray[np.float64]
TOKENS = 256
HALF = {**FINE, "allocation": "uniform"}


@cache
def one_layer(arch: str) -> LoadedModel:
    wide = {"sliding_window": 256} if arch == "Gemma2" else {}
    model = tiny(arch, num_hidden_layers=1, max_position_embeddings=256, **wide)
    return wrap_model(model.double())


@cache
def known(arch: str) -> tuple[MethodInputs, dict[str, Array]]:
    """Return what a method is given, and the vectors behind it."""
    model, source = one_layer(arch), parse_source(f"random:{TOKENS}")
    options = CollectOptions(
        TOKENS, 64, pre_rope=True, joint_heads=2, magnitudes=True, outputs=True
    )
    *_, moments = collect_moments(model, source, options)
    seen = []
    drawn = windows(source, model_tokens(model), tokens=TOKENS, seq_len=64, seed=0)
    with capture(model, seen.append, pre_rope=True):
        for ids in batches(drawn, 4):
            run_batch(model, torch.from_numpy(ids))
    vectors = {
        key: np.concatenate([row for t in seen for row in getattr(t, key).double().numpy()], axis=1)
        for key in ("q", "k", "v", "k_pre")
    }
    vectors["w_o"] = output_slices(model.model, model.layout, 0).double().numpy()
    attention = model.model.get_submodule(model.layout.layers[0].attention)
    if hasattr(attention, "v_proj"):
        weight = attention.v_proj.weight.detach().double().numpy()
        vectors["w_v"] = weight.reshape(len(vectors["v"]), -1, weight.shape[-1])
    _, b_k, b_v = _biases(attention)
    vectors |= {
        "b_k": b_k.reshape(len(vectors["k"]), -1),
        "b_v": b_v.reshape(len(vectors["v"]), -1),
    }
    return MethodInputs(model.layout, model.fingerprint, moments), vectors


def _biases(attention: Any) -> list[Array]:
    """Return what the projections of Q, K and V add."""
    if hasattr(attention, "c_attn"):  # of one width each
        return np.split(attention.c_attn.bias.detach().double().numpy(), 3)
    return [
        np.zeros(x.out_features) if x.bias is None else x.bias.detach().double().numpy()
        for x in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
