"""What the plug-in does inside vLLM: checks, pages, weights; only the plug-in loads it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvprof.errors import UsageError
from kvprof.kernels.project.bases import basis_set
from kvprof.methods.accounting import full_bytes
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.serving.active_plan import check_identity
from kvprof.serving.backend import PlanImpl
from kvprof.serving.model import ServedModel
from kvprof.serving.pages import LayerPages, check_page, imbalance, layer_pages, token_bytes
from kvprof.serving.refusals import (
    check_dtype,
    check_load_format,
    check_positions,
    check_shape,
    check_shared,
)
from kvprof.serving.rotary import QueriesAlone, keep_keys
from kvprof.serving.steps import Rebuilding, ServedLayer, value_lifts
from kvprof.serving.weights import folded_output, folded_value, narrowed

__all__ = [
    "check_engine",
    "check_model",
    "fold",
    "page_spec",
    "prepare",
    "run_layer",
    "tell_tokens",
]

logger = init_logger("vllm.kvprof")

# --- Before anything is loaded.


def check_engine(config: Any) -> None:
    """Refuse settings of the engine with which a plan cannot be served."""
    parallel, cache = config.parallel_config, config.cache_config
    reasons = {
        "speculative decoding (--speculative-config)": config.speculative_config is not None,
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "LoRA": config.lora_config is not None,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"{config.model_config.quantization}-quantised weights": bool(
            config.model_config.quantization
        ),
        f"--kv-cache-dtype {cache.cache_dtype}; leave it out": cache.cache_dtype
        not in ("auto", "bfloat16", "float16"),
    }
    for what, there in reasons.items():
        if there:
            raise UsageError(f"a plan cannot be served with {what}")


def check_model(plan: Plan, config: Any) -> None:
    """Refuse another model's plan before weights load; with random weights check the shape only."""
    model = config.model_config
    kv_heads, parallel = model.get_total_num_kv_heads(), config.parallel_config
    check_shape(plan, model.get_total_num_hidden_layers(), kv_heads, model.get_head_size())
    ranks = parallel.tensor_parallel_size
    layer_pages(plan, ranks)
    check_shared(plan, model.get_num_attention_heads(parallel) * ranks // kv_heads)
    if model.uses_mrope or model.uses_xdrope_dim:
        check_positions(plan)
    if config.cache_config.user_specified_block_size:
        check_page(plan, config.cache_config.block_size)
    if plan.quantiser is not None and config.device_config.device_type == "cuda":
        check_dtype(plan, model.dtype)
    way = config.load_config.load_format
    check_load_format(str(getattr(way, "value", way)))
    if way == "dummy":
        logger.info("Weights are random (dummy): only the plan's shape is checked.")
        return
    check_identity(
        plan, model.model, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


# --- The cache's pages.


def page_spec(layer: Any, plan: Plan, config: Any) -> FullAttentionSpec:
    """Return what a layer stores of a token, as one head of as many columns."""
    ranks, dtype = config.parallel_config.tensor_parallel_size, layer.kv_cache_torch_dtype
    own = layer_pages(plan, ranks)[extract_layer_index(layer.layer_name)]
    return FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=1,
        head_size=own.columns if own.codes is None else own.token_bytes(dtype.itemsize),
        head_size_v=0,
        dtype=dtype if own.codes is None else torch.uint8,
    )


def tell_tokens(plan: Plan, config: Any, pages: int) -> None:
    """Say how many tokens of cache fit, against uncompressed in the same memory."""
    ranks, itemsize = (
        config.parallel_config.tensor_parallel_size,
        config.model_config.dtype.itemsize,
    )
    layers = layer_pages(plan, ranks)
    own, full = token_bytes(layers, itemsize), full_bytes(plan, 1, itemsize=itemsize) // ranks
    tokens = pages * config.cache_config.block_size
    spread = (
        f" on each of {ranks} ranks, {imbalance(layers):.1%} of them empty" if ranks > 1 else ""
    )
    logger.info(
        "kvprof serves %s: %s tokens of KV cache; uncompressed (BF16): %s (%s bytes a token%s, "
        "not %s)",
        plan.method,
        f"{tokens:,}",
        f"{tokens * own // full:,}",
        f"{own:,}",
        spread,
        f"{full:,}",
    )


# --- The weights.


class _Found(NamedTuple):
    """An attention layer of a model."""

    number: int  # of the layer
    attention: Any
    inner: Any  # its projections before and behind it
    outer: Any
    parent: Any  # that calls all three

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        found: int = self.attention.num_heads // self.attention.num_kv_heads
        return found


def _attention_layers(model: Any) -> Iterator[_Found]:
    """Yield each attention layer with its projections."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, Attention):
            continue
        parent = modules[name.rpartition(".")[0]]
        found = [
            [child for child in parent.children() if isinstance(child, kind)]
            for kind in (QKVParallelLinear, RowParallelLinear)
        ]
        if any(len(own) != 1 for own in found):
            raise UsageError(
                f"{type(model).__name__} cannot be served: {name} is not between one Q, K and V "
                "projection and one output projection"
            )
        (inner,), (outer,) = found
        for linear in (inner, outer):
            if not isinstance(linear.quant_method, UnquantizedLinearMethod):
                raise UsageError(
                    f"{type(model).__name__} cannot be served: {linear.prefix} is quantised, so "
                    "bases cannot be folded into it"
                )
        yield _Found(extract_layer_index(module.layer_name), module, inner, outer, parent)


def prepare(model: Any, plan: Plan, longest: int) -> None:
    """See to it that each rank loads the heads that it serves, and keys come as they are stored."""
    ranks = get_tensor_model_parallel_world_size()
    pages = layer_pages(plan, ranks)
    for one in _attention_layers(model):
        if plan.layers[one.number].keys.placement is Placement.PRE_ROPE:
            keep_keys(one.parent, one.attention.head_size, longest)
        if ranks > 1:
            _deal_heads(one, pages[one.number].order)


def _deal_heads(found: _Found, order: Sequence[int]) -> None:
    queries = [head * found.group + at for head in order for at in range(found.group)]
    sizes = {"q": queries, "k": order, "v": order}
    for parameter in found.inner.parameters(recurse=False):
        _wrap_loader(parameter, _inner_order(sizes))
    _wrap_loader(found.outer.weight, _outer_order(queries))


def _outer_order(order: Sequence[int]) -> Callable[[Tensor, Any], Tensor]:
    return lambda tensor, _: _picked(tensor, order, 1)


def _inner_order(orders: dict[str, Sequence[int]]) -> Callable[[Tensor, Any], Tensor]:
    def reorder(tensor: Tensor, shard: Any) -> Tensor:
        if shard is not None:
            return _picked(tensor, orders[shard], 0)
        heads = [len(orders[kind]) for kind in "qkv"]
        each = tensor.shape[0] // sum(heads)
        parts = torch.split(tensor[:], [each * count for count in heads])
        return torch.cat(
            [_picked(part, orders[kind], 0) for part, kind in zip(parts, "qkv", strict=True)]
        )

    return reorder


def _picked(tensor: Tensor, order: Sequence[int], dim: int) -> Tensor:
    heads = tensor[:].unflatten(dim, (len(order), -1))
    found: Tensor = heads.index_select(dim, torch.tensor(order, device=heads.device))
    return found.flatten(dim, dim + 1)


def _wrap_loader(parameter: Any, reorder: Callable[[Tensor, Any], Tensor]) -> None:
    load = parameter.weight_loader

    def weight_loader(parameter: Any, loaded: Tensor, shard: Any = None, *rest: Any) -> Any:
        given = () if shard is None else (shard,)
        return load(parameter, reorder(loaded, shard), *given, *rest)

    name = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
    setattr(parameter, name, weight_loader)


@torch.no_grad()
def fold(model: Any, plan: Plan, longest: int) -> None:
    """Fold V's bases into the weights, and give every layer the bases of its keys."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    pages, served = layer_pages(plan, ranks), ServedModel()
    for found in _attention_layers(model):
        impl = found.attention.impl
        assert isinstance(impl, PlanImpl)
        layer = _folded(found, plan.layers[found.number], pages[found.number], rank)
        impl.model, impl.served, impl.longest = served, layer, longest
        served.layers.append(layer)


def _folded(found: _Found, plan: LayerPlan, pages: LayerPages, rank: int) -> ServedLayer:
    """Return a layer of a rank, whose weights have its bases from here on."""
    _, attention, inner, outer, parent = found
    key_widths, value_widths = pages.of_rank(rank)
    own = pages.assignment.heads[rank]
    key_downs, key_ups = _narrowed(plan.keys.groups, own, key_widths)
    value_downs, value_ups = _narrowed(plan.values.groups, own, value_widths)
    tail, weight = attention.num_kv_heads * attention.head_size, inner.weight
    _fold_rows(inner, slice(-tail, None), value_downs)
    # Latents of several heads that are wider than one would make W_O wider than it was.
    whole = plan.keys.placement is Placement.PRE_ROPE and max(value_widths) > attention.head_size
    if not whole:
        # Of every head, also where several share a latent.
        ups = [up for shared in value_ups for up in shared.chunk(pages.heads)]
        outer.weight.data = folded_output(outer.weight.data, ups, found.group)
    how: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    queries, rebuilding = None, None
    if plan.keys.placement is Placement.PRE_ROPE:
        (rotary,) = (one for one in parent.children() if isinstance(one, QueriesAlone))
        matrices = [
            tuple(up.to(**how) for up in own) for own in (key_ups, value_ups if whole else ())
        ]
        # Here, where the engine counts what weights take.
        lifts = value_lifts(matrices[1], pages.heads, found.group)
        rebuilding = Rebuilding(
            matrices[0], pages.heads, rotary.form, *rotary.tables, matrices[1], lifts
        )
        if plan.keys.fold_down:
            _fold_rows(inner, slice(-2 * tail, -tail), key_downs)
            # What is stored are the first columns of a latent's heads.
            key_downs = [torch.eye(max(key_widths))[:, :width] for width in key_widths]
    else:
        queries = basis_set(key_ups, **how)
    return ServedLayer(
        attention,
        queries,
        basis_set(key_downs, **how),
        value_widths,
        found.group * pages.heads,
        pages.codes,
        rebuilding,
        None if plan.key_mean is None else plan.key_mean[list(own)].to(weight.device),
    )


def _narrowed(
    groups: Sequence[HeadGroup], own: Sequence[int], widths: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``down`` and ``up`` of some groups."""
    pairs = [narrowed(groups[at], width) for at, width in zip(own, widths, strict=True)]
    return [down for down, _ in pairs], [up for _, up in pairs]


def _fold_rows(linear: Any, rows: slice, downs: Sequence[Tensor]) -> None:
    """Let some heads of a projection, and of its bias, put out latents."""
    linear.weight.data[rows] = folded_value(linear.weight.data[rows], downs)
    if linear.bias is not None:
        linear.bias.data[rows] = folded_value(linear.bias.data[rows], downs)


# --- A layer in a step.


def run_layer(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run a layer; the output is as wide as W_O's input, latents or values."""
    impl = layer.impl
    query = query.view(-1, layer.num_heads, layer.head_size)
    key = key.view(-1, layer.num_kv_heads, layer.head_size)
    value = value.view(-1, layer.num_kv_heads, layer.head_size)
    if not torch.compiler.is_compiling():
        metadata = get_forward_context().attn_metadata
        own = None if metadata is None else metadata[layer.layer_name]
        found: Tensor = impl.attended(query, key, value, own)
        return found
    output = query.new_empty(query.shape[0], impl.served.outputs)
    torch.ops.vllm.unified_attention_with_output(
        query, key, value, output, _encode_layer_name(layer.layer_name)
    )
    return output
