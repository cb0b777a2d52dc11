"""The passes of ``kvprof sensitivity``: cells, then what follows from them measured as a whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.output import Outcome, end_without_result
from kvprof.commands.planning import calibration_interrupts, calibration_options
from kvprof.errors import Interrupted, KvprofError, UsageError
from kvprof.evaluation.data import TextSample, default_shape, text_samples
from kvprof.evaluation.decode import mean_context
from kvprof.evaluation.sensitivity import Sensitivity, answers, layers_that_stay, refuse_shared
from kvprof.interrupt import Stop
from kvprof.methods.budget import BitAllocation, CandidateSet, candidates_of, parts_of_layers
from kvprof.methods.family import MethodInputs
from kvprof.methods.plan_files import save_plan
from kvprof.methods.registry import plan_family
from kvprof.methods.settings import FULL, SIDES, Part, Setting, settings_of
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.moments.calibrator import Calibrator
from kvprof.moments.tokens import content_digest, content_sketch
from kvprof.moments.uncalibrated import Laid, stand_in_family
from kvprof.sources.grammar import parse_source

if TYPE_CHECKING:
    from kvprof.commands.sensitivity import SensitivityRequest

__all__ = ["check_study", "chosen_layers", "read_samples", "study"]

# Tokens of text, and of each sequence on a CPU: about a minute of a small model.
_CPU_TOKENS, _GPU_TOKENS = 2048, 32768
_CPU_LENGTH = 64  # 32 sequences, which an interval takes
#: How llama.cpp's q4_1 cuts a row: blocks of 32 values with a float16 scale and minimum.
_BLOCK = 32


def chosen_layers(text: str | None, number: int) -> list[int]:
    """Return the layers that ``--layers`` names, ascending; all without it."""
    if text is None:
        return list(range(number))
    found = set()
    for entry in text.split(","):
        try:
            index = int(entry)
        except ValueError:
            raise UsageError(f"--layers: {entry.strip()[:40]!r} is not a layer index") from None
        if not -number <= index < number:
            raise UsageError(f"--layers: layer {index} does not exist; the model has {number}")
        found.add(index % number)
    return sorted(found)


def study(
    loaded: LoadedModel,
    request: "SensitivityRequest",
    layers: list[int],
    samples: list[TextSample],
    stop: Stop,
) -> Outcome:
    """Measure; an interrupt keeps what was measured before it."""
    measuring = Sensitivity(loaded, samples, request.batch_size)
    usual = calibration_options()
    how: dict[str, Any] = {"progress": console.track, "should_stop": stop, "notice": console.warn}
    with calibration_interrupts():
        given = Calibrator(loaded, usual, **how).inputs("kq" if request.ranks else "full")
    family = plan_family("kq", given, grid=1, minimum=1) if request.ranks else None
    settings = settings_of(
        given, request.quantiser, request.bits, request.ranks, request.exact_first, family
    )
    parts = parts_of_layers(loaded.layout, layers, by_head=request.by == "head")
    inputs = _inputs(measuring, request, layers, given)
    warnings: list[str] = []
    lost: list[str] = []
    with console.track(f"{len(parts) * len(settings)} cells", len(parts) * len(settings)) as bar:
        noise = measuring.measure({})
        rows, complete = measuring.cells(parts, settings, advance=bar.advance, should_stop=stop)
    if not rows:
        end_without_result("interrupted before anything was measured; no result")
    data: dict[str, Any] = {
        "model_layers": len(loaded.layout.layers),
        "heads": [loaded.layout.layers[layer].num_kv_heads for layer in layers],
        "baseline_accuracy": noise["baseline_accuracy"],
        "noise": noise["kl"],
        "cells": rows,
        **answers(rows, parts, request.limit),
        "budgets": [],
        "flags": [],
    }
    if complete:
        candidates = candidates_of(given, inputs, settings, rows)
        asked = None
        if request.rate is not None:
            asked = candidates.at_rate(request.rate, measuring.context)
            try:  # before the wholes: an interrupt leaves the plan
                if request.save is not None:
                    save_plan(asked.plan, request.save, force=request.force)
            except KvprofError as problem:
                lost.append(str(problem))
                inputs["saved"] = None
        wanted = [*_budgets(measuring, candidates, settings, data, asked)]
        if len(layers) == len(loaded.layout.layers):
            wanted += _flags(loaded, request, parts, settings, rows)
        else:
            warnings.append("flags of other programs are for the whole cache; they need all layers")
        complete = _measured(measuring, wanted, data, stop)
    elif request.save is not None:
        warnings.append(f"{request.save} was not written: not everything was measured")
    if not complete:
        warnings.insert(0, "interrupted: the result is incomplete")
    return Outcome(inputs=inputs, data=data, warnings=warnings, complete=complete, lost=lost)


def read_samples(
    loaded: OpenedModel, request: "SensitivityRequest", length: int | None
) -> list[TextSample]:
    """Read what is measured on, when the options have been held against it."""
    usual, longest = _GPU_TOKENS, default_shape(loaded)[1]
    if loaded.device.type == "cpu":
        usual, longest = _CPU_TOKENS, min(_CPU_LENGTH, longest)
    length = length or longest
    if request.tokens is not None and request.tokens < length:
        raise UsageError(
            f"--tokens {request.tokens:,} is less than one sequence of {length:,}; give more, or "
            "a shorter --seq-len"
        )
    wanted = max(1, (request.tokens or usual) // length)
    sources = tuple(parse_source(name, what="--text") for name in request.text or ("prose",))
    return text_samples(loaded, sources, seq_len=length, sequences=wanted, calibrating=True)


def check_study(
    laid: Laid, request: "SensitivityRequest", chosen: list[int], samples: list[TextSample]
) -> None:
    """Refuse what a model's layout rules out: ranks, bits, and a rate that none of them reaches."""
    refuse_shared(laid.layout)
    layers = laid.layout.layers
    width = min(width for x in layers for width in (x.qk_head_dim, x.v_head_dim))
    for rank in request.ranks:
        if rank >= width:
            raise UsageError(f"--ranks: {rank} is not below head_dim, {width}")
    given = MethodInputs(laid.layout, laid.fingerprint)
    family = stand_in_family(laid, "kq", grid=1, minimum=1) if request.ranks else None
    settings = settings_of(given, request.quantiser, request.bits, request.ranks, 0, family)
    if request.rate is not None:
        asked = {**request.inputs(), "layers": chosen, "ranks": ()}
        context = mean_context(samples[0].ids.shape[1])
        candidates_of(given, asked, settings, ()).check_reach(request.rate, context)


