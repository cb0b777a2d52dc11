"""What the plug-in changes in vLLM's model runners: which steps run as graphs.

vLLM has two. The first makes a step's inputs up on the host, and is taken here unless
``VLLM_USE_V2_MODEL_RUNNER`` says otherwise; the second, which 0.26 and 0.27 take for dense models
by themselves, makes them up on the device. A graph that holds any step has launches for several new
tokens, which a step in which all decode does not need: vLLM's mode ``FULL`` has no others, and here
steps in which all decode have graphs of their own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any

from kvprof.serving.settings import SHORT_GRAPH

__all__ = ["CAPTURE", "graph_pays", "scheduled_rows", "take_runners"]


@dataclass
class _Capture:
    """The graph that the second model runner is capturing."""

    #: Whether all decode in the steps that it holds; None where nobody says so.
    decodes: bool | None = None


#: What the back end looks at; a process captures one graph at a time.
CAPTURE = _Capture()


@dataclass
class _Eager:
    """Whether the step under way has to run without its graph; a process runs one at a time."""

    asked: bool = False

    @contextmanager
    def where(self, asked: bool) -> Iterator[None]:
        """Ask for it in what runs here, or do not."""
        self.asked = asked
        try:
            yield
        finally:
            self.asked = False


def take_runners(path: str) -> None:
    """Change both of vLLM's model runners, whichever it is going to take."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    _decode_apart_first(CudagraphDispatcher)
    _decode_apart_second(cudagraph_utils.CudaGraphManager)
    eager = _Eager()
    first, second = gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner
    _let_run_eagerly(first, "_determine_batch_execution_and_padding", "force_eager", eager)
    _let_run_eagerly(model_runner, "dispatch_cg_and_sync_dp", "need_eager", eager)
    for runner in (first, second):
        _choose_graphs(runner, path, eager)


# --- Graphs of steps in which all decode.


def _decode_apart_first(dispatcher: Any) -> None:
    """Let the first runner capture such graphs too, and run such steps by them."""
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


def _decode_apart_second(manager: Any) -> None:
    """Let the second runner do so; what it captures with has one token a sequence either way."""
    begun, captured = manager._init_candidates, manager.capture

    @wraps(begun)
    def _init_candidates(self: Any) -> None:
        begun(self)
        mode = self.cudagraph_mode
        if mode.name != "FULL" or mode not in self._capture_descs:
            return
        # Lists that several numbers of tokens share, each of the graphs that may hold them.
        for own in {id(one): one for one in self._candidates.values()}.values():
            apart = [
                replace(one, uniform_token_count=1)
                for one in own
                if 1 < one.num_tokens <= self.max_num_reqs
            ]
            own[:0] = apart
            self._capture_descs[mode] += apart
        self._capture_descs[mode].sort(key=lambda one: -one.num_tokens)

    @wraps(captured)
    def capture(self: Any, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def create(desc: Any, *args: Any, **kwargs: Any) -> Any:
            CAPTURE.decodes = desc.num_tokens == 1 or desc.uniform_token_count == 1
            try:
                return create_forward_fn(desc, *args, **kwargs)
            finally:
                CAPTURE.decodes = None

        return captured(self, create, *args, **kwargs)

    manager._init_candidates = _init_candidates
    manager.capture = capture


# --- Steps without their graph.


def _let_run_eagerly(place: Any, name: str, option: str, eager: _Eager) -> None:
    """Let a step run without its graph where that is asked for, if vLLM lets a step run so."""
    chosen = getattr(place, name, None)
    if chosen is None or option not in signature(chosen).parameters:
        return

    @wraps(chosen)
    def choose(*args: Any, **kwargs: Any) -> Any:
        if eager.asked:
            kwargs[option] = True
        return chosen(*args, **kwargs)

    setattr(place, name, choose)


def graph_pays(rows: Iterable[tuple[int, int]]) -> bool:
    """Tell whether a CUDA graph of a long step over quantised latents is faster."""
    tokens = again = 0
    for new, before in rows:
        tokens += new
        again += new * before if new > 1 else 0
    return tokens <= SHORT_GRAPH or 2 * again <= tokens**2


def scheduled_rows(scheduled: Any) -> Iterator[tuple[int, int]]:
    """Give what `graph_pays` takes of a step that vLLM's scheduler has made up."""
    new, known = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
    for one in scheduled.scheduled_new_reqs:
        yield new[one.req_id], one.num_computed_tokens
    for name, before in zip(known.req_ids, known.num_computed_tokens, strict=True):
        yield new[name], before


def _choose_graphs(runner: Any, path: str, eager: _Eager) -> None:
    """Run long steps over quantised latents without a CUDA graph where that is faster."""
    ran = runner.execute_model

    @wraps(ran)
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprof.serving.active_plan import served_plan

        quantised = served_plan(path).quantiser is not None
        with eager.where(quantised and not graph_pays(scheduled_rows(scheduled))):
            return ran(self, scheduled, *args, **kwargs)

    runner.execute_model = execute_model
