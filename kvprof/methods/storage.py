"""Which tokens a plan keeps, at which level and with how many bits; `kvprof.methods.plan` says how.

These classes are the part of a plan that is the same for all layers; each is checked here, and the
layouts of the libraries that quantise follow.
"""

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvprof.errors import LackingError, UsageError

__all__ = [
    "ARITHMETICS",
    "LIBRARIES",
    "ROW_RMS",
    "SCALE_BYTES",
    "Arithmetic",
    "Eviction",
    "Levels",
    "Library",
    "Quantiser",
    "RowLayout",
    "SideQuantiser",
    "bits_of",
    "check_eviction",
    "check_levels",
    "check_quantiser",
    "load_library",
    "row_layout",
]


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
        One per token level, lowest first; empty where each group of heads says its own.
    axis : str
        ``token`` or ``channel``: what shares a scale lies along; see the module.
    group : int or None
        Values that share a scale: columns for ``token`` (None: the row), tokens for ``channel``.
        A library's groups of columns are of equal width, at most this.
    clip : float or None
        Share of a token's row whose magnitudes stay as they are; larger ones are cut to the least
        that is not among them (``affine`` only).
    kind : str or None
        Where the two sides are of different kinds: this one's in place of the quantiser's.
    """

    bits: tuple[int, ...]
    axis: str = "token"
    group: int | None = None
    clip: float | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Quantiser:
    """How latents are quantised; None for a side that is not.

    Attributes
    ----------
    kind : str
        ``affine``, ``codebook``, ``lloyd-max``, ``lloyd-max-unit``, ``lloyd-max-rms``,
        ``uniform-rms``, ``fp8``, ``fp8-e5m2``, ``absmax``, ``signed-max``, ``minimum``,
        ``hidden-zero``, ``iq4_nl``, or a library's: ``hqq``, ``quanto``.
    keys, values : SideQuantiser or None
    window : int
        Newest tokens that always stay at full precision.
    block : int
        Older tokens are quantised this many at a time, so that up to ``window + block - 1`` are at
        full precision.
    outliers : float
        Share of each row kept apart at full precision (``codebook`` only).
    scale_dtype : str
        Of scales and zeros; ``model`` is the dtype that the model runs in (libraries only), and
        ``float8_e4m3fn`` is for those of `ROW_RMS` alone.
    """

    kind: str
    keys: SideQuantiser | None
    values: SideQuantiser | None
    window: int = 0
    block: int = 1
    outliers: float = 0.0
    scale_dtype: str = "float16"

    def kind_of(self, side: SideQuantiser) -> str:
        """Return the kind of one of its sides."""
        return side.kind or self.kind


@dataclass(frozen=True)
class Eviction:
    """Which tokens are dropped, per layer and KV head (per layer alone for ``recent``).

    After T tokens ``kept(T)`` are left (`kvprof.methods.tokens.kept`). The first ``sink`` tokens
    and the newest ``floor(recent_share * kept)`` are never dropped; of the others those with the
    smallest score go. A score is summed over the query heads of the KV head, over all queries so
    far, in float32; ``snapkv`` has a rule of its own.

    ``snapkv`` (arXiv 2404.14469, §4.2) looks at the last ``window`` queries of each pass over more
    than one token: a token before them scores the mean of the softmax probabilities that they give
    it, and that mean is averaged over ``pool`` adjacent tokens (those beyond the ends count as 0).
    The window's own tokens and those written since score higher than all of these, the newest
    highest. Published, it cuts a prompt once; here the share kept holds at every length, so tokens
    of the prompt go on leaving, the lowest first, while an answer grows.

    Attributes
    ----------
    kind : str
        ``recent`` (sinks and the newest; StreamingLLM), ``h2o`` (scores are softmax
        probabilities), ``keyformer`` (scores are ``softmax((x + g) / tau)`` of the scaled logits
        x, with g one standard Gumbel sample per key, kept with the key, and tau going from
        ``tau[0]`` for the first query to ``tau[1]`` for the last that generation may reach) or
        ``snapkv``.
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
    window, pool : int
        Of ``snapkv``; `pool` is odd.
    """

    kind: str
    keep: float
    sink: int = 4
    recent_share: float = 1.0
    order: str = "compress_first"
    tau: tuple[float, float] = (1.0, 2.0)
    seed: int = 0
    window: int = 0
    pool: int = 1


# --- Quantisers of other projects: HQQ and quanto, what they can do and how they lay out a row.
#
# Both are called as they are (`kvprof.runtime.codecs`); nothing here imitates them. What is
# here without them is the arithmetic of what they store, for the byte account.


@dataclass(frozen=True)
class Library:
    """One project that quantises.

    Attributes
    ----------
    package : str
        As pip knows it.
    module : str
        What is imported.
    bits : tuple of int
        That it has.
    """

    package: str
    module: str
    bits: tuple[int, ...]


#: By the kind of quantiser, which is also the name of kvprof's extra.
LIBRARIES = {
    "hqq": Library("hqq", "hqq.core.quantize", (2, 3, 4, 8)),
    "quanto": Library("optimum-quanto", "optimum.quanto", (2, 4, 8)),
}


@dataclass(frozen=True)
class RowLayout:
    """How a library stores one token's row of a latent.

    Attributes
    ----------
    groups : int
        Of columns with a scale of their own.
    width : int
        Columns of a group, filled up where the row is shorter than ``groups * width``.
    words : int
        Stored words of codes per group.
    word_bytes : int
        Of one word.
    zeros : bool
        Whether a group has a zero point beside its scale.
    """

    groups: int
    width: int
    words: int
    word_bytes: int
    zeros: bool

    @property
    def code_bytes(self) -> int:
        """Bytes of the row's codes."""
        return self.groups * self.words * self.word_bytes


