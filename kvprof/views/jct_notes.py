"""What a reader of a report of job completion time must know beside its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.views.jct_data import groups, peak_name

__all__ = ["notes", "provenance"]

_MODES = {
    "real": "A real run: the model generated through the runtime; JCT, TTFT and TBT are wall "
    "times.",
    "composed": "A composed run: the parts of one layer, timed at a ladder of contexts and "
    "integrated over prefill and every decode step. Nobody ran the whole request.",
}
_PARTS = (
    "Parts were timed in runs with marks, in turn with runs without; the wall time without marks "
    "decides, and what no part explains is unattributed (negative: parts sum to more)."
)
_COMPOSED_PARTS = (
    "Unattributed is what the whole layers take beyond the sum of their parts (negative: the parts "
    "sum to more)."
)
_SHARES = (
    "Share: of the case's job completion time, over prefill and decode; none where the parts of a "
    "phase sum to more than its time by over 10 % of the request. Differs: the part's time less "
    "the same part's time of {baseline}."
)
_TIMES = (
    "JCT: prefill and all output tokens. TTFT: prefill. TBT: the median decode step; p99, its 99th "
    "percentile."
)
_TIMING = (
    "Timing costs: what timing every part added to the request, and to its decode steps; the times "
    "above are without it."
)
_APART = (
    "In brackets: the 95 % interval of the difference between two job completion times, from those "
    "of both."
)
_ENERGY = "J per token: the energy of the whole request over its output tokens."
_LONGEST = (
    "lpt: FDC's longest-first assignment, which gives a head of a sequence to one multiprocessor "
    "whole; with fewer of them than multiprocessors the others have nothing to do."
)
_PROCESS = "Process peak: resident memory of the whole process, its weights and libraries included."


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
    if any(case["overhead"] is not None for case in data["cases"]):
        found.append(_TIMING)
    if any(group.apart(case) for group in groups(result) for case in group.cases):
        found.append(_APART)
    if any(case["energy_per_token_joules"] is not None for case in data["cases"]):
        found.append(_ENERGY)
    if peak_name(result["inputs"]) == "process peak" and data["memory"]:
        found.append(_PROCESS)
    if any(row["schedule"] == "lpt" for row in data["balance"]):
        found.append(_LONGEST)
    labels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for case in data["cases"]:
        for name, text in case["labels"].items():
            if name != "by_difference":
                labels.setdefault((name, text), []).append(case)
    for (name, text), own in labels.items():
        of = _whose(result, own)
        found.append(f"{name[:1].upper()}{name[1:].replace('_', ' ')}{of}: {text}.")
    return found


def _whose(result: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> str:
    """Return of which cases something is told, as short as can be; nothing where it is of all."""
    every = result["data"]["cases"]
    if len(own) == len(every):
        return ""
    names = {case["case"] for case in own}
    methods = list(dict.fromkeys(case["method"] for case in own))
    if len(own) == sum(case["method"] in methods for case in every):
        return f" ({', '.join(methods)})"
    whole = [group for group in groups(result) if names >= {one["case"] for one in group.cases}]
    if len(own) == sum(len(group.cases) for group in whole):
        return f" ({'; '.join(group.name for group in whole)})"
    return f" ({', '.join(case['case'] for case in own)})"


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
