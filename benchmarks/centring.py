"""What keys and values without their means keep: each method as it is and centred, one model.

Accuracy in one pass on text that nothing was chosen on: the later half of each sequence is scored
against the uncompressed model, with the divergence and its worst token beside it. Bases and means
are calibrated on the embedded calibration split.

    python benchmarks/centring.py MODEL                              # a GPU: a minute or two
    python benchmarks/centring.py reference --sequences 2 --seq-len 512 --out /tmp    # that it runs
"""

import argparse
import time
from typing import Any

from recording import RECORDS, add_out, keep

from kvprof.evaluation.data import text_samples
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.models.load import load_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.sources.grammar import parse_source

#: A label, the method, its options, and its rate where it has one to turn.
_SERVED = {"sink": 4, "window": 32}
PLANS: tuple[tuple[str, str, dict[str, Any], float | None], ...] = (
    ("fp8", "fp8", {}, None),
    ("per token, 4 bits", "per-token", {"bits": 4}, None),
    ("Hadamard 4/4", "hadamard-int4", _SERVED, None),
    ("Hadamard 3/2", "hadamard-int3", {"bits": "k3v2", **_SERVED}, None),
    ("Hadamard 2/2", "hadamard-int2", _SERVED, None),
    ("kivi, 2 bits", "kivi", {"bits": 2}, None),
    ("fdc", "fdc", {}, 0.25),
    ("kq", "kq", {}, 0.25),
    ("kq-wf", "kq-wf", {"allocation": "output"}, 0.85),
)
#: Rotary pairs that give their mean up, beside none and all.
PAIRS = (8, 16)


def main() -> None:
    """Measure, print a line for each plan, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", default="prose")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--calibrate-tokens", type=int, default=65536)
    parser.add_argument("--dtype", default="auto", help="float32 is what 16 bits are held against")
    add_out(parser)
    asked = parser.parse_args()
    start = time.perf_counter()
    loaded = load_model(asked.model, dtype=asked.dtype)
    loading = time.perf_counter() - start
    text = parse_source(asked.text)
    samples = text_samples(loaded, [text], seq_len=asked.seq_len, sequences=asked.sequences)
    evaluator = Evaluator(loaded, samples, [], EvaluationSettings())
    baseline = evaluator.baseline()
    source = CalibrationOptions(
        parse_source("calibration"), tokens=asked.calibrate_tokens, seq_len=asked.seq_len
    )
    calibrator = Calibrator(loaded, source)
    rows = []
    for label, method, options, rate in PLANS:
        for centre in (False, *(PAIRS if label == "Hadamard 3/2" else ()), True):
            family = calibrator.family(method, **options, centre=centre)
            plan = (
                plan_at(family, family.settings[0])
                if rate is None
                else plan_for_rate(family, rate, evaluator.context)
            )
            found = evaluator.evaluate(plan)
            keys = ("rate", "relative_accuracy", "relative_accuracy_interval", "perplexity", "kl")
            row = {"plan": label, "centre": centre, **{key: found[key] for key in keys}}
            rows.append({**row, "measured_s": found["seconds"]})
            low, high = found["relative_accuracy_interval"]
            print(
                f"{label:18} centre {centre!s:5}  rate {found['rate']:.3f}  kept "
                f"{found['relative_accuracy']:.4f} [{low:.4f}, {high:.4f}]  KL "
                f"{found['kl']['mean']:.4f}, worst {found['kl']['worst']:.2f}",
                flush=True,
            )
    headline = {
        f"{row['plan']}, {'centred' if row['centre'] else 'whole'}: accuracy kept": round(
            row["relative_accuracy"], 4
        )
        for row in rows
        if isinstance(row["centre"], bool)
    }
    data = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "loading_s": loading,
        "baseline": {key: baseline[key] for key in ("accuracy", "perplexity")},
        "rows": rows,
    }
    name = asked.model.rsplit("/", 1)[-1].removesuffix(".gguf")
    name += "" if asked.dtype == "auto" else f" {asked.dtype}"
    inputs = {"benchmark": f"centring {name}", **{k: str(v) for k, v in vars(asked).items()}}
    print(keep(asked.out or RECORDS, inputs, data, headline))


if __name__ == "__main__":
    main()
