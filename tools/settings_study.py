"""What readings of a paper, a leading token and signs of bases change, on the reference model.

One sample, every plan at one rate, decoded through the cache and compared with the uncompressed
model. Writes a record and prints the rows that docs/findings.md has::

    python tools/settings_study.py settings.json
    python tools/settings_study.py signs.json --only signs
"""

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch

from kvprof.environment import collect_environment
from kvprof.evaluation.data import text_samples
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.methods.family import plan_for_rate
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.models.load import load_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.sources.grammar import parse_source

_FIGURES = ("relative_accuracy", "perplexity", "kl")
_RATE = 0.4
_FINE = {"grid": 1, "minimum": 1}

#: Label, method, options, calibration; a calibration of None is the method's own.
ROWS: list[tuple[str, str, dict[str, Any], str | None]] = [
    (f"fdc, {source}: {label}", "fdc", {**_FINE, **options}, source)
    for source in ("random:8k", "calibration")
    for label, options in (
        ("paired, svd-vo", {}),
        ("stacked, svd-vo", {"keys": "svd-qk-stacked"}),
        ("literal, svd-vo", {"keys": "svd-qk-literal"}),
        ("paired, weight-v", {"values": "weight-v"}),
    )
] + [
    ("zack, random:8k", "zack", _FINE, "random:8k"),
    ("zack:paper", "zack:paper", {}, None),
    ("fdc, random-bos:8k", "fdc", _FINE, "random-bos:8k"),
    ("fdc, random:64k", "fdc", _FINE, "random:64k"),
    ("kq, random:8k", "kq", _FINE, "random:8k"),
    ("kq, random-bos:8k", "kq", _FINE, "random-bos:8k"),
]


def turned(plan: Plan, seed: int) -> Plan:
    """Return the plan with each column of every basis turned round or not, by chance."""
    generator = torch.Generator().manual_seed(seed)

    def one(group: HeadGroup) -> HeadGroup:
        if group.down is None or group.up is None:
            return group
        signs = torch.randint(0, 2, (group.rank,), generator=generator) * 2.0 - 1.0
        return replace(group, down=group.down * signs, up=group.up * signs)

    layers = tuple(
        replace(
            layer,
            keys=replace(layer.keys, groups=tuple(map(one, layer.keys.groups))),
            values=replace(layer.values, groups=tuple(map(one, layer.values.groups))),
        )
        for layer in plan.layers
    )
    return replace(plan, layers=layers)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=384)
    parser.add_argument("--signs", type=int, default=5, help="random signs that are tried")
    parser.add_argument("--only", choices=("readings", "signs"), help="half of it")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()

    loaded = load_model("reference", device=given.device)
    sources = tuple(parse_source(name) for name in ("prose", "code"))
    samples = text_samples(loaded, sources, seq_len=given.seq_len, sequences=given.sequences)
    evaluator = Evaluator(loaded, samples, [], EvaluationSettings(batch_size=2 * given.sequences))
    rows: list[dict[str, Any]] = []

    def measure(label: str, plan: Plan) -> dict[str, Any]:
        found = evaluator.evaluate(plan)
        row = {
            "label": label,
            "rate": found["rate"],
            **{key: figure(found, key) for key in _FIGURES},
        }
        rows.append(row)
        print(
            f"| {label} | " + " | ".join(f"{row[key]:.4f}" for key in _FIGURES) + " |", flush=True
        )
        return row

    def figure(found: dict[str, Any], key: str) -> float:
        value = found[key]
        return float(value["mean"] if isinstance(value, dict) else value)

    def plan_of(method: str, options: dict[str, Any], source: str | None) -> Plan:
        about = CalibrationOptions(parse_source(source) if source else None, seq_len=given.seq_len)
        key = repr(source)
        if key not in calibrators:
            calibrators[key] = Calibrator(loaded, about)
        family = calibrators[key].family(method, **options)
        return plan_for_rate(family, _RATE, evaluator.context)

    calibrators: dict[str, Calibrator] = {}
    for label, method, options, source in ROWS if given.only != "signs" else ():
        measure(label, plan_of(method, options, source))
    spreads = []
    quantised = (("kq-4bit", {}), ("palu-3bit", {"hadamard": True}))
    for method, options in quantised if given.only != "readings" else ():
        base = plan_of(method, options, "calibration")
        own = measure(f"{method}, the convention's signs", base)
        drawn = [
            measure(f"{method}, random signs {s}", turned(base, s)) for s in range(given.signs)
        ]
        spread: dict[str, Any] = {"method": method, "signs": given.signs}
        for key in _FIGURES:
            values = [row[key] for row in drawn]
            spread[key] = {
                "convention": own[key],
                "least": min(values),
                "mean": mean(values),
                "most": max(values),
                "deviation": pstdev(values),
            }
        spreads.append(spread)
    if given.only != "signs":
        measure("palu-3bit-g32", plan_of("palu-3bit-g32", {"hadamard": True}, "calibration"))
    result = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rate": _RATE,
        "sequences": 2 * given.sequences,
        "seq_len": given.seq_len,
        "decoded_tokens": 2 * given.sequences * given.seq_len // 2,
        "environment": collect_environment(),
        "rows": rows,
        "signs": spreads,
    }
    given.file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
