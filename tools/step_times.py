"""Gathers the steps that records of a GPU hold, for who simulates a load without one.

It measures nothing: each step names the record that it is from. Those of Llama-3.1-8B are vLLM's
own: stretches of loads that it served (`load-steps.json`) and requests of long contexts
(`serving.json`). Those of one GPU's part of Llama-3.1-70B are put together from one layer's parts
(`jct.json`), as are the prompts that say how long computing a context again takes.

    python tools/step_times.py --records docs/benchmarks --out kvprof/assets/step_times/h200.json

Stretches lie in a run's events, which are too large to be kept: of the folders of runs that
`kvprof bench --load` served, means of stretches that are alike are written.

    python tools/step_times.py --loads RUN RUN --prompts RUN --out docs/benchmarks/load-steps.json

Of runs after `--prompts` only prompts are taken that were read while nobody else was there: where
prompts are long, steps that read one are too few among stretches for these to tell anything. With
`--onto` a record of this kind is kept and added to, and with `--only` by some methods alone:

    python tools/step_times.py --onto docs/benchmarks/load-steps.json --only fdc-4bit:kinds=4 \
        --loads RUN --out docs/benchmarks/load-steps.json
"""

import argparse
import statistics
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvprof.records.files import read_result, write_result
from kvprof.records.result import build_result
from kvprof.serving.load.replica import EngineSettings
from kvprof.serving.load.step_records import (
    METHOD_COLUMNS,
    read_model_steps,
    samples_of,
    weight_bytes,
)
from kvprof.serving.load.step_times import StepSample, fit_step_times, pairs_of

_ITEMSIZE = 2  # of bfloat16
#: Where a step decodes one token of each sequence at about the middle of what was written.
_MIDDLE = 0.5
#: Groups of stretches of a load, by the requests that decode, and in each by the prompt tokens.
_BATCHES, _PROMPTS = 32, 3
#: Share of the weight of all stretches that each measured time of long contexts has.
_LONG_SHARE = 0.02
_DIGITS = 6
#: Rates of the cache's bytes that are the same method's: pages round them.
_ALIKE = 0.02


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--loads", type=Path, nargs="+", help="folders of loads that were served")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="further ones")
    parser.add_argument("--onto", type=Path, help="a record of loads that is added to")
    parser.add_argument("--only", nargs="+", help="methods as the runs name them; all by default")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.loads:
        onto = read_result(options.onto) if options.onto else None
        result = _of_loads(options.loads, options.prompts, onto, options.only)
    else:
        result = _shipped(options.records)
    write_result(options.out, result, force=True)


def _shipped(records: Path) -> dict[str, Any]:
    names = ("load-steps", "serving", "load-cocktail-h200", "jct")
    found = {name: read_result(records / f"{name}.json") for name in names}
    models = [_eight(found), _seventy(found["jct"]["data"])]
    for model in models:
        for method in model["methods"]:
            fit = fit_step_times(samples_of(method))
            print(
                f"{model['name']} tp {model['tp']} {method['method']}: {fit.samples} steps, "
                f"met to {fit.residual:.1%}"
            )
    environment = found["load-steps"]["environment"]
    return build_result(
        "benchmark",
        environment=environment,
        inputs={"benchmark": "step_times"},
        data={
            "gpu": environment["gpus"][0],
            "columns": list(METHOD_COLUMNS),
            "sources": {
                f"{name}.json": {
                    "created": one["created"],
                    "gpu": one["environment"]["gpus"][0]["name"],
                    "torch": one["environment"]["packages"]["torch"],
                }
                for name, one in found.items()
            },
            "models": models,
        },
        created=datetime.fromisoformat(max(one["created"] for one in found.values())),
    )


# --- Means of stretches of loads that were served.


