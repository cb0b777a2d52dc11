"""The dtypes that a model computes and a cache is counted in, by name; torch is not needed."""

from kvprof.errors import UsageError

__all__ = ["DTYPE_BYTES", "long_name", "read_dtype"]

#: Bytes of a value.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def long_name(name: str) -> str | None:
    """Return a dtype's name as torch has it, for ``bf16`` as for ``bfloat16``; else None."""
    found = _LONG.get(name, name)
    return found if found in DTYPE_BYTES else None


def read_dtype(name: str, device_type: str) -> str:
    """Read ``--dtype``: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return "float32" if device_type == "cpu" else "bfloat16"
    found = long_name(name)
    if found is None:
        raise UsageError(f"--dtype {name!r}: use auto, {', '.join(DTYPE_BYTES)}")
    return found
