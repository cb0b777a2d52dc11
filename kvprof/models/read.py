"""Reads config and weights with transformers, turning each way it can fail into one clear line."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.models.locate import Checkpoint

__all__ = ["read_config", "read_weights"]

# A buffer that old checkpoints carry and every model computes for itself.
_HARMLESS = ("rotary_emb.inv_freq",)


def read_config(spec: str, folder: Path, trust_remote_code: bool) -> Any:
    """Read a folder's ``config.json`` and make sure that it names a causal language model.

    Raises
    ------
    UsageError
        An unknown or unsupported architecture, or one that needs ``trust_remote_code``.
    FailedError
        A config that contradicts itself.
    LackingError
        A package that its code needs is missing.
    """
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ImportError as error:
        raise LackingError(f"{spec} needs a package that is not installed: {error}") from error
    except Exception as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise UsageError(
                f"{spec} needs Python code that it brings along; read that code, then pass "
                "--trust-remote-code"
            ) from error
        if "model_type" in str(error) or "model type" in str(error):
            raise UsageError(
                f"{spec} has an architecture that this version of transformers does not know: "
                f"{_first_sentence(error)}"
            ) from error
        raise FailedError(
            f"{spec}: config.json cannot be used: {_first_sentence(error)}"
        ) from error
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise UsageError(
            f"{spec} is not supported: {type(config).__name__} belongs to no causal language model"
        )
    return config


def read_weights(spec: str, checkpoint: Checkpoint, **options: Any) -> PreTrainedModel:
    """Build a model from a whole checkpoint, with every weight of it and no other.

    Parameters
    ----------
    spec : str
        Named in errors.
    checkpoint : Checkpoint
    **options
        For ``from_pretrained``.

    Raises
    ------
    FailedError
        Tensors that are missing (they would be random), unexpected, or of another shape.
    LackingError
        Not enough GPU memory, or a missing package.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below instead
            **options,
        )
    except torch.OutOfMemoryError as error:
        raise LackingError(
            f"{spec} does not fit the GPU's free memory; use --device auto or --device offload"
        ) from error
    except ImportError as error:
        raise LackingError(f"{spec} needs a package that is not installed: {error}") from error
    except Exception as error:
        raise FailedError(f"{spec} cannot be loaded: {_first_sentence(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise FailedError(
            f"{spec}: the checkpoint lacks {missing[0]}{_more(missing)}, which would be random; "
            "it is not complete or belongs to another architecture"
        )
    unexpected = sorted(k for k in report["unexpected_keys"] if not k.endswith(_HARMLESS))
    if unexpected:
        raise FailedError(
            f"{spec}: the checkpoint holds {unexpected[0]}{_more(unexpected)}, which "
            f"{type(model).__name__} has no place for; config.json names another architecture"
        )
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        raise FailedError(
            f"{spec}: the checkpoint holds {mismatched[0]}{_more(mismatched)} of another shape "
            "than config.json says"
        )
    loaded: PreTrainedModel = model
    return loaded


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0]
