"""What a user has today: vLLM's own time between tokens, beside kvprof's figures of the same shape.

The engine runs in a process of its own, alone on the device: full width, weights that vLLM draws,
decoding steps in CUDA graphs, no ``torch.compile`` (`kvprof.serving.alone`). What weights hold
costs no time, so a shape's figure is a model's.
"""

import copy
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvprof.benchmark.machine import free_bytes
from kvprof.child import module_command
from kvprof.errors import FailedError, LackingError
from kvprof.leash import Leash
from kvprof.models.load import LoadedModel
from kvprof.models.noise import quiet
from kvprof.printable import printable
from kvprof.progress import Progress, silent
from kvprof.requirements import extra_command
from kvprof.serving.alone import REQUEST, spare_tokens

__all__ = [
    "ENGINE",
    "VllmShape",
    "check_measured",
    "check_vllm",
    "measure_vllm",
    "not_asked",
    "not_reached",
]

#: Its name in results.
ENGINE = "vLLM"

#: A batch, the tokens of its prompts, and those that are written.
Case = tuple[int, int, int]

_RUNS = (3, 5)  # at least, and at most where they are short
_CASE_SECONDS = 60.0
_SILENT_SECONDS = 900.0  # without a line, an engine is given up
_LOOK_SECONDS = 0.1
_MEMORY = 0.9  # of what is free
_CACHE_SLACK = 2**28  # bytes: pages that are not full, and the engine's own block
_ERROR = re.compile(
    r"\b\w*(?:Error|Exception|Interrupt): .*|Value error, .*|^vLLM .* runs on a [CG]PU$"
)
# What vLLM says last is that something failed, and where to look.
_NO_CAUSE = re.compile("See (?:root cause|stack trace|above)|validation errors? for ")
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class VllmShape:
    """What vLLM has to know of a model, once its weights are gone.

    Attributes
    ----------
    config : transformers.PretrainedConfig
    device : torch.device
    dtype : torch.dtype
    token_bytes : int
        Of the cache at full width, all layers.
    vocabulary : int
    """

    config: Any
    device: torch.device
    dtype: torch.dtype
    token_bytes: int
    vocabulary: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> "VllmShape":
        """Return what there is to know of a loaded model."""
        values = sum(
            facts.num_kv_heads * (facts.qk_head_dim + facts.v_head_dim)
            for facts in loaded.layout.layers
            if not facts.shared
        )
        config = copy.deepcopy(loaded.model.config)
        config.architectures = [type(loaded.model).__name__]
        # The weights are full numbers again, also of a file in which they were rounded.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return cls(
            config,
            loaded.device,
            loaded.dtype,
            values * loaded.dtype.itemsize,
            loaded.vocab_size,
        )


def check_vllm() -> None:
    """Refuse to measure vLLM where it is not.

    Raises
    ------
    LackingError
    """
    if find_spec("vllm") is None:
        raise LackingError(f"--vllm: vLLM is not installed: {extra_command('serve')}")


def not_asked() -> dict[str, Any]:
    """Return what stands in a result that vLLM was not measured for, and how it would be."""
    there = "is installed here" if find_spec("vllm") is not None else "is not installed here"
    return _result(f"it was not asked for (--vllm), and {there}")


def not_reached() -> dict[str, Any]:
    """Return what stands in a result whose run ended before vLLM's turn."""
    return _result("the run ended before its turn")


def _result(why: str | None) -> dict[str, Any]:
    return {"engine": ENGINE, "version": None, "why": why, "settings": {}, "rows": []}


