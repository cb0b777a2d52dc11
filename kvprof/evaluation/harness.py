"""Tasks of lm-evaluation-harness, run by its own Python interface on a compressed model.

The harness scores choices in single forward passes and lets the model generate where a task asks
for it; both run compressed, but a single pass does not show what quantising and eviction cost: of
such plans only what was generated is kept. Its protocol is its own: figures are comparable to
others of the harness, not to the rest of an evaluation.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.models.noise import quiet
from kvprof.requirements import extra_command
from kvprof.runtime.compressed import compressed
from kvprof.runtime.rows import remembered_rows

__all__ = [
    "HarnessSettings",
    "check_harness",
    "harness_rows",
    "settings_described",
    "single_pass_tasks",
]

HARNESS_PROTOCOL = (
    "lm-evaluation-harness: choices are scored in a single pass, texts are generated greedily "
    "or as the task states; choices are n/a for methods that a single pass does not fully test"
)
_GENERATES = "generate_until"
_STDERR = "_stderr"
_SEED = 0  # of its random generators
_COUNT = "sample_len"  # of the questions; it stands among the figures
_LOGGERS = ("lm-eval", "lm_eval", "datasets")


@dataclass(frozen=True)
class HarnessSettings:
    """What of the harness is run."""

    tasks: tuple[str, ...]  # names that it knows, also from `include`
    limit: int | None = None  # questions of each task, at most
    include: Path | None = None  # A folder with task files (YAML) of one's own
    #: Its requests at once. It pads on the right, so that windows and levels of a plan see the
    #: padding as the newest tokens; with 1 there is none.
    batch_size: int = 1


def check_harness(settings: HarnessSettings) -> None:
    """Find out before the work whether the tasks can be run."""
    if find_spec("lm_eval") is None:
        raise LackingError(f"--harness requires lm-eval: {extra_command('harness')}")
    if settings.include is not None and not settings.include.is_dir():
        raise UsageError(f"--harness-include {settings.include} is not a folder")
    with _silenced():
        known = set(_manager(settings.include).all_tasks)
    for task in settings.tasks:
        if task not in known:
            raise UsageError(
                f"--harness: lm-eval has no task {task!r} (see lm_eval ls tasks); "
                "--harness-include adds your own"
            )


def harness_rows(
    loaded: LoadedModel, plan: Plan | None, settings: HarnessSettings
) -> list[dict[str, Any]]:
    """Run the tasks on a model, compressed or as it is."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    # Before the context: the wrapper examines the model, and the context then swaps its modules.
    with _silenced():
        model = HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer(),
            batch_size=settings.batch_size,
            max_length=loaded.context_length,
        )
    context = contextlib.nullcontext() if plan is None else compressed(loaded, plan)
    try:
        with remembered_rows(), context, _silenced():
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=list(settings.tasks),
                limit=settings.limit,
                task_manager=_manager(settings.include),
                random_seed=_SEED,
                numpy_random_seed=_SEED,
                torch_random_seed=_SEED,
                fewshot_random_seed=_SEED,
                log_samples=False,
            )
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as problem:  # whatever a task's own code, or the download of its data, raises
        raise FailedError(f"lm-eval failed: {type(problem).__name__}: {problem}") from problem
    return _rows(found, "full" if plan is None else plan.method)


def settings_described(settings: HarnessSettings) -> dict[str, Any]:
    """Return the settings as a result keeps them."""
    return {
        "tasks": list(settings.tasks),
        "limit": settings.limit,
        "include": settings.include.name if settings.include is not None else None,
        "batch_size": settings.batch_size,
        "version": version("lm-eval"),
        "protocol": HARNESS_PROTOCOL,
    }


def _rows(found: dict[str, Any], method: str) -> list[dict[str, Any]]:
    counts = found.get("n-samples", {})
    single = single_pass_tasks(found)
    rows = []
    for task, figures in found["results"].items():
        for key, value in figures.items():
            name, _, variant = key.partition(",")
            if name.endswith(_STDERR) or name == _COUNT or not isinstance(value, int | float):
                continue
            spread = figures.get(f"{name}{_STDERR},{variant}")
            rows.append(
                {
                    "method": method,
                    "task": task,
                    "metric": name if variant in ("", "none") else f"{name} ({variant})",
                    "value": float(value),
                    "stderr": float(spread) if isinstance(spread, int | float) else None,
                    "items": counts.get(task, {}).get("effective"),
                    "single_pass": task in single,
                }
            )
    return rows


def single_pass_tasks(found: dict[str, Any]) -> set[str]:
    """Return the tasks of a run of the harness that it did not let the model generate for."""
    members = found.get("group_subtasks", {})

    def single(task: str) -> bool:
        if members.get(task):
            return any(single(member) for member in members[task])
        return bool(found.get("configs", {}).get(task, {}).get("output_type") != _GENERATES)

    return {task for task in found["results"] if single(task)}


@cache
def _manager(include: Path | None) -> Any:
    """Return the harness's index of tasks; it reads thousands of files for it, so only once."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(include) if include is not None else None)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hold back what the harness prints, logs and draws: stdout and stderr are kvprof's."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with (
            quiet(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
