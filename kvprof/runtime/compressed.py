"""Run a model with a plan's compressed cache: ``with compressed(model, plan): ...``.

Inside, the model uses kvprof's attention, folded projections and compressed caches. Afterwards it
is restored bit for bit, also after an exception.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from kvprof.errors import KvprofError, UsageError
from kvprof.methods.family import MethodInputs
from kvprof.methods.low_rank import full_plan
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.methods.soundness import check_fits, refuse_latent_attention
from kvprof.models.interface import set_attention, text_decoder, watched_rotations
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.models.noise import quiet
from kvprof.runtime.folding import OutputSwitch, folded_modules
from kvprof.runtime.masks import masks, whole_mask, without
from kvprof.runtime.session import Compression

__all__ = ["Compression", "active", "attend", "check_runs", "compressed", "refusal"]

# --- A layer's attention as one operator of torch: all that ``torch.compile`` sees of the
# runtime.
#
# The operator finds the layer, its plan and its cache by the identity of the attention module.
# What it stores is not among its arguments, so no CUDA graph of Inductor's may hold it (it is
# tagged so: they are cut there); a graph that a user captures may, see
# `CompressedCache.replayed`.


#: By the identity of every attention module that runs compressed: registered functions are global.
active: dict[int, tuple["Compression", int]] = {}


def attend(
    compression: "Compression",
    index: int,
    module_id: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Run a layer's attention, as an operator where the model is being compiled.

    Parameters
    ----------
    compression : Compression
    index : int
        Which layer.
    module_id : int
        The identity of its attention module.
    query, key, value, mask, options
        As the attention function got them.

    Returns
    -------
    Tensor
        ``[batch, t, 1, Σ_h w_h]``.
    """
    if not torch.compiler.is_compiling() or options.get("dropout") or not compression.opaque:
        return compression.attend(index, query, key, value, mask, options)
    found: Tensor = _attend(
        query,
        key,
        value,
        mask,
        options.get("s_aux"),
        options.get("scaling"),
        options.get("softcap"),
        module_id,
        compression.widths[index],
    )
    return found


@torch.library.custom_op("kvprof::attend", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    module_id: int,
    width: int,
) -> Tensor:
    compression, index = active[module_id]
    if compression.cache is not None:
        # The cache layer has set it too, but compiled code does so after its graph has run.
        compression.cache.layers[index].pending = query.shape[2]
    options = {"s_aux": sinks, "scaling": scaling, "softcap": softcap}
    return compression.attend(index, query, key, value, mask, options)


@_attend.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], 1, rest[-1])


_NAME = "kvprof_compressed"

# A pass to find out whether a model runs: tokens at once, and then one by one.
_PROMPT, _STEPS = 6, 2
# Of the logits' spread; what a layer does not see of the past costs more, rounding less.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_HALF = 0.25