def measure_vllm(
    shape: VllmShape,
    cases: Sequence[Case],
    *,
    seed: int = 0,
    seconds: float = _CASE_SECONDS,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Return vLLM's time between tokens in every case, as ``data.external`` has it.

    Whatever keeps the engine from an answer is in ``why``; what was measured before is kept.

    Parameters
    ----------
    shape : VllmShape
        Of a model that lies on the device no more.
    cases : sequence of (int, int, int)
        Batch, tokens of the prompt, tokens to write; each is measured once.
    seed : int
        Of the prompts.
    seconds : float
        Of a case, after which no further run begins once there are enough for a median.
    progress : Progress
    should_stop : callable
        Asked several times a second; True ends the engine.
    """
    timed = [case for case in dict.fromkeys(cases) if case[2] > 1]
    if not timed:
        return _result("one token has no time to the next: write two or more (--output-len)")
    folder = TemporaryDirectory(prefix="kvprof-vllm-")
    try:
        files = Path(folder.name)
        _describe(shape, timed, files, seed, seconds)
        with progress("vLLM alone", len(timed) + 1) as bar:
            lines, why = _run(shape, files, bar.advance, should_stop)
    finally:
        folder.cleanup()
    found = _result(why)
    for line in lines:
        if "version" in line:
            found["version"] = line.pop("version")
            found["settings"] = {
                "dtype": str(shape.dtype).removeprefix("torch."),
                "weights": "dummy",
                "cuda_graphs": line["graphs"],
                "torch_compile": False,
                "page_tokens": line["page_tokens"],
                "start_seconds": line["start_seconds"],
            }
        else:
            found["rows"].append(
                {
                    **{key: line[key] for key in ("batch", "input_len", "output_len")},
                    "tbt_seconds": median(line["tbt"]),
                    "tbt_samples": line["tbt"],
                    # In a batch the first answer waits for other prompts.
                    "ttft_seconds": median(line["ttft"]) if line["batch"] == 1 else None,
                }
            )
    return found


def check_measured(external: Mapping[str, Any]) -> None:
    """Raise what kept vLLM from an answer.

    Parameters
    ----------
    external : mapping
        Of `measure_vllm`.

    Raises
    ------
    FailedError
    """
    if external["why"] is not None:
        raise FailedError(f"{ENGINE} was not measured: {external['why']}")


def _describe(
    shape: VllmShape, cases: Sequence[Case], folder: Path, seed: int, seconds: float
) -> None:
    """Write what the engine's process reads: the shape as it is, but for how long it may write."""
    tokens = {case: case[1] + case[2] + spare_tokens(case[0], case[1]) for case in cases}
    longest = max(tokens.values())
    config = copy.deepcopy(shape.config)
    text = config.get_text_config(decoder=True)
    # Nothing is read from what is written: positions beyond the model's own cost the same.
    text.max_position_embeddings = max(longest, getattr(text, "max_position_embeddings", 0) or 0)
    with quiet():
        config.save_pretrained(folder)
    on_cpu = shape.device.type == "cpu"
    needed = max(case[0] * tokens[case] for case in cases) * shape.token_bytes
    asked = {
        "device": shape.device.type,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "seed": seed,
        "longest": longest,
        "vocabulary": shape.vocabulary,
        "memory": _share(shape.device),
        # On a GPU vLLM takes its share and finds out what is left for the cache.
        "cache_bytes": needed + needed // 4 + _CACHE_SLACK if on_cpu else None,
        "cases": cases,
        "least": _RUNS[0],
        "most": _RUNS[1],
        "seconds": seconds,
    }
    (folder / REQUEST).write_text(json.dumps(asked))


def _share(device: torch.device) -> float:
    """Return the share of a GPU's memory that an engine may take; of a CPU's it is not asked."""
    if device.type == "cpu":
        return _MEMORY
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    return round(_MEMORY * free_bytes(device) / total, 3)


def _run(
    shape: VllmShape,
    folder: Path,
    advance: Callable[[], None],
    should_stop: Callable[[], bool],
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the lines that the engine's process printed, and why there are no more."""
    environment = {**os.environ, **_QUIET}
    if shape.device.type == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = _visible(shape.device.index or 0)
    said, printed = folder / "said.log", folder / "printed"
    leash = Leash()
    with said.open("wb") as err, printed.open("wb") as out:
        child = leash.start(
            module_command("kvprof.serving.alone", str(folder)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    why = None
    count, heard = 0, time.monotonic()
    try:
        while (code := child.poll()) is None:
            time.sleep(_LOOK_SECONDS)
            if should_stop():
                why = "it was interrupted"
                break
            while count < len(_lines(printed)):
                count, heard = count + 1, time.monotonic()
                advance()
            if time.monotonic() - heard > _SILENT_SECONDS:
                why = f"it said nothing for {_SILENT_SECONDS / 60:.0f} minutes"
                break
        else:
            if code:
                # The engine's own process tells its errors where it tells everything.
                words = _last_words(said) or _last_words(printed)
                why = words or f"its process ended with {code}"
    finally:
        with suppress(OSError):  # the engine's own processes hold memory
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        leash.close()
    return _lines(printed), why


def _visible(index: int) -> str:
    """Return the one GPU that the engine may see, as ``CUDA_VISIBLE_DEVICES`` names it here."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    return stated.split(",")[index] if stated else str(index)


def _lines(printed: Path) -> list[dict[str, Any]]:
    """Return the whole lines of JSON that were printed; vLLM prints others."""
    whole = printed.read_text(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in whole if line.startswith("{")]


def _last_words(said: Path) -> str:
    """Return the last line that tells an error's cause; nothing where none does."""
    found = [
        match.group()
        for line in said.read_text(errors="replace").splitlines()
        if (match := _ERROR.search(line.strip())) and not _NO_CAUSE.search(line)
    ]
    return printable(found[-1])[:200] if found else ""
