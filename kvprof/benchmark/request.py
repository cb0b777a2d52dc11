"""What a run of the benchmark is asked for, checked before anything is made."""

from dataclasses import dataclass
from pathlib import Path

from kvprof.benchmark.methods import named_plans
from kvprof.benchmark.shape_plans import parse_method
from kvprof.errors import UsageError

__all__ = ["DEFAULT_METHODS", "PHASES", "BenchRequest"]

PHASES = ("decode", "prefill")
DEFAULT_METHODS = ("full", "fp8", "fdc", "kq", "palu", "tale")


@dataclass(frozen=True)
class BenchRequest:
    """What to measure."""

    shape: str | Path = "Llama-3.1-8B"  # see `kvprof.benchmark.shapes.load_shape`
    seqs: tuple[int, ...] = (102_400,)  # contexts in tokens, and sequences at once
    batches: tuple[int, ...] = (1,)
    rate: float = 0.5  # each plan's own, at the longest context; TALE has its published setting
    rate_given: bool = False  # whether it was asked for
    #: Widths from a file instead of the recorded profile; see `kvprof.benchmark.ranks.ranks_from`.
    ranks: str | Path | None = None
    #: Methods are those of `kvprof.benchmark.shape_plans.parse_method`, and the names of `plans`.
    phases: tuple[str, ...] = PHASES
    methods: tuple[str, ...] = DEFAULT_METHODS
    plans: tuple[str, ...] = ()  # files of saved plans; each is named by its file
    dtype: str = "auto"  # `auto` (bfloat16 on a GPU, float32 on a CPU), or a dtype's name
    repeats: int | None = None  # samples per row; None takes 30 on a GPU and 7 on a CPU
    device: str = "auto"  # `auto`, `cpu`, `cuda` or `cuda:N`
    seed: int = 0  # of the inputs

    def __post_init__(self) -> None:
        if any(seq < 1 for seq in self.seqs) or not self.seqs:
            raise UsageError(f"--seq {min(self.seqs, default=0)}: use 1 token or more")
        if any(batch < 1 for batch in self.batches) or not self.batches:
            raise UsageError(f"--batch {min(self.batches, default=0)}: use 1 or more")
        if self.repeats is not None and self.repeats < 3:
            raise UsageError(f"--repeats {self.repeats}: use 3 or more")
        unknown = [name for name in self.phases if name not in PHASES]
        if unknown or not self.phases:
            raise UsageError(f"no phase {''.join(unknown[:1])!r}; use {', '.join(PHASES)}")
        if not self.methods:
            raise UsageError("no method given; use for example --methods fdc,fp8")
        plans = named_plans(self.plans)
        for name in self.methods:
            if name not in plans:
                parse_method(name)
