"""A shape from a local config: a small random model of its kind is built and looked at.

Heads, widths, windows and sinks are what the probe of `kvprof.models` finds in the model's own
code; layers, hidden size, MLP and vocabulary are cut down before, because attention's shape does
not depend on them. No weights are read, and no code that a model brings along is run.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvprof.benchmark.shapes import Rope, Shape
from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.models.config_limits import check_config_sizes
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.locate import read_json
from kvprof.models.noise import quiet
from kvprof.models.probe import inspect_layout
from kvprof.models.read import read_config

__all__ = ["shape_of_config"]

_HIDDEN = 64
_SMALL = {
    "vocab_size": 128, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 1, "ffn_dim": 64,
}  # fmt: skip
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def shape_of_config(given: str) -> Shape:
    """Return the shape that a model's folder or its ``config.json`` describes.

    Parameters
    ----------
    given : str
        A folder with a ``config.json``, that file, or ``reference``.

    Raises
    ------
    UsageError
        When there is no config, or the model's attention cannot be read (MLA, hybrid models, those
        that need code of their own).
    FailedError
        When the config is damaged.
    """
    path = _folder(given)
    check_config_sizes(given, read_json(given, path / "config.json"))
    with quiet():
        config = read_config(given, path, trust_remote_code=False).get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layout = _layout(given, config, width)
    first = layout.layers[0]
    if any(layer.mla or layer.qk_head_dim != layer.v_head_dim for layer in layout.layers):
        raise UsageError(
            f"{given}: K and V are no heads of one width (latent attention is compressed already); "
            "bench has no kernel for it"
        )
    context = getattr(config, "max_position_embeddings", None)
    pattern, window = _windows(given, config, layout.layers, context)
    return Shape(
        name=given if path != Path(given) else path.resolve().name, source=str(path),
        layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        num_heads=first.num_heads, num_kv_heads=first.num_kv_heads, head_dim=first.qk_head_dim,
        rope=_rope(config, first), context=context, scaling=first.scaling,
        sliding_window=window, window_pattern=pattern,
        sinks=any(layer.sinks for layer in layout.layers),
        softcap=float(first.softcap or 0.0), qk_norm=first.qk_norm,
    )  # fmt: skip


def _folder(given: str) -> Path:
    if given == "reference":
        return Path(__file__).parent.parent / "assets" / "reference"
    path = Path(given).expanduser()
    if path.is_file() and path.name == "config.json":
        return path.parent
    if not (path / "config.json").is_file():
        raise UsageError(f"{given} has no config.json; name a model's folder or that file")
    return path


def _layout(given: str, config: Any, width: int) -> ModelLayout:
    """Probe a small model; where a narrow hidden state does not fit the kind, keep the model's."""
    problem: Exception | None = None
    for hidden in (_HIDDEN, None):
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(_cut(config, hidden, width)).eval()
                layout = inspect_layout(model)
        except UsageError:
            raise
        except (KvprofError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            problem = error
            continue
        if layout.layers[0].qk_head_dim == width:
            return layout
    raise FailedError(
        f"{given}: no model can be built from config.json"
        + (f": {' '.join(str(problem).split())}" if problem is not None else "")
    )


def _cut(config: Any, hidden: int | None, width: int) -> Any:
    small = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    # As many layers as show every kind once; two where all are said to be alike.
    layers = max(map(kinds.index, set(kinds))) + 1 if kinds else min(2, config.num_hidden_layers)
    if kinds:
        small.layer_types = kinds[:layers]
    small.num_hidden_layers = layers
    for name in _SPECIAL:
        setattr(small, name, None)
    for name, value in _SMALL.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(value, getattr(small, name)))
    if hidden is not None:
        small.hidden_size = hidden
        small.head_dim = width
    return small


def _windows(
    given: str, config: Any, layers: tuple[LayerLayout, ...], context: int | None
) -> tuple[str, int | None]:
    """Return the pattern of windows over all layers, and the window."""
    # A window as long as the context hides nothing.
    found = [
        layer.sliding_window
        if layer.sliding_window and (context is None or layer.sliding_window < context)
        else None
        for layer in layers
    ]
    sizes = {window for window in found if window is not None}
    if len(sizes) > 1:
        raise UsageError(f"{given}: layers have several sliding windows; bench knows one")
    if not sizes:
        return "F", None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        if None in found:
            raise UsageError(f"{given}: config.json does not say which layers have a window")
        return "W", sizes.pop()
    by_kind = dict(zip(kinds[: len(found)], found, strict=True))
    return "".join("F" if by_kind[kind] is None else "W" for kind in kinds), sizes.pop()


def _rope(config: Any, layer: LayerLayout) -> Rope:
    if layer.position not in ("rope", "partial_rope"):
        return Rope("none", None)
    stated = getattr(config, "rope_parameters", None) or {}
    stated = stated.get("full_attention", stated)
    theta = stated.get("rope_theta", getattr(config, "rope_theta", None))
    return Rope(str(stated.get("rope_type", "default")), float(theta) if theta else None)
