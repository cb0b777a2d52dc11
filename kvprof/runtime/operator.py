"""A layer's attention as one operator of torch: all that ``torch.compile`` sees of the runtime.

The operator finds the layer, its plan and its cache by the identity of the attention module. What
it stores is not among its arguments, so no CUDA graph of Inductor's may hold it (it is tagged so:
they are cut there); a graph that a user captures may, see `CompressedCache.replayed`.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvprof.runtime.session import Compression

__all__ = ["active", "attend"]

#: By the identity of every attention module that runs compressed: registered functions are global.
active: dict[int, tuple["Compression", int]] = {}


def attend(
    compression: "Compression", index: int, place: int, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Run a layer's attention, as an operator where the model is being compiled.

    Parameters
    ----------
    compression : Compression
    index : int
        Which layer.
    place : int
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
        query, key, value, mask, options.get("s_aux"), options.get("scaling"),
        options.get("softcap"), place, compression.widths[index],
    )  # fmt: skip
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
    place: int,
    width: int,
) -> Tensor:
    compression, index = active[place]
    if compression.cache is not None:
        # The cache layer has set it too, but compiled code does so after its graph has run.
        compression.cache.layers[index].pending = query.shape[2]
    options = {"s_aux": sinks, "scaling": scaling, "softcap": softcap}
    return compression.attend(index, query, key, value, mask, options)


@_attend.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], 1, rest[-1])
