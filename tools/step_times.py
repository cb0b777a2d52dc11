"""Gathers the steps that records of a GPU hold, for who simulates a load without one.

It measures nothing: each step names the record that it is from. Steps that decode are those of
whole models (`generate.json`), prompts those of `jct.json`, put together from one layer's parts,
since `generate` launches short prompts piece by piece and an engine does not.

    python tools/step_times.py --records docs/benchmarks --out kvprof/assets/step_times/h200.json
"""

import argparse
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

from kvprof.records.files import read_result, write_result
from kvprof.records.result import build_result
from kvprof.serving.load.step_records import METHOD_COLUMNS, samples_of, weight_bytes
from kvprof.serving.load.step_times import fit_step_times, pairs_of

_ITEMSIZE = 2  # of bfloat16
#: Where a step decodes one token of each sequence at about the middle of what was written.
_MIDDLE = 0.5


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    names = ("generate", "jct", "kernels")
    found = {name: read_result(options.records / f"{name}.json") for name in names}
    models = [_eight(found), _seventy(found["jct"]["data"])]
    for model in models:
        for method in model["methods"]:
            fit = fit_step_times(samples_of(method))
            print(
                f"{model['name']} tp {model['tp']} {method['method']}: {fit.samples} steps, "
                f"met to {fit.residual:.1%}"
            )
    result = build_result(
        "benchmark",
        environment=found["generate"]["environment"],
        inputs={"benchmark": "step_times"},
        data={
            "gpu": found["generate"]["environment"]["gpus"][0],
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
    write_result(options.out, result, force=True)


def _model(shape: dict[str, Any], methods: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one GPU's part of a model, from the shape that a composed run says it has."""
    keys = shape["num_kv_heads"] * shape["head_dim"]
    return {
        "name": shape["name"],
        "tp": shape["tp"],
        "layers": shape["layers"],
        "positions": shape["context"],
        "dtype": "bfloat16",
        "weights_bytes": weight_bytes(shape, _ITEMSIZE),
        "full_token_bytes": shape["layers"] * 2 * keys * _ITEMSIZE,
        "methods": methods,
    }


def _decoding(batch: int, context: float, seconds: float, source: str) -> list[Any]:
    return [batch, batch * context, 0, 0, seconds, source]


def _prompt(tokens: int, seconds: float, source: str) -> list[Any]:
    return [0, 0, tokens, pairs_of(0, tokens), seconds, source]


# --- Llama-3.1-8B, one GPU.


def _eight(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rates = {
        "full": 0.0,
        "fdc": found["generate"]["inputs"]["rate"],
        "kq": found["generate"]["inputs"]["rate"],
        "fdc-4bit": _kernel_row(found["kernels"], "fdc-4bit", 8)["rate"],
    }
    methods = [
        {
            "method": method,
            "rate": rate,
            "notes": _NOTES.get(method, []),
            "samples": _generated(found, method) + _prompts(found, method),
        }
        for method, rate in rates.items()
    ]
    methods.insert(1, _fp8(found, methods[0]["samples"]))
    return _model(found["jct"]["data"]["inputs-8b"]["shape"], methods)


_NOTES = {
    "fdc-4bit": [
        "prompts are of generate.json, of 8,192 and 32,768 tokens; one of 1,024 was not taken: it "
        "waits for the host, which launches it piece by piece",
    ],
}


def _generated(found: dict[str, dict[str, Any]], method: str) -> list[list[Any]]:
    """Return the steps that decode: medians of a row, at the middle of the tokens it wrote."""
    record = found["generate"]
    half = record["inputs"]["tokens"] * _MIDDLE
    return [
        _decoding(
            row["batch"],
            row["context"] + half,
            statistics.median(row["tbt_s"][4:]),
            "generate.json",
        )
        for row in record["data"]["rows"]
        if row["method"] == method
    ]


def _prompts(found: dict[str, dict[str, Any]], method: str) -> list[list[Any]]:
    if method == "fdc-4bit":
        rows = found["generate"]["data"]["rows"]
        return [
            _prompt(row["context"], row["ttft_s"], "generate.json")
            for row in rows
            if row["method"] == method and row["ttft_s"] and row["context"] > 1024
        ]
    return _composed_prompts(found["jct"]["data"], "8b", method)


def _composed_prompts(data: dict[str, Any], size: str, method: str) -> list[list[Any]]:
    found = {}
    for sweep in (f"inputs-{size}", f"outputs-{size}"):
        for case in data[sweep]["cases"]:
            if case["method"] == method and "predicted" not in case["labels"]:
                found[case["input_len"]] = case["ttft_seconds"]
    return [_prompt(tokens, seconds, "jct.json") for tokens, seconds in sorted(found.items())]


def _kernel_row(record: dict[str, Any], method: str, batch: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = record["data"]["decode"]["rows"]
    return next(row for row in rows if row["method"] == method and row["batch"] == batch)


def _fp8(found: dict[str, dict[str, Any]], full: list[list[Any]]) -> dict[str, Any]:
    """Return full width with its attention's time exchanged for that of FP8's kernel.

    Where that was measured; at 1,024 tokens, of which attention reads 0.5 % of what weights are,
    nothing is exchanged.
    """
    layers, seq = 32, found["kernels"]["data"]["decode"]["rows"][0]["seq"]
    samples = []
    for decode, context, prefill, pairs, seconds, source in full:
        each = context / decode if decode else 0
        if prefill or each < 2048:
            samples.append([decode, context, prefill, pairs, seconds, source])
        elif seq <= each < seq + 1024:
            of_full, of_fp8 = (
                statistics.median(_kernel_row(found["kernels"], method, decode)["seconds"])
                for method in ("full", "fp8")
            )
            exchanged = seconds - layers * (of_full - of_fp8)
            samples.append(
                [decode, context, 0, 0, exchanged, f"{source} and kernels.json, put together"]
            )
    return {
        "method": "fp8",
        "rate": _kernel_row(found["kernels"], "fp8", 8)["rate"],
        "notes": [
            "steps are full width's, with the attention kernel's time exchanged; prompts are full "
            "width's"
        ],
        "samples": samples,
    }


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
    return _model(data["inputs-70b"]["shape"], methods)


if __name__ == "__main__":
    main()
