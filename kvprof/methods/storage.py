"""Which tokens a plan keeps, at which level and with how many bits; `kvprof.methods.plan` says how.

These classes are the part of a plan that is the same for all layers.
"""

from dataclasses import dataclass

__all__ = ["Eviction", "Levels", "Quantiser", "SideQuantiser"]


@dataclass(frozen=True)
class Levels:
    """Which tokens are stored at which level (TALE §2.2.1, appendix A).

    Attributes
    ----------
    sink : int
        First tokens, left at top rank and full precision (alpha).
    shares : tuple of float
        Share of the other tokens per level, lowest and oldest first; they sum to 1. ``(1.0,)`` is
        one level; TALE's p = 0.1 is ``(0.9, 0.1)``.
    batch : int
        Tokens that move down together (u). A level grows by whole batches, so up to ``batch - 1``
        tokens stay longer than the shares ask.
    """

    sink: int = 0
    shares: tuple[float, ...] = (1.0,)
    batch: int = 1


@dataclass(frozen=True)
class SideQuantiser:
    """How K, or V, is quantised.

    Attributes
    ----------
    bits : tuple of int
        One per token level, lowest first.
    axis : str
        ``token`` or ``channel``: what shares a scale lies along; see the module.
    group : int or None
        Values that share a scale: columns for ``token`` (None: the row), tokens for ``channel``.
        A library's groups of columns are of equal width, at most this.
    """

    bits: tuple[int, ...]
    axis: str = "token"
    group: int | None = None


@dataclass(frozen=True)
class Quantiser:
    """How latents are quantised; None for a side that is not.

    Attributes
    ----------
    kind : str
        ``affine``, ``codebook``, ``fp8``, or a library's: ``hqq``, ``quanto``.
    keys, values : SideQuantiser or None
    window : int
        Newest tokens that always stay at full precision.
    block : int
        Older tokens are quantised this many at a time, so that up to ``window + block - 1`` are at
        full precision.
    outliers : float
        Share of each row kept apart at full precision (``codebook`` only).
    scale_dtype : str
        Of scales and zeros; ``model`` is the dtype that the model runs in (libraries only).
    """

    kind: str
    keys: SideQuantiser | None
    values: SideQuantiser | None
    window: int = 0
    block: int = 1
    outliers: float = 0.0
    scale_dtype: str = "float16"


@dataclass(frozen=True)
class Eviction:
    """Which tokens are dropped, per layer and KV head (per layer alone for ``recent``).

    After T tokens ``kept(T)`` are left (`kvprof.methods.tokens.kept`). The first ``sink`` tokens
    and the newest ``floor(recent_share * kept)`` are never dropped; of the others those with the
    smallest accumulated score go. A score is summed over the query heads of the KV head, over all
    queries so far, in float32.

    Attributes
    ----------
    kind : str
        ``recent`` (sinks and the newest; StreamingLLM), ``h2o`` (scores are softmax
        probabilities) or ``keyformer`` (scores are ``softmax((x + g) / tau)`` of the scaled logits
        x, with g one standard Gumbel sample per key, kept with the key, and tau going from
        ``tau[0]`` for the first query to ``tau[1]`` for the last that generation may reach).
    keep : float
        Share of the tokens kept.
    sink : int
        First tokens never dropped.
    recent_share : float
        Of the kept tokens; 1 for ``recent``.
    order : str
        ``evict_first`` (FDC's KF-F: a prefill's scores come from exact Q and K, so with scores the
        keys' bases must not be folded) or
        ``compress_first`` (Keyformer-Z: from what is stored). Decode scores always come from what
        is stored.
    tau : tuple of float
        Keyformer's temperatures.
    seed : int
        Of the Gumbel samples.
    """

    kind: str
    keep: float
    sink: int = 4
    recent_share: float = 1.0
    order: str = "compress_first"
    tau: tuple[float, float] = (1.0, 2.0)
    seed: int = 0
