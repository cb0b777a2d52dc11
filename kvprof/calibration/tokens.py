"""The tokens that a calibration sees: how many, in sequences of which length, from which files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.analysis.collect import model_tokens
from kvprof.calibration.overlap import content_digest, content_sketch
from kvprof.models.load import LoadedModel
from kvprof.sources.grammar import Source, SourceKind
from kvprof.sources.windows import batches, windows

__all__ = ["CalibrationTokens", "read_tokens"]

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CalibrationTokens:
    """The sequences of one source.

    Attributes
    ----------
    source : Source
    sequences : tuple of arrays
        Token ids, at most `seq_len` each.
    seq_len : int
    """

    source: Source
    sequences: tuple[Ids, ...]
    seq_len: int

    @property
    def count(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.sequences))

    def described(self) -> dict[str, Any]:
        """Return what a plan keeps about them, by which the same text is known again."""
        return {
            "files": [str(path.resolve()) for path in self.source.paths],
            "digest": content_digest(self.sequences),
            "sketch": content_sketch(self.sequences),
        }

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield ``[batch, T]`` ids on the CPU; sequences that predict no token are left out."""
        whole = (sequence for sequence in self.sequences if len(sequence) > 1)
        for batch in batches(whole, batch_size):
            yield torch.from_numpy(batch)


def read_tokens(
    loaded: LoadedModel,
    source: Source,
    *,
    tokens: int | None,
    most: int,
    seq_len: int,
    seed: int = 0,
) -> CalibrationTokens:
    """Read the sequences of a source before anything is run.

    Parameters
    ----------
    loaded : LoadedModel
        Its tokenizer, vocabulary and context.
    source : Source
        Any kind but moments.
    tokens : int or None
        How many; a source that has fewer is refused. None: what the source's name asks for, else
        at most `most`, fewer where a text is shorter.
    most : int
        See `tokens`.
    seq_len : int
        Longest sequence; capped at the model's context.
    seed : int
        For random tokens.

    Raises
    ------
    UsageError
        When the source has fewer tokens than were asked for, or none.
    """
    length = min(seq_len, loaded.context_length)
    if tokens is None:
        tokens = source.tokens
    if tokens is None and source.kind is SourceKind.RANDOM:
        tokens = most
    found: list[Ids] = []
    seen = 0
    stream = windows(source, model_tokens(loaded), tokens=tokens, seq_len=length, seed=seed)
    for sequence in stream:
        kept = sequence if tokens is not None else sequence[: most - seen]
        found.append(kept)
        seen += len(kept)
        if tokens is None and seen == most:
            break
    return CalibrationTokens(source, tuple(found), length)
