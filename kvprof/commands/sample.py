"""What plans are evaluated on: options for text and tasks, and the evaluator that they give."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.commands.options import DATA
from kvprof.sizes import parse_count
from kvprof.sources.grammar import Source, parse_source

if TYPE_CHECKING:
    from kvprof.evaluation.evaluator import Evaluator
    from kvprof.models.load import LoadedModel

__all__ = [
    "Sample",
    "SeqLenOption",
    "SequencesOption",
    "TaskItemsOption",
    "TasksOption",
    "TeacherForcedOption",
    "TextOption",
    "load_sample",
]

TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        rich_help_panel=DATA,
        help="prose, code (embedded) or a file; repeatable. Default prose.",
    ),
]
SequencesOption = Annotated[
    int | None,
    typer.Option(
        "--sequences", rich_help_panel=DATA, min=1, help="Of each text, at most. Default by device."
    ),
]
SeqLenOption = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        rich_help_panel=DATA,
        help="Tokens per sequence; half is decoded. Default by device.",
    ),
]
TasksOption = Annotated[
    str,
    typer.Option(
        "--tasks", rich_help_panel=DATA, help="all, none, or needle,variables,copy,frequent-words."
    ),
]
TaskItemsOption = Annotated[
    int | None,
    typer.Option(
        "--task-items",
        rich_help_panel=DATA,
        min=1,
        help="Questions of each task. Default by device.",
    ),
]
TeacherForcedOption = Annotated[
    bool,
    typer.Option(
        "--teacher-forced",
        rich_help_panel=DATA,
        help="Score text in one pass instead of decoding it.",
    ),
]

_DEFAULT_TEXT = ("prose",)


@dataclass(frozen=True)
class Sample:
    """What is evaluated.

    Attributes
    ----------
    sources : tuple of Source
    evaluator : Evaluator
    warnings : tuple of str
    """

    sources: tuple[Source, ...]
    evaluator: "Evaluator"
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
            "protocol": "teacher_forced" if evaluator.settings.teacher_forced else "decode",
        }


def load_sample(
    loaded: "LoadedModel",
    *,
    text: list[str] | None,
    sequences: int | None,
    seq_len: str | None,
    tasks: str,
    task_items: int | None,
    teacher_forced: bool,
    batch_size: int | None,
) -> Sample:
    """Read what a model is to be evaluated on.

    Parameters
    ----------
    loaded : LoadedModel
    text, sequences, seq_len, tasks, task_items, teacher_forced, batch_size
        From the command line.

    Raises
    ------
    UsageError
        For an unknown text or task, or one that is too short or too long.
    """
    length = parse_count(seq_len, what="--seq-len") if seq_len else None
    sources = tuple(parse_source(name, what="--text") for name in text or _DEFAULT_TEXT)

    from kvprof.evaluation.data import (
        default_shape,
        default_task_items,
        parse_tasks,
        select_tasks,
        text_samples,
    )
    from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator

    number, longest = default_shape(loaded)
    with console.status("reading what is evaluated"):
        samples = text_samples(
            loaded, sources, seq_len=length or longest, sequences=sequences or number
        )
        selection = select_tasks(
            loaded, parse_tasks(tasks), task_items or default_task_items(loaded)
        )
    warnings = []
    if selection.left_out:
        warnings.append(
            f"{selection.left_out} questions exceed the context of {loaded.spec} and are left out"
        )
    warnings += [
        f"{one.name} has {len(one.ids)} sequences of {one.ids.shape[1]:,} tokens, fewer than the "
        f"{sequences} asked for"
        for one in samples
        if sequences is not None and len(one.ids) < sequences
    ]
    settings = EvaluationSettings(teacher_forced=teacher_forced, batch_size=batch_size)
    evaluator = Evaluator(loaded, samples, selection.items, settings)
    return Sample(sources, evaluator, tuple(warnings))
