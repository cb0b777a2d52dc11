"""``run_jct``: every case of a request, as events in a journal."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvprof.benchmark.external import (
    VllmShape,
    check_measured,
    check_vllm,
    measure_vllm,
    not_asked,
    not_reached,
)
from kvprof.benchmark.jct.ablations import composed_method, parse_variant
from kvprof.benchmark.jct.composed import measure_composed, run_composed
from kvprof.benchmark.jct.composer import ComposedRequest, Composer, RequestLengths
from kvprof.benchmark.jct.layer_bench import LayerBench
from kvprof.benchmark.jct.model import (
    check_names,
    load_run_model,
    make_plans,
    needs_calibration,
    plan_ready,
    prompt,
)
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.real import measure_real, preview_real
from kvprof.benchmark.jct.request import JctRequest, Run, case_name
from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.benchmark.limits import flop_rate
from kvprof.benchmark.machine import all_threads, gpu_warnings, open_machine
from kvprof.benchmark.methods import Method
from kvprof.benchmark.shapes import has_weights
from kvprof.benchmark.timing import DeviceLost
from kvprof.errors import FailedError, Interrupted, KvprofError, UsageError
from kvprof.models.load import LoadedModel
from kvprof.models.placement import main_device
from kvprof.progress import Progress, silent
from kvprof.records.events import CaseFinished, RunFinished
from kvprof.records.journal import Journal

__all__ = [
    "JctRequest",
    "differences",
    "run_jct",
]

# --- Real runs; with ``--check`` of random-weight layers, each held against a composed run.


#: What both ways run on the same kernels.
CHECKED_METHODS = ("full", "fdc", "kq", "uniform")
#: How far the two may be apart without a warning.
MOST_DIFFERENCE = 0.05


def check_methods(methods: Sequence[str]) -> None:
    """Refuse methods whose real run does not use the kernels that a composed run times.

    Raises
    ------
    UsageError
    """
    if other := [name for name in methods if name not in CHECKED_METHODS]:
        raise UsageError(
            f"--check: a real run of {other[0]} does not use the kernels that a composed run "
            f"times; compare {', '.join(CHECKED_METHODS)}"
        )


def differences(
    case: str,
    method: str,
    real: CaseFinished,
    composed: ComposedRequest,
    warn: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return the rows of ``data.check`` for one case, and warn where the two are far apart.

    Parameters
    ----------
    case, method : str
    real : CaseFinished
        Its uninstrumented times count.
    composed : ComposedRequest
    warn : callable
    """
    rows: list[dict[str, Any]] = []
    for phase, measured, made in (
        ("prefill", real.prefill_seconds, composed.prefill_seconds),
        ("decode", real.decode_seconds, composed.decode_seconds),
        ("both", real.prefill_seconds + real.decode_seconds, composed.jct),
    ):
        if measured <= 0:
            continue
        rows.append(
            {
                "method": method,
                "phase": phase,
                "real_seconds": measured,
                "composed_seconds": made,
                "difference": made / measured - 1,
            }
        )
    if rows and abs(rows[-1]["difference"]) > MOST_DIFFERENCE:
        warn(
            f"{case}: the composed run is {rows[-1]['difference']:+.1%} off the real one, more "
            f"than {MOST_DIFFERENCE:.0%}"
        )
    return rows


# At least and at most, where nobody says how many.
_REPEATS = {"cuda": (3, 10), "cpu": (3, 9)}


def run_real(run: Run) -> None:
    """Load the model, plan every method, and let the model answer every case; then vLLM, if asked.

    Parameters
    ----------
    run : Run
    """
    request = run.request
    if request.vllm:
        check_vllm()
    run.extra["external"] = not_reached() if request.vllm else not_asked()
    shape = _model_answers(run)
    if not request.vllm or run.should_stop():
        return
    # The model is no longer needed, and its memory is the engine's.
    gc.collect()
    cases = [(batch, given, written) for _, batch, given, written in request.cases()]
    external = measure_vllm(
        shape, cases, seed=request.seed, progress=run.progress, should_stop=run.should_stop
    )
    run.extra["external"] = external
    if run.should_stop():
        raise Interrupted
    with run.spared("vLLM"):
        check_measured(external)