def _inputs(
    measuring: Sensitivity, request: "SensitivityRequest", layers: list[int], given: MethodInputs
) -> dict[str, Any]:
    loaded, samples = measuring.loaded, measuring.samples
    length = int(samples[0].ids.shape[1])
    calibration = None
    if given.moments is not None:
        keys = ("source", "tokens", "seq_len", "seed")
        known = {**given.moments.info, "tokens": given.moments.tokens}
        calibration = {key: known.get(key) for key in keys}
    return {
        "model": loaded.spec,
        "fingerprint": loaded.fingerprint,
        **loaded.origin,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        **request.inputs(),
        "layers": layers,
        "text": [sample.name for sample in samples],
        "sequences": sum(len(sample.ids) for sample in samples),
        "seq_len": length,
        "context": measuring.context,
        "calibration": calibration,
        # By which the same text is known again when a plan that these cells made is evaluated.
        "measured_on": {
            sample.name: {
                "source": sample.name,
                "tokens": sample.ids.numel(),
                "seq_len": length,
                "digest": content_digest(list(sample.ids.numpy())),
                "sketch": content_sketch(list(sample.ids.numpy())),
            }
            for sample in samples
        },
    }


# --- What follows from the cells, measured as a whole.


_Chosen = Mapping[Part, Setting | None]
#: The list that an entry goes to, the entry, its choice, and that of its ``uniform``.
_Whole = tuple[str, dict[str, Any], Sequence[_Chosen]]


def _key(chosen: _Chosen) -> frozenset[tuple[Part, str]]:
    return frozenset((part, one.spec.name) for part, one in chosen.items() if one is not None)


def _measured(
    measuring: Sensitivity, wanted: list[_Whole], data: dict[str, Any], stop: Stop
) -> bool:
    """Measure choices, each once; an interrupt keeps those that were measured."""
    total = len({_key(chosen) for _, _, choices in wanted for chosen in choices})
    known: dict[frozenset[tuple[Part, str]], dict[str, Any]] = {}
    with console.track(f"{total} allocations as a whole", total) as bar:
        for where, entry, choices in wanted:
            for chosen in choices:
                if (key := _key(chosen)) in known:
                    continue
                if stop():
                    return False
                try:
                    known[key] = measuring.measure(chosen)
                except Interrupted:
                    return False
                bar.advance(1)
            for one, chosen in zip((entry, entry.get("uniform") or {}), choices, strict=False):
                one["measured"] = known[_key(chosen)]
            data[where].append(entry)
    return True


