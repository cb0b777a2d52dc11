"""Loads a decoder from a hub id, a folder or `reference`, checked before anyone measures it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)

from kvprof.errors import FailedError, KvprofError, LackingError, UsageError
from kvprof.models.fingerprint import ModelIdentity, files_fingerprint
from kvprof.models.layout import ModelLayout
from kvprof.models.locate import Checkpoint, check_config_sizes, locate
from kvprof.models.noise import quiet
from kvprof.models.placement import device_map_for, main_device, parse_dtype
from kvprof.models.probe import inspect_config, inspect_layout, model_class
from kvprof.models.weights import check_finite, input_device

if TYPE_CHECKING:
    from kvprof.models.gguf import GgufFile

__all__ = [
    "LoadedModel",
    "OpenedModel",
    "Outline",
    "blaming",
    "load_model",
    "read_config",
    "read_tokenizer",
    "read_weights",
    "token_counter",
    "wrap_model",
]

# --- Reads config and weights with transformers, turning each way it can fail into one clear
# line.


# A buffer that old checkpoints carry and every model computes for itself.
_HARMLESS = ("rotary_emb.inv_freq",)
# Times the numbers of a GGUF file: with tensors of wrong shapes it is told which.
_MOST_DESCRIBED = 4


def read_config(
    spec: str, folder: Path, trust_remote_code: bool, gguf: "GgufFile | None" = None
) -> Any:
    """Read a folder's config.json, or a GGUF file's, and check that it is a causal LM."""
    given = {} if gguf is None else {"gguf_file": gguf.path.name}
    where = "config.json" if gguf is None else gguf.path.name
    try:
        with _read_as_gguf() if gguf is not None else nullcontext():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True, **given
            )
        config.get_text_config(decoder=True).to_dict()  # a stranger's may be no config
    except ImportError as error:
        raise LackingError(f"{spec} requires a package that is not installed: {error}") from error
    except Exception as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise UsageError(
                f"{spec} contains its own Python code; review it, then pass --trust-remote-code"
            ) from error
        if "model_type" in str(error) or "model type" in str(error):
            raise UsageError(
                f"{spec}: this version of transformers does not know its architecture: "
                f"{_first_sentence(error)}"
            ) from error
        raise FailedError(f"{spec}: {where} cannot be used: {_first_sentence(error)}") from error
    if gguf is not None:
        from kvprof.models.gguf_config import hold_against_file

        check_config_sizes(spec, config.to_dict(), gguf.size, where)
        with blaming(f"{spec}: {where} cannot be used"):
            hold_against_file(spec, gguf, config)
    if model_class(config) is AutoModel:
        raise UsageError(
            f"{spec} is not supported: {type(config).__name__} is not a causal language model"
        )
    return config


def read_weights(spec: str, checkpoint: Checkpoint, **options: Any) -> PreTrainedModel:
    """Build a model from a whole checkpoint, with every weight of it and no other."""
    source: dict[str, Any] = {"use_safetensors": True}
    described, numbers = "config.json", 0
    if checkpoint.gguf is not None:
        described = checkpoint.gguf.path.name
        # Where a kernel for packed weights is installed, transformers would leave them in blocks.
        unpacked = GgufConfig(dequantize=True)
        source = {"gguf_file": described, "quantization_config": unpacked}
        numbers = _check_numbers(spec, checkpoint.gguf, options["config"])
    try:
        with _read_as_gguf() if checkpoint.gguf is not None else nullcontext():
            model, report = model_class(options["config"]).from_pretrained(
                checkpoint.folder,
                **source,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below instead
                **options,
            )
    except torch.OutOfMemoryError as error:
        raise LackingError(
            f"{spec} does not fit in the GPU's free memory; use --device auto or --device offload"
        ) from error
    except ImportError as error:
        raise LackingError(f"{spec} requires a package that is not installed: {error}") from error
    except Exception as error:
        raise FailedError(f"{spec} cannot be loaded: {_first_sentence(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise FailedError(
            f"{spec}: the checkpoint lacks {missing[0]}{_more(missing)}; it is incomplete or "
            "belongs to another architecture"
        )
    unexpected = sorted(k for k in report["unexpected_keys"] if not k.endswith(_HARMLESS))
    if unexpected:
        raise FailedError(
            f"{spec}: the checkpoint has {unexpected[0]}{_more(unexpected)}, which "
            f"{type(model).__name__} does not use; {described} names another architecture"
        )
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        raise FailedError(
            f"{spec}: the shape of {mismatched[0]}{_more(mismatched)} in the checkpoint differs "
            f"from {described}"
        )
    # transformers reads the tensors that it has a place for, and leaves out others without a word.
    if checkpoint.gguf is not None and checkpoint.gguf.numbers > numbers:
        raise FailedError(
            f"{spec}: {described} has {checkpoint.gguf.numbers - numbers:,} more parameters than "
            f"{type(model).__name__} uses; it is not this architecture"
        )
    loaded: PreTrainedModel = model
    return loaded


def _check_numbers(spec: str, gguf: "GgufFile", config: Any) -> int:
    """Return how many numbers the model has, before memory is taken; far too many are refused."""
    try:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        name = gguf.path.name
        raise FailedError(f"{spec}: {name} cannot be used: {_first_sentence(error)}") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    described = sum(
        weight.numel()
        for name, weight in model.named_parameters(remove_duplicate=False)
        if name not in tied
    )
    if described > _MOST_DESCRIBED * gguf.numbers:
        raise FailedError(
            f"{spec}: {gguf.path.name} declares {described:,} parameters but contains "
            f"{gguf.numbers:,}; it is incomplete or damaged"
        )
    return int(described)


_AS_GGUF = RLock()


@contextmanager
def _read_as_gguf() -> Iterator[None]:
    """Let transformers read a GGUF file faster and without a progress bar."""
    import gguf  # an extra, which the file's reader has asked for

    from kvprof.models.gguf import open_gguf, release

    with _AS_GGUF:  # two at once would put back what the other has put there
        bar, table = modeling_gguf_pytorch_utils.tqdm, gguf.get_tensor_name_map
        reader, dequantize = gguf.GGUFReader, gguf.dequantize

        def sparing(data: Any, kind: Any) -> Any:
            unpacked = dequantize(data, kind)
            release(data)
            return unpacked

        modeling_gguf_pytorch_utils.tqdm = partial(bar, disable=True)
        gguf.get_tensor_name_map, gguf.GGUFReader = cache(table), open_gguf
        gguf.dequantize = sparing
        try:
            yield
        finally:
            modeling_gguf_pytorch_utils.tqdm = bar
            gguf.get_tensor_name_map, gguf.GGUFReader = table, reader
            gguf.dequantize = dequantize


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def _first_sentence(error: Exception) -> str:
    if isinstance(error, KeyError):  # of a word that transformers looks up, such as a rope_type
        return f"transformers does not know {error} in its config"
    return " ".join(str(error).split()).split(". ")[0]


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turn any error in the body into one line that names the file; keep kvprof's own errors."""
    try:
        yield
    except (KvprofError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise FailedError(f"{what}: {type(error).__name__}: {_first_sentence(error)}") from error


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
            "max_target_positions")  # fmt: skip