def row_layout(kind: str, bits: int, columns: int, group: int | None) -> RowLayout:
    """Return how a library stores a row.

    A row is cut into groups of equal width, as few as `group` allows: 80 columns in groups of at
    most 64 are two of 40, not one of 64 and one of 16 filled up to 64. A group fills whole bytes,
    as the libraries ask. HQQ packs ten codes of 3 bits into a 32-bit word; quanto is symmetric at
    8 bits (no zero point).

    Parameters
    ----------
    kind : str
        A key of `LIBRARIES`.
    bits : int
        One of its bits.
    columns : int
        Of the row, r.
    group : int or None
        Most columns that share a scale; None for the whole row.
    """
    fill = 1 if bits == 3 else 8 // bits
    groups = math.ceil(columns / (group or columns))
    width = math.ceil(math.ceil(columns / groups) / fill) * fill
    # Filling up may have left a narrow row's last group without a column of its own.
    groups = math.ceil(columns / width)
    words = math.ceil(width / 10) if bits == 3 else width * bits // 8
    zeros = kind != "quanto" or bits < 8
    return RowLayout(groups, width, words, 4 if bits == 3 else 1, zeros)


def load_library(kind: str) -> Any:
    """Return the module of a library.

    Parameters
    ----------
    kind : str
        A key of `LIBRARIES`.

    Raises
    ------
    LackingError
        When it is not installed, or cannot be imported.
    """
    library = LIBRARIES[kind]
    try:
        return import_module(library.module)
    except ImportError as cause:
        from kvprof.requirements import extra_command

        raise LackingError(
            f"{kind} requires the package {library.package}, which cannot be imported "
            f"({cause}); {extra_command(kind)}"
        ) from cause


# --- kvprof's own arithmetic (`kvprof.runtime.codecs`): what each kind stores.


@dataclass(frozen=True)
class Arithmetic:
    """A kind of quantiser that is kvprof's own.

    Attributes
    ----------
    bits : tuple of int
        That it has.
    kept : tuple of str
        What the values of a group share, in words: a number in ``scale_dtype`` each; empty for a
        cast.
    words : str
        How a cast is called.
    """

    bits: tuple[int, ...]
    kept: tuple[str, ...]
    words: str = ""


