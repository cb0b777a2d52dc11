"""The methods that are measured: their names, their widths, and in which phase they differ."""

import re
from dataclasses import dataclass

from kvprof.benchmark.ranks import Widths, ranks_from, resampled
from kvprof.benchmark.shapes import Shape
from kvprof.benchmark.tale import tale_paper_ratio, tale_widths
from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP

__all__ = ["KINDS", "Method", "method_widths", "parse_method"]

#: The plain names; fdc, kq, uniform and palu may carry ``-4bit`` and the like.
KINDS = ("full", "fp8", "fdc", "kq", "uniform", "palu", "palu-folded", "tale")
_LOW_RANK = ("fdc", "kq", "uniform")
_BITS = (2, 4, 8)
_NAME = re.compile(r"([a-z0-9]+(?:-folded)?)(?:-([0-9]+)bit)?((?::[a-z]+=[a-z0-9]+)*)")
# What each kind may be told after a colon.
_GROUPS: dict[str, tuple[str, ...]] = {"group": ("1", "2", "4", "8")}
_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "tale": {"bits": ("none", "published")}, "palu": _GROUPS, "palu-folded": _GROUPS,
}  # fmt: skip
#: Columns of one token that share a scale: what every 4-bit row of this project counts.
COLUMNS = 32


@dataclass(frozen=True)
class Method:
    """One method as it was asked for.

    Attributes
    ----------
    name : str
        As written, for example ``fdc-4bit`` or ``tale:bits=none``.
    kind : str
        One of `KINDS`.
    bits : int or None
        Of its latents; None for values of the run's dtype.
    group : int
        KV heads that share a latent (Palu).
    quantised_levels : bool
        Whether TALE's levels are quantised as published.
    """

    name: str
    kind: str
    bits: int | None = None
    group: int = 4
    quantised_levels: bool = True

    @property
    def cut(self) -> bool:
        """Whether the ragged kernels run it, whose work can be cut in several ways."""
        return self.low_rank and self.bits is None

    @property
    def low_rank(self) -> bool:
        """Whether every KV head has widths of its own."""
        return self.kind in _LOW_RANK

    def lacks(self, phase: str) -> str | None:
        """Return why a phase has no row of this method; None where it has one."""
        if phase == "decode" or self.cut or self.kind == "full":
            return None
        if self.kind == "tale":
            return "its prefill attends to exact K and V (lazily compressed): it is full width's"
        if self.kind in ("palu", "palu-folded"):
            return "its prefill attends to rebuilt K and V: it is full width's and a product"
        what = "full width" if self.kind == "fp8" else self.kind
        return f"a prefill attends to its own tokens before they are quantised: it is {what}'s"


def parse_method(text: str) -> Method:
    """Read a method's name: ``fdc``, ``fdc-4bit``, ``palu:group=1``, ``tale:bits=none``.

    Raises
    ------
    UsageError
        For a name or an option that there is not.
    """
    match = _NAME.fullmatch(text)
    kind = match[1] if match else ""
    if match is None or kind not in KINDS:
        raise UsageError(
            f"no method {text!r} to measure: there are {', '.join(KINDS)}, and fdc-4bit and the "
            "like"
        )
    bits = int(match[2]) if match[2] else None
    if bits is not None and (bits not in _BITS or not (kind in _LOW_RANK or "folded" in kind)):
        raise UsageError(
            f"{text}: fdc, kq, uniform and palu-folded are quantised to "
            f"{', '.join(map(str, _BITS))} bits (a plan of 3 bits runs in the 4-bit container)"
        )
    given = dict(part.split("=") for part in match[3].split(":")[1:])
    known = _OPTIONS.get(kind, {})
    for key, value in given.items():
        if key not in known or value not in known[key]:
            options = [f"{name}={'|'.join(values)}" for name, values in known.items()]
            raise UsageError(
                f"{text}: {kind} "
                + (f"takes {', '.join(options)}" if options else "has no options")
            )
    return Method(
        text,
        kind,
        bits,
        group=int(given.get("group", 4)),
        quantised_levels=given.get("bits") != "none",
    )


def method_widths(
    method: Method, shape: Shape, rate: float, ranks: str | None = None
) -> Widths | None:
    """Return the widths of a method's stored heads; None for FP8 and full width.

    Parameters
    ----------
    method : Method
    shape : Shape
    rate : float
    ranks : str, optional
        A file with the widths of every KV head; it holds for all low-rank methods but ``uniform``.

    Raises
    ------
    UsageError
        For a rate out of reach, or ranks of another shape.
    """
    if method.kind == "uniform":
        return _uniform(shape, rate)
    if method.low_rank:
        if ranks is not None:
            return ranks_from(ranks, shape)
        return resampled(shape, rate, method.kind)
    if method.kind in ("palu", "palu-folded"):
        return _latents(method, shape, rate)
    return _tale(method, shape) if method.kind == "tale" else None


def _tale(method: Method, shape: Shape) -> Widths:
    """Return the widths of TALE's middle level, which holds nine tenths of the tokens."""
    full = (shape.head_dim,) * shape.num_kv_heads
    ratio = tale_paper_ratio(quantised=method.quantised_levels)
    return Widths(
        full,
        tale_widths(full),
        "TALE's published setting whatever the rate asked for (here its middle level); the paper "
        f"counts {ratio:.2f}× for it, without scales, zero points and sinks",
    )


def _uniform(shape: Shape, rate: float) -> Widths:
    width = min(shape.head_dim, max(STEP, round((1 - rate) * shape.head_dim / STEP) * STEP))
    whole = (width,) * shape.num_kv_heads
    return Widths(whole, whole, f"uniform width {width}")


def _latents(method: Method, shape: Shape, rate: float) -> Widths:
    """Return the latent widths of Palu's groups: the same for all, multiples of 32."""
    most = min(method.group, 512 // shape.head_dim)
    group = max(size for size in range(1, most + 1) if shape.num_kv_heads % size == 0)
    step = 2 * STEP
    full = group * shape.head_dim
    width = min(full, max(step, round((1 - rate) * full / step) * step))
    count = shape.num_kv_heads // group
    words = f"uniform latents of {width}, one per {group} KV heads"
    warnings: tuple[str, ...] = ()
    if group != method.group:
        warnings = (
            f"{method.name}: {group} instead of {method.group} KV heads share a latent (of "
            f"{shape.num_kv_heads}, and a latent is at most 512 wide)",
        )
    return Widths((width,) * count, (width,) * count, words, warnings)
