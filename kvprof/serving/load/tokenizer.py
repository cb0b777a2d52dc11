"""How many tokens a text has, by a model's tokenizer alone: its weights are not read."""

from collections.abc import Callable

from kvprof.errors import FailedError, UsageError
from kvprof.models.gguf_tokenizer import check_split
from kvprof.models.load import read_tokenizer
from kvprof.models.locate import locate

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
        When it has none, or a GGUF file one that would cut texts otherwise than the model's own.
    """
    checkpoint = locate(model)
    if checkpoint.gguf is not None:
        check_split(model, checkpoint.gguf)
    try:
        tokenizer = read_tokenizer(model, checkpoint.folder, checkpoint.gguf)
    except FailedError as problem:
        raise UsageError(
            f"--lengths: {model} has no tokenizer to tell the lengths of texts"
        ) from problem

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count
