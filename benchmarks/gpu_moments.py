"""What moments and a stability sweep cost on a GPU, on top of the bare forward passes.

A Llama-3.1-8B-shaped decoder with random weights in bfloat16 reads random tokens. Bare passes and
passes with moments alternate, so that drift of the clocks hits both; medians are compared.

    python benchmarks/gpu_moments.py --out docs/benchmarks
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from recording import keep
from transformers import LlamaConfig, LlamaForCausalLM

from kvprof.analysis.stability import Run
from kvprof.analysis.stability_data import stability_data
from kvprof.analysis.stability_study import RankChoice
from kvprof.models.capture import run_batch
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments, model_tokens
from kvprof.moments.stability_passes import StudyPlan, plan_passes, run_pass
from kvprof.sources.grammar import Source, SourceKind
from kvprof.sources.windows import batches, windows

RANDOM = Source(SourceKind.RANDOM, "random")


def llama_8b(layers: int) -> LoadedModel:
    """Return a randomly initialised decoder of Llama-3.1-8B's shape on the GPU."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("sdpa")
    return wrap_model(model.eval(), "llama-3.1-8b shape, random weights")


def bare(loaded: LoadedModel, tokens: int, seq_len: int, batch_size: int, seed: int = 0) -> None:
    """Run the forward passes alone."""
    sequences = windows(RANDOM, model_tokens(loaded), tokens=tokens, seq_len=seq_len, seed=seed)
    with torch.inference_mode():
        for ids in batches(sequences, batch_size):
            run_batch(loaded, torch.from_numpy(ids).to(loaded.device))


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of `work`, the device idle before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--study-tokens", type=int, default=131072)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    loaded = llama_8b(arguments.layers)
    shape = (arguments.seq_len, arguments.batch_size)
    options = CollectOptions(
        tokens=arguments.tokens, seq_len=arguments.seq_len, batch_size=arguments.batch_size
    )

    def with_moments() -> None:
        list(collect_moments(loaded, RANDOM, options))

    bare(loaded, arguments.tokens // 2, *shape)
    with_moments()
    samples: dict[str, list[float]] = {"forward_s": [], "forward_with_moments_s": []}
    for _ in range(arguments.repeats):
        samples["forward_s"].append(seconds(lambda: bare(loaded, arguments.tokens, *shape)))
        samples["forward_with_moments_s"].append(seconds(with_moments))
    overhead = (
        statistics.median(samples["forward_with_moments_s"])
        / statistics.median(samples["forward_s"])
        - 1.0
    )
    print(f"moments: {overhead:+.1%} on top of the forward pass ({samples})", flush=True)

    study = _study(loaded, arguments)
    print(f"stability sweep: {study}", flush=True)
    keep(
        arguments.out / "gpu-moments.json",
        inputs={
            "benchmark": "gpu_moments",
            "model": loaded.spec,
            "layers": arguments.layers,
            "tokens": arguments.tokens,
            "study_tokens": arguments.study_tokens,
            "seq_len": arguments.seq_len,
            "batch_size": arguments.batch_size,
            "dtype": "bfloat16",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        },
        data={"moments": {"overhead": overhead, **samples}, "stability": study},
    )


def _study(loaded: LoadedModel, arguments: argparse.Namespace) -> dict[str, object]:
    """Time a sweep of random tokens, one seed, against its noise floor, comparisons included."""
    total = arguments.study_tokens
    counts = tuple(total // 2**k for k in range(4, -1, -1))
    plan = StudyPlan(
        RANDOM, (RANDOM,), ("qk", "vo"), counts, total, (0,), arguments.seq_len, arguments.seq_len
    )
    passes = plan_passes(plan)

    compare_s = 0.0

    def study() -> None:
        nonlocal compare_s
        runs: dict[str, list[Run]] = {"source": [], "target": [], "noise": []}
        for item in passes:
            run, _ = run_pass(loaded, item, plan.pairs, batch_size=arguments.batch_size)
            runs[item.role].append(run)
        torch.cuda.synchronize()
        start = time.perf_counter()
        stability_data(
            runs["source"],
            runs["noise"],
            runs["target"],
            [],
            plan.pairs,
            [RankChoice(rank=32), RankChoice(rank=64), RankChoice(removal_rate=0.05)],
            random_source=True,
        )
        compare_s = time.perf_counter() - start

    def forwards() -> None:
        for item in passes:
            bare(loaded, item.tokens, arguments.seq_len, arguments.batch_size, item.seed)

    forward_s = statistics.median(seconds(forwards) for _ in range(2))
    study_s = seconds(study)
    return {
        "passes": len(passes),
        "tokens_per_pass": total,
        "counts": list(counts),
        "forward_s": forward_s,
        "study_s": study_s,
        "of_it_comparing_s": compare_s,
        "ratio": study_s / forward_s,
    }


if __name__ == "__main__":
    main()