def _of_loads(
    loads: Sequence[Path],
    prompts: Sequence[Path],
    onto: dict[str, Any] | None,
    only: Sequence[str] | None,
) -> dict[str, Any]:
    folders = [*loads, *prompts]
    runs = [read_result(folder / "result.json") for folder in folders]
    earlier = onto["data"] if onto else {"loads": [], "methods": []}
    last = max([*runs, *([onto] if onto else [])], key=lambda result: str(result["created"]))
    methods: dict[str, dict[str, Any]] = {own["method"]: own for own in earlier["methods"]}
    for number, folder in enumerate(folders, len(earlier["loads"])):
        for name, own in read_model_steps(folder).methods.items():
            # Of one that was disturbed steps are too long.
            if own.notes or (only and name not in only):
                continue
            found = methods.setdefault(name, {"method": name, "rate": own.rate, "samples": []})
            if abs(found["rate"] - own.rate) > _ALIKE:
                raise SystemExit(f"{folder}: {name} has another rate there: {own.rate:.3f}")
            stretches = [one for one in own.samples if one.decode and folder in loads]
            alone = [one for one in own.samples if not one.decode]
            found["samples"] += [[*one, number] for one in _grouped(stretches)]
            found["samples"] += [[*_columns(one), number] for one in alone]
    return build_result(
        "benchmark",
        environment=last["environment"],
        inputs={"benchmark": "load_steps", "model": runs[0]["inputs"]["model"]},
        data={
            "columns": [*METHOD_COLUMNS[:5], "tokens", "load"],
            "loads": [*earlier["loads"], *map(_load, runs)],
            "methods": list(methods.values()),
        },
        created=datetime.fromisoformat(str(last["created"])),
    )


def _load(result: dict[str, Any]) -> dict[str, Any]:
    inputs = ("methods", "lengths", "memory", "rates", "seconds", "engine")
    return {
        "created": result["created"],
        "engine": result["data"]["methods"][0]["engine"],
        "gpus": [gpu["name"] for gpu in result["environment"].get("gpus") or []],
        "kvprof": result["environment"].get("kvprof"),
        **{key: result["inputs"][key] for key in inputs},
    }


def _grouped(samples: Sequence[StepSample]) -> list[list[float]]:
    """Return means of stretches with about as many requests and prompt tokens, and their weights.

    A line through all of them is a line through these too.
    """
    found = []
    for group in _split(sorted(samples, key=lambda one: (one.decode, one.context)), _BATCHES):
        for own in _split(sorted(group, key=lambda one: one.prefill), _PROMPTS):
            weight = sum(one.weight for one in own)
            means = [
                sum(one.weight * getattr(one, name) for one in own) / weight
                for name in METHOD_COLUMNS[:5]
            ]
            found.append(_columns(StepSample(*means, weight=weight)))
    return found


