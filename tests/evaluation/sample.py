"""A tiny model with sequences and questions of its own vocabulary, for evaluating plans on."""

from typing import Any

import torch

from kvprof.evaluation.data import TaskItem, TextSample
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.plan import Plan
from kvprof.methods.registry import plan_family
from kvprof.models.load import LoadedModel
from tests.methods.models import FINE, inputs, model
from tests.models.tiny import token_ids


def text(sequences: int = 5, tokens: int = 20, *, name: str = "text", seed: int = 0) -> TextSample:
    ids = token_ids(sequences, tokens, seed=seed)
    return TextSample(name, ids)


def greedy(loaded: LoadedModel, prompt: list[int], tokens: int) -> list[int]:
    """Let the uncompressed model go on by its own generate."""
    found = loaded.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def questions(loaded: LoadedModel) -> tuple[list[TaskItem], list[bool]]:
    """Return questions of two tasks, several lengths, and whether the model gets them right."""
    items, right = [], []
    for number, length in enumerate((12, 9, 30, 31, 11, 29)):
        prompt = token_ids(1, length, seed=number)[0].tolist()
        answer = greedy(loaded, prompt, 3 + number % 3)
        spoilt = number % 2 == 1
        if spoilt:  # at its end: everything before it is right
            answer[-1] = (answer[-1] + 1) % 90 + 3
        task = "needle" if number < 4 else "copy"
        items.append(TaskItem(task, length, [0.0, 0.5][number % 2], prompt, answer))
        right.append(not spoilt)
    return items, right


def plan(name: str, rate: float, context: int, arch: str = "Llama") -> Plan:
    options: dict[str, Any] = {} if name in ("full", "fp8") else FINE
    family = plan_family(name, inputs(arch), **options)
    if name in ("full", "fp8"):
        return plan_at(family, family.settings[0])
    return plan_for_rate(family, rate, context)


def evaluator(arch: str = "Llama", **settings: Any) -> Evaluator:
    samples = [text(), text(3, name="other", seed=9)]
    return Evaluator(model(arch), samples, [], EvaluationSettings(**settings))
