"""Compile a small kernel for compute capability 9.0; run by `kvprof.triton_probe`, not imported."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, width: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, width)
    tl.store(target + columns, tl.load(source + columns))


if __name__ == "__main__":
    signature = {"source": "*fp32", "target": "*fp32", "width": "constexpr"}
    triton.compile(ASTSource(_copy, signature, {"width": 128}), target=GPUTarget("cuda", 90, 32))
