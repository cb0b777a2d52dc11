"""Run a model over a source once and keep the second moments, with snapshots on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvprof.analysis.moments import (
    JOINT_KEYS,
    AcrossMoments,
    LayerMoments,
    Moments,
    group_size,
    join_heads,
    layer_groups,
)
from kvprof.analysis.pairs import PAIRS
from kvprof.analysis.rotary import RotaryPairs
from kvprof.errors import FailedError, Interrupted, UsageError
from kvprof.models.interface import (
    AttentionCall,
    before_rotation,
    intercept,
    rotary_tables,
    text_decoder,
)
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.models.projections import output_slices, projection_biases, value_weight
from kvprof.models.weights import compute_device
from kvprof.sources.grammar import RANDOM, Source, SourceKind
from kvprof.sources.windows import ModelTokens, batches, windows

__all__ = [
    "CollectOptions",
    "PassAbandoned",
    "Tap",
    "capture",
    "collect_moments",
    "count_tokens",
    "empty_moments",
    "model_tokens",
    "moment_shapes",
    "run_batch",
    "suitable_batch_size",
    "undefined_pairs",
]

# Tokens per forward pass that keep a device busy without needing much memory.
_CPU_BATCH_TOKENS = 2048
_GPU_BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Tap:
    """One layer of one forward pass; detached, on the layer's device, in the model's dtype."""

    layer: int
    q: Tensor  # `[B, num_heads, T, qk_head_dim]`, after RoPE and QK-norm
    k: Tensor  # `[B, num_kv_heads, T, qk_head_dim]`, after RoPE and QK-norm
    v: Tensor  # `[B, num_kv_heads, T, v_head_dim]`
    #: `[B, num_heads, T, v_head_dim]`, what each query head puts out before W_O: `S V` with its
    #: probabilities S.
    o: Tensor
    #: As `q` and `k`, before RoPE (after QK-norm), when asked for; equal to `q` and `k` in layers
    #: that have no RoPE.
    q_pre: Tensor | None = None
    k_pre: Tensor | None = None
    #: The cosines and sines that the layer's rotary function got, `[B or 1, T, columns]` each; None
    #: in layers without RoPE.
    tables: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class CollectOptions:
    """How a source is fed to the model.

    Attributes
    ----------
    tokens : int or None
        Tokens in all; None means all that a text has.
    seq_len : int
        Longest sequence; post-RoPE moments depend on it.
    batch_size : int
        Sequences per forward pass.
    seed : int
        For random tokens.
    skip_first : int
        Positions left out at the start of every sequence.
    pre_rope : bool
        Keep the moments of Q and K before RoPE too.
    joint_heads : int or None
        Keep the moments of V, and with `pre_rope` of K before RoPE, over groups of this many KV
        heads too (Palu, TALE); None keeps none.
    magnitudes : bool
        Count how large the values of K and V are too (``fp8``).
    outputs : bool
        Keep the moments of what each query head puts out too (OSCAR).
    across : tuple of (int, int) or None
        Keep moments of so many adjacent layers together (0 for all), without so many first tokens
        of each sequence, and the first sequence itself (KVTC); needs `pre_rope`.
    """

    tokens: int | None
    seq_len: int
    batch_size: int = 4
    seed: int = 0
    skip_first: int = 0
    pre_rope: bool = False
    joint_heads: int | None = None
    magnitudes: bool = False
    outputs: bool = False
    across: tuple[int, int] | None = None


class PassAbandoned(Exception):
    """A pass was stopped; `tokens` counts the complete batches before."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"after {tokens:,} tokens")
        self.tokens = tokens