#: By the kind of quantiser; the byte account and the reports read it here.
ARITHMETICS = {
    "affine": Arithmetic((2, 3, 4, 8), ("scale", "zero point")),
    "codebook": Arithmetic((2, 3, 4, 8), ("scale", "zero point")),
    "lloyd-max": Arithmetic((2, 3, 4, 8), ("norm",)),
    "lloyd-max-unit": Arithmetic((2, 3, 4, 8), ("norm",)),
    "lloyd-max-rms": Arithmetic((2, 3, 4, 8), ("scale",)),
    "uniform-rms": Arithmetic((2, 3, 4, 8), ("scale",)),
    "fp8": Arithmetic((8,), (), "FP8 (e4m3)"),
    "fp8-e5m2": Arithmetic((8,), (), "FP8 (e5m2)"),
    "absmax": Arithmetic((8,), ("scale",)),
    "signed-max": Arithmetic((4, 5), ("scale",)),
    "minimum": Arithmetic((3, 4, 5), ("scale", "zero point")),
    "hidden-zero": Arithmetic((4,), ("scale",)),
    "iq4_nl": Arithmetic((4,), ("scale",)),
}
#: Those whose scale is the root mean square of a token's row: columns can have bits of their own.
ROW_RMS = ("lloyd-max-rms", "uniform-rms")
#: Bytes of a scale, or of a zero point, by the dtype that it can have.
SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


def bits_of(kind: str) -> tuple[int, ...]:
    """Return the bits that a kind of quantiser has, a library's or kvprof's own."""
    return (LIBRARIES[kind] if kind in LIBRARIES else ARITHMETICS[kind]).bits


# --- What contradicts itself is refused, each in one clear line.


_KINDS = (*ARITHMETICS, *LIBRARIES)


def check_levels(levels: Levels) -> None:
    """Refuse token levels that are none.

    Raises
    ------
    UsageError
        Naming what makes no sense.
    """
    if levels.sink < 0 or levels.batch < 1:
        raise UsageError(
            f"levels: sink {levels.sink} must be 0 or more and batch {levels.batch} 1 or more"
        )
    if not levels.shares or min(levels.shares) < 0 or abs(sum(levels.shares) - 1) > 1e-9:
        raise UsageError(f"levels: shares {levels.shares} must be 0 or more and sum to 1")


def check_quantiser(quantiser: Quantiser, levels: Levels) -> None:
    """Refuse a quantiser that there is not, or that does not go with the token levels.

    Raises
    ------
    UsageError
        Naming what makes no sense.
    """
    sides = [side for side in (quantiser.keys, quantiser.values) if side is not None]
    wrong = [side.kind for side in sides if side.kind not in (None, *ARITHMETICS)]
    if wrong or quantiser.kind not in _KINDS:
        kind = (*wrong, quantiser.kind)[0]
        raise UsageError(f"quantiser: {kind!r} is unknown; use {', '.join(_KINDS)}")
    if quantiser.window < 0 or quantiser.block < 1 or not 0 <= quantiser.outliers < 1:
        raise UsageError(
            f"quantiser: window {quantiser.window} must be 0 or more, block {quantiser.block} 1 "
            f"or more, outliers {quantiser.outliers:g} in [0, 1)"
        )
    if quantiser.outliers and quantiser.kind != "codebook":
        raise UsageError(f"quantiser: {quantiser.kind} does not support outliers; use codebook")
    known = ("model",) if quantiser.kind in LIBRARIES else tuple(SCALE_BYTES)
    if quantiser.kind not in ROW_RMS:
        # A zero point of three binary digits would move every value.
        known = tuple(name for name in known if name != "float8_e4m3fn")
    if quantiser.scale_dtype not in known:
        raise UsageError(
            f"quantiser: {quantiser.kind} does not support scales in {quantiser.scale_dtype!r}; "
            f"use {' or '.join(known)}"
        )
    if not sides:
        raise UsageError("quantiser: neither keys nor values are quantised; leave it out")
    for side in sides:
        _check_side(side, quantiser, levels)


