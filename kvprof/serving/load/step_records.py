"""The step times that a simulation takes: those that ship, of an H200 (`tools/step_times.py`)."""

from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file, files
from typing import Any

from kvprof.errors import UsageError
from kvprof.records.files import read_result
from kvprof.serving.load.step_times import StepSample, StepTimes, fit_step_times

__all__ = ["SHIPPED", "MethodSteps", "ModelSteps", "read_model_steps"]

SHIPPED = "h200.json"
#: Share of a device's memory that an engine takes, as vLLM does. Activations are not counted.
_UTILISATION = 0.92


@dataclass(frozen=True)
class MethodSteps:
    """One method's steps."""

    method: str
    rate: float  # of the cache's bytes
    token_bytes: float  # bytes of a token in one device's cache
    samples: tuple[StepSample, ...]
    notes: tuple[str, ...] = ()  # what a reader must know of them

    @cached_property
    def times(self) -> StepTimes:
        """What a step takes, fitted to the samples."""
        return fit_step_times(self.samples)


@dataclass(frozen=True)
class ModelSteps:
    """A model's steps on one device, or on one of several that share it."""

    model: str
    tp: int  # devices that share the model; bytes are one device's
    device: str  # what the steps were measured on
    created: str  # of the record, UTC
    #: That one device's cache may have: what vLLM may take of its memory, less the weights.
    cache_bytes: int
    positions: int  # tokens that a request of the model may have
    methods: dict[str, MethodSteps]  # the uncompressed is `full`

    def method(self, name: str) -> MethodSteps:
        """Return a method's steps."""
        if name not in self.methods:
            raise UsageError(
                f"--methods {name}: {SHIPPED} has no step times for it with {self.model}; it has "
                f"{', '.join(self.methods)}"
            )
        return self.methods[name]

    def described(self) -> dict[str, Any]:
        """Return what a result says of it, as JSON values."""
        return {
            "source": SHIPPED,
            "created": self.created,
            "device": self.device,
            "model": self.model,
            "tp": self.tp,
            "methods": [
                {
                    "method": one.method,
                    "rate": one.rate,
                    "token_bytes": one.token_bytes,
                    "samples": one.times.samples,
                    "largest_difference": one.times.residual,
                    "notes": list(one.notes),
                }
                for one in self.methods.values()
            ],
        }


def read_model_steps(model: str | None = None, tp: int = 1) -> ModelSteps:
    """Read the steps of a model."""
    with as_file(files("kvprof") / "assets" / "step_times" / SHIPPED) as path:
        result = read_result(path)
    data = result["data"]
    room = int(_UTILISATION * data["gpu"]["memory_bytes"])
    for one in data["models"]:
        if one["tp"] == tp and (model is None or _plain(model) == _plain(one["name"])):
            return ModelSteps(
                one["name"],
                tp,
                data["gpu"]["name"],
                result["created"],
                room - one["weights_bytes"],
                one["positions"],
                {
                    own["method"]: MethodSteps(
                        own["method"],
                        own["rate"],
                        one["full_token_bytes"] * (1 - own["rate"]),
                        tuple(StepSample(*sample) for sample in own["samples"]),
                        tuple(own["notes"]),
                    )
                    for own in one["methods"]
                },
            )
    known = ", ".join(f"{one['name']} with --tp {one['tp']}" for one in data["models"])
    wanted = f"--tp {tp}" if model is None else f"{model} with --tp {tp}"
    raise UsageError(f"--simulate: no step times for {wanted}; {SHIPPED} has {known}")


def _plain(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()
