"""The prompt of ``kvprof generate``: where it is read from, and whether it fits."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvprof.errors import FailedError, UsageError

if TYPE_CHECKING:
    from kvprof.models.load import LoadedModel

__all__ = ["check_length", "read_prompt"]


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text to continue, from the one place that was named.

    Parameters
    ----------
    prompt : str or None
        The text itself; ``-`` reads stdin.
    file : Path or None

    Raises
    ------
    UsageError
        When none or both are given, or what they name is missing or empty.
    FailedError
        For bytes that are no UTF-8.
    """
    if (prompt is None) == (file is None):
        raise UsageError("give the text to continue, with --prompt TEXT (- for stdin) or "
                         "--prompt-file FILE, not both")  # fmt: skip
    if file is None and prompt != "-":
        assert prompt is not None
        return prompt
    try:
        content = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as problem:
        raise UsageError(f"--prompt-file {file}: {problem.strerror}") from problem
    try:
        # An editor, or echo, ends the text with a newline that is no part of it.
        text = content.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as problem:
        name = file or "stdin"
        raise FailedError(f"{name} is no text (byte {problem.start} is not UTF-8)") from None
    if not text:
        raise UsageError(f"{file or 'stdin'} is empty; give a text to continue")
    return text


def check_length(loaded: "LoadedModel", prompt: int, new: int) -> None:
    """Refuse to run past the model's context, before anything is calibrated.

    Parameters
    ----------
    loaded : LoadedModel
    prompt, new : int
        Tokens of the prompt, and how many may come.

    Raises
    ------
    UsageError
        Says what would fit.
    """
    longest = loaded.context_length
    if prompt + new <= longest:
        return
    fits = (
        f"at most --max-new-tokens {longest - prompt:,} fits after it"
        if prompt < longest
        else "shorten it"
    )
    raise UsageError(
        f"the prompt has {prompt:,} tokens and --max-new-tokens asks for {new:,} more, over the "
        f"context of {loaded.spec}, {longest:,}; {fits}"
    )
