"""Loading what commands plan for and evaluate on, calibrating, and making a plan.

It imports torch: only where the work begins. Commands without plans need `loading` alone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprof import console
from kvprof.analysis.stats import LEAST_SEQUENCES
from kvprof.commands.loading import load_for_command
from kvprof.commands.options import read_counts
from kvprof.commands.output import end_without_result
from kvprof.errors import Interrupted, UsageError
from kvprof.evaluation.data import TaskSelection, TextSample, default_shape, text_samples
from kvprof.evaluation.decode import check_steps
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.interrupt import Stop
from kvprof.methods.family import PlanFamily, check_reached, plan_at, plan_for_rate
from kvprof.methods.low_rank import KNOBS
from kvprof.methods.plan import Plan
from kvprof.methods.registry import calibration_needs, has_one_setting, has_removal_rate
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.moments.uncalibrated import Laid, uncalibrated_family
from kvprof.sizes import parse_count
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, Source, SourceKind, parse_source

__all__ = [
    "Sample",
    "calibration_interrupts",
    "calibration_options",
    "check_plan_file",
    "check_plannable",
    "check_reach",
    "evaluation_context",
    "load_sample",
    "load_to_compress",
    "make_plan",
    "method_calibrator",
    "plan_of",
    "resolve_context",
]


def load_to_compress(
    model: str | None,
    choice: Mapping[str, Any],
    context: str | None,
    *,
    before: Callable[[OpenedModel], object] = lambda _: None,
    laid: Callable[[Laid], object] = lambda _: None,
    **how: Any,
) -> tuple[LoadedModel, int]:
    """Load the model that a plan is chosen for, when the choice has been looked at."""
    method, options = choice["method"], choice["options"]
    needs = None if method is None else calibration_needs(method, **options)
    tokens: list[int] = []

    def first(opened: OpenedModel) -> None:
        check_plan_file(opened, choice["plan_file"])
        tokens.append(resolve_context(context, opened))
        if needs is not None:
            source = parse_source(choice["calibrate"] or needs.source, what="--calibrate")
            if source.kind in (SourceKind.TEXT, SourceKind.EMBEDDED):
                opened.tokenizer()
        before(opened)

    def then(one: Laid) -> None:
        laid(one)
        check_plannable(one, **choice, context=tokens[0])

    return load_for_command(model, **how, before=first, laid=then), tokens[0]


def evaluation_context(context_length: int) -> int:
    """Return the mean context of an evaluation, in tokens.

    Sequences are 2,048 tokens long, or the model's context; their second half is decoded, so that
    three quarters of them are in the cache on average.
    """
    return max(1, min(DEFAULT_SEQ_LEN, context_length) * 3 // 4)


def resolve_context(
    context: str | None, loaded: OpenedModel | None, plan: Plan | None = None
) -> int:
    """Return the tokens that ``--context`` names, or an evaluation's mean context."""
    if context is not None:
        return parse_count(context, what="--context")
    if loaded is not None:
        return evaluation_context(loaded.context_length)
    stated = plan.made.get("context") if plan is not None else None
    return stated if isinstance(stated, int) else evaluation_context(DEFAULT_SEQ_LEN)


_DEFAULT_TEXT = ("prose",)


@dataclass(frozen=True)
class Sample:
    """What is evaluated."""

    sources: tuple[Source, ...]
    evaluator: Evaluator
    selection: TaskSelection
    warnings: tuple[str, ...]

    def inputs(self) -> dict[str, Any]:
        """Return the resolved options, for a result."""
        evaluator = self.evaluator
        items = evaluator.items
        sequences = sum(int(sample.ids.shape[0]) for sample in evaluator.samples)
        return {
            "text": [sample.name for sample in evaluator.samples],
            "sequences": sequences,
            "seq_len": int(evaluator.samples[0].ids.shape[1]),
            "tasks": list(dict.fromkeys(item.task for item in items)),
            "task_items": len(items),
            "task_lengths": list(self.selection.lengths),
            "task_notes": list(self.selection.notes),
            "protocol": "decode" if evaluator.settings.decode else "one_pass",
        }


def load_sample(
    how: Mapping[str, Any],
    *,
    plan_file: Path | None = None,
    text: list[str] | None,
    sequences: int | None,
    seq_len: str | None,
    tasks: str,
    task_items: int | None,
    task_lengths: str | None,
    settings: EvaluationSettings,
    laid: Callable[[Laid, list[TextSample], TaskSelection], object],
    halves: bool = False,
) -> Sample:
    """Load a model, and before its weights what it is to be evaluated on."""
    length = parse_count(seq_len, what="--seq-len") if seq_len else None
    lengths = read_counts(task_lengths, what="--task-lengths") if task_lengths else None
    sources = tuple(parse_source(name, what="--text") for name in text or _DEFAULT_TEXT)
    select = _selecting(tasks, task_items, lengths)
    read: list[tuple[list[TextSample], TaskSelection]] = []

    def before(opened: OpenedModel) -> None:
        check_plan_file(opened, plan_file)
        number, longest = default_shape(opened)
        number = max(number, 2 * LEAST_SEQUENCES) if halves else number
        samples = text_samples(
            opened, sources, seq_len=length or longest, sequences=sequences or number
        )
        if settings.decode:
            check_steps(opened, samples[0].ids.shape[1])
        read.append((samples, select(opened)))

    loaded = load_for_command(
        **how, compressed=True, before=before, laid=lambda one: laid(one, *read[0])
    )
    samples, selection = read[0]
    warnings = []
    if selection.left_out:
        warnings.append(
            f"{selection.left_out} questions exceed the context of {loaded.spec} and are left out"
        )
    warnings += [
        f"{one.name} has {len(one.ids)} sequences of {one.ids.shape[1]:,} tokens, fewer than the "
        f"{sequences} requested"
        for one in samples
        if sequences is not None and len(one.ids) < sequences
    ]
    evaluator = Evaluator(loaded, samples, selection.items, settings)
    return Sample(sources, evaluator, selection, tuple(warnings))


