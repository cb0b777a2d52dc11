"""kvprof in vLLM: entry point ``vllm.general_plugins``; does nothing unless ``KVPROF_PLAN`` is set.

vLLM calls `register` in every process that it starts. There the plan takes its places: the engine's
configuration is checked against it before anything is loaded, attention layers get the back end,
the cache gets pages of the plan's size, heads go to the ranks that carry them, and V's bases go
into the weights when these are there. Written for vLLM 0.26 and 0.27; the tests run the plug-in in
the engine.
"""

import os
import subprocess
from functools import wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvprof.child import child_environment, child_python
from kvprof.errors import LackingError, UsageError
from kvprof.requirements import install_command
from kvprof.serving.runners import take_runners
from kvprof.serving.settings import RUNNER_VARIABLE, model_runner

__all__ = ["PLAN_VARIABLE", "check_found", "register"]

#: Names the file of the plan.
PLAN_VARIABLE = "KVPROF_PLAN"


def check_found() -> None:
    """Refuse to serve where vLLM's own processes would not find the plug-in."""
    group = entry_points(group="vllm.general_plugins")
    names = {one.name for one in group if one.module == register.__module__}
    if not names:
        raise LackingError(
            "vLLM cannot find kvprof's plug-in: this installation does not register it; install "
            f"kvprof again from its clone: {install_command('.')}"
        )
    asked = subprocess.run(
        child_python("-c", f"import {__name__} as own; print(own.__file__)"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=child_environment(),
        check=False,
    )
    there = os.fsdecode(asked.stdout).strip()
    if not there or not Path(there).samefile(__file__):
        theirs = f"the one in {Path(there).parents[2]}" if there else "none"
        raise LackingError(
            f"vLLM does not find this kvprof ({Path(__file__).parents[2]}) but {theirs}; run that "
            f"one, or install this one from its clone: {install_command('.')}"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not names & set(allowed.split(",")):
        raise UsageError(f"VLLM_PLUGINS={allowed} excludes kvprof's plug-in; add kvprof to it")


def register() -> None:
    """Serve the plan that ``KVPROF_PLAN`` names; without one vLLM stays as it is."""
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        return
    from vllm.engine import arg_utils
    from vllm.model_executor.layers.attention import attention
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.engine import core

    if getattr(register, "done", False):
        return
    register.done = True  # type: ignore[attr-defined]  # none to mypy
    os.environ[RUNNER_VARIABLE] = model_runner()
    # As `vllm serve` does by itself, and scripts do not: a process that read the checkpoint to hold
    # the plan against it may not be forked into one that uses CUDA.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    register_backend(AttentionBackendEnum.CUSTOM, "kvprof.serving.backend.PlanBackend")
    _check_configuration(arg_utils.EngineArgs, path)
    _take_attention(attention.Attention, path)
    _take_weights(base_loader, path)
    _tell_tokens(core, path)
    take_runners(path)


def _check_configuration(engine_args: Any, path: str) -> None:
    """Refuse what cannot be served as soon as the engine's configuration is known."""
    made = engine_args.create_engine_config

    @wraps(made)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.active_plan import plan_digest, served_plan
        from kvprof.serving.engine import check_engine, check_model

        plan = served_plan(path)
        config = made(self, *args, **kwargs)
        check_engine(config)
        check_model(plan, config)
        # What vLLM keeps of compiled code it finds again by this: widths are compiled in.
        if isinstance(config.additional_config, dict):
            config.additional_config["kvprof"] = plan_digest(path)
        return config

    engine_args.create_engine_config = create_engine_config


def _take_attention(attention: Any, path: str) -> None:
    """Give attention layers the back end, and the cache its pages."""
    begin, specified, ran = attention.__init__, attention.get_kv_cache_spec, attention.forward

    @wraps(begin)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        from kvprof.serving.backend import PlanBackend

        if type(self) is not attention:
            raise UsageError(f"a plan cannot be served with layers of type {type(self).__name__}")
        kwargs["attn_backend"] = PlanBackend
        begin(self, *args, **kwargs)

    @wraps(specified)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        from kvprof.serving.active_plan import served_plan
        from kvprof.serving.engine import page_spec

        return page_spec(self, served_plan(path), vllm_config)

    @wraps(ran)
    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.engine import run_layer

        return run_layer(self, query, key, value)

    attention.__init__ = made
    attention.get_kv_cache_spec = get_kv_cache_spec
    attention.forward = forward


def _take_weights(base_loader: Any, path: str) -> None:
    """Deal heads out to ranks as weights are loaded, and fold bases in afterwards."""
    made, processed = base_loader.initialize_model, base_loader.process_weights_after_loading

    @wraps(made)
    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.active_plan import served_plan
        from kvprof.serving.engine import prepare

        model = made(vllm_config, *args, **kwargs)
        prepare(model, served_plan(path), vllm_config.model_config.max_model_len)
        return model

    @wraps(processed)
    def process_weights_after_loading(model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.active_plan import served_plan
        from kvprof.serving.engine import fold

        fold(model, served_plan(path), config.max_model_len)
        return processed(model, config, *args, **kwargs)

    base_loader.initialize_model = initialize_model
    base_loader.process_weights_after_loading = process_weights_after_loading


def _tell_tokens(core: Any, path: str) -> None:
    """Say how many tokens of cache fit, once the engine knows what memory there is."""
    made = core.get_kv_cache_configs

    @wraps(made)
    def get_kv_cache_configs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.active_plan import served_plan
        from kvprof.serving.engine import tell_tokens

        found = made(vllm_config, *args, **kwargs)
        tell_tokens(served_plan(path), vllm_config, found[0].num_blocks)
        return found

    core.get_kv_cache_configs = get_kv_cache_configs
