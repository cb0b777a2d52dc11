"""How many tokens a text has, by a model's tokenizer alone: its weights are not read."""

from collections.abc import Callable

from transformers import AutoTokenizer

from kvprof.errors import UsageError
from kvprof.models.locate import locate
from kvprof.models.noise import quiet

__all__ = ["token_counter"]


def token_counter(model: str) -> Callable[[str], int]:
    """Return what counts the tokens of a text.

    Parameters
    ----------
    model : str
        As ``--model`` names one that has a tokenizer.

    Raises
    ------
    UsageError
        When it has none.
    """
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(locate(model).folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as problem:
        raise UsageError(
            f"--lengths: {model} has no tokenizer to tell the lengths of texts"
        ) from problem

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count
