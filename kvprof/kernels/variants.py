"""What a compiled form of a kernel is, so that each operation can list its own."""

from dataclasses import dataclass
from typing import Any

__all__ = ["DEPENDENT_FROM", "Variant"]

#: Compute capability times ten from which a kernel can be launched while the one that it depends on
#: still runs: Hopper's.
DEPENDENT_FROM = 90


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled."""

    name: str
    kernel: Any
    types: dict[str, str]  # of its arguments that are not `i32`: pointers, and numbers in fp32
    #: Compile-time arguments, and those that it runs without; `DEPENDENT` is false where the
    #: architecture has no such launches.
    constants: dict[str, Any]
    warps: int
    stages: int = 3  # of the compiler's software pipeline, where the kernel leaves it to the launch

    @property
    def signature(self) -> dict[str, str]:
        """Types of all its arguments but the constants."""
        # Only compile-time parameters are annotated: one that `constants` forgot is not made a
        # number here, and a type of none of the kernel's parameters stays; Triton refuses both.
        fixed = self.constants.keys() | self.kernel.fn.__annotations__.keys()
        numbers = dict.fromkeys(
            (name for name in self.kernel.arg_names if name not in fixed), "i32"
        )
        return numbers | {name: kind for name, kind in self.types.items() if name not in fixed}