def _model_answers(run: Run) -> VllmShape:
    request = run.request
    if request.check:
        check_methods(request.methods)
        if has_weights(request.model):
            raise UsageError(
                "--check draws random weights for a shape: name one, such as --model Llama-3.1-8B"
            )
    check_names(request)
    with run.progress(f"loading {request.model}", 1) as bar:
        loaded, shape = load_run_model(request)
        bar.advance()
    run.device = loaded.device
    cases = [(case_name(*case), *case) for case in request.cases()]
    names = [name for name, *_ in cases]
    if request.check:
        names = [name for case in names for name in (case, _composed_name(case))]
    run.start(names, _described(loaded, shape))
    if shape is None:
        _look_ahead(run, loaded, cases)
    if run.should_stop():
        raise Interrupted
    plans = make_plans(loaded, shape, request, progress=run.progress, should_stop=run.should_stop)
    repeats, most = _REPEATS[loaded.device.type]
    if request.repeats is not None:
        repeats = most = request.repeats
    # Against a composed run the same kernels have to run, and on a GPU without the host's gaps;
    # parts of a composed layer are the model's own.
    kernels = "on" if request.check else request.kernels
    graph = None if kernels == "auto" else kernels == "on" and loaded.device.type == "cuda"
    with (
        Telemetry(run.emit, run.now, loaded.device) as telemetry,
        run.progress("cases", len(cases)) as bar,
    ):
        for name, method, batch, given, written in cases:
            bar.describe(name)
            with run.case(name):
                ids = prompt(loaded, batch, given, request.seed)
                found = measure_real(
                    loaded,
                    plans[method],
                    case=name,
                    input_ids=ids,
                    output_len=written,
                    emit=run.emit,
                    now=run.now,
                    should_stop=run.should_stop,
                    repeats=repeats,
                    most=most,
                    kernels=kernels,
                    graph=graph,
                    fused=not request.check,
                    energy=telemetry.energy_joules,
                )
                if found is None or run.should_stop():
                    raise Interrupted
                if request.check:
                    assert shape is not None  # has_weights was asked
                    composed = _composed_beside(
                        run, shape, loaded.dtype, name, method, batch, given, written
                    )
                    rows = differences(name, method, found, composed, partial(run.warn, case=name))
                    checked = run.extra.setdefault("check", {"layers": shape.layers, "rows": []})
                    checked["rows"] += [
                        {**row, "batch": batch, "input_len": given, "output_len": written}
                        for row in rows
                    ]
            bar.advance()
    return VllmShape.of(loaded)


def _look_ahead(run: Run, loaded: LoadedModel, cases: list[tuple[str, str, int, int, int]]) -> None:
    """Show parts of the first case that can run as it is, where others are calibrated first."""
    ready = [case for case in cases if not needs_calibration(case[1], run.request)]
    if not ready or len(ready) == len(cases) or run.should_stop():
        return  # a case's own measurement begins with the same
    name, method, batch, given, written = ready[0]
    # What is wrong with it is said once, by the measurement.
    known = (KvprofError, MemoryError, torch.OutOfMemoryError)
    with run.spared(name), suppress(*known), run.progress(f"first look at {name}", 1):
        preview_real(
            loaded,
            plan_ready(loaded, method, run.request),
            case=name,
            input_ids=prompt(loaded, batch, given, run.request.seed),
            output_len=written,
            emit=run.emit,
            now=run.now,
            should_stop=run.should_stop,
            kernels=run.request.kernels,
        )


def _composed_name(case: str) -> str:
    method, rest = case.split(" ", 1)
    return f"{method} composed {rest}"