@contextmanager
def compressed(
    model: PreTrainedModel | LoadedModel,
    plan: Plan,
    kernels: str | None = None,
    *,
    graphs: bool = True,
    prompt: int | None = None,
) -> Iterator[Compression]:
    """Run a model with a plan's compressed cache while the body runs.

    Inference only: no gradients flow through the attention. A plain forward pass without a cache
    runs compressed too (one pass, its cache is `Compression.cache`).

    Parameters
    ----------
    model : PreTrainedModel or LoadedModel
        A model is examined first (`wrap_model`), which puts it into eval mode.
    plan : Plan
        Made for this model.
    kernels : str, optional
        ``auto``: layers run on kvprof's kernels where these can run them and are the faster way,
        which takes a prompt of some thousand tokens (`kvprof.runtime.backends.route`).
        ``on``: all layers do, or there is an error. ``off``: none does. By default what the
        environment variable ``KVPROF_KERNELS`` says, else ``auto``. `Compression.kernel_reasons`
        tells what became of it.
    graphs : bool
        On a GPU, where all layers run on the kernels, decoding steps are captured in a CUDA graph
        and replayed, in ``generate`` as in loops of one's own (`kvprof.runtime.graphs`);
        `Compression.graph_reason` says why they are not. Norms, rotations and gated units of single
        tokens are run in one launch each there (`kvprof.runtime.pointwise`).
    prompt : int, optional
        Makes every pass one over whole sequences: each query attends as it would with the first
        `prompt` tokens prefilled and the rest decoded one by one. Nothing is stored, and torch
        runs. Not for plans that evict or code across layers.

    Yields
    ------
    Compression
        To make caches with, and to look at the last one.

    Raises
    ------
    UsageError
        For a model that cannot run compressed (`check_runs`), a plan that does not fit, a layer
        that cannot run on the kernels with ``on``, and for wrong use inside: a cache of another
        kind, a model in training mode, contexts that nest, rolling back what cannot be.
    """
    loaded = model if isinstance(model, LoadedModel) else wrap_model(model)
    # Whether the weights are still what they were costs a pass over all of them.
    fingerprint = loaded.fingerprint
    check_fits(plan, loaded.layout, fingerprint)
    session = Compression(loaded, plan, kernels, prompt)
    check_runs(loaded, fingerprint)
    with _running(session), ExitStack() as stack:
        if loaded.device.type == "cuda":
            from kvprof.runtime.graphs import faster

            stack.enter_context(faster(session, graphs))
        yield session


# By model: its fingerprint and why it cannot run.
_found: WeakKeyDictionary[PreTrainedModel, tuple[str, str | None]] = WeakKeyDictionary()


def check_runs(loaded: LoadedModel, fingerprint: str | None = None) -> None:
    """Make sure that a model can run with a compressed cache, before anything is measured for one.

    Parameters
    ----------
    loaded : LoadedModel
    fingerprint : str, optional
        What `LoadedModel.fingerprint` has just returned; asked again by default.

    Raises
    ------
    UsageError
        When it cannot.
    """
    refuse_latent_attention(loaded.layout)
    if (reason := refusal(loaded, fingerprint)) is not None:
        # What fails for a reason of its own may fail there too.
        takes = " (spectrum and stability still work)" if loaded.layout.unstorable else ""
        raise UsageError(
            f"{loaded.layout.architecture} cannot run with a compressed cache: {reason}{takes}"
        )


def refusal(loaded: LoadedModel, fingerprint: str | None = None) -> str | None:
    """Return why a model cannot run compressed; None if uncompressed logits are reproduced."""
    if loaded.layout.layers[0].mla:
        return "multi-head latent attention"
    known = _found.get(loaded.model)
    fingerprint = fingerprint or loaded.fingerprint
    if known is None or known[0] != fingerprint:
        known = fingerprint, loaded.layout.unstorable or _tried(loaded)
        _found[loaded.model] = known
    return known[1]


def _tried(loaded: LoadedModel) -> str | None:
    """Run a few tokens through a cache of full rank, beside the model's own."""
    count = _PROMPT + _STEPS
    ids = (torch.arange(count, device=loaded.device) * 7 + 3).unsqueeze(0) % loaded.vocab_size
    session = Compression(loaded, _turned(loaded), "off")
    try:
        with torch.inference_mode(), quiet():
            wanted = loaded.model(input_ids=ids, use_cache=False).logits[0].float()
            with _running(session):
                cache = session.new_cache()
                rows = []
                for start, stop in [(0, _PROMPT), *((i, i + 1) for i in range(_PROMPT, count))]:
                    output = loaded.model(
                        input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True
                    )
                    rows.append(output.logits[0].float())
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except KvprofError as error:
        return str(error)
    except Exception as error:  # whatever a model's own code does with a cache it does not know
        return f"a forward pass of {count} tokens fails: {' '.join(str(error).split())[:200]}"
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
    error_share = float((torch.cat(rows) - wanted).norm() / spread.clamp(min=1e-30))
    if not math.isfinite(error_share):
        return (
            "its logits are not finite although nothing was compressed; check its config and "
            "weights"
        )
    if not error_share <= _TOLERANCE.get(loaded.dtype, _HALF):
        return (
            f"its logits differ from the model's own by {error_share:.0%} of their spread "
            "although nothing was compressed"
        )
    return None


