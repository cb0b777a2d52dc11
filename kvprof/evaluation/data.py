"""The text that plans are evaluated on: sequences of equal length, never the calibration split."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.models.load import OpenedModel
from kvprof.moments.collect import model_tokens
from kvprof.sources.grammar import Source, SourceKind
from kvprof.sources.windows import windows

__all__ = ["TextSample", "default_shape", "text_samples"]

_SPLITS = resources.files("kvprof") / "assets" / "splits" / "evaluation"
_SHORTEST = 4  # two tokens to prefill, two to decode

# Sequences and tokens of each, by kind of device: what about 30 s of a small model allow a CPU.
_CPU_SHAPE = (32, 256)
_GPU_SHAPE = (64, 1024)


@dataclass(frozen=True, eq=False)
class TextSample:
    """Sequences of one source."""

    name: str  # of the source, for tables
    #: `[n, T]` int64 on the CPU; what the tokenizer puts in front (BOS) stands at position 0.
    ids: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 of name, shape and ids."""
        shape = tuple(self.ids.shape)
        digest = hashlib.sha256(f"{self.name} {shape}".encode())
        digest.update(self.ids.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def part(self, index: int, of: int) -> "TextSample":
        """Return every `of`-th sequence from `index` on."""
        return TextSample(self.name, self.ids[index::of])


def default_shape(loaded: OpenedModel) -> tuple[int, int]:
    """Return how many sequences of how many tokens an evaluation takes by default."""
    sequences, seq_len = _CPU_SHAPE if loaded.device.type == "cpu" else _GPU_SHAPE
    return sequences, min(seq_len, loaded.context_length)


def text_samples(
    loaded: OpenedModel,
    sources: Sequence[Source],
    *,
    seq_len: int,
    sequences: int,
    calibrating: bool = False,
) -> list[TextSample]:
    """Take sequences of each source.

    Embedded names (``prose``, ``code``, ``tasks``) give the evaluation split, from which sequences
    are taken at equal distances, so that a small sample is not one document. Of a file the first
    sequences are taken; its end is not read.
    """
    if seq_len < _SHORTEST:
        raise UsageError(f"--seq-len {seq_len} is too short; give {_SHORTEST} or more")
    if seq_len > loaded.context_length:
        raise UsageError(
            f"--seq-len {seq_len:,} exceeds the context of {loaded.spec}, {loaded.context_length:,}"
        )
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--text names {twice} twice")
    return [_sample(loaded, source, seq_len, sequences, calibrating) for source in sources]


def _sample(
    loaded: OpenedModel, source: Source, seq_len: int, sequences: int, calibrating: bool
) -> TextSample:
    embedded = source.kind is SourceKind.EMBEDDED
    with _readable(source, calibrating) as readable:
        found: list[NDArray[np.int64]] = []
        longest = 0
        # The last window of a text, and any of a token-id file, may be shorter.
        for window in windows(readable, model_tokens(loaded), tokens=None, seq_len=seq_len):
            longest = max(longest, len(window))
            if len(window) == seq_len:
                found.append(window)
            if not embedded and len(found) == sequences:
                break
    if not found:
        raise UsageError(
            f"--text {source.name} has at most {longest:,} tokens per row, fewer than --seq-len "
            f"{seq_len:,}; give more text or a smaller --seq-len"
        )
    if len(found) > sequences:
        found = [found[index * len(found) // sequences] for index in range(sequences)]
    return TextSample(source.name, torch.from_numpy(np.stack(found)))


@contextmanager
def _readable(source: Source, calibrating: bool) -> Iterator[Source]:
    """Give the source that holds the text to evaluate on: of an embedded name its own split."""
    if source.kind is SourceKind.RANDOM:
        raise UsageError("--text random: random tokens cannot be predicted; give a text")
    if source.kind is SourceKind.MOMENTS:
        raise UsageError(f"--text {source.name} is a moments file, not text")
    if source.kind is not SourceKind.EMBEDDED:
        yield source
        return
    if source.name == "calibration":
        if calibrating:
            yield source
            return
        raise UsageError("--text calibration is for calibration only; give prose, code or tasks")
    with resources.as_file(_SPLITS / f"{source.name}.jsonl") as path:
        yield replace(source, kind=SourceKind.TEXT, paths=(path,))
