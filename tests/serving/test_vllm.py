"""The plug-in in vLLM's engine: tokens of kvprof's own runtime, whatever the engine does to them.

They run where vLLM is installed (a CPU build will do); ``.ci/run`` makes an environment for them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvprof
from kvprof.child import module_command
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.quantisers import quantised
from kvprof.models.load import load_model
from kvprof.runtime.compressed import compressed
from kvprof.serving.settings import LONG_GRAPH, SHORT_GRAPH, engine_options
from tests.models.gguf_files import write_llama
from tests.serving.engine_runs import (
    CHUNKS,
    ENGINE,
    ENVIRONMENT,
    TOKENS,
    drawn_prompts,
    served_by_engine,
    written_by_runtime,
)
from tests.serving.tiny import rebuilt_plan, save_model, save_tiny_plan

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_chunks_prefixes_and_preemption_change_no_token(
    model: Path, plan: Path, wanted: list[list[int]]
) -> None:
    """Prompts come in chunks of 32, prefixes are found again, and pages run out on the way."""
    found = served_by_engine(model, plan, waves=2, **CHUNKS)
    assert found["waves"] == [wanted, wanted]
    assert found["hits"] > 0
    assert found["preemptions"] > 0


def test_the_form_that_graphs_hold_changes_no_token(
    model: Path, plan: Path, wanted: list[list[int]]
) -> None:
    """Steps that read prompts run as a GPU's graph would run them."""
    found = served_by_engine(
        model, plan, waves=2, fixed=True, distributed_executor_backend="uni", **CHUNKS
    )
    assert found["waves"] == [wanted, wanted]
    assert found["preemptions"] > 0


def test_steps_that_decode_have_graphs_of_their_own() -> None:
    """Where vLLM would run them by the graphs of steps that read prompts."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    from kvprof.serving.runners import _decode_apart_first

    class Dispatcher(CudagraphDispatcher):  # type: ignore[misc]  # vLLM has no types here
        """One that is kvprof's alone."""

    _decode_apart_first(Dispatcher)
    sizes = [1, 2, 4, 8, 16]
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=16,
        compile_sizes=None,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=0,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=6),
    )
    made = Dispatcher(config)
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL, 1)
    ((mode, captured),) = made.get_capture_descs()
    assert mode == CUDAGraphMode.FULL
    found = sorted((one.num_tokens, one.num_reqs, one.uniform) for one in captured)
    mixed = [(size, min(size, 6), False) for size in sizes]
    assert found == sorted([*mixed, (2, 2, True), (4, 4, True)])

    def asked(tokens: int, decode: bool) -> tuple[str, int, int | None, bool]:
        mode, own = made.dispatch(num_tokens=tokens, uniform_decode=decode)
        return mode.name, own.num_tokens, own.num_reqs, own.uniform

    assert asked(3, True) == ("FULL", 4, 4, True)
    assert asked(3, False) == ("FULL", 4, 4, False)
    # More than vLLM has a graph of decoding for, and longer than any.
    assert asked(6, True) == ("FULL", 8, 6, False)
    assert asked(17, False)[0] == "NONE"
    eager = made.dispatch(3, uniform_decode=True, valid_modes={CUDAGraphMode.NONE})
    assert eager[0] == CUDAGraphMode.NONE
    made = Dispatcher(config)
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1)
    ((_, captured),) = made.get_capture_descs()
    assert all(one.uniform for one in captured)


@pytest.mark.parametrize(
    ("longest", "given", "most", "count", "last"),
    [
        (LONG_GRAPH, [], 8192, 71, 3072),
        (LONG_GRAPH, [], 2048, 67, 2048),
        (LONG_GRAPH, ["--max-num-batched-tokens", "1000"], 1000, 59, 1000),
        (SHORT_GRAPH, ["--max-num-batched-tokens", "300"], 300, 38, 300),
        # What is asked for stands: as short as it was.
        (LONG_GRAPH, ["--max-cudagraph-capture-size", "512"], 8192, 51, 512),
    ],
)
def test_sizes_of_graphs_are_those_that_the_engine_takes(
    longest: int, given: list[str], most: int, count: int, last: int
) -> None:
    from vllm.config import CompilationConfig, VllmConfig

    options = engine_options(longest_graph=longest, given=given)
    (text,) = [one.value for one in options if one.name == "--compilation-config"]
    asked = {"max_cudagraph_capture_size": 512} if "--max-cudagraph-capture-size" in given else {}
    own = CompilationConfig(**json.loads(text), **asked)
    config = SimpleNamespace(
        compilation_config=own,
        model_config=SimpleNamespace(enforce_eager=False),
        num_speculative_tokens=0,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        performance_mode="balanced",
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most, max_num_seqs=256),
    )
    VllmConfig._set_cudagraph_sizes(config)
    assert len(own.cudagraph_capture_sizes) == count
    assert own.cudagraph_capture_sizes[-1] == own.max_cudagraph_capture_size == last


