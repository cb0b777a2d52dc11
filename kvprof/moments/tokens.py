"""The tokens that a calibration sees: how many, in sequences of which length, from which files."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.moments.collect import model_tokens
from kvprof.sources.grammar import EMBEDDED, Source, SourceKind
from kvprof.sources.windows import batches, windows

__all__ = [
    "CalibrationTokens",
    "Sample",
    "check_separate",
    "chosen_on",
    "content_digest",
    "content_sketch",
    "read_tokens",
    "shared_content",
]

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CalibrationTokens:
    """The sequences of one source."""

    source: Source
    sequences: tuple[Ids, ...]  # token ids, at most `seq_len` each
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
    """Read the sequences of a source before anything is run."""
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


# --- Whether calibration saw what a plan is evaluated on; if it did, the evaluation is refused.


# Tokens of a shingle: long enough that two texts hardly share one by chance, short enough that a
# passage is found again wherever the windows of the other text begin.
_SHINGLE = 32
# Hashes kept of a calibration, the smallest ones: of a passage of a twentieth of the smaller text
# some 25 are found again.
_KEPT = 512
# Shared passages of this share of either text make an evaluation doubtful: headers, licences and
# quotations stay below (the two embedded splits share 1 % of their runs of 13 words).
_SHARE = 0.05
_FEWEST = 3


class Sample(Protocol):
    """Evaluation data as token ids, for example `kvprof.evaluation.data.TextSample`."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def ids(self) -> Tensor:
        """``[sequences, T]`` token ids."""


def check_separate(
    calibrated: Plan | Mapping[str, Any],
    sources: Iterable[Source] = (),
    samples: Iterable[Sample] = (),
) -> None:
    """Refuse to evaluate a plan on its calibration data: same files, or runs of 32 tokens."""
    made = calibrated.made if isinstance(calibrated, Plan) else calibrated
    data = [made[part] for part in ("calibration", "fisher", "sensitivity") if part in made]
    evaluated = list(samples)
    files = {str(path.resolve()): path.name for source in sources for path in source.paths}
    for known in data:
        for path in known.get("files", ()):
            if path in files:
                raise _clash(known, files[path], "the same file")
        if "sketch" not in known and known.get("source") in files.values():
            raise UsageError(
                f"the plan's moments ({known['source']}) do not record their tokens and may "
                "overlap the evaluation's; calibrate on the text itself"
            )
        embedded = known.get("source") in EMBEDDED and not known.get("files")
        for sample in evaluated:
            if embedded and sample.name in EMBEDDED:
                continue  # another split
            rows: list[NDArray[np.int64]] = list(sample.ids.cpu().numpy())
            if known.get("digest") == content_digest(rows):
                raise _clash(known, sample.name, "the same tokens")
            shared = shared_content(known.get("sketch", ""), rows)
            if shared:
                raise _clash(known, sample.name, f"{shared:.0%} of the text is the same")


def chosen_on(made: Mapping[str, Any], samples: Iterable[Sample]) -> list[str]:
    """Return a warning if a plan's settings were chosen on the evaluation data (``budget``)."""
    cells = made.get("cells") or {}
    found = []
    for sample in samples:
        rows: list[NDArray[np.int64]] = list(sample.ids.cpu().numpy())
        for known in cells.get("measured_on", {}).values():
            same = known.get("digest") == content_digest(rows)
            if same or shared_content(known.get("sketch", ""), rows):
                found.append(
                    f"the settings were chosen on {sample.name}, so its figures are optimistic; "
                    "measure sensitivity on calibration text"
                )
                break
    return found


def content_digest(sequences: Sequence[NDArray[np.int64]]) -> str:
    """Return a digest of token ids and of where sequences end."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sequence, dtype="<i8").tobytes())
    return digest.hexdigest()


def content_sketch(sequences: Sequence[NDArray[np.int64]]) -> str:
    """Return a bottom-k sketch of all runs of 32 tokens, as hexadecimal digits."""
    return _hashes(sequences)[:_KEPT].astype(">u4").tobytes().hex()


def shared_content(sketch: str, sequences: Sequence[NDArray[np.int64]]) -> float:
    """Return the share of the smaller text that both hold; 0 where it is too little to matter."""
    kept = np.frombuffer(bytes.fromhex(sketch), dtype=">u4").astype(np.uint32)
    if not len(kept):
        return 0.0
    others = _hashes(sequences)
    if len(kept) == _KEPT:  # a sample: only what lies in its range can be found
        others = others[others <= kept[-1]]
    hits = int(np.isin(kept, others, assume_unique=True).sum())
    share = hits / max(1, min(len(kept), len(others)))
    return share if hits >= _FEWEST and share >= _SHARE else 0.0


def _hashes(sequences: Sequence[NDArray[np.int64]]) -> NDArray[np.uint32]:
    """Return the distinct hashes of all shingles, ascending."""
    parts = [_shingles(sequence) for sequence in sequences if len(sequence) >= _SHINGLE]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint32)


def _shingles(sequence: NDArray[np.int64]) -> NDArray[np.uint32]:
    odd = np.random.default_rng(20260).integers(2**63, size=_SHINGLE, dtype=np.uint64) * 2 + 1
    count = len(sequence) - _SHINGLE + 1
    # Ids are spread over 64 bits first: a sum of small numbers times weights would be nearly linear
    # in them, and permuted texts would collide.
    spread = _mixed(sequence.astype(np.uint64))
    total = np.zeros(count, np.uint64)
    for offset, weight in enumerate(odd):
        total += spread[offset : offset + count] * weight
    return (_mixed(total) >> np.uint64(32)).astype(np.uint32)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit integers (the finaliser of SplitMix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _clash(known: Mapping[str, Any], evaluated: str, why: str) -> UsageError:
    return UsageError(
        f"{evaluated} was calibrated on ({known.get('source', 'the plan')}: {why}); evaluate or "
        "calibrate on other text"
    )
