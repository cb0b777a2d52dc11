"""A tiny random Llama in a folder, and plans of ragged widths for it."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.plan_files import save_plan
from kvprof.models.load import load_model

LAYERS, HEADS, KV_HEADS, DEPTH, VOCABULARY = 2, 8, 4, 64, 300
#: Of K and of V, by layer and KV head.
RANKS = (((48, 16), (16, 64), (32, 32), (48, 48)), ((16, 16), (64, 48), (32, 16), (24, 40)))


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


def ragged_plan(fingerprint: str = "tiny", seed: int = 0) -> Plan:
    """Return a plan whose heads all differ; V's two matrices differ too, as SVD-VO's do."""
    generator = torch.Generator().manual_seed(seed)

    def group(head: int, rank: int, skewed: bool) -> HeadGroup:
        basis = torch.linalg.qr(torch.randn(DEPTH, DEPTH, generator=generator))[0][:, :rank]
        turn = torch.randn(rank, rank, generator=generator) / 8 + torch.eye(rank)
        down = basis @ turn if skewed else basis
        up = basis @ torch.linalg.inv(turn).T if skewed else basis
        return HeadGroup(head, 1, DEPTH, (rank,), down.contiguous(), up.contiguous())

    layers = []
    for ranks in RANKS:
        keys = tuple(group(head, pair[0], True) for head, pair in enumerate(ranks))
        values = tuple(group(head, pair[1], True) for head, pair in enumerate(ranks))
        layers.append(
            LayerPlan(
                KeyPlan(Placement.POST_ROPE, keys),
                ValuePlan(values, fold_down=True, fold_up=True),
            )
        )
    return Plan("fdc", fingerprint, tuple(layers), made={"model": "tiny"})


def save_ragged_plan(model: Path, file: Path) -> Path:
    """Write the ragged plan of a model in a folder."""
    loaded = load_model(str(model), device="cpu", dtype="float32")
    save_plan(ragged_plan(loaded.fingerprint), file)
    return file