def suitable_batch_size(device: torch.device, seq_len: int) -> int:
    """Return how many sequences of `seq_len` make a sensible forward pass on a device."""
    budget = _CPU_BATCH_TOKENS if device.type == "cpu" else _GPU_BATCH_TOKENS
    return max(1, budget // seq_len)


def model_tokens(loaded: OpenedModel) -> ModelTokens:
    """Return what a token source has to know of a model; the tokenizer is loaded when needed."""

    def tokenize() -> Callable[[str], list[int]]:
        loaded.tokenizer()
        return loaded.token_ids

    def prefix() -> tuple[int, ...]:
        # What the tokenizer itself puts in front of the empty text: BOS, or nothing.
        ids = loaded.token_ids("", add_special_tokens=True)
        return tuple(ids[:1]) if ids and ids[0] == loaded.tokenizer().bos_token_id else ()

    def separator() -> tuple[int, ...]:
        eos = loaded.tokenizer().eos_token_id
        return () if eos is None else tuple(loaded.embedded([eos]))

    writers: list[Callable[..., str]] = []

    def chat(messages: list[dict[str, object]]) -> str:
        tokenizer = loaded.tokenizer()
        if tokenizer.chat_template is None:
            raise UsageError(f"{loaded.spec}: its tokenizer has no chat template for this chat log")
        if not writers:
            from kvprof.models.chat import ChatWriter

            writers.append(ChatWriter(tokenizer, loaded.spec))
        text = writers[0](messages)
        # Every window begins with BOS already; the template's own would be a second one.
        return text.removeprefix(tokenizer.bos_token or "")

    return ModelTokens(loaded.vocab_size, loaded.special_ids, tokenize, prefix, separator, chat)


def moment_shapes(
    layer: LayerLayout, *, pre_rope: bool, joint_heads: int | None, outputs: bool = False
) -> dict[str, tuple[int, int]]:
    """Return which vectors of a layer are kept, each with its heads and their width."""
    query = (layer.num_heads, layer.qk_head_dim)
    key = (layer.num_kv_heads, layer.qk_head_dim)
    shapes = {"q": query, "k": key, "v": (layer.num_kv_heads, layer.v_head_dim)}
    if pre_rope:
        shapes |= {"q_pre": query, "k_pre": key}
    if outputs:
        shapes["o"] = (layer.num_heads, layer.v_head_dim)
    if joint_heads is not None:
        size = group_size(joint_heads, layer.num_kv_heads)
        for joint, vector in JOINT_KEYS.items():
            if vector in shapes:
                heads, width = shapes[vector]
                shapes[joint] = (heads // size, width * size)
    return shapes


def empty_moments(
    loaded: LoadedModel,
    *,
    pre_rope: bool = False,
    joint_heads: int | None = None,
    magnitudes: bool = False,
    outputs: bool = False,
) -> Moments:
    """Return moments of a model with nothing counted yet, the weights' own filled in."""
    layers = []
    for index, layer in enumerate(loaded.layout.layers):
        c_o = c_wv = None
        if layer.output_projection is not None:
            slices = output_slices(loaded.model, loaded.layout, index)
            c_o = _grams(slices).unflatten(0, (layer.num_kv_heads, -1)).sum(1)
        if not layer.mla and layer.value_projection is not None:
            c_wv = _grams(value_weight(loaded.model, loaded.layout, index).mT)
        shapes = moment_shapes(layer, pre_rope=pre_rope, joint_heads=joint_heads, outputs=outputs)
        device = compute_device(loaded.model.get_submodule(layer.attention))
        pairs = (
            None if layer.mla or layer.rotary_pairs is None else RotaryPairs.of(layer.rotary_pairs)
        )
        layers.append(
            LayerMoments.empty(
                shapes,
                device,
                c_o=c_o,
                c_wv=c_wv,
                magnitudes=magnitudes,
                pairs=pairs,
                biases=projection_biases(loaded.model, layer),
            )
        )
    return Moments(layers, loaded.fingerprint)


def _grams(heads: Tensor) -> Tensor:
    """Return ``W Wᵀ`` of each head, float64; one by one, for copies of all stay on the heap."""
    return torch.stack([(wide := head.to(torch.float64)) @ wide.mT for head in heads])


def count_tokens(loaded: OpenedModel, source: Source, options: CollectOptions) -> int:
    """Return how many tokens a pass will see, so that a short text fails early."""
    if options.seq_len > loaded.context_length:
        raise UsageError(
            f"--seq-len {options.seq_len:,} exceeds the context of {loaded.spec}, "
            f"{loaded.context_length:,}"
        )
    if options.skip_first >= options.seq_len:
        raise UsageError(
            f"--skip-first {options.skip_first} is not below the sequence length, {options.seq_len}"
        )
    if source.kind is SourceKind.RANDOM and options.tokens is not None:
        return options.tokens
    return sum(len(sequence) for sequence in _sequences(loaded, source, options))


def _sequences(
    loaded: OpenedModel, source: Source, options: CollectOptions
) -> Iterator[NDArray[np.int64]]:
    return windows(
        source,
        model_tokens(loaded),
        tokens=options.tokens,
        seq_len=options.seq_len,
        seed=options.seed,
    )


def collect_moments(
    loaded: LoadedModel,
    source: Source,
    options: CollectOptions,
    *,
    snapshots: Sequence[int] = (),
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    abandon: Callable[[], bool] | None = None,
) -> Iterator[Moments]:
    """Yield the moments of `source` at each snapshot and at the end, in float64."""
    moments = empty_moments(
        loaded,
        pre_rope=options.pre_rope,
        joint_heads=options.joint_heads,
        magnitudes=options.magnitudes,
        outputs=options.outputs,
    )
    moments.info = _info(loaded, source, options)
    if options.across is not None:
        size, skip = options.across
        codable = [x.index for x in loaded.layout.layers if x.sliding_window is None]
        moments.across = AcrossMoments(layer_groups(tuple(codable), size), skip)

    def receive(tap: Tap) -> None:
        vectors = {"q": tap.q, "k": tap.k, "v": tap.v, "o": tap.o}
        if tap.q_pre is not None and tap.k_pre is not None:
            vectors |= {"q_pre": tap.q_pre, "k_pre": tap.k_pre}
        if options.joint_heads is not None:
            size = group_size(options.joint_heads, tap.k.shape[1])
            vectors |= {
                joint: join_heads(vectors[vector], size)
                for joint, vector in JOINT_KEYS.items()
                if vector in vectors
            }
        if seen and abandon is None:
            before[tap.layer] = moments.layers[tap.layer].copy()
        moments.add(
            tap.layer,
            vectors,
            angles=_angles(moments.layers[tap.layer].pairs, tap),
            skip_first=options.skip_first,
        )
        if moments.across is not None and tap.k_pre is not None:
            moments.across.add(tap.layer, {"keys": tap.k_pre, "values": tap.v})
        if abandon is not None and abandon():
            raise PassAbandoned(seen)

    seen = 0
    before: dict[int, LayerMoments] = {}  # of a layer that this batch was added to
    stops = sorted(set(snapshots))
    if stops and source.kind is SourceKind.TOKEN_IDS:
        # Its sequences have any length: a snapshot inside one is found out before the model runs.
        for _ in batches(_sequences(loaded, source, options), 1, stops):
            pass
    longest = 0
    with capture(loaded, receive, pre_rope=options.pre_rope):
        for ids in batches(_sequences(loaded, source, options), options.batch_size, stops):
            try:
                run_batch(loaded, torch.from_numpy(ids).to(loaded.device))
            except Interrupted:
                if not seen or abandon is not None:
                    raise
                for layer, kept in before.items():
                    moments.layers[layer] = kept
                moments.complete = False
                break
            before.clear()
            moments.count(ids.shape[0], ids.shape[1], skip_first=options.skip_first)
            seen += ids.size
            longest = max(longest, ids.shape[1])
            moments.info["positions"] = f"{options.skip_first}-{longest - 1}"
            advance(ids.size)
            if stops and seen >= stops[0]:
                stops.pop(0)
                if seen != options.tokens:
                    yield moments.snapshot()
            if should_stop() and seen != options.tokens:
                moments.complete = False
                break
    if not moments.tokens:
        raise UsageError("no tokens remain; lower --skip-first or give more text")
    _check_finite(loaded, moments)
    yield moments


def _angles(pairs: RotaryPairs | None, tap: Tap) -> Tensor | None:
    """Return the cosines and sines of each token of a pass, ``[B or 1, T, 2F + 1]``."""
    if pairs is None:
        return None
    if tap.tables is None:  # no RoPE: the same for all tokens
        return torch.ones(1, tap.k.shape[2], 1, device=tap.k.device)
    cos, sin = (x.to(tap.k.device) for x in tap.tables)
    return pairs.angles(cos, sin)


def _prefix(loaded: LoadedModel, source: Source) -> str:
    """Return in words what each sequence starts with: it decides what position 0 holds."""
    if source.kind in (SourceKind.TEXT, SourceKind.EMBEDDED) or source.name == RANDOM[1]:
        tokenizer = loaded.tokenizer()
        if model_tokens(loaded).prefix():
            return f"{tokenizer.bos_token} (added by the tokenizer)"
        return "nothing (the tokenizer adds none)"
    return "nothing (token ids are used unchanged)"


def _info(loaded: LoadedModel, source: Source, options: CollectOptions) -> dict[str, Any]:
    """Return what a reader needs to repeat the pass."""
    labels = []
    if any(layer.mla for layer in loaded.layout.layers):
        labels.append("MLA: spectra are of the expanded heads; the cache itself stores a latent")
    return {
        "model": loaded.spec,
        "architecture": loaded.layout.architecture,
        **loaded.origin,
        "source": source.name,
        "seed": options.seed if source.kind is SourceKind.RANDOM else None,
        "prefix": _prefix(loaded, source),
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "skip_first": options.skip_first,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": ", ".join(sorted(_devices(loaded))),
        "labels": labels,
    }


def _devices(loaded: LoadedModel) -> set[str]:
    """Return every device that a layer computes on; a spread model has several."""
    modules = (loaded.model.get_submodule(layer.attention) for layer in loaded.layout.layers)
    return {str(compute_device(module)) for module in modules} | {str(loaded.device)}


def _check_finite(loaded: LoadedModel, moments: Moments) -> None:
    for index, layer in enumerate(moments.layers):
        for key in layer.rest:
            if not bool(torch.isfinite(layer.gram(key)).all()):
                raise FailedError(
                    f"{loaded.spec}: {key} of layer {index} is not finite; use --dtype float32, "
                    "or check the weights"
                )


def undefined_pairs(layout: ModelLayout) -> tuple[str, ...]:
    """Return the pairs that a model does not have, in the order of `PAIRS`."""
    lacking = {
        "vo": any(layer.output_projection is None for layer in layout.layers),
        "w_v": any(layer.mla or layer.value_projection is None for layer in layout.layers),
    }
    return tuple(pair for pair in PAIRS if lacking.get(pair))


# --- Taps Q, K, V and what attention makes of them, of every layer, while a model runs.


@contextmanager
def capture(
    loaded: LoadedModel, receive: Callable[[Tap], None], *, pre_rope: bool = False
) -> Iterator[None]:
    """Pass every layer's Q, K and V to `receive` while the body runs the model unchanged."""
    layout = loaded.layout
    if pre_rope and any(layer.rotary_offset is None for layer in layout.layers):
        raise UsageError(
            f"{layout.architecture}: Q and K before RoPE cannot be captured; leave out the pairs "
            "q_pre and k_pre and methods that store K before RoPE (palu, kvtc, xkv)"
        )
    indices = {id(loaded.model.get_submodule(x.attention)): x.index for x in layout.layers}
    seen: set[int] = set()

    def observe(call: AttentionCall) -> None:
        facts = layout.layers[indices[id(call.module)]]
        if call.key.shape[2] != call.query.shape[2]:
            raise UsageError(
                f"captured {call.key.shape[2]} keys for {call.query.shape[2]} queries; run the "
                "model without a cache (use_cache=False)"
            )
        seen.add(facts.index)
        q, k, v = call.query.detach(), call.key.detach(), call.value.detach()
        q_pre, k_pre = (q, k) if pre_rope else (None, None)
        if pre_rope and facts.rotary_dim and facts.rotary_offset is not None:
            q_pre, k_pre = before_rotation(
                call.rotations[-1], q, k, facts.rotary_offset, facts.rotary_transposed
            )
            q_pre, k_pre = q_pre.detach(), k_pre.detach()
        tables = rotary_tables(call.rotations[-1]) if facts.rotary_pairs else None
        output = call.output.detach().transpose(1, 2)
        receive(Tap(facts.index, q, k, v, output, q_pre, k_pre, tables))

    def begin(module: nn.Module, args: Any) -> None:
        seen.clear()

    def end(module: nn.Module, args: Any, result: Any) -> None:
        if len(seen) != len(layout.layers):
            missing = next(x.index for x in layout.layers if x.index not in seen)
            raise FailedError(
                f"{layout.architecture}: layer {missing} was not captured in a forward pass; the "
                "capture is incomplete"
            )

    decoder = text_decoder(loaded.model)
    with ExitStack() as stack:
        rotary = pre_rope or any(layer.rotary_pairs for layer in layout.layers)
        stack.enter_context(intercept(loaded.model, observe, rotary=rotary))
        stack.callback(decoder.register_forward_pre_hook(begin).remove)
        stack.callback(decoder.register_forward_hook(end).remove)
        yield


def run_batch(loaded: LoadedModel, input_ids: Tensor) -> None:
    """Run a batch of full sequences through the decoder, without cache and logits."""
    with torch.inference_mode():
        text_decoder(loaded.model)(input_ids=input_ids.to(loaded.device), use_cache=False)