def _composed_beside(
    run: Run,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    method: str,
    batch: int,
    given: int,
    written: int,
) -> ComposedRequest:
    """Compose a case as the runtime runs it: full width through the same kernels as the others."""
    machine = open_machine(run.device)
    as_run = _as_run(method, shape, run.request.rate, given + written, run.device, dtype)
    case = _composed_name(name)
    bench = LayerBench(
        shape,
        machine,
        dtype,
        run.request.seed,
        should_stop=run.should_stop,
        warn=lambda text: run.warn(text, case),
    )
    asked = RequestLengths(given, written)
    composer = Composer(bench, as_run, batch, [asked], flop_rate(machine, dtype))
    with torch.inference_mode():
        made = measure_composed(composer, asked, case=case, emit=run.emit, now=run.now)
    for text in bench.spread_warnings():
        run.warn(text, case)
    return made


def _as_run(
    name: str, shape: ModelShape, rate: float, tokens: int, device: torch.device, dtype: torch.dtype
) -> Method:
    # The runtime's kernels store full width as what it is to them: heads of width d.
    asked, wanted = ("uniform", 0.0) if name == "full" else (name, rate)
    method = composed_method(
        parse_variant(asked), shape.attention, wanted, tokens=tokens, device=device, dtype=dtype
    )
    return replace(method, name=f"{name} composed")


def _described(loaded: LoadedModel, shape: ModelShape | None) -> dict[str, Any]:
    if shape is not None:
        return {**shape.described(), "weights": "random"}
    first = loaded.layout.layers[0]
    config = loaded.model.config.get_text_config(decoder=True)
    return {
        "name": _name(loaded),
        "architecture": loaded.layout.architecture,
        "layers": len(loaded.layout.layers),
        "hidden_size": config.hidden_size,
        "num_heads": first.num_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.qk_head_dim,
        "vocab_size": loaded.vocab_size,
        "context": loaded.context_length,
        "fingerprint": loaded.fingerprint,
        "gguf": loaded.gguf.described if loaded.gguf is not None else None,
    }


def _name(loaded: LoadedModel) -> str:
    """Return what a model is called, without where it lies."""
    if loaded.folder is None or loaded.spec in ("reference", "smollm2"):
        return loaded.spec
    return loaded.folder.name if loaded.gguf is None else loaded.gguf.path.name


_INTERRUPTED = "interrupted"


def run_jct(
    request: JctRequest,
    journal: Journal,
    *,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Measure every case of a request and write what happens as events.

    The last event says whether all was measured. What was measured stays in the journal however the
    run ends.

    Parameters
    ----------
    request : JctRequest
    journal : Journal
        Entered.
    progress : Progress
        Shows how far the cases are.
    should_stop : callable
        Asked between samples and forward passes; True ends the run.

    Raises
    ------
    UsageError, LackingError, FailedError
        When nothing can be measured, before the first event or with the reason in the last one; and
        FailedError when the GPU stops (what was measured before is in the journal).
    """
    device = main_device(request.device)
    run = Run(request, journal, progress, should_stop, device)
    measure = run_composed if request.composed else run_real
    reason: str | None = None
    lost: KvprofError | None = None
    with all_threads():
        try:
            measure(run)
        except KvprofError as problem:
            if not run.started:
                raise
            reason, lost = str(problem), problem
        except Interrupted:
            reason = _INTERRUPTED
        except DeviceLost as stopped:
            reason = f"the GPU stopped ({stopped}); what comes after it was not measured"
            lost = FailedError(reason)
    if not run.started:  # it ended while the model was being loaded
        if lost is not None:
            raise lost
        return
    if reason is None and should_stop():
        reason = _INTERRUPTED
    if reason is None and run.problems:
        reason = (
            "nothing could be measured"
            if not run.done
            else f"{len(run.problems)} of {len(run.problems) + run.done} cases were not measured"
        )
        reason += f": {run.problems[0]}"
    for text in gpu_warnings(device, before=False) if lost is None else []:
        run.warn(text)
    journal.emit(RunFinished(journal.now(), reason is None, reason, run.extra))
    if lost is not None:
        raise lost
    if run.problems and not run.done:
        raise run.problems[0]