def test_the_second_runners_decoding_steps_have_graphs_of_their_own() -> None:
    """What it captures a graph with says nothing of what the graph is for."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from kvprof.serving.runners import CAPTURE, _decode_apart_second

    class Manager(CudaGraphManager):  # type: ignore[misc]  # vLLM has no types here
        """One that is kvprof's alone, and captures nothing."""

        def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
            for one in self._capture_descs[self.cudagraph_mode]:
                create_forward_fn(one, warmup=True)

    _decode_apart_second(Manager)

    def manager(mode: CUDAGraphMode, sizes: Sequence[int] = (1, 2, 4, 8, 16)) -> Any:
        made = object.__new__(Manager)
        made.compilation_config = SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=16
        )
        made.vllm_config = SimpleNamespace(speculative_config=None)
        made.cudagraph_mode, made.max_num_reqs, made.decode_query_len = mode, 6, 1
        made.lora_capture_cases, made._lora_dispatch_map = [0], {}
        made._candidates, made._capture_descs = {}, {}
        made.use_breakable_cg, made._graphs_captured = False, True
        made._init_candidates()
        return made

    made = manager(CUDAGraphMode.FULL)
    met: list[tuple[int, int, bool | None]] = []
    made.capture(lambda one, warmup: met.append((one.num_tokens, one.num_reqs, CAPTURE.decodes)))
    mixed = [(1, 1, True), (2, 2, False), (4, 4, False), (8, 6, False), (16, 6, False)]
    assert sorted(met) == sorted([*mixed, (2, 2, True), (4, 4, True)])
    assert [tokens for tokens, _, _ in met] == [16, 8, 4, 4, 2, 2, 1]
    assert CAPTURE.decodes is None

    def asked(rows: int, tokens: int, uniform: int | None) -> tuple[str, int, int | None]:
        own = made.dispatch(rows, tokens, uniform, num_active_loras=0)
        return own.cg_mode.name, own.num_tokens, own.uniform_token_count

    assert asked(3, 3, 1) == ("FULL", 4, 1)
    assert asked(2, 3, None) == ("FULL", 4, None)
    assert asked(1, 3, 3) == ("FULL", 4, None)
    assert asked(6, 6, 1) == ("FULL", 8, None)
    assert asked(1, 17, 17)[0] == "NONE"
    assert not manager(CUDAGraphMode.FULL, ())._capture_descs
    apart = manager(CUDAGraphMode.FULL_DECODE_ONLY)
    assert {one.uniform_token_count for one in apart._capture_descs[CUDAGraphMode.FULL]} == {1}


def test_both_runners_let_a_step_run_without_its_graph() -> None:
    """As long steps over quantised latents do that read much."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    chosen = GPUModelRunner._determine_batch_execution_and_padding
    assert "force_eager" in signature(chosen).parameters
    assert "need_eager" in signature(model_runner.dispatch_cg_and_sync_dp).parameters
    for told, names in (
        (NewRequestData, {"req_id", "num_computed_tokens"}),
        (CachedRequestData, {"req_ids", "num_computed_tokens"}),
    ):
        assert names <= {one.name for one in fields(told)}


def test_a_step_that_is_tried_out_stays_within_its_pages() -> None:
    """The first runner calls every sequence as long as the step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvprof.serving.backend import PlanBuilder

    builder = object.__new__(PlanBuilder)
    builder.kv_cache_spec = SimpleNamespace(block_size=16)
    bound: list[Any] = []
    builder._model = SimpleNamespace(alike={}, captured_step=lambda *given: given)
    builder._bind = bound.append

    def common(most: int) -> CommonAttentionMetadata:
        starts = torch.tensor([0, 1, 5, 9, 129], dtype=torch.int32)
        lengths = torch.full((4,), most, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.clone(),
            num_reqs=4,
            num_actual_tokens=129,
            max_query_len=most,
            max_seq_len=200,
            block_table_tensor=torch.zeros(4, 6, dtype=torch.int32),
            slot_mapping=torch.full((129,), -1),
        )

    tried = common(129)
    step = builder.build(0, tried)
    assert step.lengths.tolist() == [96] * 4
    assert step.host_lengths == [96, 96, 96, 120]
    assert (step.decodes, step.rows) == (1, 4)
    assert common(96).seq_lens.tolist() == builder.build(0, common(96)).host_lengths == [96] * 4
    tried = common(129)
    *_, lengths = builder.build_for_cudagraph_capture(tried)
    # Where a graph reads them.
    assert lengths is tried.seq_lens
    assert lengths.tolist() == [96] * 4
    assert len(bound) == 3


def test_two_ranks_write_the_same(model: Path, plan: Path, wanted: list[list[int]]) -> None:
    """With heads dealt out by their widths over two processes no token changes."""
    found = served_by_engine(model, plan, tensor_parallel_size=2, **ENGINE)
    assert found["waves"] == [wanted]


def test_rebuilt_keys_over_chunks_prefixes_preemption_and_ranks(
    model: Path, tmp_path: Path
) -> None:
    """Keys rebuilt from pages give the runtime's tokens, with all of it at once."""
    plan = save_tiny_plan(model, tmp_path / "palu.plan", rebuilt_plan)
    found = served_by_engine(model, plan, waves=2, tensor_parallel_size=2, **CHUNKS)
    wanted = written_by_runtime(model, plan)
    assert found["waves"] == [wanted, wanted]
    assert found["hits"] > 0
    assert found["preemptions"] > 0