def _check_side(side: SideQuantiser, quantiser: Quantiser, levels: Levels) -> None:
    kind = quantiser.kind_of(side)
    allowed = bits_of(kind)
    unknown = [bits for bits in side.bits if bits not in allowed]
    if unknown:
        raise UsageError(
            f"quantiser: {kind} does not support {unknown[0]} bits; use "
            f"{', '.join(map(str, allowed))}"
        )
    # Without any, groups of heads say their own; where there is one choice there is nothing to say.
    if len(side.bits) != len(levels.shares) and (side.bits or len(allowed) == 1):
        raise UsageError(
            f"quantiser: {len(side.bits)} bit widths for {len(levels.shares)} token levels"
        )
    if side.axis not in ("token", "channel"):
        raise UsageError(f"quantiser: axis must be token or channel, not {side.axis!r}")
    if side.axis != "token" and kind not in ("affine", "codebook"):
        raise UsageError(f"quantiser: {kind} does not support axis channel; use token")
    if side.clip is not None and (kind != "affine" or not 0 < side.clip < 1):
        raise UsageError(
            f"quantiser: clip requires affine and a value between 0 and 1, not {kind} with "
            f"{side.clip:g}"
        )
    own = ARITHMETICS.get(kind)
    if side.group is not None and (kind in ROW_RMS or (own is not None and "norm" in own.kept)):
        kept = "scale" if kind in ROW_RMS else "norm"
        raise UsageError(f"quantiser: {kind} stores one {kept} per token and takes no group")
    if side.group is not None and side.group < 1:
        raise UsageError(f"quantiser: group {side.group} must be 1 or more")
    if side.axis == "channel":
        if side.group is None or quantiser.block % side.group:
            raise UsageError(
                "quantiser: axis channel requires a block that is a multiple of group "
                f"{side.group}, not {quantiser.block}"
            )
        if len(levels.shares) > 1 and levels.batch % side.group:
            raise UsageError(
                f"levels: batch {levels.batch} must be a multiple of the quantiser's group "
                f"{side.group}"
            )


def check_eviction(eviction: Eviction, quantiser: Quantiser | None) -> None:
    """Refuse an eviction that there is not, or that does not go with the quantiser.

    Raises
    ------
    UsageError
        Naming what makes no sense.
    """
    if eviction.kind not in ("recent", "h2o", "keyformer", "snapkv"):
        raise UsageError(
            f"eviction: {eviction.kind!r} is unknown; use recent, h2o, keyformer or snapkv"
        )
    if eviction.kind == "snapkv":
        if eviction.window < 1 or eviction.pool < 1 or eviction.pool % 2 == 0:
            raise UsageError(
                "eviction: snapkv requires a window of 1 or more and an odd pool, not "
                f"{eviction.window} and {eviction.pool}"
            )
    elif (eviction.window, eviction.pool) != (0, 1):
        raise UsageError(f"eviction: {eviction.kind} does not support window or pool; use snapkv")
    if eviction.order not in ("evict_first", "compress_first"):
        raise UsageError(
            f"eviction: {eviction.order!r} is unknown; use evict_first or compress_first"
        )
    if not 0 < eviction.keep <= 1 or not 0 <= eviction.recent_share <= 1 or eviction.sink < 0:
        raise UsageError(
            f"eviction: keep {eviction.keep:g} must be in (0, 1], recent share "
            f"{eviction.recent_share:g} in [0, 1], sink {eviction.sink} 0 or more"
        )
    if eviction.kind == "recent" and eviction.recent_share != 1:
        raise UsageError(
            f"eviction: recent requires a recent share of 1, not {eviction.recent_share:g}"
        )
    if min(eviction.tau) <= 0:
        raise UsageError(f"eviction: temperatures {eviction.tau} must be above 0")
    sides = (quantiser.keys, quantiser.values) if quantiser is not None else ()
    if any(side is not None and side.axis == "channel" for side in sides):
        raise UsageError(
            "eviction cannot be combined with scales per channel (KIVI), which blocks of "
            "tokens share; quantise per token"
        )
