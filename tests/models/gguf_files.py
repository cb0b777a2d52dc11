"""Tiny GGUF files, written by the package gguf itself."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH, HEADS, KV_HEADS, LAYERS, INNER, CONTEXT = 64, 4, 2, 2, 128, 512
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁the", "▁a", "▁", "t"]


def add_byte_level(writer: Any, pre: str | None) -> None:
    """Add a tokenizer that merges digits, spaces and nothing else."""
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    alphabet = list(bytes_to_unicode().values())
    merged = ["12", "ĠĠ", "Ġ1"]
    tokens = [*alphabet, *merged, "<｜User｜>"]
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), len(TOKENS)))])
    writer.add_token_types([1] * (len(tokens) - 1) + [3] + [5] * (len(TOKENS) - len(tokens)))
    writer.add_token_merges(["1 2", "Ġ Ġ", "Ġ 1"])
    writer.add_eos_token_id(2)


def write_llama(path: Path, seed: int = 0, rounded: bool = False, **changes: Any) -> Path:
    """Write a Llama of random weights; `changes` leave out tensors or replace what is written.

    Parameters
    ----------
    without : sequence of str
        Tensors that are left out.
    extra : mapping of str to array
        Tensors that are added.
    keys : mapping of str to number or str
        Whole keys that are written over; None leaves one out.
    architecture : str
    tokenizer : bool
    template : str
    pre : str or None
        Makes the tokenizer byte-level, and names how it cuts texts.
    writer : mapping
        Of the package's writer: into how many parts, in which order of bytes.
    """
    import gguf

    writer = gguf.GGUFWriter(
        path, changes.get("architecture", "llama"), **changes.get("writer", {})
    )
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    if "pre" in changes:
        add_byte_level(writer, changes["pre"])
    elif changes.get("tokenizer", True):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
        kinds = [2, 3, 3, *([6] * 256), *([1] * (len(TOKENS) - 259))]
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if "template" in changes:
            writer.add_chat_template(changes["template"])
    for key, value in changes.get("keys", {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        narrow = WIDTH * KV_HEADS // HEADS
        shapes |= {
            f"{block}attn_norm.weight": (WIDTH,),
            f"{block}ffn_norm.weight": (WIDTH,),
            f"{block}attn_q.weight": (WIDTH, WIDTH),
            f"{block}attn_k.weight": (narrow, WIDTH),
            f"{block}attn_v.weight": (narrow, WIDTH),
            f"{block}attn_output.weight": (WIDTH, WIDTH),
            f"{block}ffn_gate.weight": (INNER, WIDTH),
            f"{block}ffn_up.weight": (INNER, WIDTH),
            f"{block}ffn_down.weight": (WIDTH, INNER),
        }
    for name, shape in shapes.items():
        if name in changes.get("without", ()):
            continue
        weight = rng.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            weight = np.ones(shape, np.float32)
        if rounded and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    for name, weight in changes.get("extra", {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
