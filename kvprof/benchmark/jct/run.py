"""``run_jct``: every case of a request, as events in a journal."""

from collections.abc import Callable
from typing import Any

from kvprof.benchmark.jct.composed import run_composed
from kvprof.benchmark.jct.model import (
    check_names,
    load_run_model,
    make_plans,
    prompt,
)
from kvprof.benchmark.jct.model_shape import ModelShape
from kvprof.benchmark.jct.real import measure_real
from kvprof.benchmark.jct.request import JctRequest, Run, case_name
from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.benchmark.machine import all_threads, gpu_warnings
from kvprof.benchmark.timing import DeviceLost
from kvprof.errors import FailedError, Interrupted, KvprofError
from kvprof.models.load import LoadedModel
from kvprof.models.placement import main_device
from kvprof.progress import Progress, silent
from kvprof.records.events import RunFinished
from kvprof.records.journal import Journal

__all__ = [
    "JctRequest",
    "run_jct",
]

# --- Real runs.


# At least and at most, where nobody says how many.
_REPEATS = {"cuda": (3, 10), "cpu": (3, 9)}


def run_real(run: Run) -> None:
    """Load the model, plan every method, and let the model answer every case."""
    request = run.request
    check_names(request)
    with run.progress(f"loading {request.model}", 1) as bar:
        loaded, shape = load_run_model(request)
        bar.advance()
    run.device = loaded.device
    cases = [(case_name(*case), *case) for case in request.cases()]
    run.start([name for name, *_ in cases], _described(loaded, shape))
    if run.should_stop():
        raise Interrupted
    plans = make_plans(loaded, shape, request, progress=run.progress, should_stop=run.should_stop)
    repeats, most = _REPEATS[loaded.device.type]
    if request.repeats is not None:
        repeats = most = request.repeats
    kernels = request.kernels
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
                    energy=telemetry.energy_joules,
                )
                if found is None or run.should_stop():
                    raise Interrupted
            bar.advance()


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
    """Measure every case of a request; the journal keeps what was measured if the run ends."""
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
            reason = f"the GPU stopped ({stopped}); later cases were not measured"
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