# --- What is known of a decoder before its weights are read, and one that is loaded and examined.


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """What texts are read for: a decoder whose weights need not be there yet."""

    spec: str  # what the user wrote
    config: Any
    device: torch.device  # where input ids go
    #: Longest sequence the model accepts, in tokens; `sys.maxsize` where it states none.
    context_length: int
    vocab_size: int  # rows of the embedding
    folder: Path | None = None  # where config and tokenizer lie; None for a model made in memory
    trust_remote_code: bool = False
    #: The file that it was read from, if it was one: its weights were rounded, and are another
    #: model's than those that they were rounded from.
    gguf: "GgufFile | None" = None
    files: tuple[Path, ...] = ()  # that say which model it is
    # Once it was read; of an opened model also that of the loaded one.
    _tokenizers: list[PreTrainedTokenizerBase] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def stored(self) -> str | None:
        """Its fingerprint, where files alone say it."""
        known = self.files and not self.trust_remote_code
        return files_fingerprint(self.files) if known else None

    @cached_property
    def outline(self) -> "Outline | None":
        """Its layout where its config says it, of a model that may run with a compressed cache."""
        text = self.config.get_text_config(decoder=True)
        if self.trust_remote_code:
            return None
        try:
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            layout = inspect_config(text, width, whole=True)
        except Exception:  # whatever a config that is a stranger's makes of so small a model
            return None
        known = layout.unstorable is None and layout.layers[0].qk_head_dim == width
        return Outline(layout) if known else None

    @property
    def _stating(self) -> tuple[Any, ...]:
        """What names tokens with a meaning of their own."""
        return self.config, self.config.get_text_config(decoder=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Token ids that random tokens exclude: special ids and unused embedding rows."""
        ids: set[Any] = set()
        for config in self._stating:
            for name, value in config.to_dict().items():
                if name.endswith(("token_id", "token_index")):  # of images too
                    ids.update(value if isinstance(value, list | tuple) else [value])
        if self.gguf is not None:
            ids |= self.gguf.special_ids
            ids.update(range(len(self.gguf.token_types) or self.vocab_size, self.vocab_size))
        elif _has_tokenizer(self.folder, None):
            tokenizer = self.tokenizer()
            ids.update(tokenizer.all_special_ids)
            ids.update(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)
            ids |= set(range(self.vocab_size)) - set(tokenizer.get_vocab().values())
        return frozenset(i for i in ids if isinstance(i, int) and 0 <= i < self.vocab_size)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, read on first use."""
        if not self._tokenizers:
            trusted = self.trust_remote_code
            found = read_tokenizer(self.spec, self.folder, self.gguf, trust_remote_code=trusted)
            self._tokenizers.append(found)
        return self._tokenizers[0]

    def token_ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        ids = self.tokenizer()(text, add_special_tokens=add_special_tokens, verbose=False)
        return self.embedded(list(ids["input_ids"]))

    def embedded(self, ids: list[int]) -> list[int]:
        """Return ids of the tokenizer that are rows of the embedding; others are refused."""
        if beyond := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise UsageError(
                f"{self.spec}: its tokenizer produced token id {beyond[0]} "
                f"({self.tokenizer().decode(beyond[:1])!r}), but the vocabulary has "
                f"{self.vocab_size:,}"
            )
        return ids


@dataclass(frozen=True)
class Outline:
    """What a plan stores of a model follows from it, before weights are read."""

    layout: ModelLayout
    fingerprint: str = ""


def _has_tokenizer(folder: Path | None, gguf: "GgufFile | None") -> bool:
    if gguf is not None:
        return bool(gguf.token_types)
    return folder is not None and any(next(folder.glob(name), None) for name in _TOKENIZER_FILES)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(OpenedModel):
    """A decoder ready to be measured."""

    model: PreTrainedModel  # in eval mode
    identity: ModelIdentity  # of its weights and configuration
    revision: str | None  # commit on the hub
    layout: ModelLayout
    dtype: torch.dtype
    # Holds a temporary folder of offloaded weights for as long as the model lives.
    _scratch: Any = field(default=None, repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """Which model it is, as it is now (`kvprof.models.fingerprint`)."""
        return self.identity.current()

    @property
    def end_ids(self) -> list[int]:
        """The ids with which it ends a text; none where it has no such token."""
        value = self.model.generation_config.eos_token_id
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [int(value)]

    @property
    def origin(self) -> dict[str, Any]:
        """What a result's inputs say of where the weights came from."""
        if self.gguf is None:
            return {"revision": self.revision}
        return {"revision": self.revision, "gguf": self.gguf.described}

    @property
    def _stating(self) -> tuple[Any, ...]:
        return *super()._stating, self.model.generation_config


def read_tokenizer(
    spec: str, folder: Path | None, gguf: "GgufFile | None", *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a folder, or that of a GGUF file, which cuts texts as the file says."""
    if not _has_tokenizer(folder, gguf):
        beside = (
            "; a model in memory has none"
            if folder is None
            else " (kvprof generate needs the tokenizer's files in the model's folder)"
        )
        raise UsageError(
            f"{spec} has no tokenizer and cannot read text; use random tokens or a file of token "
            f"ids{beside}"
        )
    if gguf is not None:
        from kvprof.models.gguf_tokenizer import byte_level_tokenizer, check_texts
    tokenizer: PreTrainedTokenizerBase
    try:
        with quiet(), _read_as_gguf() if gguf is not None else nullcontext():
            if gguf is not None and gguf.byte_level:
                tokenizer = byte_level_tokenizer(spec, gguf)
            else:
                tokenizer = AutoTokenizer.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=trust_remote_code,
                    **({} if gguf is None else {"gguf_file": gguf.path.name}),
                )
            if gguf is not None:
                check_texts(spec, gguf, tokenizer)
    except KvprofError:
        raise
    except ImportError as error:
        raise LackingError(f"{spec}: its tokenizer requires a package: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exception
        raise FailedError(f"{spec}: its tokenizer cannot be read: {error}") from error
    return tokenizer


def token_counter(spec: str) -> Callable[[str], int]:
    """Return what counts the tokens of a text, by a model's tokenizer: weights are not read."""
    checkpoint = locate(spec)
    tokenizer = read_tokenizer(spec, checkpoint.folder, checkpoint.gguf)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_model(
    spec: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    gguf: str | None = None,
    before: Callable[[OpenedModel], object] = lambda _: None,
) -> LoadedModel:
    """Load a decoder for measuring, and refuse it in one clear line where it cannot be trusted."""
    target = main_device(device)
    kind = parse_dtype(dtype, target)
    checkpoint = locate(spec, revision=revision, with_code=trust_remote_code, gguf=gguf)
    with quiet():
        config = read_config(spec, checkpoint.folder, trust_remote_code, checkpoint.gguf)
        text = config.get_text_config(decoder=True)
        opened = OpenedModel(
            spec=spec,
            config=config,
            device=target,
            context_length=_context_length(text),
            vocab_size=getattr(text, "vocab_size", sys.maxsize),
            folder=checkpoint.folder,
            trust_remote_code=trust_remote_code,
            gguf=checkpoint.gguf,
            files=tuple(checkpoint.identifying),
        )
        before(opened)
        needed = int(checkpoint.size / checkpoint.stored_itemsize) * kind.itemsize
        build = partial(
            model_class(config).from_config, config, trust_remote_code=trust_remote_code
        )
        device_map = device_map_for(device, target, needed, config, build)
        spread = device_map is not None and device_map != {"": target}
        scratch = TemporaryDirectory(prefix="kvprof-offload-") if spread else None
        model = read_weights(
            spec,
            checkpoint,
            config=config,
            dtype=kind,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            offload_folder=scratch and scratch.name,
        )
    model.requires_grad_(False)
    return _examined(model, spec, checkpoint, trust_remote_code, scratch, opened._tokenizers)


def wrap_model(model: PreTrainedModel, spec: str = "<python>") -> LoadedModel:
    """Take a model that is already in memory; it is put into eval mode."""
    return _examined(model, spec, None, False, None, [])


def _examined(
    model: PreTrainedModel,
    spec: str,
    checkpoint: Checkpoint | None,
    trusted: bool,
    scratch: Any,
    tokenizers: list[PreTrainedTokenizerBase],
) -> LoadedModel:
    files = tuple(checkpoint.identifying) if checkpoint else ()
    model.eval()
    check_finite(model, spec)
    with quiet(), blaming(f"{spec} cannot run as its config describes it"):
        layout = inspect_layout(model)
    _check_ends(model, spec)
    return LoadedModel(
        model=model,
        spec=spec,
        config=model.config,
        identity=ModelIdentity(model, files),
        files=files,
        revision=checkpoint.revision if checkpoint else None,
        layout=layout,
        device=input_device(model),
        dtype=model.dtype,
        context_length=_context_length(model.config.get_text_config(decoder=True)),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        folder=checkpoint.folder if checkpoint else None,
        trust_remote_code=trusted,
        gguf=checkpoint.gguf if checkpoint else None,
        _scratch=scratch,
        _tokenizers=tokenizers,
    )


def _context_length(config: Any) -> int:
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    return next((n for n in lengths if isinstance(n, int)), sys.maxsize)


def _check_ends(model: PreTrainedModel, spec: str) -> None:
    """Refuse ends of a text that are no token's number."""
    for name in ("eos_token_id", "pad_token_id"):
        value = getattr(model.generation_config, name, None)
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and (isinstance(one, bool) or not isinstance(one, int)):
                raise FailedError(
                    f"{spec}: generation config: {name} is {str(value)[:40]}, which is not a "
                    "token id"
                )
