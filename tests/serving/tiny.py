"""A tiny random Llama in a folder, and plans of ragged widths for it."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.plan_files import save_plan
from kvprof.models.load import load_model

LAYERS, HEADS, KV_HEADS, DEPTH, VOCABULARY = 2, 8, 4, 64, 300
#: Of K and of V, by layer and KV head.
RANKS = (((48, 16), (16, 64), (32, 32), (48, 48)), ((16, 16), (64, 48), (32, 16), (24, 40)))

#: Of K and of V, by layer and latent, where two KV heads share one.
SHARED_RANKS = (((48, 88), (64, 32)), ((96, 32), (40, 112)))


def save_model(folder: Path, seed: int = 0) -> Path:
    """Write the model; its tokens are far from ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DEPTH,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        attention_bias=True,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def _group(first: int, rank: int, generator: torch.Generator, heads: int = 1) -> HeadGroup:
    """Return a random basis of KV heads whose two matrices differ."""
    width = heads * DEPTH
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:, :rank]
    turn = torch.randn(rank, rank, generator=generator) / (8 * heads) + torch.eye(rank)
    down, up = basis @ turn, basis @ torch.linalg.inv(turn).T
    return HeadGroup(first, heads, DEPTH, (rank,), down.contiguous(), up.contiguous())


def ragged_plan(fingerprint: str = "tiny", seed: int = 0) -> Plan:
    """Return a plan whose heads all differ; V's two matrices differ too, as SVD-VO's do."""
    generator = torch.Generator().manual_seed(seed)

    layers = []
    for ranks in RANKS:
        keys = tuple(_group(head, pair[0], generator) for head, pair in enumerate(ranks))
        values = tuple(_group(head, pair[1], generator) for head, pair in enumerate(ranks))
        layers.append(
            LayerPlan(
                KeyPlan(Placement.POST_ROPE, keys), ValuePlan(values, fold_down=True, fold_up=True)
            )
        )
    return Plan("fdc", fingerprint, tuple(layers), made={"model": "tiny"})


def rebuilt_plan(fingerprint: str = "tiny") -> Plan:
    """Return a plan like `palu`'s: latents of two KV heads each, keys rebuilt before RoPE."""
    generator = torch.Generator().manual_seed(2)
    layers = []
    for sides in SHARED_RANKS:
        keys, values = (
            tuple(_group(2 * latent, rank, generator, 2) for latent, rank in enumerate(ranks))
            for ranks in sides
        )
        layers.append(
            LayerPlan(
                KeyPlan(Placement.PRE_ROPE, keys, fold_down=True),
                ValuePlan(values, fold_down=True, fold_up=True),
            )
        )
    return Plan("palu", fingerprint, tuple(layers), made={"model": "tiny"})


def save_tiny_plan(model: Path, file: Path, made: Callable[[str], Plan] = ragged_plan) -> Path:
    """Write a plan of a model in a folder."""
    loaded = load_model(str(model), device="cpu", dtype="float32")
    save_plan(made(loaded.fingerprint), file)
    return file