def _turned(loaded: LoadedModel) -> Plan:
    """Return a plan that keeps everything, in other coordinates."""
    plan = full_plan(MethodInputs(loaded.layout, loaded.fingerprint))
    source = torch.Generator().manual_seed(0)

    def turned(group: HeadGroup) -> HeadGroup:
        square = torch.randn(group.width, group.width, generator=source, dtype=torch.float64)
        basis = torch.linalg.qr(square).Q.float()
        return replace(group, down=basis, up=basis)

    def layer_of(layer: LayerPlan) -> LayerPlan:
        keys, values = (tuple(map(turned, side.groups)) for side in (layer.keys, layer.values))
        return replace(
            layer,
            keys=replace(layer.keys, groups=keys, placement=Placement.POST_ROPE),
            values=replace(layer.values, groups=values),
        )

    return replace(plan, layers=tuple(map(layer_of, plan.layers)))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    if id(module) not in active:
        raise UsageError(
            f"{type(module).__name__} uses kvprof's compressed attention outside kvprof.compressed"
        )
    compression, index = active[id(module)]
    return attend(compression, index, id(module), query, key, value, attention_mask, options), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, whole_mask)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@contextmanager
def _running(session: Compression) -> Iterator[None]:
    """Change the model, and change it back."""
    model, layout = session.loaded.model, session.loaded.layout
    decoder = text_decoder(model)
    attentions = {id(model.get_submodule(x.attention)): x.index for x in layout.layers}
    if any(module_id in active for module_id in attentions):
        raise UsageError(f"{layout.architecture} is already compressed; contexts cannot be nested")
    modules = folded_modules(session.loaded, session.plan)
    before = decoder.config._attn_implementation
    with ExitStack() as stack:
        stack.callback(setattr, session.loaded.identity, "held", False)
        session.loaded.identity.held = True
        for name, module in modules.items():
            stack.callback(_put, model, name, model.get_submodule(name))
            _put(model, name, module)
            if isinstance(module, OutputSwitch):
                index = next(x.index for x in layout.layers if name.startswith(x.attention + "."))
                session.switches[index] = module
        stack.callback(set_attention, decoder, before)
        set_attention(decoder, _NAME)
        if decoder.config._attn_implementation != _NAME:
            raise UsageError(f"{layout.architecture} does not support replacing its attention")
        active.update({module_id: (session, index) for module_id, index in attentions.items()})
        stack.callback(lambda: [active.pop(module_id) for module_id in attentions])
        if session.takes_angles:
            stack.enter_context(watched_rotations(decoder, session.watching))
        name = "_preprocess_mask_arguments"
        stack.callback(setattr, masking_utils, name, getattr(masking_utils, name))
        setattr(masking_utils, name, without(lambda: session.packed))
        if model.config is not decoder.config:
            hook = model.register_forward_pre_hook(session.bring, with_kwargs=True)
            stack.callback(hook.remove)
        hook = decoder.register_forward_pre_hook(session.begin, with_kwargs=True)
        stack.callback(hook.remove)
        stack.callback(decoder.register_forward_hook(session.end).remove)
        prepare = getattr(model, "_prepare_cache_for_generation", None)
        if prepare is not None:
            model._prepare_cache_for_generation = session.prepare_cache(prepare)
            stack.callback(delattr, model, "_prepare_cache_for_generation")
        session.active = True
        stack.callback(setattr, session, "active", False)
        stack.callback(setattr, masks, "needed", True)
        yield
