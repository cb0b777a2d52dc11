"""What ``--source``, ``--against``, ``--text`` and ``--calibrate`` accept, told apart by name.

One grammar for every command: ``random:8k``, ``random-bos:8k``, ``prose``, ``code``, ``tasks``,
``calibration``, a text or JSON Lines file, a token-id file, a file of saved moments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvprof.errors import UsageError
from kvprof.sizes import format_count, parse_count

__all__ = [
    "DEFAULT_SEQ_LEN",
    "DEFAULT_TOKENS",
    "DEFAULT_TOKENS_REASON",
    "EMBEDDED",
    "RANDOM",
    "Source",
    "SourceKind",
    "parse_source",
]

DEFAULT_TOKENS = 8192
DEFAULT_TOKENS_REASON = (
    "8,192 random tokens are FDC's recommendation (§6.7); `kvprof stability` checks it on a model"
)

#: Post-RoPE moments depend on the positions seen; longer contexts are for the user to ask for.
DEFAULT_SEQ_LEN = 2048


#: Samples that ship with kvprof (calibration split); ``calibration`` interleaves the three.
EMBEDDED = ("prose", "code", "tasks", "calibration")

_TOKEN_ID_SUFFIXES = {".npy", ".ids"}
_MOMENT_SUFFIXES = {".safetensors"}


#: Random tokens as they are drawn, and behind what the tokenizer puts in front of a text (BOS).
RANDOM = ("random", "random-bos")


class SourceKind(StrEnum):
    """How the tokens of a source come about."""

    RANDOM = "random"
    EMBEDDED = "embedded"
    TEXT = "text"
    TOKEN_IDS = "token_ids"
    MOMENTS = "moments"


@dataclass(frozen=True)
class Source:
    """A parsed source; nothing has been opened yet."""

    kind: SourceKind  # how the tokens come about
    name: str  # short name for tables: `random`, `prose`, or the file's name
    paths: tuple[Path, ...] = ()  # files to read, in order; empty for random and embedded sources
    tokens: int | None = None  # tokens that the name itself asks for (`random:8k`)

    def describe(self) -> str:
        """Return the source as a person would write it on the command line."""
        if self.tokens is not None:
            return f"{self.name}:{format_count(self.tokens)}"
        return self.name


def parse_source(text: str, *, what: str = "--source") -> Source:
    """Tell what a source is from its name."""
    name, _, amount = text.partition(":")
    if name in RANDOM:
        tokens = parse_count(amount, what=f"{what} {text}") if amount else None
        return Source(SourceKind.RANDOM, name, tokens=tokens)
    if text in EMBEDDED:
        return Source(SourceKind.EMBEDDED, text)
    path = Path(text)
    if not _holds(path.is_file):
        reason = "is a folder" if _holds(path.is_dir) else "is not a file"
        raise UsageError(
            f"{what}: {text!r} {reason} and not a known source; use a file, random:8k, "
            f"{', '.join(EMBEDDED[:-1])} or {EMBEDDED[-1]}"
        )
    if path.suffix in _MOMENT_SUFFIXES:
        return Source(SourceKind.MOMENTS, path.name, (path,))
    return file_source([path], token_ids=path.suffix in _TOKEN_ID_SUFFIXES)


def _holds(question: Callable[[], bool]) -> bool:
    """Ask a path something; what may not be seen, or has an impossible name, is not there."""
    try:
        return question()
    except OSError:
        return False


def file_source(paths: list[Path], *, token_ids: bool) -> Source:
    """Return the source that reads `paths` in order, as text or as token ids."""
    for path in paths:
        if not _holds(path.is_file):
            raise UsageError(f"{str(path)!r}: no such file")
    name = paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
    return Source(SourceKind.TOKEN_IDS if token_ids else SourceKind.TEXT, name, tuple(paths))