def test_the_form_that_graphs_hold_rebuilds_the_same_keys(model: Path, tmp_path: Path) -> None:
    """Sequences whose pages find no room decode token by token."""
    plan = save_tiny_plan(model, tmp_path / "palu.plan", rebuilt_plan)
    found = served_by_engine(model, plan, fixed=True, distributed_executor_backend="uni", **CHUNKS)
    assert found["waves"] == [written_by_runtime(model, plan)]
    assert found["preemptions"] > 0


def test_no_chunk_prefix_or_preemption_changes_what_quantised_pages_serve(
    model: Path, plan: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    own = tmp_path / "tiny-4bit.plan"
    save_plan(quantised(load_plan(plan), "per-token", 4), own)
    how = {**ENGINE, "block_size": 64}
    (wave,) = served_by_engine(model, own, enable_prefix_caching=False, **how)["waves"]
    assert all(len(tokens) == TOKENS for tokens in wave)
    assert wave != wanted
    how = {**how, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 8}
    found = served_by_engine(model, own, waves=2, **how)
    assert found["waves"] == [wave, wave]
    assert found["hits"] > 0
    assert found["preemptions"] > 0


def test_quantised_pages_serve_the_same_in_the_form_that_graphs_hold(
    model: Path, plan: Path, tmp_path: Path
) -> None:
    """Prompts begin, and go on in chunks of 64 behind what is quantised."""
    own = tmp_path / "tiny-8bit.plan"
    save_plan(quantised(load_plan(plan), "per-token", 8), own)
    how = {**ENGINE, "block_size": 64, "max_num_batched_tokens": 64}
    eager = served_by_engine(model, own, **how)
    fixed = served_by_engine(model, own, fixed=True, distributed_executor_backend="uni", **how)
    assert fixed["waves"] == eager["waves"]


def _kvprof(*words: str, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        module_command("kvprof", *words),
        env={**os.environ, **ENVIRONMENT, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_another_models_plan_is_refused_before_weights_load(plan: Path, tmp_path: Path) -> None:
    """The same shape with other weights is another model: one line, and no server."""
    other = save_model(tmp_path / "other", seed=1)
    process = _kvprof("serve", str(other), "--plan", str(plan), "--", "--skip-tokenizer-init")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 2, said[-3000:]
    assert "kvprof: the plan is for" in said
    assert "Traceback" not in said
    assert "Loading weights took" not in said


def test_the_server_answers_and_ends(
    model: Path, plan: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """A completion over HTTP on loopback has the runtime's tokens; SIGTERM ends the server."""
    log = tmp_path / "log"
    engine = ("--skip-tokenizer-init", "--max-model-len", "200", "--block-size", "32")
    with _serving(model, plan, log, *engine) as answered:
        assert answered({"prompt": drawn_prompts()[4]}) == wanted[4]
    said = log.read_text()
    assert "--host 127.0.0.1" in said
    assert "uncompressed (BF16)" in said


def test_a_gguf_files_model_is_served(tmp_path: Path) -> None:
    """Its weights are written out for the engine, which writes the runtime's tokens to a text."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    file, saved = write_llama(tmp_path / "tiny.gguf", rounded=True), tmp_path / "own.plan"
    loaded = load_model(str(file), device="cpu", dtype="float32")
    made = kvprof.plan(loaded, "kq", 0.4, calibrate="random:512", grid=4, minimum=4)
    save_plan(made, saved)
    ids = loaded.tokenizer()("tea at the", return_tensors="pt").input_ids
    with compressed(loaded, made):
        answer = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    wanted = answer[0, ids.shape[1] :].tolist()
    body = {"prompt": "tea at the", "model": str(file)}
    with _serving(file, saved, tmp_path / "log", "--max-model-len", "200") as answered:
        assert answered(body) == wanted
    said = (tmp_path / "log").read_text()
    assert f"--served-model-name {file}" in said


@contextlib.contextmanager
def _serving(model: Path, plan: Path, log: Path, *engine: str) -> Any:
    """Serve in float32, and give what answers a request with its tokens; SIGTERM ends the server.

    Nobody listens at its address afterwards.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as stream:
        process = subprocess.Popen(
            module_command(
                "kvprof", "serve", str(model), "--plan", str(plan), "--port", str(port),
                "--dtype", "float32", "--", *engine,
            ),
            env={**os.environ, **ENVIRONMENT},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

        def answered(body: dict[str, Any]) -> list[int]:
            asked = {
                "model": str(model),
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **body,
            }
            answer = _asked(f"http://127.0.0.1:{port}/v1/completions", asked, process, log)
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

        try:
            yield answered
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130
        finally:
            if process.poll() is None:
                process.kill()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)


def _asked(
    address: str, body: dict[str, Any], process: "subprocess.Popen[bytes]", log: Path
) -> dict[str, Any]:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    found: dict[str, Any] = json.load(reply)
                    return found
            except urllib.error.HTTPError as problem:
                raise AssertionError(problem.read().decode()) from problem
        time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
