"""The result of ``kvprof sensitivity``."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from kvprof.results.base import Compared, Figure, Interval, Key, Keyed, Part, Result, Size, ends

__all__ = [
    "SIDES",
    "Budget",
    "Cell",
    "FirstTokens",
    "Flags",
    "Needed",
    "SensitivityData",
    "SensitivityResult",
    "Stay",
]

Side = Literal["keys", "values"]
SIDES: tuple[Side, Side] = ("keys", "values")

_PART = ("layer", "side", "kv_head", "setting", "bits", "rank", "exact_first")
_MEASURED = ("kl", "kl_p999", "kl_worst", "accuracy", "relative_accuracy")
_BOUNDED = ("kl", "relative_accuracy")


class Measured(Part):
    """What storing some of the cache otherwise costs."""

    kl: Annotated[float, Compared("lower", interval="kl_interval")] = Field(
        ge=0,
        description="Mean over decoded tokens of the divergence of the next token's distribution "
        "from the uncompressed model's, in nats.",
    )
    kl_interval: Interval = Field(
        description="95 % bootstrap over sequences; null with fewer than 32."
    )
    kl_p999: Size
    kl_worst: Size
    accuracy: Size
    baseline_accuracy: Size
    relative_accuracy: Annotated[
        Size | None, Compared("higher", interval="relative_accuracy_interval")
    ]
    relative_accuracy_interval: Interval
    decoded_tokens: int = Field(ge=0)

    def row(self) -> dict[str, Any]:
        """Return the figures as columns of the CSV."""
        bounds = (ends(name, getattr(self, f"{name}_interval")) for name in _BOUNDED)
        row = {name: getattr(self, name) for name in _MEASURED}
        for one in bounds:
            row |= one
        return row


class Cell(Measured):
    """A part at a setting; everything else as the model stores it."""

    layer: Annotated[int, Keyed()] = Field(ge=0)
    side: Annotated[Side, Keyed()]
    kv_head: Annotated[int | None, Keyed()] = Field(
        description="Null for all KV heads of the layer together."
    )
    setting: Annotated[str, Keyed()] = Field(
        description="Bits of the quantiser, `fp8`, or a rank in kq's bases."
    )
    bits: int | None
    rank: int | None
    exact_first: Annotated[int, Keyed()] = Field(
        ge=0, description="First tokens of a sequence left uncompressed."
    )
    bytes_per_token: Annotated[Size, Compared("lower", headline=True, exact=True)] = Field(
        description="Of the part, at the mean context of the sample, scales and windows included."
    )


class Sides(Part):
    """The divergences of all keys and of all values at a setting, summed."""

    setting: str
    keys: Size
    values: Size
    ratio: float | None = Field(description="Keys over values.")
    more: Side | None = Field(
        description="The more sensitive side; null within a quarter of each other."
    )


class Stay(Part):
    """The fewest layers to leave uncompressed so that the rest sums to the limit at most."""

    setting: str
    kl: float = Field(description="Sum over all parts.")
    stay: list[int]
    kl_left: float = Field(description="Sum over the parts of the other layers.")


class Choice(Part):
    """What a part takes."""

    layer: int
    side: Side
    kv_head: int | None
    setting: str


class Needed(Choice):
    """The smallest quantised setting of a part within an equal share of the limit, or `full`."""

    bits: int | None


class BySide(Part):
    """A share for each side."""

    keys: float | None
    values: float | None


class FirstTokens(Part):
    """What of a setting's divergence goes away when the first tokens are uncompressed."""

    setting: str
    exact_first: int = Field(ge=1)
    kl: float
    kl_exact: float
    explained: float | None = Field(description="Share that goes away; below 0 where it grows.")
    explained_by_side: BySide


class Uniform(Part):
    """All parts at one setting."""

    rate: float = Field(le=1, description="Of the measured parts' bytes.")
    bytes_per_token: Size
    predicted_kl: Size = Field(description="Sum of the cells.")
    measured: Measured


class Budget(Part):
    """Settings handed out by cost per byte, and measured as a whole."""

    like: str | None = Field(
        description="The setting whose bytes it may take; null at the rate asked for."
    )
    rate_asked: float | None = Field(
        None, description="Of the whole cache. Absent in results of earlier versions."
    )
    rate: float = Field(le=1, description="Of the measured parts' bytes.")
    bytes_per_token: Size
    predicted_kl: Size = Field(description="Sum of the cells.")
    measured: Measured
    uniform: Uniform | None = Field(description="All parts at that setting; null without one.")
    choices: list[Choice]

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield what can be compared, of the mixture and of all parts alike."""
        key = (*key, ("like", self.like), ("rate", self.rate_asked))
        for name, one in (("mixed", self), ("uniform", self.uniform)):
            if one is not None:
                yield from one.measured.figures((*key, ("allocation", name)))


class Flags(Part):
    """Flags of another program that say the same, within the limit by the sum of the cells."""

    program: Annotated[str, Keyed()]
    flags: str
    says: str
    unsaid: str
    measured: Measured


class SensitivityData(Part):
    """Data of `kvprof sensitivity`."""

    model_layers: int = Field(ge=1)
    heads: list[int] = Field(description="KV heads of each measured layer.")
    baseline_accuracy: Size | None = Field(description="Of the uncompressed model's next token.")
    noise: Size | None = Field(
        description="Divergence of the same passes with nothing stored otherwise."
    )
    cells: list[Cell] = Field(description="One for each part and setting that was measured.")
    sides: list[Sides]
    layers: list[Stay]
    needed: list[Needed]
    first_tokens: list[FirstTokens]
    budgets: list[Budget]
    flags: list[Flags]

    def plain(self, setting: str, first: int = 0) -> list[Cell]:
        """Return the cells of a setting with so many first tokens uncompressed."""
        return [one for one in self.cells if (one.setting, one.exact_first) == (setting, first)]


class SensitivityInputs(Part):
    """Every resolved input, so that a reader can repeat the run."""

    model_config = ConfigDict(extra="allow")

    model: str
    fingerprint: str
    limit: float
    text: Sequence[str]
    sequences: int
    seq_len: int
    quantiser: str | None = None
    dtype: str | None = None
    device: str | None = None
    gguf: dict[str, Any] | None = None


class SensitivityResult(Result):
    """What it costs to store one part of the cache otherwise.

    Its CSV says in ``what`` whether a row is a ``cell``, a ``budget`` (settings handed out at the
    bytes of ``setting``, measured as a whole), or ``uniform``: all parts at ``setting``.
    """

    columns: ClassVar[tuple[str, ...]] = (
        *("what", *_PART, "bytes_per_token", *_MEASURED),
        *(f"{name}_{end}" for name in _BOUNDED for end in ("low", "high")),
    )

    inputs: SensitivityInputs
    data: SensitivityData

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each cell, and one for each whole."""
        names = (*_PART, "bytes_per_token")
        for cell in self.data.cells:
            yield {"what": "cell", **{x: getattr(cell, x) for x in names}, **cell.row()}
        for budget in self.data.budgets:
            for what, one in (("budget", budget), ("uniform", budget.uniform)):
                if one is not None:
                    own = {"setting": budget.like, "bytes_per_token": one.bytes_per_token}
                    yield {"what": what, **own, **one.measured.row()}
