"""Steps of an engine that were sampled: what an engine's process writes down, and who reads it.

Standard library only: the plug-in writes, a load reads, and neither needs the other's packages.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = [
    "SAMPLE_VARIABLE",
    "SampledStep",
    "StepReader",
    "StepWriter",
    "asked_sampling",
    "sampling_variable",
]

#: Says which steps an engine is to sample, and the folder that they are written into.
SAMPLE_VARIABLE = "KVPROF_SAMPLE_STEPS"
_LONGEST = 2**14  # bytes of a line


@dataclass(frozen=True)
class SampledStep:
    """One step of an engine, from its input to its logits.

    Attributes
    ----------
    end : float
        When the host had launched it, by `time.monotonic`, which all processes share.
    seconds : float
    decodes, context : int
        Sequences that decode a token, and the tokens that they hold together, the new ones
        included.
    prefill : int
        Tokens of prompts.
    parts : dict of str to float
        Seconds of what was marked (`kvprof.records.parts.PARTS`); empty where the step was seen as
        a whole.
    waited : float
        Seconds of stretches in which the GPU may have waited for the host.
    """

    end: float
    seconds: float
    decodes: int
    context: int
    prefill: int
    parts: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0


def sampling_variable(every: int, folder: Path) -> str:
    """Return what `SAMPLE_VARIABLE` is set to: every how manieth step, and where it is written."""
    return f"{every}:{folder}"


def asked_sampling(text: str | None) -> tuple[int, Path] | None:
    """Return what the variable asks for; None where it asks for nothing."""
    every, _, folder = (text or "").partition(":")
    return (int(every), Path(folder)) if every.isdigit() and int(every) and folder else None


class StepWriter:
    """Writes a process's steps into a file of its own, a line each.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"steps-{os.getpid()}.jsonl"

    def write(self, step: SampledStep) -> None:
        """Add a step; where it cannot be written, the engine goes on without."""
        with suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(step)).encode() + b"\n")


class StepReader:
    """Reads what several processes write, each line once.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[SampledStep]:
        """Return the steps that were written since the last call, in the order of their ends."""
        found = []
        for path in sorted(self._folder.glob("steps-*.jsonl")):
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # the rest of it comes
                    self._read[path] = self._read.get(path, 0) + len(line)
                    if len(line) <= _LONGEST:
                        with suppress(ValueError, TypeError):
                            found.append(SampledStep(**json.loads(line)))
        return sorted(found, key=lambda step: step.end)
