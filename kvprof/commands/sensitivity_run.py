"""The passes of ``kvprof sensitivity``: cells, then what follows from them measured as a whole."""

from dataclasses import dataclass
from typing import Any

from kvprof import console
from kvprof.commands.steps import calibration_interrupts, calibration_options
from kvprof.errors import UsageError
from kvprof.evaluation.data import default_shape, text_samples
from kvprof.evaluation.sensitivity import FULL, Part, Sensitivity, Setting, settings_of
from kvprof.evaluation.sensitivity_answers import answers, layers_that_stay
from kvprof.interrupt import Stop
from kvprof.models.load import LoadedModel
from kvprof.moments.calibrator import Calibrator
from kvprof.records.figures import LEAST_SEQUENCES
from kvprof.sources.grammar import parse_source

__all__ = ["Request", "chosen_layers", "study"]

# Tokens of text, and of each sequence on a CPU: about a minute of a small model.
_CPU_TOKENS, _GPU_TOKENS = 2048, 32768
_CPU_LENGTH = 256
#: How llama.cpp's q4_1 cuts a row: blocks of 32 values with a float16 scale and minimum.
_BLOCK = 32


@dataclass(frozen=True)
class Request:
    """What the user asked for, resolved as far as it goes without the sample."""

    by_head: bool
    layers: tuple[int, ...]
    bits: tuple[str, ...]
    quantiser: str
    ranks: tuple[int, ...]
    exact_first: int
    limit: float
    text: tuple[str, ...]
    tokens: int | None
    seq_len: int | None
    batch_size: int | None


def chosen_layers(text: str | None, number: int) -> tuple[int, ...]:
    """Return the layers that ``--layers`` names, ascending; all without it.

    Raises
    ------
    UsageError
        For one that the model does not have.
    """
    if text is None:
        return tuple(range(number))
    found = set()
    for entry in text.split(","):
        try:
            index = int(entry)
        except ValueError:
            raise UsageError(f"--layers: {entry.strip()[:40]!r} is no number of a layer") from None
        if not -number <= index < number:
            raise UsageError(f"--layers: there is no layer {index}; the model has {number}")
        found.add(index % number)
    return tuple(sorted(found))


