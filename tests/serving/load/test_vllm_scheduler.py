"""The simulator against vLLM's own scheduler, in virtual time; runs where vLLM is installed."""

import os
from importlib.resources import files

import numpy as np
import pytest

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as EngineRequest
from vllm.v1.structured_output import StructuredOutputManager

from kvprof.serving.load.simulator import simulate
from tests.serving.load.test_simulator import drawn

pytestmark = pytest.mark.vllm

_LONGEST = 100_000


def scheduler(settings):
    model = ModelConfig(
        model=str(files("kvprof") / "assets" / "reference"),
        dtype="float32",
        skip_tokenizer_init=True,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=settings.block_size, enable_prefix_caching=settings.prefix_caching
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=_LONGEST,
            is_encoder_decoder=False,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    # What the configuration makes of them for this model is not what is simulated.
    config.model_config.max_model_len = _LONGEST
    config.cache_config.block_size = settings.block_size
    config.cache_config.num_gpu_blocks = settings.pages + 1  # one of them is vLLM's own
    spec = FullAttentionSpec(
        block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    pages = KVCacheConfig(settings.pages + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=pages,
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings.block_size,
    )


def engine_request(request, settings):
    """Return a request whose first tokens are its session's, and all others its own."""
    shared = min(request.prefix, request.prompt) if request.session is not None else 0
    tokens = [10_000 * ((request.session or 0) + 1) + place for place in range(shared)]
    own = 10_000_000 + 100_000 * request.number
    tokens += [own + place for place in range(request.prompt - shared)]
    hasher = get_request_block_hasher(settings.block_size, sha256)
    sampling = SamplingParams(max_tokens=request.output, ignore_eos=True)
    return EngineRequest(
        str(request.number),
        tokens,
        sampling,
        None,
        block_hasher=hasher if settings.prefix_caching else None,
    )


def served(requests, settings, times):
    """Return when every token comes, step by step of vLLM's scheduler."""
    engine, now = scheduler(settings), 0.0
    coming, live, decoding = list(requests), {}, set()
    found = {str(one.number): [] for one in requests}
    while coming or live:
        while coming and coming[0].arrival <= now:
            request = engine_request(coming.pop(0), settings)
            live[request.request_id] = request
            engine.add_request(request)
        planned = engine.schedule()
        if not planned.total_num_scheduled_tokens:
            now = coming[0].arrival
            continue
        tokens = planned.num_scheduled_tokens
        # The scheduler counts them as computed by now.
        before = {name: live[name].num_computed_tokens - count for name, count in tokens.items()}
        context = sum(before[name] + 1 for name in tokens if name in decoding)
        prompts = [name for name in tokens if name not in decoding]
        pairs = sum(tokens[n] * before[n] + tokens[n] * (tokens[n] + 1) / 2 for n in prompts)
        read = sum(tokens[name] for name in prompts)
        now += times.step(len(tokens) - len(prompts), context, read, pairs)
        decoding, sampled = set(), []
        for name, count in tokens.items():
            written = before[name] + count >= live[name].num_tokens
            # No token of an answer is one of a prompt.
            sampled.append([90_000_000 + 100_000 * int(name) + len(found[name])] * written)
            if written:
                found[name].append(now)
                decoding.add(name)
        names = list(tokens)
        places = {name: place for place, name in enumerate(names)}
        engine.update_from_output(planned, ModelRunnerOutput(names, places, sampled))
        for name in [name for name in decoding if len(found[name]) >= live[name].max_tokens]:
            decoding.discard(name)
            del live[name]
    return found


def test_every_token_comes_when_vllm_s_scheduler_says():
    init_none_hash(sha256)
    preempted = shared = 0
    for seed in range(5000, 5040):
        requests, settings, times = drawn(np.random.default_rng(seed))
        expected = served(requests, settings, times)
        simulated = simulate(requests, settings, times)
        for outcome in simulated.outcomes:
            own = expected[str(outcome.request.number)]
            np.testing.assert_allclose(list(outcome.tokens), own, rtol=1e-9, err_msg=f"{seed}")
        preempted += simulated.totals.preemptions
        shared += simulated.totals.found
    assert preempted > 20
    assert shared > 1000
