"""What a reader of a report of job completion time must know beside its figures."""

from collections.abc import Mapping
from typing import Any

__all__ = ["notes", "provenance"]

_MODES = {
    "real": "A real run: the model generated through the runtime; JCT, TTFT and TBT are wall "
    "times.",
    "composed": "A composed run: the parts of one layer, timed at a ladder of contexts and "
    "integrated over prefill and every decode step. Nobody ran the whole request.",
}
_PARTS = (
    "Parts were timed in a second, instrumented run of the same request; the uninstrumented wall "
    "time decides, and what no part explains is unattributed (negative: parts sum to more)."
)
_COMPOSED_PARTS = (
    "Unattributed is what the whole layers take beyond the sum of their parts (negative: the parts "
    "sum to more)."
)
_SHARES = "Share: of the case's job completion time, over prefill and decode. Differs: the part's "
_SHARES += "time less the same part's time of {baseline}."
_TIMES = (
    "JCT: prefill and all output tokens. TTFT: prefill. TBT: the median decode step; p99, its 99th "
    "percentile."
)


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return how to read the report, with what the cases' labels say.

    Parameters
    ----------
    result : mapping
        Of kind ``jct``.
    """
    data = result["data"]
    composed = data["mode"] == "composed"
    found = [_MODES[data["mode"]], _TIMES, _COMPOSED_PARTS if composed else _PARTS]
    found.append(_SHARES.format(baseline=data["baseline"]))
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for case in data["cases"]:
        for name, text in case["labels"].items():
            if name != "by_difference":
                labels.setdefault((name, text), {})[case["method"]] = None
    methods = {case["method"] for case in data["cases"]}
    for (name, text), own in labels.items():
        of = "" if len(own) == len(methods) else f" ({', '.join(own)})"
        found.append(f"{name[:1].upper()}{name[1:].replace('_', ' ')}{of}: {text}.")
    return found


def provenance(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what was measured with what.

    Parameters
    ----------
    result : mapping
        Of kind ``jct``.
    """
    inputs, data, environment = result["inputs"], result["data"], result["environment"]
    shape = data["shape"]
    packages = environment.get("packages", {})
    gpus = environment.get("gpus", [])
    device = str(inputs.get("device", ""))
    cpu = environment["cpu"]
    machine = f"{cpu['model']}, {cpu['threads']} threads"
    if device.startswith("cuda") and gpus:
        index = int(device.partition(":")[2] or 0)
        machine = f"{gpus[min(index, len(gpus) - 1)]['name']} ({device})"
    shown = {
        "shape": ", ".join(
            [str(shape["name"]), *(f"{shape[key]} {words}" for key, words in (
                ("layers", "layers"), ("num_heads", "query heads"), ("num_kv_heads", "KV heads"),
            ) if key in shape)]
        ),
        "run": data["mode"],
        "device": machine,
        "dtype": inputs.get("dtype"),
        "torch": packages.get("torch"),
        "seed": inputs.get("seed"),
        "written": result.get("created"),
    }  # fmt: skip
    return {key: str(value) for key, value in shown.items() if value is not None}
