"""What a compiled form of a kernel is, so that each operation can list its own."""

from dataclasses import dataclass
from typing import Any

__all__ = ["DEPENDENT_FROM", "Variant"]

#: Compute capability times ten from which a kernel can be launched while the one that it depends on
#: still runs: Hopper's.
DEPENDENT_FROM = 90


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled.

    Attributes
    ----------
    name : str
    kernel : JITFunction
    signature : dict
        Types of its arguments.
    constants : dict
        Compile-time arguments; `DEPENDENT` is false where the architecture has no such launches.
    warps : int
    stages : int
        Of the compiler's software pipeline, where the kernel leaves it to the launch.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
