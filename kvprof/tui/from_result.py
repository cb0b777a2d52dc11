"""The state of a run of which only the result is left."""

from typing import Any

from kvprof.records.events import (
    Balance,
    CaseFinished,
    CaseStarted,
    LayerMeasured,
    MemorySample,
    RunFinished,
    RunStarted,
    StepFinished,
    TelemetrySample,
    Warned,
)
from kvprof.tui.state import LayerState, RunState

__all__ = ["state_of"]


def state_of(result: dict[str, Any]) -> RunState:
    """Return the state that a finished run's events would have left.

    Parameters
    ----------
    result : dict
        Of kind ``jct``. Samples that a result does not keep (parts by step) are there as sums.
    """
    state, data = RunState(), result["data"]
    state.apply(
        RunStarted(
            0.0,
            result["created"],
            result["kvprof_version"],
            "jct",
            ("kvprof", "bench", "--jct"),
            data["mode"] or "",
            result["inputs"],
            result["environment"],
            data["shape"],
            tuple(row["case"] for row in data["cases"]),
            data["baseline"] or "",
        )
    )
    for row in data["cases"]:
        _case(state, row, data)
    for device, entry in data["telemetry"].items():
        series = dict(entry["series"])
        times = series.pop("time")
        for reason, samples in entry["throttled"].items():
            of = entry["samples"]
            state.write("device", f"{device}: slowed down in {samples} of {of} samples: {reason}")
        for index, time in enumerate(times):
            values = {name: row[index] for name, row in series.items() if row[index] is not None}
            state.apply(TelemetrySample(time, device, values))
    for message in result["warnings"]:
        state.apply(Warned(0.0, message))
    state.apply(RunFinished(state.time, result["complete"], result["incomplete_reason"]))
    return state


def _case(state: RunState, row: dict[str, Any], data: dict[str, Any]) -> None:
    name = row["case"]

    def own(key: str) -> list[dict[str, Any]]:
        return [entry for entry in data[key] if entry["case"] == name]

    state.apply(
        CaseStarted(
            0.0,
            name,
            row["method"],
            row["rate"],
            row["batch"],
            row["input_len"],
            row["output_len"],
            own("layers"),
            row["labels"],
        )
    )
    case = state.cases[name]
    for part in own("parts"):
        if part["part"] != "unattributed":
            case.measured.add_part(part["phase"], part["part"], part["seconds"])
    for layer in own("layers"):
        if layer["error"] is not None:
            state.apply(
                LayerMeasured(0.0, name, layer["layer"], layer["error"], layer["nbytes"] or 0)
            )
        case.layers.setdefault(layer["layer"], LayerState()).seconds = layer["seconds"]
    for step in own("steps"):
        state.apply(
            StepFinished(
                0.0,
                name,
                step["phase"],
                step["step"],
                step["context"],
                step["seconds"],
                step["weight"],
            )
        )
    for sample in own("memory"):
        state.apply(MemorySample(time=0.0, **sample))
    for one in own("balance"):
        state.apply(Balance(time=0.0, **one))
    if row["jct_seconds"] is not None:
        with_it = row["instrumented_seconds"]
        state.apply(
            CaseFinished(
                0.0,
                name,
                row["ttft_seconds"],
                row["decode_seconds"],
                # A result keeps the sum alone.
                with_it,
                0.0 if with_it is not None else None,
            )
        )