def _columns(one: StepSample) -> list[float]:
    """Return a mean as the record has it: with its weight, and as many digits as count."""
    values = [getattr(one, name) for name in (*METHOD_COLUMNS[:5], "weight")]
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def _split(samples: Sequence[StepSample], groups: int) -> list[Sequence[StepSample]]:
    bounds = [len(samples) * number // groups for number in range(groups + 1)]
    parts = [samples[low:high] for low, high in pairwise(bounds)]
    return [part for part in parts if part]


# --- What all models have.


def _model(
    shape: dict[str, Any], methods: list[dict[str, Any]], prompts: list[list[Any]]
) -> dict[str, Any]:
    """Return one GPU's part of a model, from the shape that a composed run says it has.

    `prompts` are full width's, by themselves and as they were measured, for who asks what computing
    a context again takes.
    """
    keys = shape["num_kv_heads"] * shape["head_dim"]
    return {
        "name": shape["name"],
        "tp": shape["tp"],
        "layers": shape["layers"],
        "positions": shape["context"],
        "dtype": "bfloat16",
        "weights_bytes": weight_bytes(shape, _ITEMSIZE),
        "full_token_bytes": shape["layers"] * 2 * keys * _ITEMSIZE,
        "prompts": prompts,
        "methods": methods,
    }


def _decoding(batch: int, context: float, seconds: float, source: str) -> list[Any]:
    return [batch, batch * context, 0, 0, seconds, source]


def _prompt(tokens: int, seconds: float, source: str) -> list[Any]:
    return [0, 0, tokens, pairs_of(0, tokens), seconds, source]


# --- Llama-3.1-8B, one GPU.

_FDC = "steps are fdc's, whose kernels it runs over as many bytes"
_FP8 = (
    "steps are full width's, less what one and eight requests of 32,768 and one of 100,000 tokens "
    "take less in FP8, by the token and by the pair"
)
_FOUR = (
    "prompts of 32,768 tokens are full width's, times what a prompt of Cocktail's takes with 4 "
    "bits over what it takes at full width"
)


def _eight(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    # Of one plan each: `kinds` is told in the record and in the documents.
    loads = {own["method"].split(":")[0]: own for own in found["load-steps"]["data"]["methods"]}
    total = {name: sum(one[5] for one in own["samples"]) for name, own in loads.items()}
    long = {
        name: _long_contexts(found["serving"], name, _LONG_SHARE * total[of])
        for name, of in (("full", "full"), ("fdc", "fdc"), ("fp8", "full"))
    }
    samples = {
        name: [[*one[:5], "load-steps.json", True, one[5]] for one in own["samples"]]
        + long.get(name, [])
        for name, own in loads.items()
    }
    samples["fdc-4bit"].append(
        _four_bits(
            found["load-cocktail-h200"]["data"]["rates"],
            long["full"],
            _LONG_SHARE * total["fdc-4bit"],
        )
    )
    samples["fp8"] = [*_less(samples["full"], long), *long["fp8"]]
    samples["kq"] = samples["fdc"]
    rates = {name: own["rate"] for name, own in loads.items()}
    rates |= {"fp8": 0.5, "kq": rates["fdc"]}
    notes = {"fp8": [_FP8], "kq": [_FDC], "fdc-4bit": [_FOUR]}
    jct = found["jct"]["data"]
    return _model(
        jct["inputs-8b"]["shape"],
        [
            {
                "method": name,
                "rate": rates[name],
                "notes": notes.get(name, []),
                "samples": samples[name],
            }
            for name in ("full", "fp8", "fdc", "kq", "fdc-4bit")
        ],
        _composed_prompts(jct, "8b", "full"),
    )


def _long_contexts(record: dict[str, Any], method: str, weight: float) -> list[list[Any]]:
    """Return requests of long contexts: their tokens, and a prompt as steps of one mean size."""
    found, most = [], EngineSettings(1).max_num_batched_tokens
    for row in record["data"]["rows"]:
        if row["method"] != method:
            continue
        batch, context = row["batch"], row["context"]
        middle = context + _MIDDLE * record["inputs"]["tokens"][str(batch)]
        seconds = statistics.median(row["tbt_s"])
        found.append([batch, batch * middle, 0, 0, seconds, "serving.json", True, weight])
        if row["ttft_s"]:
            steps = -(-context // most)
            whole = [context, pairs_of(0, context), statistics.median(row["ttft_s"])]
            found.append([0, 0, *(one / steps for one in whole), "serving.json", True, weight])
    return found


def _four_bits(rows: list[dict[str, Any]], full: list[list[Any]], weight: float) -> list[Any]:
    """Return full width's prompt of whole steps, as 4 bits read Cocktail's over its own."""
    read = {row["method"].split(":")[0]: row["parts"]["prefill_seconds"] for row in rows}
    prompt = next(one for one in full if one[2] == EngineSettings(1).max_num_batched_tokens)
    source = "serving.json and load-cocktail-h200.json, put together"
    return [*prompt[:4], prompt[4] * read["fdc-4bit"] / read["full"], source, True, weight]


def _less(samples: list[list[Any]], long: dict[str, list[list[Any]]]) -> list[list[Any]]:
    """Return full width's stretches less what FP8 saves by the token and by the pair."""
    token, pair = 0.0, 0.0
    for full, fp8 in zip(long["full"], long["fp8"], strict=True):
        token = max(token, (full[4] - fp8[4]) / full[1] if full[1] else 0.0)
        pair = max(pair, (full[4] - fp8[4]) / full[3] if full[3] else 0.0)
    return [
        [*one[:4], one[4] - token * one[1] - pair * one[3], f"{one[5]}, less", *one[6:]]
        for one in samples
        if one[5] == "load-steps.json"
    ]


def _composed_prompts(data: dict[str, Any], size: str, method: str) -> list[list[Any]]:
    found = {}
    for sweep in (f"inputs-{size}", f"outputs-{size}"):
        for case in data[sweep]["cases"]:
            if case["method"] == method and "predicted" not in case["labels"]:
                found[case["input_len"]] = case["ttft_seconds"]
    return [_prompt(tokens, seconds, "jct.json") for tokens, seconds in sorted(found.items())]


# --- Llama-3.1-70B, one of four GPUs.


def _seventy(data: dict[str, Any]) -> dict[str, Any]:
    methods = []
    for method in ("full", "palu", "fdc", "kq"):
        samples, rate = [], 0.0
        for sweep in ("inputs-70b", "outputs-70b"):
            for case in data[sweep]["cases"]:
                if case["method"] == method:
                    middle = case["input_len"] + case["output_len"] * _MIDDLE
                    samples.append(_decoding(1, middle, case["tbt_seconds"], "jct.json"))
                    rate = case["rate"]
        methods.append(
            {
                "method": method,
                "rate": rate,
                "notes": ["steps that decode were measured at batch 1 alone"],
                "samples": samples + _composed_prompts(data, "70b", method),
            }
        )
    prompts = _composed_prompts(data, "70b", "full")
    return _model(data["inputs-70b"]["shape"], methods, prompts)


if __name__ == "__main__":
    main()