def study(
    loaded: LoadedModel, request: Request, stop: Stop
) -> tuple[dict[str, Any], dict[str, Any], list[str], bool]:
    """Measure, and return the inputs, data and warnings of the result, and whether it is complete.

    Raises
    ------
    UsageError
        For text or settings that do not fit the model.
    typer.Exit
        With 130 when the calibration of ranks was interrupted.
    """
    usual, length = _GPU_TOKENS, default_shape(loaded)[1]
    if loaded.device.type == "cpu":
        usual, length = _CPU_TOKENS, min(_CPU_LENGTH, length)
    length = request.seq_len or length
    if request.tokens is not None and request.tokens < length:
        raise UsageError(
            f"--tokens {request.tokens:,}: fewer than one sequence of {length:,}; take more, or "
            "give a shorter --seq-len"
        )
    wanted = max(1, (request.tokens or usual) // length)
    widths = [width for x in loaded.layout.layers for width in (x.qk_head_dim, x.v_head_dim)]
    for rank in request.ranks:
        if rank >= min(widths):
            raise UsageError(
                f"--ranks: {rank} keeps all of heads of {min(widths)}; name a smaller one"
            )
    sources = tuple(parse_source(name, what="--text") for name in request.text)
    with console.status("reading what is evaluated"):
        samples = text_samples(loaded, sources, seq_len=length, sequences=wanted)
    measuring = Sensitivity(loaded, samples, request.batch_size)
    family = None
    if request.ranks:
        given = calibration_options(None, None, seq_len=None)
        calibrator = Calibrator(
            loaded, given, progress=console.track, should_stop=stop, notice=console.warn
        )
        with calibration_interrupts():
            family = calibrator.family("kq", grid=1, minimum=1)
    settings = settings_of(
        loaded, request.quantiser, request.bits, request.ranks, request.exact_first, family
    )
    parts = measuring.parts(request.layers, by_head=request.by_head)
    sequences = sum(len(sample.ids) for sample in samples)
    inputs = {
        "model": loaded.spec,
        "fingerprint": loaded.fingerprint,
        **loaded.origin,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "by": "head" if request.by_head else "layer",
        "layers": list(request.layers),
        "bits": list(request.bits),
        "quantiser": request.quantiser,
        "ranks": list(request.ranks),
        "exact_first": request.exact_first,
        "limit": request.limit,
        "text": [sample.name for sample in samples],
        "sequences": sequences,
        "seq_len": length,
        "context": measuring.context,
    }
    warnings = []
    if sequences < LEAST_SEQUENCES:
        warnings.append(
            f"intervals come from {sequences} sequence{'s' if sequences > 1 else ''}, too few to "
            f"vary as other text would: take --tokens {LEAST_SEQUENCES * length} or more"
        )
    noise = None
    with console.track(f"{len(parts) * len(settings)} cells", len(parts) * len(settings)) as bar:
        if not stop():
            noise = measuring.measure({})
        rows, complete = measuring.cells(parts, settings, advance=bar.advance, should_stop=stop)
    data: dict[str, Any] = {
        "model_layers": len(loaded.layout.layers),
        "heads": [loaded.layout.layers[layer].num_kv_heads for layer in request.layers],
        "baseline_accuracy": noise["baseline_accuracy"] if noise else None,
        "noise": noise["kl"] if noise else None,
        "cells": rows,
        **answers(rows, parts, request.limit),
        "budgets": [],
        "flags": [],
    }
    if complete:
        with console.status("measuring what follows from the cells as a whole"):
            whole = len(request.layers) == len(loaded.layout.layers)
            for make in (_budgets, _flags) if whole else (_budgets,):
                complete = complete and make(measuring, request, parts, settings, data, stop)
            if not whole:
                warnings.append(
                    "flags of other programs are for the whole cache; they need all layers"
                )
    if not complete:
        warnings.insert(0, "interrupted: what was measured is here, the rest is missing")
    return inputs, data, warnings, complete


def _budgets(
    measuring: Sensitivity,
    request: Request,
    parts: list[Part],
    settings: list[Setting],
    data: dict[str, Any],
    stop: Stop,
) -> bool:
    """Hand out settings at the bytes of each one that all parts could take; measure both."""
    plain = [one for one in settings if not one.spec.exact_first]
    full = sum(measuring.bytes_per_token(part, None) for part in parts)
    for setting in plain:
        size = sum(measuring.bytes_per_token(part, setting) for part in parts)
        found = measuring.allocation(data["cells"], parts, plain, size)
        if found is None or size >= full:
            continue
        if stop():
            return False
        chosen, predicted = found
        own = sum(measuring.bytes_per_token(part, one) for part, one in chosen.items())
        uniform = dict.fromkeys(parts, setting)
        mixed = {part: one for part, one in chosen.items() if one is not None}
        data["budgets"].append(
            {
                "like": setting.spec.name,
                "rate": 1 - own / full,
                "bytes_per_token": own,
                "predicted_kl": predicted,
                "measured": measuring.measure(measuring.assignment(mixed)),
                "uniform": {
                    "rate": 1 - size / full,
                    "bytes_per_token": size,
                    "predicted_kl": sum(
                        row["kl"]
                        for row in data["cells"]
                        if row["setting"] == setting.spec.name and not row["exact_first"]
                    ),
                    "measured": measuring.measure(measuring.assignment(uniform)),
                },
                "choices": [
                    {
                        "layer": part.layer,
                        "side": part.side,
                        "kv_head": part.kv_head,
                        "setting": FULL if one is None else one.spec.name,
                    }
                    for part, one in chosen.items()
                ],
            }
        )
    return True


def _flags(
    measuring: Sensitivity,
    request: Request,
    parts: list[Part],
    settings: list[Setting],
    data: dict[str, Any],
    stop: Stop,
) -> bool:
    """Say what other programs' flags can say of it, and measure just that."""
    named = {one.spec.name: one for one in settings if not one.spec.exact_first}
    for make in (_vllm, _llama_cpp):
        if stop():
            return False
        if (found := make(measuring, request, parts, named, data["cells"])) is not None:
            data["flags"].append(found)
    return True


def _rows(cells: list[dict[str, Any]], setting: str) -> list[dict[str, Any]]:
    return [row for row in cells if row["setting"] == setting and not row["exact_first"]]


def _vllm(
    measuring: Sensitivity,
    request: Request,
    parts: list[Part],
    named: dict[str, Setting],
    cells: list[dict[str, Any]],
) -> dict[str, Any] | None:
    if "fp8" not in named:
        return None
    stay = layers_that_stay(_rows(cells, "fp8"), request.limit)
    if len(stay) == len(request.layers):
        return None
    flags = "--kv-cache-dtype fp8"
    if stay:
        flags += " --kv-cache-dtype-skip-layers " + " ".join(map(str, stay))
    chosen = {part: named["fp8"] for part in parts if part.layer not in stay}
    return {
        "program": "vLLM",
        "flags": flags,
        "says": f"keys and values of all {'other ' * bool(stay)}layers in FP8 (e4m3) with a "
        "scale of 1",
        "unsaid": "measured with exact queries and an exact prefill; some of vLLM's attention "
        "backends turn queries into FP8 too, and scales from a checkpoint change the figures",
        "measured": measuring.measure(measuring.assignment(chosen)),
    }


def _llama_cpp(
    measuring: Sensitivity,
    request: Request,
    parts: list[Part],
    named: dict[str, Setting],
    cells: list[dict[str, Any]],
) -> dict[str, Any] | None:
    facts = measuring.loaded.layout.layers
    blocks = all(x.qk_head_dim % _BLOCK == x.v_head_dim % _BLOCK == 0 for x in facts)
    if request.quantiser != "per-token" or "4 bits" not in named or not blocks:
        return None
    rows = _rows(cells, "4 bits")
    costs = {
        side: sum(row["kl"] for row in rows if row["side"] == side) for side in ("keys", "values")
    }
    sides = [side for side, cost in costs.items() if cost <= request.limit]
    if sum(costs[side] for side in sides) > request.limit:
        sides.remove(max(sides, key=costs.__getitem__))
    if not sides:
        return None
    flags = {side: "q4_1" if side in sides else "f16" for side in costs}
    chosen = {part: named["4 bits"] for part in parts if part.side in sides}
    return {
        "program": "llama.cpp",
        "flags": f"LLAMA_ATTN_ROT_DISABLE=1 … -ctk {flags['keys']} -ctv {flags['values']}",
        "says": f"4 bits of the {' and '.join(sides)} of all layers, each 32 values of a token "
        "with a float16 scale and minimum",
        "unsaid": "measured with an exact prefill, and what is f16 there in the model's dtype; "
        "without the variable llama.cpp rotates before it quantises, which is likely better; "
        "quantised values need flash attention (-fa on); 8 bits here are no q8_0, which has no "
        "minimum",
        "measured": measuring.measure(measuring.assignment(chosen)),
    }
