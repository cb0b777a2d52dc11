"""Export trained weights as bf16 safetensors with the tokenizer: ``python export.py``."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from batches import BOS, EOS, PAD
from transformers import AutoModelForCausalLM, GenerationConfig


def export(source: Path, tokenizer: Path, out: Path) -> None:
    """Load fp32 weights, round them to bf16, write what ``from_pretrained`` reads."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size="2GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    config = json.loads((out / "config.json").read_text())
    config.pop("_attn_implementation_autoset", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Export one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    export(args.run / "fp32", args.tokenizer, args.out)
    print(sum(p.stat().st_size for p in args.out.iterdir()), "bytes in", args.out)


if __name__ == "__main__":
    main()
