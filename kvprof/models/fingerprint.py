"""A model's identity: the values of its weights and its whole configuration.

It guards plans, moments, recorded rates and evaluations: what was made for one model is not taken
for another. It does not depend on where a checkpoint lies, on how it is cut into files, on whether
a tied weight is written once or twice, or on the dtype that it is loaded in. A model that was made
or changed in memory counts as it is there, so that one that was rounded to a narrower dtype is
another model than the checkpoint it came from.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kvprof.models.layout import ModelLayout
from kvprof.models.noise import quiet
from kvprof.models.weight_digests import checksum, file_digests, tensor_digests
from kvprof.models.weights import named_weights

__all__ = ["LEFT_OUT", "ModelIdentity", "configuration", "fingerprint"]

#: Entries of a configuration, at any depth, that say nothing about what a model computes: where it
#: came from and with what it was written, the dtype it is loaded in, what it returns beside the
#: logits, the names of token ids and labels. With them go names that begin with an underscore and
#: the defaults of generation (``temperature``, ``max_length`` and the like), unless the class of a
#: configuration has an entry of that name itself.
LEFT_OUT = frozenset(
    {
        "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype",
        "use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "id2label", "label2id", "problem_type", "tokenizer_class", "task_specific_params",
        "attn_implementation",
    }
)  # fmt: skip

_GENERATION = frozenset(GenerationConfig().to_dict())


def configuration(config: Any) -> dict[str, Any]:
    """Return what a configuration says about what a model computes, as JSON values.

    Entries that have their class's default are left out with those of `LEFT_OUT`, so that a
    checkpoint that spells a default out is the same model, in other versions of transformers too.

    Parameters
    ----------
    config : PretrainedConfig
    """
    try:
        usual = type(config)().to_dict()
    except Exception:  # a class that needs arguments has no defaults to leave out
        usual = {}
    dropped = LEFT_OUT | (_GENERATION - _names(usual))
    described: dict[str, Any] = _differing(
        _plain(config.to_dict(), dropped), _plain(usual, dropped)
    )
    return {"model_type": getattr(config, "model_type", ""), **described}


def _names(value: Any) -> set[str]:
    """Return the names of a nest of mappings."""
    if not isinstance(value, Mapping):
        return set()
    return {str(key) for key in value}.union(*(_names(entry) for entry in value.values()))


def _plain(value: Any, dropped: Set[str]) -> Any:
    """Return a value as JSON holds it, numbers alike whether written 1 or 1.0."""
    if isinstance(value, Mapping):
        return {
            str(key): _plain(entry, dropped)
            for key, entry in value.items()
            if str(key) not in dropped and not str(key).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_plain(entry, dropped) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return str(value)


def _differing(value: Any, usual: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(usual, dict):
        return value
    return {
        key: _differing(entry, usual.get(key))
        for key, entry in value.items()
        if key not in usual or entry != usual[key]
    }


def fingerprint(model: PreTrainedModel, layout: ModelLayout, digests: Mapping[str, str]) -> str:
    """Identify a model by 32 hexadecimal digits.

    Parameters
    ----------
    model : PreTrainedModel
        Its configuration counts, and its code where it brought it along.
    layout : ModelLayout
        Its layout: the same weights split into other heads are another model.
    digests : mapping of str to str
        Of its weights, by the names that a checkpoint has for them.
    """
    facts = {
        "architecture": layout.architecture,
        "config": configuration(model.config),
        "code": _code(model),
        "layers": [
            [x.num_heads, x.num_kv_heads, x.qk_head_dim, x.v_head_dim, x.position, x.rotary_dim,
             x.sliding_window, x.softcap, x.scaling]
            for x in layout.layers
        ],
        "weights": _own(model, digests),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _own(model: PreTrainedModel, digests: Mapping[str, str]) -> dict[str, str]:
    """Leave out what the model ignores, and a tied weight that is written a second time."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    found = {
        name: digest
        for name, digest in digests.items()
        if not any(re.search(pattern, name) for pattern in ignored)
    }
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in dict(tied).items():
        if name in found and found.get(source) == found[name]:
            del found[name]
    return found


def _code(model: PreTrainedModel) -> list[str]:
    """Return digests of the code that is of neither torch nor transformers."""
    names = {type(module).__module__ for module in model.modules()}
    files = {
        getattr(sys.modules.get(name), "__file__", None)
        for name in names
        if name.split(".")[0] not in ("torch", "transformers", "kvprof")
    }
    paths = (Path(file) for file in files if file)
    return sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file())


def _live(model: PreTrainedModel) -> dict[str, str]:
    """Return the digests of a model's weights as they are in memory."""
    state = _state(model)
    if any(isinstance(value, Tensor) and value.device.type == "meta" for value in state.values()):
        digests: dict[str, str] = {}
        for name, weight in named_weights(model):  # offloaded: one module at a time
            digests |= tensor_digests({name: weight})
        rest = {name: value for name, value in state.items() if name not in digests}
        return digests | tensor_digests({n: v for n, v in rest.items() if not _away(v)})
    with quiet():
        # Experts are put together when they are loaded; a checkpoint has them one by one.
        state = revert_weight_conversion(model, state)
    return tensor_digests(state)


def _away(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _state(model: PreTrainedModel) -> dict[str, Any]:
    state: dict[str, Any] = model.state_dict()
    return state


class ModelIdentity:
    """Knows a model's fingerprint, and whether it still is the model's.

    Parameters
    ----------
    model : PreTrainedModel
    layout : ModelLayout
    files : iterable of Path or None
        The checkpoint that it was just loaded from, whole and unchanged; None counts what is in
        memory.

    Attributes
    ----------
    held : bool
        Whether the model is changed for a while, by kvprof itself (`kvprof.runtime.compressed`).

    Raises
    ------
    FailedError
        As `kvprof.models.weight_digests.file_digests` does.
    """

    def __init__(
        self, model: PreTrainedModel, layout: ModelLayout, files: Iterable[Path] | None = None
    ) -> None:
        self.held = False
        self._model = model
        self._layout = layout
        digests = _live(model) if files is None else file_digests(files)
        self._known = fingerprint(model, layout, digests)
        self._now = self._sums()

    def _sums(self) -> Any:
        return checksum(_state(self._model)), json.dumps(configuration(self._model.config))

    def current(self) -> str:
        """Return the fingerprint; a model whose weights were changed in memory has another."""
        if not self.held and (now := self._sums()) != self._now:
            self._known = fingerprint(self._model, self._layout, _live(self._model))
            self._now = now
        return self._known
