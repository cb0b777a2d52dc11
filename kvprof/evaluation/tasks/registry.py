"""Every task by its name, and the questions of those that an evaluation asks for.

Generators that are short stand here beside their rows; RULER's and the embedded questions have
modules of their own.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvprof.errors import UsageError
from kvprof.evaluation.data import Question, Scoring, TaskItem, TaskSelection
from kvprof.evaluation.tasks.embedded import EMBEDDED, embedded_items
from kvprof.evaluation.tasks.prompts import Fitted, PromptWriter, largest_fitting
from kvprof.evaluation.tasks.prose import lexicon
from kvprof.evaluation.tasks.ruler import ABSENT, RULER, Draw
from kvprof.models.load import OpenedModel

__all__ = [
    "ALIKE",
    "GROUPS",
    "OPERATIONS",
    "PROMPTS",
    "TASKS",
    "Task",
    "default_task_items",
    "draw_arithmetic",
    "draw_rounds",
    "parse_tasks",
    "select_tasks",
]


@dataclass(frozen=True)
class Task:
    """What an evaluation has to know of a task."""

    scoring: Scoring
    #: Generates a question of a size (`kvprof.evaluation.tasks.ruler.RulerTask`); None where the
    #: questions are embedded, at lengths of their own.
    draw: Draw | None = None
    limit: int = 0  # tokens that may be written; 0 where the answer's own number decides
    least: int = 0  # sizes that `draw` takes
    most: int = 0
    note: str = ""  # what a reader must know of it; empty for nothing


# --- A conversation of many rounds, of which one answer is asked for again (as MRCR, generated).
# As in multi-round co-reference resolution (arXiv 2409.12640), the user asks several times for the
# same thing, and in the end for the n-th of these answers. The answers are lines of random words,
# so that nothing but looking back gives them, and the line has to be written as it was; MRCR asks a
# large model for texts and scores their similarity.

#: How often the same thing is asked for.
ALIKE = 4

_FORMS = ("poem", "riddle", "slogan", "motto", "rhyme", "chant", "proverb", "title")
_TOPICS = ("rivers", "clocks", "winter", "bridges", "bread", "owls", "trains", "gardens", "salt")
_ORDINALS = ("first", "second", "third", "fourth")
_LINE_WORDS = 6  # of a line


def draw_rounds(rng: random.Random, size: int, length: int) -> Question:
    """Return a conversation and the question at its end."""
    things = [(form, topic) for form in _FORMS for topic in _TOPICS]
    rng.shuffle(things)
    form, topic = things[0]
    same = sorted(rng.sample(range(size), ALIKE))
    turns: list[str] = []
    lines: list[str] = []
    for number in range(size):
        own_form, own_topic = things[0] if number in same else rng.choice(things[1:])
        line = " ".join(rng.sample(lexicon(), _LINE_WORDS))
        while line in lines:
            line = " ".join(rng.sample(lexicon(), _LINE_WORDS))
        lines.append(line)
        turns += [f"Write a {own_form} about {own_topic}.", line]
    asked = rng.randrange(ALIKE)
    which = f"{_ORDINALS[asked]} {form} about {topic}"
    turns.append(f"Write the {which} again, word for word, and nothing else.")
    depth = round(4 * same[asked] / max(1, size - 1)) / 4
    return Question(tuple(turns), "", (lines[same[asked]],), 1 / ALIKE, depth)


# --- Chains of additions and subtractions of growing length (as GSM-Infinite, generated). As there
# (arXiv 2502.05252), the number of operations says how hard a question is, and statements of the
# same kind that do not matter fill it to any length. They stand in any order.

#: Operations of the tasks.
OPERATIONS = (2, 4, 8)

_MOST_APPLES = 60  # that a chain begins with
_STEP = 9


def _arithmetic_limit(operations: int) -> int:
    """Return how many tokens may be written: a sentence for each operation, and the answer."""
    return 64 + 32 * operations


def draw_arithmetic(operations: int, rng: random.Random, size: int, length: int) -> Question:
    """Return a question that takes `operations` steps."""
    names: set[str] = set()

    def name() -> str:
        while (drawn := "".join(rng.choices(string.ascii_uppercase, k=3))) in names:
            pass
        names.add(drawn)
        return drawn

    statements: list[str] = []
    values: list[int] = []

    def chain(steps: int) -> tuple[str, int]:
        last, value = name(), rng.randint(_STEP + 1, _MOST_APPLES)
        statements.append(f"Crate {last} holds {value} apples.")
        values.append(value)
        for _ in range(steps):
            step = rng.randint(2, _STEP)
            more = value <= _STEP or rng.random() < 0.5
            value += step if more else -step
            following = name()
            word = "more" if more else "fewer"
            statements.append(f"Crate {following} holds {step} {word} apples than crate {last}.")
            values.append(value)
            last = following
        return last, value

    asked, answer = chain(operations)
    left = size
    while left > 0:
        crates = min(left, rng.randint(1, operations + 1))
        chain(crates - 1)
        left -= crates
    rng.shuffle(statements)
    text = (
        "Read the following statements.\n"
        + "\n".join(statements)
        + f"\nQuestion: How many apples does crate {asked} hold? Work it out step by step, and end "
        "with: The answer is N."
    )
    chance = values.count(answer) / len(values)
    return Question((text,), " Answer:", (str(answer),), chance)


# --- Short prompts that are answered freely: nothing to be right, only how long the answer is.

#: Tokens that may be written.
_OPEN_LIMIT = 256

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Name three differences between a list and a tuple in Python.",
    "Write a short letter that declines an invitation to a wedding.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "How does a bicycle stay upright?",
    "Summarise the story of Romeo and Juliet in one paragraph.",
    "Which planets have rings?",
    "Write a haiku about rain.",
    "What should I pack for a weekend in the mountains?",
    "Explain what a hash table is to a child.",
    "How many minutes are there in a day?",
    "What is the difference between weather and climate?",
    "Write a function that reverses a string, and say how it works.",
    "Why do we have leap years?",
    "Suggest five names for a bakery.",
    "What causes the tides?",
    "Translate into French: The library opens at nine.",
    "How do I remove a coffee stain from a shirt?",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Explain the rule of three in photography.",
    "What is inflation?",
    "List the steps to change a tyre.",
)


# --- Which tasks there are.

_RULER_NOTE = (
    "RULER's tasks are generated by its definitions (arXiv 2404.06654) and scored as there: the "
    "share of the strings asked for that stands in the answer, whatever the case of its letters. "
    "Embedded prose stands in for its essays, words of that prose for its word list. "
    f"{' and '.join(ABSENT)} are not there: they need {' and '.join(ABSENT.values())}."
)
_ROUNDS_NOTE = (
    "multi rounds: a conversation in which the same is asked for several times, and the n-th "
    "answer again at the end (as MRCR, arXiv 2409.12640; right is the whole line, word for word)."
)
_ARITHMETIC_NOTE = (
    "arithmetic N: N additions and subtractions among statements that do not matter (as "
    "GSM-Infinite, arXiv 2502.05252); the last number that is written counts."
)
_ROUNDS_LIMIT = 64
_CRATES = 10_000

#: Every task, in the order of reports.
TASKS: dict[str, Task] = {
    **{name: Task(Scoring.TOKENS) for name in EMBEDDED},
    **{
        name: Task(Scoring.STRINGS, one.draw, one.limit, one.least, one.most, _RULER_NOTE)
        for name, one in RULER.items()
    },
    "multi_rounds": Task(Scoring.STRINGS, draw_rounds, _ROUNDS_LIMIT, ALIKE, _CRATES, _ROUNDS_NOTE),
    **{
        f"arithmetic_{count}": Task(
            Scoring.NUMBER,
            partial(draw_arithmetic, count),
            _arithmetic_limit(count),
            0,
            _CRATES,
            _ARITHMETIC_NOTE,
        )
        for count in OPERATIONS
    },
    "open_questions": Task(Scoring.NONE, limit=_OPEN_LIMIT),
}

#: Names that stand for several.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": EMBEDDED,
    "ruler": tuple(RULER),
    "arithmetic": tuple(f"arithmetic_{count}" for count in OPERATIONS),
}

# Questions of each task, by kind of device. Four are enough for right answers to be no guesses.
_CPU_ITEMS = 4
_GPU_ITEMS = 24

# Lengths of generated questions, by kind of device; those that the context holds are taken.
# Embedded ones are no longer than the longest.
_CPU_LENGTHS = (512,)
_GPU_LENGTHS = (1024, 2048, 4096, 8192)

_SEED = 42  # RULER's default


# --- The questions that an evaluation asks.


def parse_tasks(text: str) -> tuple[str, ...]:
    """Read ``none``, or names of tasks and of `GROUPS` joined by commas."""
    if text == "none":
        return ()
    chosen: set[str] = set()
    for name in (part.strip().replace("-", "_") for part in text.split(",")):
        if name in ABSENT:
            raise UsageError(
                f"--tasks {name} needs {ABSENT[name]}, which kvprof does not ship; use --harness "
                "ruler_qa_squad,ruler_qa_hotpot"
            )
        if name and name not in TASKS and name not in GROUPS:
            known = ", ".join((*GROUPS, "none", *TASKS))
            raise UsageError(f"--tasks: {name!r} is unknown; give some of {known}")
        chosen.update(GROUPS.get(name, (name,)))
    return tuple(task for task in TASKS if task in chosen)


def default_task_items(loaded: OpenedModel) -> int:
    """Return how many questions of each task an evaluation asks by default."""
    return _CPU_ITEMS if loaded.device.type == "cpu" else _GPU_ITEMS


def select_tasks(
    loaded: OpenedModel,
    names: Sequence[str],
    per_task: int,
    lengths: Sequence[int] | None = None,
) -> TaskSelection:
    """Take questions of each task, evenly over lengths, and over depths where they are embedded.

    The same ones for the same model and numbers; a smaller choice is the start of a larger one.
    """
    parse_tasks(",".join(names) or "none")
    generated = [name for name in names if TASKS[name].draw is not None]
    if lengths and not generated:
        raise UsageError(
            "--task-lengths requires a generated task; embedded tasks have fixed lengths"
        )
    lengths = _lengths(loaded, lengths) if generated else ()
    items: list[TaskItem] = []
    left_out = 0
    for name in names:
        if name in EMBEDDED:
            longest = max(_usual_lengths(loaded))
            own, over = embedded_items(loaded, name, per_task, longest)
            left_out += over
        elif TASKS[name].draw is None:
            own, over = _open_items(loaded, name, per_task)
            left_out += over
        else:
            own = _generated(loaded, name, per_task, lengths)
        items += own
    notes = dict.fromkeys(TASKS[name].note for name in names if TASKS[name].note)
    return TaskSelection(items, left_out, tuple(lengths), tuple(notes))


def _usual_lengths(loaded: OpenedModel) -> tuple[int, ...]:
    return _CPU_LENGTHS if loaded.device.type == "cpu" else _GPU_LENGTHS


def _lengths(loaded: OpenedModel, asked: Sequence[int] | None) -> tuple[int, ...]:
    longest = loaded.context_length
    for length in asked or ():
        if length > longest:
            raise UsageError(
                f"--task-lengths {length:,} exceeds the context of {loaded.spec}, {longest:,}"
            )
    usual = _usual_lengths(loaded)
    found = tuple(dict.fromkeys(asked or (length for length in usual if length <= longest)))
    if not found:
        raise UsageError(
            f"--tasks: generated questions have {usual[0]:,} tokens, over the context of "
            f"{loaded.spec}, {longest:,}; give --task-lengths"
        )
    return found


def _generated(
    loaded: OpenedModel, name: str, count: int, lengths: Sequence[int]
) -> list[TaskItem]:
    task = TASKS[name]
    draw = task.draw
    assert draw is not None
    items: list[TaskItem] = []
    near: dict[int, int] = {}
    with PromptWriter(loaded) as write:
        for index in range(count):
            length = lengths[index % len(lengths)]

            def take(size: int, seed: str, length: int = length) -> tuple[Question, list[int]]:
                question = draw(random.Random(seed), size, length)
                return question, write(question)

            seeded = partial(take, seed=f"{_SEED} {name} {length} {index}")
            room = length - task.limit
            found = largest_fitting(seeded, room, task.least, task.most, near.get(length))
            if not isinstance(found, Fitted):
                raise UsageError(
                    f"--task-lengths {length:,}: {name} needs at least {found + task.limit:,} "
                    f"tokens with {loaded.spec}"
                )
            near[length] = found.size
            items.append(_item(name, length, found.question, found.ids))
    return items


def _open_items(loaded: OpenedModel, name: str, count: int) -> tuple[list[TaskItem], int]:
    items: list[TaskItem] = []
    left_out = 0
    with PromptWriter(loaded) as write:
        for index in range(min(count, len(PROMPTS))):
            question = Question((PROMPTS[index],))
            ids = write(question)
            length = len(ids) + TASKS[name].limit
            if length > loaded.context_length:
                left_out += 1
            else:
                items.append(_item(name, length, question, ids))
    return items, left_out


def _item(name: str, length: int, question: Question, ids: list[int]) -> TaskItem:
    task = TASKS[name]
    return TaskItem(
        name,
        length,
        question.depth,
        ids,
        [],
        task.scoring,
        question.references,
        task.limit,
        question.chance,
    )
