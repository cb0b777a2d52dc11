"""What few kinds of head cost at equal bytes: accuracy of plans with at most K pairs of ranks.

One sample, plans of one calibration at the same rates, with 4, 8, 16 kinds and no limit; each
limit that changes no rank is told and not measured again. Text is scored in a single pass through
the cache, which shows all of an unquantised plan. Writes a file of results and prints the table::

    python tools/kinds_study.py docs/findings/kinds/reference.json
    python tools/kinds_study.py docs/findings/kinds/smollm2.json --model smollm2 --sequences 2 \
        --seq-len 256 --tokens 2048
    python tools/kinds_study.py docs/findings/kinds/kernels.json --kernels

With ``--kernels`` the decode kernels of as many kinds are compiled for an H100 instead, which needs
no GPU: each alone, in a process of its own and into an empty cache.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvprof.environment import collect_environment
from kvprof.evaluation.data import text_samples
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.methods.family import plan_for_rate
from kvprof.methods.plan_report import ranks_of
from kvprof.methods.soundness import head_kinds
from kvprof.models.load import load_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.sources.grammar import parse_source

_KINDS = (0, 16, 8, 4)
_RATES = (0.3, 0.5)
_FIGURES = (
    "rate",
    "relative_accuracy",
    "relative_accuracy_interval",
    "perplexity_ratio",
    "perplexity_ratio_interval",
    "kl",
)

#: Heads of the ragged layer that docs/benchmarks times: K's and V's width.
_WIDTHS = ((112, 32), (96, 48), (80, 64), (64, 64), (48, 112), (48, 80), (32, 64), (32, 48))
_ARCHITECTURE = 90


def _compiled(kinds: int, bits: int | None) -> dict[str, Any]:
    """Compile a decode kernel for so many kinds of head, from an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        import torch

        from kvprof.kernels.compile import compile_variant
        from kvprof.kernels.decode.variants import decode_form
        from kvprof.kernels.segments.variants import segments_form

        widths = _WIDTHS[:kinds]
        if bits is None:
            form = decode_form("kinds", "bf16", widths)
        else:
            form = segments_form("kinds", torch.bfloat16, 4, ((widths, bits, bits),))
        begun = time.perf_counter()
        found = compile_variant(form, _ARCHITECTURE)
        seconds = time.perf_counter() - begun
        (binary,) = Path(folder).rglob("*.cubin")
        return {"seconds": seconds, "cubin_bytes": binary.stat().st_size, **found}


def kernel_rows() -> list[dict[str, Any]]:
    """Return what the decode kernels of 1 to 8 kinds take to compile, and how large they are."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for bits in (None, 4):
        for kinds in (1, 2, 4, 8):
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                pool.submit(_compiled, 1, None).result()  # what a process pays once
                found = pool.submit(_compiled, kinds, bits).result()
            rows.append({"bits": bits, "kinds": kinds, **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--methods", default="fdc,kq")
    parser.add_argument("--grids", default="16,1")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=8192, help="of the calibration text")
    parser.add_argument("--kernels", action="store_true", help="what kinds cost the compilers")
    given = parser.parse_args()
    common = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": collect_environment(),
    }
    if given.kernels:
        result = {**common, "architecture": f"sm_{_ARCHITECTURE}", "rows": kernel_rows()}
        given.file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        return

    loaded = load_model(given.model, device="cpu")
    sources = tuple(parse_source(name) for name in ("prose", "code"))
    samples = text_samples(loaded, sources, seq_len=given.seq_len, sequences=given.sequences)
    settings = EvaluationSettings(teacher_forced=True, batch_size=2 * given.sequences)
    evaluator = Evaluator(loaded, samples, [], settings)
    about = CalibrationOptions(parse_source("calibration"), tokens=given.tokens)
    calibrator = Calibrator(loaded, about)
    rows: list[dict[str, Any]] = []
    for method in given.methods.split(","):
        for grid in map(int, given.grids.split(",")):
            for wanted in _RATES:
                known: dict[str, dict[str, Any]] = {}
                for kinds in _KINDS:
                    family = calibrator.family(method, grid=grid, minimum=grid, kinds=kinds)
                    plan = plan_for_rate(family, wanted, evaluator.context)
                    key = json.dumps(ranks_of(plan))
                    if key not in known:
                        found = evaluator.evaluate(plan)
                        known[key] = {name: found[name] for name in _FIGURES}
                    rows.append(
                        {
                            "method": method,
                            "grid": grid,
                            "rate_asked": wanted,
                            "limit": kinds,
                            "kinds": len(head_kinds(plan)),
                            "heads": sum(layer.kv_heads for layer in plan.layers),
                            **known[key],
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
    result = {
        **common,
        "model": given.model,
        "sequences": 2 * given.sequences,
        "seq_len": given.seq_len,
        "calibration": f"calibration, {given.tokens} tokens",
        "rows": rows,
    }
    given.file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
