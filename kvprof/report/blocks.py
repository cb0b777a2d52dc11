"""What a report is made of: data alone, which four renderers draw.

`kvprof.report.terminal`, `pages` and `figure` each have a case for a block.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

from kvprof.records.result import RECORD_DAMAGED, RECORD_ENDS

__all__ = [
    "Bars",
    "Block",
    "Chart",
    "Column",
    "Curves",
    "Drawing",
    "Facts",
    "Heading",
    "HeatMap",
    "Notes",
    "Paragraph",
    "Ratios",
    "Ready",
    "Report",
    "Series",
    "Table",
    "colours_of",
    "framed",
]


@dataclass(frozen=True)
class Heading:
    """A section's heading."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Running text; its role is ``verdict`` (first, once), ``caution``, ``stopped``, ``aside``."""

    text: str
    role: str = ""

    @property
    def strong(self) -> bool:
        """Whether it is what a reader should see first."""
        return self.role in ("verdict", "stopped")


@dataclass(frozen=True)
class Notes:
    """Lines of a list; `caution` for warnings."""

    lines: Sequence[str]
    caution: bool = False


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for."""

    pairs: Mapping[str, str]


@dataclass(frozen=True)
class Column:
    """A column: `field` is a row's attribute or entry, or makes a value of it; `show` writes it."""

    field: str | int | Callable[[Any], Any]
    title: str
    show: Callable[[Any], str] = str
    words: bool = False  # text, left-aligned, that may wrap; otherwise a figure
    goes: int = 0  # how early it goes where a terminal is too narrow; 0 for never

    def cell(self, row: Any) -> str:
        """Return what stands in this column of a row."""
        if callable(self.field):
            return self.show(self.field(row))
        if isinstance(self.field, int) or isinstance(row, Mapping):
            return self.show(row[self.field])
        return self.show(getattr(row, self.field))


@dataclass(frozen=True)
class Table:
    """Rows, of any type, by columns; the first column names the row."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""

    def cells(self) -> list[list[str]]:
        """Return the rows as text."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Series:
    """One curve, and a band that figures for papers draw; None, NaN leave a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    method: str = ""  # a common one has a colour of its own
    reference: bool = False  # what the others are held against


def colours_of(series: Sequence[Series], palette: Sequence[str], reference: str) -> list[str]:
    """Return each curve's colour: a common method's own, or else one that is still free."""
    names = [one.method.partition(":")[0] for one in series]
    common = zip(("full", "kq", "fdc", "zack", "palu", "tale", "fp8"), palette, strict=False)
    own = {names.index(name): colour for name, colour in common if name in names}
    own |= {index: reference for index, one in enumerate(series) if one.reference}
    free = chain((colour for colour in palette if colour not in own.values()), cycle(palette))
    return [own[index] if index in own else next(free) for index in range(len(series))]


@dataclass(frozen=True)
class Curves:
    """A line plot; the x ticks are for a linear axis."""

    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()
    height: int = 16


@dataclass(frozen=True)
class HeatMap:
    """One figure per layer and head, ``[layer][head]``; `log` is for figures over decades."""

    values: Sequence[Sequence[float | None]]
    title: str
    low: float | None = None
    high: float | None = None
    show: Callable[[float], str] | None = None
    columns: str = "KV head"
    layers: Sequence[str] = ()
    names: Sequence[str] = ()
    log: bool = False


@dataclass(frozen=True)
class Bars:
    """Stacked bars (`kvprof.views.bars.StackedBars`)."""

    bars: Any

    @property
    def title(self) -> str:
        """What stands above them."""
        return str(self.bars.title)


@dataclass(frozen=True)
class Ratios:
    """What was measured beside what was published (`kvprof.views.recipe.Beside`)."""

    beside: Any

    @property
    def title(self) -> str:
        """What stands above them."""
        return str(self.beside.title)


@dataclass(frozen=True)
class Ready:
    """What makes matplotlib's figure; of reports that are not made of blocks yet."""

    make: Callable[[], Any]
    title: str = ""


@dataclass(frozen=True)
class Drawing:
    """What only a terminal's characters can show; of reports that are not made of blocks yet."""

    text: str


Chart = Curves | HeatMap | Bars | Ratios | Ready
Block = Heading | Paragraph | Notes | Facts | Table | Chart | Drawing


@dataclass(frozen=True)
class Report:
    """Blocks, and what was measured on what: the title of the report's figure."""

    blocks: Sequence[Block]
    subject: str = ""

    @property
    def figure(self) -> Chart | None:
        """The chart that ``--svg`` and ``--png`` draw: the first."""
        return next((one for one in self.blocks if isinstance(one, Chart)), None)


def framed(
    result: Any,
    body: Iterable[Block],
    *,
    verdict: str,
    subject: str,
    cautions: Iterable[str] = (),
    notes: Sequence[str] = (),
    measured_with: Mapping[str, Any],
) -> Report:
    """Return a report: verdict, what limits it, the kind's own blocks, five notes, provenance."""
    stopped = []
    if str(getattr(result.inputs, "device", None)).startswith("cuda"):
        gpus = dict.fromkeys(gpu["name"] for gpu in result.environment.get("gpus", ()))
        subject = ", ".join([subject, *gpus])
    if not result.complete:
        why = result.incomplete_reason or ""
        named = (one for one in (RECORD_DAMAGED, RECORD_ENDS) if why.startswith(one))
        said = next(named, "the run stopped before its end")
        stopped = [
            Paragraph(f"INCOMPLETE: {said}; these figures cover what was measured.", "stopped")
        ]
        subject = f"{subject} (incomplete)"
    blocks: list[Block] = [*stopped, Paragraph(verdict, "verdict")]
    blocks += [Paragraph(line, "caution") for line in cautions]
    blocks += body
    if notes:
        blocks += [Heading("Notes"), Notes(notes)]
    inputs = result.inputs
    gguf, device = getattr(inputs, "gguf", None), getattr(inputs, "device", None)
    dtype = getattr(inputs, "dtype", None) or getattr(result.data, "dtype", None)
    known = {
        **measured_with,
        "weights": f"{gguf['file']}, {gguf['quantisation']}" if gguf else None,
        "fingerprint": inputs.fingerprint,
        "dtype": f"{dtype} on {device}" if dtype and device else dtype,
        "written": result.created,
    }
    facts = {name: str(value) for name, value in known.items() if value not in (None, "")}
    blocks += [Heading("Measured with"), Facts(facts)]
    if result.warnings:
        blocks += [Heading("Warnings"), Notes(result.warnings, caution=True)]
    return Report([*blocks, *stopped], subject)
