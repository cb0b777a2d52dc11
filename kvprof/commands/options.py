"""Options that several commands share, and how ``--help`` shows a command's options."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from kvprof import console
from kvprof.commands.request import Mark, Parsed, Request, Rule, excludes, one_of
from kvprof.errors import LackingError, UsageError
from kvprof.loading import loading
from kvprof.methods.named import check_names, listed, options_in
from kvprof.sizes import check_rate, parse_counts, parse_share, second_reading

__all__ = [
    "DATA",
    "GONE",
    "METHOD",
    "MODEL",
    "OUTPUT",
    "AllocationOption",
    "BatchSizeOption",
    "CalibrateOption",
    "CalibrateSeqLenOption",
    "CalibrateTokensOption",
    "CalibrationOptions",
    "Command",
    "ContextOption",
    "DecodeOption",
    "DeviceOption",
    "DtypeOption",
    "Examples",
    "GgufOption",
    "GridOption",
    "LoadOptions",
    "MethodOption",
    "MethodOptions",
    "MethodOptionsOption",
    "MinimumOption",
    "ModelArgument",
    "ModelOptions",
    "PlanFileOption",
    "RateOption",
    "RemovalOption",
    "RevisionOption",
    "SampleOptions",
    "SeedOption",
    "SeqLenOption",
    "SequencesOption",
    "TaskItemsOption",
    "TaskLengthsOption",
    "TasksOption",
    "TextOption",
    "TrustOption",
    "grouped_option",
    "joined",
    "method_option",
    "one_method",
    "parse_removals",
    "read_counts",
    "resolve_device",
    "share_option",
]


#: Commands, and options after their command's name, that went: what to use instead.
#: `kvprof.cli` reads it where nothing of that name exists.
GONE = {
    "bench --against": "use kvprof compare",
    "bench --capacity": "use kvprof advise",
    "bench --check": "run --real, then --composed",
    "bench --rates": "use --request-rate",
    "bench --sample-steps": "use kvprof bench --jct",
    "bench --schedule": "leave it out; only one schedule remains",
    "bench --step-times": "--simulate uses the step times that ship with kvprof",
    "bench --vllm": "use python benchmarks/vllm_alone.py",
    "eval --teacher-forced": "leave it out; one masked pass is the default",
    "frontier --speeds": "use kvprof bench",
    "frontier --teacher-forced": "leave it out; one masked pass is the default",
    "plan --fit": "use kvprof advise",
    "plan --prefill": "use kvprof bench --jct",
    "plan --rates": "give --rate (kvprof frontier finds one)",
    "plan --reserve": "use kvprof advise",
    "plan --target": "give --rate (kvprof frontier finds one)",
    "runs": "use kvprof show",
    "warm": "kernels are compiled at first use",
}


# --- What ``--help`` says of a command: its options in groups, and examples to copy.


# Titles of groups that commands share, for `rich_help_panel` of an option; a command names its own.
MODEL = "Model and device"
METHOD = "Method"
DATA = "Text and tasks"
OUTPUT = "Output"

# The head of a NumPy docstring's section; help ends before the first.
_SECTION = re.compile(r"^([A-Z][A-Za-z ]*)\n-{3,}\n", re.MULTILINE)


class Examples:
    """Of a command or a group: the command lines that its help ends with."""

    examples: Sequence[str]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they stand, and what else comes last."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        # Typer's class, which stands beside this one in every use.
        super().format_epilog(ctx, formatter)  # type: ignore[misc]


class Command(Examples, TyperCommand):
    """A command that shows its options in groups and ends with its docstring's examples.

    An option's group is its ``rich_help_panel``; those without one come first, as *Options*.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        text, *sections = _SECTION.split(cleandoc(getattr(self.callback, "__doc__", None) or ""))
        self.help = text.strip().replace("``", "") or self.help
        named = dict(zip(sections[::2], sections[1::2], strict=True))
        self.examples = named.get("Examples", "").strip().splitlines()

    def make_parser(self, ctx: Any) -> Any:
        """Make the parser, which takes one value where one is asked for."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            values, rest, order = parse(args)
            for option, times in Counter(order).items():
                single = not getattr(option, "multiple", True) and not getattr(
                    option, "is_flag", True
                )
                if single and times > 1:
                    raise UsageError(f"{option.opts[0]} is given {times} times; it takes one value")
            return values, rest, order

        parser.parse_args = parse_args  # type: ignore[method-assign]
        return parser

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = getattr(parameter, "rich_help_panel", None)
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(own or kind, []).append(record)
        # What all commands share comes after what is this one's own.
        shared = {title: groups.pop(title, []) for title in (METHOD, DATA, MODEL, OUTPUT)}
        for title, records in (groups | shared).items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def share_option(
    name: str, help: str, group: str | None = None, parse: Callable[..., float] = parse_share
) -> Any:
    """Return an option that takes a share: ``30%``, ``0.3`` or ``.3``."""
    return typer.Option(
        name,
        help=help,
        metavar="SHARE",
        parser=partial(parse, what=name),
        rich_help_panel=group,
    )


def grouped_option(group: str, *names: str, metavar: str | None = None, text: str) -> Any:
    """Return an option of a group that says in its own words what its default is."""
    return typer.Option(
        *names, metavar=metavar, help=text, show_default=False, rich_help_panel=group
    )


def _model(text: str, *, what: str) -> str:
    """Refuse an empty name: a variable that is not set is no wish for the reference model."""
    if not text:
        raise UsageError(f"{what} is empty; name a model, or leave it out for the reference model")
    return text


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Hub id, folder, .gguf file, smollm2, or reference (ships with kvprof).  [default: "
        "reference]",
        show_default=False,
    ),
    Parsed(_model),
    Mark.READS,
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        rich_help_panel=MODEL,
        help="Sequences per forward pass.  [default: by device]",
    ),
    Mark.FREE,
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of the random tokens."), Mark.FREE
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        rich_help_panel=MODEL,
        help="auto, cpu, cuda, cuda:1, balanced (over GPUs) or offload (to CPU memory).",
    ),
    Mark.FREE,
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        rich_help_panel=MODEL,
        help="float32, bfloat16 … or auto: BF16 on a GPU, float32 on a CPU.",
    ),
    Mark.FREE,
]
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", rich_help_panel=MODEL, help="Branch, tag or commit of a hub model."),
    Mark.FREE,
]
GgufOption = Annotated[
    str | None,
    typer.Option(
        "--gguf",
        metavar="FILE",
        rich_help_panel=MODEL,
        help="Load weights from this GGUF file of the model's folder or repository.",
    ),
    Mark.FREE,
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        rich_help_panel=MODEL,
        help="Run code from the model's repository.",
    ),
]


class LoadOptions(Request):
    """Which model is loaded, and how."""

    model: ModelArgument = None
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    revision: RevisionOption = None
    gguf: GgufOption = None
    trust_remote_code: TrustOption = False

    @property
    def how(self) -> dict[str, Any]:
        """What `kvprof.commands.loading.load_for_command` is told beside the model."""
        names = ("device", "dtype", "revision", "gguf", "trust_remote_code")
        return {name: getattr(self, name) for name in names}


class ModelOptions(LoadOptions):
    """Of a command that runs over texts."""

    batch_size: BatchSizeOption = None


_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")


def resolve_device(name: str) -> str:
    """Return where a benchmark runs, ``cpu`` or ``cuda:N``; say what to do without such a GPU."""
    match = _DEVICE.fullmatch(name)
    if match is None and name != "auto":
        raise UsageError(f"--device {name!r}: give auto, cpu, cuda or cuda:1")
    if name == "cpu":
        return name
    with loading():
        import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(match[1] or 0) if match is not None else 0
    if index < gpus:
        return f"cuda:{index}"
    if match is None:
        return "cpu"
    instead = f"the last GPU is cuda:{gpus - 1}" if gpus else "use --device cpu"
    raise LackingError(
        f"--device {name}: torch sees {gpus or 'no'} CUDA GPU{'' if gpus == 1 else 's'}; "
        f"{instead} (kvprof doctor describes this machine)"
    )


def parse_removal(text: str, *, what: str) -> float:
    """Read a removal rate: from 0, which removes nothing, to 1, which leaves the smallest ranks."""
    rate = parse_share(text, what=what)
    if not 0 <= rate <= 1:
        raise UsageError(f"{what}: {text.strip()[:40]} is not between 0 and 1")
    return rate


def parse_removals(text: str, *, what: str) -> list[float]:
    """Read removal rates that commas separate, ascending and without repeats."""
    return sorted({parse_removal(entry, what=what) for entry in text.split(",")})


# --- Options that say which method, how much of it, and what it is calibrated on.


def method_option(
    text: str = "Method: fdc, zack, palu, tale, kq, fp8 …; kq-4bit also quantises, fdc+keyformer "
    "also evicts.",
) -> Any:
    """Return the option that names methods: joined by commas, or repeated."""
    return typer.Option(
        "--method",
        "--methods",
        metavar="LIST",
        rich_help_panel=METHOD,
        help=text,
        show_default=False,
    )


MethodOption = Annotated[list[str] | None, method_option(), Mark.FREE]
RateOption = Annotated[
    float | None,
    share_option(
        "--rate",
        "Compression rate: share of the cache's bytes saved, scales counted; 0 is uncompressed.",
        METHOD,
    ),
    Mark.FREE,
]
RemovalOption = Annotated[
    float | None,
    share_option(
        "--removal", "Removal rate (FDC eq. 1), instead of --rate.", METHOD, parse_removal
    ),
    Mark.FREE,
]
PlanFileOption = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", rich_help_panel=METHOD, help="Saved plan, instead of --method."
    ),
    Mark.READS,
]
CalibrateOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        rich_help_panel=METHOD,
        help="Calibration data: calibration (embedded text), prose, code, tasks, random:8k, a "
        "file, or saved moments.  [default: calibration]",
    ),
    Mark.READS,
]
CalibrateTokensOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate-tokens",
        rich_help_panel=METHOD,
        help="Calibration tokens.  [default: 8k or 4 sequences, or all of a shorter text]",
    ),
    Mark.FREE,
]
CalibrateSeqLenOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate-seq-len",
        rich_help_panel=METHOD,
        help="Tokens per calibration sequence.  [default: --seq-len, else 2k]",
    ),
    Mark.FREE,
]
AllocationOption = Annotated[
    str | None,
    typer.Option(
        "--allocation",
        rich_help_panel=METHOD,
        help="How heads share ranks: removal, uniform, tail, fisher or budget; with kq-wf: loss, "
        "budget or output.  [default: by method]",
    ),
    Mark.FREE,
]
GridOption = Annotated[
    int | None,
    typer.Option(
        "--grid",
        rich_help_panel=METHOD,
        min=1,
        help="Round ranks up to multiples of this.  [default: by method]",
    ),
    Mark.FREE,
]
MinimumOption = Annotated[
    int | None,
    typer.Option(
        "--minimum", rich_help_panel=METHOD, min=1, help="Smallest rank.  [default: by method]"
    ),
    Mark.FREE,
]
MethodOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        rich_help_panel=METHOD,
        metavar="KEY=VALUE",
        help="Set another option of the method; repeatable.",
    ),
    Mark.FREE,
]


ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        rich_help_panel=METHOD,
        help="Context length at which bytes are counted; k is 1,024.  [default: mean context of "
        "an evaluation]",
    ),
    Mark.FREE,
]
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        rich_help_panel=DATA,
        help="Text to score: prose, code (embedded) or a file; repeatable.  [default: prose]",
    ),
    Mark.READS,
]
SequencesOption = Annotated[
    int | None,
    typer.Option(
        "--sequences",
        rich_help_panel=DATA,
        min=1,
        help="Maximum sequences per text.  [default: by device]",
    ),
    Mark.FREE,
]
SeqLenOption = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        rich_help_panel=DATA,
        help="Tokens per sequence; the second half is scored.  [default: by device]",
    ),
    Mark.FREE,
]
TasksOption = Annotated[
    str,
    typer.Option(
        "--tasks",
        rich_help_panel=DATA,
        help="all (four embedded tasks), ruler (eleven of its thirteen tasks), arithmetic, "
        "multi-rounds, open-questions, none, or task names: needle,vt,niah-single-1 …",
    ),
    Mark.FREE,
]
TaskLengthsOption = Annotated[
    str | None,
    typer.Option(
        "--task-lengths",
        rich_help_panel=DATA,
        help="Prompt lengths of generated questions in tokens, comma-separated.  [default: by "
        "device; 512 on a CPU]",
    ),
    Mark.FREE,
]
TaskItemsOption = Annotated[
    int | None,
    typer.Option(
        "--task-items",
        rich_help_panel=DATA,
        min=1,
        max=10_000,  # they are all written down before the first is asked
        help="Questions per task.  [default: by device]",
    ),
    Mark.FREE,
]
DecodeOption = Annotated[
    bool,
    typer.Option(
        "--decode",
        rich_help_panel=DATA,
        help="Decode token by token, instead of in one masked forward pass with the same result.",
    ),
    Mark.FREE,
]


_NAMED = ("allocation", "grid", "minimum")


_CALIBRATION = ("calibrate", "calibrate_tokens", "calibrate_seq_len")


class CalibrationOptions(Request):
    """What a method is calibrated on, and the options that most methods have."""

    calibrate: CalibrateOption = None
    calibrate_tokens: CalibrateTokensOption = None
    calibrate_seq_len: CalibrateSeqLenOption = None
    allocation: AllocationOption = None
    grid: GridOption = None
    minimum: MinimumOption = None

    @property
    def calibration(self) -> dict[str, str | None]:
        """What `kvprof.commands.planning.calibration_options` is told."""
        return {name: getattr(self, name) for name in _CALIBRATION}

    def options(self, extra: list[str] | None = None) -> dict[str, Any]:
        """Return the options of a method as keyword arguments; those not given are left out."""
        named = {name: getattr(self, name) for name in _NAMED}
        return options_in(
            extra or [], {name: value for name, value in named.items() if value is not None}
        )


class MethodOptions(CalibrationOptions):
    """Which plan, by its method and rate or its file."""

    method: MethodOption = None
    rate: RateOption = None
    removal: RemovalOption = None
    plan_file: PlanFileOption = None
    option: MethodOptionsOption = None

    rules: ClassVar[tuple[Rule, ...]] = (
        excludes(
            "plan_file",
            *("method", "rate", "removal", *_CALIBRATION, "option", *_NAMED),
        ),
        one_of("rate", "removal"),
    )

    def choice(self, method: str | None) -> dict[str, Any]:
        """Return the plan that is asked for of one method, as `steps.make_plan` takes it."""
        names = ("plan_file", "rate", "removal", *_CALIBRATION)
        if self.plan_file is None and method is None:
            raise UsageError("give --method, for example --method kq --rate 0.5, or --plan")
        check_rate(self.rate)
        if method is not None:
            check_names([method])
        chosen = {name: getattr(self, name) for name in names}
        return {**chosen, "method": method, "options": self.options(self.option)}


class SampleOptions(Request):
    """Which text and which tasks a plan is measured on, and how."""

    text: TextOption = None
    sequences: SequencesOption = None
    seq_len: SeqLenOption = None
    tasks: TasksOption = "all"
    task_items: TaskItemsOption = None
    task_lengths: TaskLengthsOption = None
    decode: DecodeOption = False

    @property
    def sample(self) -> dict[str, Any]:
        """What `kvprof.commands.planning.load_sample` is told of text and tasks."""
        names = ("text", "sequences", "seq_len", "tasks", "task_items", "task_lengths")
        return {name: getattr(self, name) for name in names}


def read_counts(text: str, *, what: str) -> list[int]:
    """Read a list of counts, and say so where it may have been meant as one (``1,536``)."""
    counts = parse_counts(text, what=what)
    if (one := second_reading(text)) is not None:
        console.note(
            f"{what} {text} was read as a list, {' and '.join(map(str, counts))}; for one number "
            f"write {one}"
        )
    return counts


def joined(given: list[str] | None) -> str | None:
    """Return what a repeated option names as one list; None where it is not given."""
    return ",".join(given) if given else None


def one_method(given: list[str] | None) -> str | None:
    """Return the method of a command that takes one."""
    named = joined(given)
    if named is not None and ("," in named or len(listed(named)) > 1):
        raise UsageError(f"--method {named}: this command takes one method")
    return named
