"""The context in which a model runs with a plan's compressed cache.

``with compressed(model, plan): model.generate(...)``. Inside, the model's attention is kvprof's,
projections carry the plan's bases, and every cache is a compressed one. Afterwards the model is
what it was, bit for bit, also after an exception.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvprof.errors import UsageError
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import check_fits
from kvprof.models.interface import text_decoder, watched_rotations
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.models.noise import quiet
from kvprof.runtime.folding import OutputSwitch, folded_modules
from kvprof.runtime.masks import masks, whole_mask
from kvprof.runtime.operator import active, attend
from kvprof.runtime.session import Compression

__all__ = ["Compression", "compressed"]

_NAME = "kvprof_compressed"


@contextmanager
def compressed(
    model: PreTrainedModel | LoadedModel, plan: Plan, kernels: str | None = None
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
        which takes a prompt of some thousand tokens (`kvprof.runtime.kernels.route`).
        ``on``: all layers do, or there is an error. ``off``: none does. By default what the
        environment variable ``KVPROF_KERNELS`` says, else ``auto``. `Compression.kernel_reasons`
        tells what became of it.

    Yields
    ------
    Compression
        To make caches with, and to look at the last one.

    Raises
    ------
    UsageError
        For a plan that does not fit, a layer that cannot run on the kernels with ``on``, and for
        wrong use inside: a cache of another kind, a model in training mode, contexts that nest,
        rolling back what cannot be.
    """
    loaded = model if isinstance(model, LoadedModel) else wrap_model(model)
    check_fits(plan, loaded.layout, loaded.fingerprint)
    session = Compression(loaded, plan, kernels)
    with _running(session):
        yield session


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
            f"{type(module).__name__} runs under kvprof's compressed attention outside "
            "kvprof.compressed"
        )
    compression, index = active[id(module)]
    place = id(module)
    return attend(compression, index, place, query, key, value, attention_mask, options), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, whole_mask)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _set_attention(decoder: PreTrainedModel, implementation: str) -> None:
    with quiet():
        decoder.set_attn_implementation(implementation)


@contextmanager
def _running(session: Compression) -> Iterator[None]:
    """Change the model, and change it back."""
    model, layout = session.loaded.model, session.loaded.layout
    decoder = text_decoder(model)
    places = {id(model.get_submodule(x.attention)): x.index for x in layout.layers}
    if any(place in active for place in places):
        raise UsageError(f"{layout.architecture} runs compressed already; contexts do not nest")
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
        stack.callback(_set_attention, decoder, before)
        _set_attention(decoder, _NAME)
        if decoder.config._attn_implementation != _NAME:
            raise UsageError(f"{layout.architecture} does not let kvprof compute its attention")
        active.update({place: (session, index) for place, index in places.items()})
        stack.callback(lambda: [active.pop(place) for place in places])
        if session.rebuilds:
            stack.enter_context(watched_rotations(decoder, session.watching))
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