def _selecting(
    tasks: str, items: int | None, lengths: list[int] | None
) -> Callable[[OpenedModel], TaskSelection]:
    """Return what takes the questions for a model; unknown tasks are refused at once."""
    if tasks == "none" and lengths is None:
        return lambda _: TaskSelection([])
    from kvprof.evaluation.tasks.registry import default_task_items, parse_tasks, select_tasks

    names = parse_tasks(tasks)
    return lambda opened: select_tasks(opened, names, items or default_task_items(opened), lengths)


def check_plan_file(opened: OpenedModel, plan_file: Path | None) -> None:
    """Refuse a saved plan that is damaged or another model's, where files say which model it is."""
    if plan_file is not None:
        from kvprof.methods.plan_files import load_plan

        load_plan(plan_file, fingerprint=opened.stored)


def calibration_options(
    seq_len: int | None = None,
    /,
    calibrate: str | None = None,
    calibrate_tokens: str | None = None,
    calibrate_seq_len: str | None = None,
) -> CalibrationOptions:
    """Return what the user said about calibration."""
    source = parse_source(calibrate, what="--calibrate") if calibrate else None
    tokens = parse_count(calibrate_tokens, what="--calibrate-tokens") if calibrate_tokens else None
    if calibrate_seq_len is not None:
        if source is not None and source.kind is SourceKind.MOMENTS:
            raise UsageError(
                f"{source.name}: saved moments have a fixed sequence length; leave out "
                "--calibrate-seq-len"
            )
        seq_len = parse_count(calibrate_seq_len, what="--calibrate-seq-len")
    return CalibrationOptions(source, tokens, seq_len or DEFAULT_SEQ_LEN)


def make_plan(
    loaded: LoadedModel,
    *,
    method: str | None,
    rate: float | None,
    removal: float | None,
    plan_file: Path | None,
    options: dict[str, Any],
    context: int,
    stop: Stop,
    **calibration: str | None,
) -> Plan:
    """Read the plan that was given, or calibrate the method that was named and make one."""
    if plan_file is not None:
        from kvprof.methods.plan_files import load_plan

        return load_plan(plan_file, fingerprint=loaded.fingerprint, layout=loaded.layout)
    assert method is not None
    calibrator = method_calibrator(loaded, calibration_options(**calibration), stop)
    with calibration_interrupts():
        family = calibrator.family(method, **options)
    with console.status(f"planning {method}"):
        return plan_of(loaded, family, rate, removal, context)


def check_reach(
    laid: Laid,
    method: str,
    options: Mapping[str, Any],
    rate: float | None,
    removal: float | None,
    context: int,
    *,
    alone: bool = True,
) -> None:
    """Refuse a rate that no plan of a method has, before anything is calibrated for it."""
    if removal is not None and not has_removal_rate(method, **options):
        raise _no_removal_rate(method)
    family = uncalibrated_family(laid, method, **options)
    if family is not None and rate is not None:  # of others the plan tells, once there is one
        check_reached(family, rate, context, alone=alone)


def check_plannable(
    laid: Laid,
    *,
    method: str | None,
    rate: float | None,
    removal: float | None,
    options: dict[str, Any],
    context: int,
    plan_file: Path | None,
    **calibration: str | None,
) -> None:
    """Refuse what a method has no use for, lacks, or does not reach."""
    if method is None:
        return
    needs = calibration_needs(method, **options)
    if needs is None and any(calibration.values()):
        raise UsageError(f"{method} needs no calibration; leave out the --calibrate options")
    if needs is not None and rate is None and removal is None and not has_one_setting(method):
        raise UsageError(f"--method {method} needs --rate or --removal")
    calibration_options(**calibration)
    check_reach(laid, method, options, rate, removal, context)


def method_calibrator(
    loaded: LoadedModel,
    given: CalibrationOptions,
    stop: Callable[[], bool],
    notice: Callable[[str], None] = console.warn,
) -> Calibrator:
    """Return what calibrates a method that is `check_plannable`, as `make_plan` has it."""
    return Calibrator(loaded, given, progress=console.track, should_stop=stop, notice=notice)


@contextmanager
def calibration_interrupts(lacking: str = "no plan exists yet") -> Iterator[None]:
    """Say what there is not, and end with 130, when the body's calibration is interrupted."""
    try:
        yield
    except Interrupted as cause:
        end_without_result(f"calibration {cause}: {lacking}; nothing was saved")


def plan_of(
    loaded: LoadedModel,
    family: PlanFamily,
    rate: float | None,
    removal: float | None,
    context: int,
    *,
    alone: bool = True,
) -> Plan:
    """Return the plan of a family that the user's rate or removal rate asks for."""
    if removal is not None:
        if family.knob != KNOBS["removal"]:
            raise _no_removal_rate(family.method)
        return plan_at(family, removal)
    if rate is not None:
        return plan_for_rate(family, rate, context, alone=alone)
    if len(family.settings) == 1:
        return plan_at(family, family.settings[0])
    raise UsageError(f"--method {family.method} needs --rate or --removal")


def _no_removal_rate(method: str) -> UsageError:
    return UsageError(
        f"--removal is FDC's removal rate, and {method} has none here; give --rate, or "
        "--allocation removal where the method has ranks"
    )
