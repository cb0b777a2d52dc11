"""kvprof in vLLM: entry point ``vllm.general_plugins``; does nothing unless ``KVPROF_PLAN`` is set.

vLLM calls `register` in every process that it starts. There the plan takes its places: the engine's
configuration is checked against it before anything is loaded, attention layers get the back end,
the cache gets pages of the plan's size, heads go to the ranks that carry them, and V's bases go
into the weights when these are there. Written for vLLM 0.26 and 0.27; the tests run the plug-in in
the engine.
"""

import os
import subprocess
from dataclasses import replace
from functools import wraps
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

from kvprof.child import child_environment, child_python
from kvprof.errors import LackingError, UsageError
from kvprof.requirements import extra_command
from kvprof.serving.sampled import SAMPLE_VARIABLE, StepWriter, asked_sampling

__all__ = ["PLAN_VARIABLE", "check_found", "register"]

#: Names the file of the plan.
PLAN_VARIABLE = "KVPROF_PLAN"


def check_found() -> None:
    """Refuse to serve where the engine's own processes would not find the plug-in.

    They look for entry points, and one that found none, or could not import it, would serve full
    width without a word. So a process like theirs is asked.

    Raises
    ------
    LackingError
        When kvprof's installation does not name it.
    UsageError
        When ``VLLM_PLUGINS`` leaves it out.
    """
    group = entry_points(group="vllm.general_plugins")
    names = {one.name for one in group if one.module == register.__module__}
    asked = subprocess.run(
        child_python("-c", f"import {__name__} as own; print(own.__file__)"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=child_environment(),
        check=False,
    )
    there = os.fsdecode(asked.stdout).strip()
    if not names or not there or not Path(there).samefile(__file__):
        raise LackingError(
            "vLLM would not find kvprof's plug-in, which this installation does not name; "
            f"install it again: {extra_command('serve')}"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not names & set(allowed.split(",")):
        raise UsageError(f"VLLM_PLUGINS={allowed} leaves kvprof's plug-in out: add kvprof to it")


def register() -> None:
    """Serve the plan that ``KVPROF_PLAN`` names; without one vLLM stays as it is."""
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        return
    from vllm.engine import arg_utils
    from vllm.model_executor.layers.attention import attention
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.engine import core

    if getattr(register, "done", False):
        return
    register.done = True  # type: ignore[attr-defined]  # none to mypy
    # The second model runner of 0.26 and 0.27 is not tried.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    register_backend(AttentionBackendEnum.CUSTOM, "kvprof.serving.backend.PlanBackend")
    _check_configuration(arg_utils.EngineArgs, path)
    _take_attention(attention.Attention, path)
    _take_weights(base_loader, path)
    _keep_decoding_apart(CudagraphDispatcher)
    _tell_tokens(core, path)
    if (asked := asked_sampling(os.environ.get(SAMPLE_VARIABLE))) is not None:
        from vllm.v1.worker import gpu_model_runner

        _sample_steps(gpu_model_runner.GPUModelRunner, *asked)


def _check_configuration(engine_args: Any, path: str) -> None:
    """Refuse what cannot be served as soon as the engine's configuration is known."""
    made = engine_args.create_engine_config

    @wraps(made)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.engine import check_engine, check_model
        from kvprof.serving.served import plan_digest, served_plan

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
            raise UsageError(f"a plan cannot be served with layers of {type(self).__name__}")
        kwargs["attn_backend"] = PlanBackend
        begin(self, *args, **kwargs)

    @wraps(specified)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        from kvprof.serving.engine import page_spec
        from kvprof.serving.served import served_plan

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
        from kvprof.serving.engine import prepare
        from kvprof.serving.served import served_plan

        model = made(vllm_config, *args, **kwargs)
        prepare(model, served_plan(path), vllm_config.model_config.max_model_len)
        return model

    @wraps(processed)
    def process_weights_after_loading(model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.engine import fold
        from kvprof.serving.served import served_plan

        fold(model, served_plan(path), config.max_model_len)
        return processed(model, config, *args, **kwargs)

    base_loader.initialize_model = initialize_model
    base_loader.process_weights_after_loading = process_weights_after_loading


def _keep_decoding_apart(dispatcher: Any) -> None:
    """Let steps in which all decode have graphs of their own where graphs hold any step.

    vLLM has one or the other: its mode ``FULL`` runs such a step by the graph of any as long, in
    which there are launches for several new tokens too.
    """
    begun, chosen = dispatcher.initialize_cudagraph_keys, dispatcher.dispatch

    @wraps(begun)
    def initialize_cudagraph_keys(self: Any, mode: Any, *args: Any, **kwargs: Any) -> None:
        begun(self, mode, *args, **kwargs)
        if mode.name != "FULL":
            return
        most = self.vllm_config.scheduler_config.max_num_seqs
        own = self.cudagraph_keys[mode]
        # A step of one token is one that decodes, or as good as that.
        own |= {replace(one, uniform=True) for one in own if 1 < one.num_tokens <= most}

    @wraps(chosen)
    def dispatch(
        self: Any, num_tokens: int, uniform_decode: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        mode, found = chosen(self, num_tokens, uniform_decode, *args, **kwargs)
        if uniform_decode and mode.name == "FULL":
            own = replace(found, uniform=True)
            found = own if own in self.cudagraph_keys[mode] else found
        return mode, found

    dispatcher.initialize_cudagraph_keys = initialize_cudagraph_keys
    dispatcher.dispatch = dispatch


def _sample_steps(runner: Any, every: int, folder: Path) -> None:
    """Time every n-th step in parts, without its graph where vLLM lets a step run so."""
    ran = runner.execute_model
    chosen = getattr(runner, "_determine_batch_execution_and_padding", None)

    @wraps(ran)
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        from kvprof.serving.sampling import StepSampler, contents, on_gpu

        if not hasattr(self, "_kvprof_sampler"):
            first = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank
            writer = StepWriter(folder) if first else None
            self._kvprof_sampler = StepSampler(every, writer, on_gpu=on_gpu(self))
        return self._kvprof_sampler.step(
            lambda: ran(self, scheduled, *args, **kwargs),
            lambda: contents(self, scheduled),
            reads=max(scheduled.num_scheduled_tokens.values(), default=0) > 1,
        )

    runner.execute_model = execute_model
    if chosen is None or "force_eager" not in signature(chosen).parameters:
        return

    @wraps(chosen)
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampler = getattr(self, "_kvprof_sampler", None)
        if sampler is not None and sampler.in_parts:
            kwargs["force_eager"] = True
        return chosen(self, *args, **kwargs)

    runner._determine_batch_execution_and_padding = determine


def _tell_tokens(core: Any, path: str) -> None:
    """Say how many tokens of cache fit, once the engine knows what memory there is."""
    made = core.get_kv_cache_configs

    @wraps(made)
    def get_kv_cache_configs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.engine import tell_tokens
        from kvprof.serving.served import served_plan

        found = made(vllm_config, *args, **kwargs)
        tell_tokens(served_plan(path), vllm_config, found[0].num_blocks)
        return found

    core.get_kv_cache_configs = get_kv_cache_configs
