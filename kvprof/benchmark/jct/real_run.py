"""Real runs of a request's cases; with ``--check`` each one is composed too."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvprof.benchmark.jct.ablations import Variant, parse_variant
from kvprof.benchmark.jct.composed import measure_case
from kvprof.benchmark.jct.composer import Composer
from kvprof.benchmark.jct.composition import Composition
from kvprof.benchmark.jct.lengths import Request
from kvprof.benchmark.jct.measured import Bench
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.real import look_at_case
from kvprof.benchmark.jct.real import measure_case as measure_real
from kvprof.benchmark.jct.request import case_name
from kvprof.benchmark.jct.run import Run
from kvprof.benchmark.jct.subjects import (
    check_names,
    has_weights,
    load_subject,
    make_plans,
    needs_calibration,
    plan_ready,
    prompt,
)
from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.benchmark.limits import flop_rate
from kvprof.benchmark.machine import open_machine
from kvprof.benchmark.ranks import Widths, full_widths
from kvprof.benchmark.timing import Interrupted
from kvprof.errors import KvprofError, UsageError
from kvprof.models.load import LoadedModel
from kvprof.records.events import CaseFinished

__all__ = ["CHECKED", "NEAR", "check_methods", "differences", "run_real"]

# --- ``--check``: a real run of random-weight layers against a composed run of the same case.


#: What both ways run on the same kernels.
CHECKED = ("full", "fdc", "kq", "uniform")
#: How far the two may be apart without a warning.
NEAR = 0.05


def check_methods(methods: Sequence[str]) -> None:
    """Refuse methods whose real run does not use the kernels that a composed run times.

    Raises
    ------
    UsageError
    """
    if other := [name for name in methods if name not in CHECKED]:
        raise UsageError(
            f"--check: a real run of {other[0]} does not use the kernels that a composed run "
            f"times; compare {', '.join(CHECKED)}"
        )


def differences(
    case: str,
    method: str,
    real: CaseFinished,
    composed: Composition,
    warn: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return the rows of ``data.check`` for one case, and warn where the two are far apart.

    Parameters
    ----------
    case, method : str
    real : CaseFinished
        Its uninstrumented times count.
    composed : Composition
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
    if rows and abs(rows[-1]["difference"]) > NEAR:
        warn(
            f"{case}: the composed run is {rows[-1]['difference']:+.1%} off the real one, more "
            f"than {NEAR:.0%}"
        )
    return rows


# At least and at most, where nobody says how many.
_REPEATS = {"cuda": (3, 10), "cpu": (3, 9)}


def run_real(run: Run) -> None:
    """Load the model, plan every method, and let the model answer every case.

    Parameters
    ----------
    run : Run
    """
    request = run.request
    if request.check:
        check_methods(request.methods)
        if has_weights(request.model):
            raise UsageError(
                "--check draws random weights for a shape: name one, such as --model Llama-3.1-8B"
            )
    check_names(request)
    with run.progress(f"loading {request.model}", 1) as bar:
        loaded, shape = load_subject(request)
        bar.advance()
    run.device = loaded.device
    cases = [(case_name(*case), *case) for case in request.cases()]
    names = [name for name, *_ in cases]
    if request.check:
        names = [name for case in names for name in (case, _composed_name(case))]
    run.start(names, _described(loaded, shape))
    if shape is None:
        _look_ahead(run, loaded, cases)
    plans = make_plans(loaded, shape, request, progress=run.progress, should_stop=run.should_stop)
    repeats, most = _REPEATS[loaded.device.type]
    if request.repeats is not None:
        repeats = most = request.repeats
    # Against a composed run the same kernels have to run, and on a GPU without the host's gaps.
    kernels = "on" if request.check else request.kernels
    graph = kernels == "on" and loaded.device.type == "cuda"
    with (
        Telemetry(run.emit, run.now, loaded.device) as telemetry,
        run.progress("cases", len(cases)) as bar,
    ):
        for name, method, batch, given, written in cases:
            _tell(bar, name)
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
                    energy=telemetry.energy_joules,
                )
                if found is None or run.should_stop():
                    raise Interrupted
                if request.check:
                    assert shape is not None  # has_weights was asked
                    composed = _composed(
                        run, shape, loaded.dtype, name, method, batch, given, written
                    )
                    rows = differences(name, method, found, composed, partial(run.warn, case=name))
                    checked = run.extra.setdefault("check", {"layers": shape.layers, "rows": []})
                    checked["rows"] += [
                        {**row, "batch": batch, "input_len": given, "output_len": written}
                        for row in rows
                    ]
            bar.advance()


def _look_ahead(run: Run, loaded: LoadedModel, cases: list[tuple[str, str, int, int, int]]) -> None:
    """Show parts of the first case that can run as it is, where others are calibrated first."""
    ready = [case for case in cases if not needs_calibration(case[1])]
    if not ready or len(ready) == len(cases):
        return  # a case's own measurement begins with the same
    name, method, batch, given, written = ready[0]
    # What is wrong with it is said once, by the measurement.
    known = (KvprofError, MemoryError, torch.OutOfMemoryError)
    with run.spared(name), suppress(*known), run.progress(f"first look at {name}", 1):
        look_at_case(
            loaded,
            plan_ready(loaded, method, run.request),
            case=name,
            input_ids=prompt(loaded, batch, given, run.request.seed),
            output_len=written,
            emit=run.emit,
            now=run.now,
            kernels=run.request.kernels,
        )


def _tell(bar: Any, text: str) -> None:
    """Say in the bar what is measured, where it can say something."""
    describe = getattr(bar, "describe", None)
    if describe is not None:
        describe(text)


def _composed_name(case: str) -> str:
    method, rest = case.split(" ", 1)
    return f"{method} composed {rest}"


def _composed(
    run: Run,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    method: str,
    batch: int,
    given: int,
    written: int,
) -> Composition:
    """Compose a case as the runtime runs it: full width through the same kernels as the others."""
    machine = open_machine(run.device)
    variant, widths = _as_run(method, shape, run.request.rate)
    case = _composed_name(name)
    bench = Bench(
        shape,
        machine,
        dtype,
        run.request.seed,
        should_stop=run.should_stop,
        warn=lambda text: run.warn(text, case),
    )
    asked = Request(given, written)
    composer = Composer(bench, variant, widths, batch, [asked], flop_rate(machine, dtype))
    with torch.inference_mode():
        made = measure_case(
            shape,
            method,
            case=case,
            batch=batch,
            input_len=given,
            output_len=written,
            dtype=dtype,
            device=run.device,
            emit=run.emit,
            now=run.now,
            should_stop=run.should_stop,
            composer=composer,
        )
    for text in bench.doubts():
        run.warn(text, case)
    return made


def _as_run(method: str, shape: ModelShape, rate: float) -> tuple[Variant, Widths | None]:
    widths: Widths | None
    if method == "full":
        # The runtime's kernels store full width as what it is to them: heads of width d.
        variant, widths = parse_variant("uniform"), full_widths(shape.attention)
    else:
        variant = parse_variant(method)
        widths = variant.widths(shape.attention, rate)
    return replace(variant, name=f"{method} composed"), widths


def _described(loaded: LoadedModel, shape: ModelShape | None) -> dict[str, Any]:
    if shape is not None:
        return {**shape.described(), "weights": "random"}
    first = loaded.layout.layers[0]
    config = loaded.model.config.get_text_config(decoder=True)
    return {
        "name": loaded.spec
        if loaded.folder is None or loaded.spec == "reference"
        else loaded.folder.name,
        "architecture": loaded.layout.architecture,
        "layers": len(loaded.layout.layers),
        "hidden_size": config.hidden_size,
        "num_heads": first.num_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.qk_head_dim,
        "vocab_size": loaded.vocab_size,
        "context": loaded.context_length,
        "fingerprint": loaded.fingerprint,
    }
