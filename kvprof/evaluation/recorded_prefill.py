"""How long computing a context again takes: prefill as it was measured, of a length that was run.

Read from a result of ``kvprof bench --jct``, or from the prompts that ship beside steps
(`tools/step_times.py`), which are gathered from such results. A length that nobody ran has no time:
nothing is interpolated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

from kvprof.dtypes import DTYPE_BYTES
from kvprof.errors import UsageError
from kvprof.models.layout import ModelLayout
from kvprof.records.files import read_result, what_was_read

__all__ = ["RecordedPrefill", "prefill_of", "shipped_prefill"]

_FULL = "full"
_SHIPPED = "h200.json"


@dataclass(frozen=True)
class RecordedPrefill:
    """Prefill of one sequence at full width, by its length.

    Attributes
    ----------
    source : str
        The file.
    origin : str
        Where it comes from: ``given``, or ``shipped`` with kvprof.
    model : str
        That it was measured with.
    device : str
    devices : int
        GPUs that shared the model (tensor parallelism).
    dtype : str
    mode : str
        ``real``: a model answered; ``composed``: one layer's parts were timed and put together.
    created : str
        UTC.
    seconds : dict of int to float
        By tokens of the prompt.
    """

    source: str
    origin: str
    model: str
    device: str
    devices: int
    dtype: str
    mode: str
    created: str
    seconds: dict[int, float]

    def described(self) -> dict[str, Any]:
        """Return what a result says of it, as JSON values."""
        names = ("source", "origin", "model", "device", "devices", "dtype", "mode", "created")
        return {name: getattr(self, name) for name in names}


def prefill_of(path: Path, layout: ModelLayout, dtype: str, fingerprint: str) -> RecordedPrefill:
    """Read a result of ``kvprof bench --jct`` of a model.

    Parameters
    ----------
    path : Path
        A result, or a run's folder.
    layout : ModelLayout
        Of the model that is asked about: the record has to be of one of this shape.
    dtype : str
        Of the run: in another one prefill takes another time.
    fingerprint : str
        Of its weights; a record of other weights is refused, one of a shape alone is not.

    Raises
    ------
    UsageError
        For another kind of result, another model or dtype, and a result without a prompt of one
        sequence at full width.
    FailedError
        When it is damaged.
    """
    result = read_result(path)
    if result["kind"] != "jct":
        raise UsageError(
            f"--prefill {path}: a result of kind {result['kind']} has no time of a prefill; "
            "kvprof bench --jct measures it"
        )
    with what_was_read(path):
        data, inputs = result["data"], result["inputs"]
        shape = data["shape"]
        if differs := _differs(shape, layout, fingerprint):
            raise UsageError(f"--prefill {path} is of {shape['name']}, another model: {differs}")
        if inputs["dtype"] != dtype:
            raise UsageError(
                f"--prefill {path} was measured in {inputs['dtype']}, and the cache is counted in "
                f"{dtype}; give --dtype {inputs['dtype']}"
            )
        runs: dict[int, list[float]] = {}
        for case in data["cases"]:
            measured = case["ttft_seconds"] is not None and "predicted" not in case["labels"]
            if case["method"] == _FULL and case["batch"] == 1 and measured:
                runs.setdefault(int(case["input_len"]), []).append(float(case["ttft_seconds"]))
        if not runs:
            raise UsageError(
                f"--prefill {path} has no prompt of one sequence at full width; measure it with "
                "--methods full --batch 1"
            )
        return RecordedPrefill(
            path.name,
            "given",
            str(shape["name"]),
            _device(result["environment"]),
            int(shape.get("tp", 1)),
            str(inputs["dtype"]),
            str(data["mode"]),
            str(result["created"]),
            {tokens: median(found) for tokens, found in runs.items()},
        )


def shipped_prefill(spec: str, layout: ModelLayout, dtype: str) -> RecordedPrefill | None:
    """Return what ships of a model of this name and shape; None where nothing does.

    Parameters
    ----------
    spec : str
        As the user named it; of a hub id the last part counts.
    layout, dtype
        As of `prefill_of`.
    """
    with as_file(files("kvprof") / "assets" / "step_times" / _SHIPPED) as path:
        result = read_result(path)
    data = result["data"]
    width = sum(x.num_kv_heads * (x.qk_head_dim + x.v_head_dim) for x in layout.layers)
    # The record of one GPU comes first: no sharing that nobody asked for.
    for model in sorted(data["models"], key=lambda model: int(model["tp"])):
        alike = (
            _plain(spec) == _plain(model["name"])
            and model["dtype"] == dtype
            and model["layers"] == len(layout.layers)
            and model["full_token_bytes"] * model["tp"] == DTYPE_BYTES[dtype] * width
        )
        if not alike:
            continue
        # A prompt has no column that is a step's alone.
        prompts = [dict(zip(data["columns"], one, strict=False)) for one in model["prompts"]]
        if prompts:
            sources = sorted({str(one["source"]) for one in prompts})
            return RecordedPrefill(
                " and ".join(sources),
                "shipped",
                str(model["name"]),
                str(data["gpu"]["name"]),
                int(model["tp"]),
                str(model["dtype"]),
                # tools/step_times.py takes its prompts from composed runs alone.
                "composed",
                max(str(data["sources"][source]["created"]) for source in sources),
                {int(one["prefill"]): float(one["seconds"]) for one in prompts},
            )
    return None


def _differs(shape: Mapping[str, Any], layout: ModelLayout, fingerprint: str) -> str | None:
    """Say in what a record's model is another one; None where it is not."""
    weights = shape.get("fingerprint")
    if weights is not None and fingerprint and weights != fingerprint:
        return f"weights {str(weights)[:12]}, not {fingerprint[:12]}"
    first = layout.layers[0]
    devices = int(shape.get("tp", 1))  # each has its part of the heads
    for name, found, own in (
        ("layers", shape["layers"], len(layout.layers)),
        ("hidden_size", shape["hidden_size"], layout.hidden_size),
        ("num_heads", shape["num_heads"] * devices, first.num_heads),
        ("num_kv_heads", shape["num_kv_heads"] * devices, first.num_kv_heads),
        ("head_dim", shape["head_dim"], first.qk_head_dim),
    ):
        if found != own:
            return f"{name} {found}, not {own}"
    return None


def _device(environment: Mapping[str, Any]) -> str:
    gpus = environment["gpus"]
    return str(gpus[0]["name"] if gpus else environment["cpu"]["model"])


def _plain(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()
