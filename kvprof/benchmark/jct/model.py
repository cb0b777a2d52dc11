"""The model of a real run and its plans: calibrated, or drawn at random for a shape."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvprof.benchmark.jct.layer import llama_config
from kvprof.benchmark.jct.model_shape import ModelShape, load_model_shape
from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.methods import FOLDED, named_plans
from kvprof.benchmark.shape_plans import parse_method, shape_plan
from kvprof.benchmark.shapes import has_weights
from kvprof.errors import UsageError
from kvprof.methods.family import plan_for_rate
from kvprof.methods.named import ALWAYS, method_entries, options_in, own_rate
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.methods.registry import calibration_needs, typed_options
from kvprof.models.load import LoadedModel, load_model, wrap_model
from kvprof.models.noise import quiet
from kvprof.models.placement import main_device, parse_dtype
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.progress import Progress
from kvprof.runtime.compressed import check_runs

__all__ = [
    "check_llama",
    "check_names",
    "load_run_model",
    "make_plans",
    "prompt",
    "random_model",
]


def check_names(request: JctRequest) -> None:
    """Refuse methods that the model of a request cannot run, before it is loaded."""
    weights = has_weights(request.model)
    plans = named_plans(request.plans)
    for method in request.methods:
        if weights and method in plans:
            load_plan(Path(plans[method]).expanduser())  # whose model it is for is seen later
            continue
        if weights:
            name, options, _ = _named(method)
            calibration_needs(name, **options)
            continue
        if method in plans:
            raise UsageError(f"--plan {method} requires the model's weights; these are random")
        if parse_method(method).base == FOLDED:
            raise UsageError(f"{method} requires a composed run: add --composed")


def load_run_model(request: JctRequest) -> tuple[LoadedModel, ModelShape | None]:
    """Load the model, or draw one of the shape; the shape is None where the model is its own."""
    if has_weights(request.model):
        if request.layers is not None:
            raise UsageError("--layers requires a shape without weights; leave it out")
        loaded = load_model(request.model, device=request.device, dtype=request.dtype)
        check_runs(loaded)
        return loaded, None
    device = main_device(request.device)
    shape = load_model_shape(request.model)
    shape = shape.of_layers(request.layers)
    return random_model(shape, device, parse_dtype(request.dtype, device), request.seed), shape


def check_llama(model: ModelShape) -> None:
    """Refuse a shape that no Llama has, of which no model with random weights is made."""
    shape, dense = model.attention, model.dense
    odd = {
        "experts": dense.experts,
        "an MLP with two matrices": not dense.gated,
        "QK-norm": shape.qk_norm,
        "sliding windows": shape.sliding_window,
        "attention sinks": shape.sinks,
        "soft-capped scores": shape.softcap,
        "no RoPE": shape.rope.kind == "none",
    }
    if found := [name for name, there in odd.items() if there]:
        raise UsageError(
            f"{model.name} has {' and '.join(found)}, which random weights do not support; it can "
            "be composed but not run"
        )


def random_model(
    model: ModelShape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LoadedModel:
    """Return a Llama of a shape with random weights."""
    check_llama(model)
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                made: Any = LlamaForCausalLM(llama_config(model))
        finally:
            torch.set_default_dtype(before)
    made.requires_grad_(False)
    return wrap_model(made, f"{model.name}, random weights")


def make_plans(
    loaded: LoadedModel,
    shape: ModelShape | None,
    request: JctRequest,
    *,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> dict[str, Plan]:
    """Return a plan for every method, at the rate asked for."""
    methods = list(dict.fromkeys(request.methods))
    if shape is not None:
        return {name: _drawn(name, loaded, shape, request) for name in methods}
    files = named_plans(request.plans)
    named = {method: _named(method) for method in methods if method not in files}
    tokens = max(request.input_lens) + max(request.output_lens)
    calibrator = Calibrator(
        loaded, CalibrationOptions(seed=request.seed), progress=progress, should_stop=should_stop
    )
    for name, options, _ in named.values():
        calibrator.expect(name, **options)
    plans = {
        method: replace(
            load_plan(
                Path(files[method]).expanduser(),
                fingerprint=loaded.fingerprint,
                layout=loaded.layout,
            ),
            method=method,  # a case has its file's name
        )
        for method in methods
        if method in files
    }
    for method, (name, options, own) in named.items():
        family = calibrator.family(name, **options)
        wanted, alone = (request.rate, _alone(request)) if own is None else (own, True)
        plans[method] = plan_for_rate(family, wanted, tokens, alone=alone)
    return plans


def _alone(request: JctRequest) -> bool:
    return request.rate_given and sum(name not in ALWAYS for name in request.methods) == 1


def _named(method: str) -> tuple[str, dict[str, Any], float | None]:
    """Return a method's registered name, its options as ``kvprof plan`` has them, and its rate."""
    ((_, name, written),) = method_entries(method)
    given = options_in(written)
    rate = own_rate(method, given)
    return name, typed_options(name, given), rate


def _drawn(name: str, loaded: LoadedModel, shape: ModelShape, request: JctRequest) -> Plan:
    """Return a method's plan on random weights, as ``bench`` makes it on the shape."""
    found = shape_plan(
        parse_method(name),
        shape.attention,
        request.rate,
        tokens=max(request.input_lens) + max(request.output_lens),
        laid=loaded,
        alone=_alone(request) and name not in ALWAYS,
    )
    return replace(found.plan, method=name, fingerprint=loaded.fingerprint)


def prompt(loaded: LoadedModel, batch: int, tokens: int, seed: int) -> Tensor:
    """Return random ids ``[batch, tokens]`` without special ones."""
    source = torch.Generator().manual_seed(seed)
    allowed = [token for token in range(loaded.vocab_size) if token not in loaded.special_ids]
    drawn = torch.randint(len(allowed), (batch, tokens), generator=source)
    return torch.tensor(allowed)[drawn].to(loaded.device)