def _budgets(
    measuring: Sensitivity,
    candidates: CandidateSet,
    settings: list[Setting],
    data: dict[str, Any],
    asked: BitAllocation | None,
) -> Iterator[_Whole]:
    """Hand out settings at the rate asked for, and at the bytes of each that all could take."""
    sizes = candidates.sizes(measuring.context)
    full = sum(sizes[part, FULL] for part in candidates.parts)

    def entry(allocation: BitAllocation, **more: Any) -> dict[str, Any]:
        names = {x: FULL if one is None else one.spec.name for x, one in allocation.chosen.items()}
        own = sum(sizes[part, name] for part, name in names.items())
        return {
            **{"like": None, "rate_asked": None, "uniform": None},
            **{"rate": 1 - own / full, "bytes_per_token": own},
            "predicted_kl": allocation.predicted_kl,
            "choices": [{**asdict(part), "setting": name} for part, name in names.items()],
            **more,
        }

    if asked is not None:
        rate = asked.plan.made["rate_asked"]
        yield "budgets", entry(asked, rate_asked=rate), (asked.chosen,)
    for setting in settings:
        size = sum(measuring.bytes_per_token(part, setting) for part in candidates.parts)
        found = None if setting.spec.exact_first else candidates.within(sizes, size)
        if found is None or size >= full:
            continue
        name = setting.spec.name
        total = sum(row["kl"] for row in _rows(data["cells"], name))
        uniform = {"rate": 1 - size / full, "bytes_per_token": size, "predicted_kl": total}
        every = dict.fromkeys(candidates.parts, setting)
        yield "budgets", entry(found, like=name, uniform=uniform), (found.chosen, every)


Rows = list[dict[str, Any]]


def _rows(cells: Rows, setting: str) -> Rows:
    return [row for row in cells if row["setting"] == setting and not row["exact_first"]]


def _flags(
    loaded: LoadedModel,
    request: "SensitivityRequest",
    parts: list[Part],
    settings: list[Setting],
    cells: Rows,
) -> Iterator[_Whole]:
    named = {one.spec.name: one for one in settings if not one.spec.exact_first}
    yield from _vllm(request.limit, named.get("fp8"), parts, _rows(cells, "fp8"))
    facts = loaded.layout.layers
    blocks = all(x.qk_head_dim % _BLOCK == x.v_head_dim % _BLOCK == 0 for x in facts)
    if blocks and request.quantiser == "per-token":
        yield from _llama_cpp(request.limit, named.get("4 bits"), parts, _rows(cells, "4 bits"))


def _vllm(limit: float, setting: Setting | None, parts: list[Part], rows: Rows) -> Iterator[_Whole]:
    """Say what vLLM's flags can say of it, to be measured just so."""
    stay = layers_that_stay(rows, limit)
    if setting is None or {part.layer for part in parts} == set(stay):
        return
    flags = "--kv-cache-dtype fp8"
    if stay:
        flags += " --kv-cache-dtype-skip-layers " + " ".join(map(str, stay))
    chosen = {part: setting for part in parts if part.layer not in stay}
    said = {
        "program": "vLLM",
        "flags": flags,
        "says": f"keys and values of all {'other ' * bool(stay)}layers in FP8 (e4m3) with a "
        "scale of 1",
        "unsaid": "measured with exact queries and an exact prefill; some of vLLM's attention "
        "backends turn queries into FP8 too, and scales from a checkpoint change the figures",
    }
    yield "flags", said, (chosen,)


def _llama_cpp(
    limit: float, setting: Setting | None, parts: list[Part], rows: Rows
) -> Iterator[_Whole]:
    """Say what llama.cpp's flags can say of it, to be measured just so."""
    costs = {side: sum(row["kl"] for row in rows if row["side"] == side) for side in SIDES}
    sides = [side for side, cost in costs.items() if cost <= limit]
    if sum(costs[side] for side in sides) > limit:
        sides.remove(max(sides, key=costs.__getitem__))
    if setting is None or not sides:
        return
    flags = {side: "q4_1" if side in sides else "f16" for side in costs}
    chosen = {part: setting for part in parts if part.side in sides}
    said = {
        "program": "llama.cpp",
        "flags": f"LLAMA_ATTN_ROT_DISABLE=1 … -ctk {flags['keys']} -ctv {flags['values']}",
        "says": f"4 bits of the {' and '.join(sides)} of all layers, each 32 values of a token "
        "with a float16 scale and minimum",
        "unsaid": "measured with an exact prefill, and what is f16 there in the model's dtype; "
        "without the variable llama.cpp rotates before it quantises, which is likely better; "
        "quantised values need flash attention (-fa on); 8 bits here are no q8_0, which has no "
        "minimum",
    }
    yield "flags", said, (chosen,)
