"""Numbers and dtypes as people write them: ``100k`` tokens, ``30%`` of the bytes, ``bf16``."""

import math
import re

from kvprof.errors import UsageError

__all__ = [
    "DTYPE_BYTES",
    "MOST",
    "check_rate",
    "format_bytes",
    "format_count",
    "long_name",
    "parse_bytes",
    "parse_count",
    "parse_counts",
    "parse_nonzero",
    "parse_share",
    "read_dtype",
    "second_reading",
]

#: Of whatever is counted; more tokens than this, nobody waits for.
MOST = 2**31 - 1

# k is 1,024 wherever tokens are counted (docs/concepts.md), so that 100k is 102,400.
_FACTORS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
# A comma only where it marks thousands: 8,16 is a list that lost its way.
_COUNT = re.compile(
    r"((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)([kmg]?)", re.IGNORECASE
)
# What a thousands separator leaves behind when a list is split at its commas.
_CUT_OFF = re.compile(r"0[0-9]{2}[kmg]?", re.IGNORECASE)
# Two counts of a list that read as well as one number with its thousands marked.
_EITHER = re.compile(r"([1-9][0-9]{0,2}),([1-9][0-9]{2})")

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b", re.IGNORECASE)
_LARGEST_SIZE = 2.0**60


def parse_count(text: str, *, what: str = "count", minimum: int = 1) -> int:
    """Read a count such as ``8192``, ``8k`` or ``1.5M`` (k = 1,024)."""
    match = _COUNT.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise UsageError(f"{what}: {text[:40]!r} is not a count; write 8192, 8k or 1M (k is 1,024)")
    value = float(match[1].replace(",", "")) * _FACTORS[match[2].lower()]
    if value > MOST:
        raise UsageError(f"{what}: {text[:20]} is above {MOST:,}")
    if value != int(value):
        raise UsageError(f"{what}: {text!r} is not a whole number")
    if value < minimum:
        raise UsageError(f"{what}: {text!r} is below {minimum}")
    return int(value)


def parse_counts(text: str, *, what: str = "counts", minimum: int = 1) -> list[int]:
    """Read a comma-separated list of counts (``1k,2k,4k``), ascending and without repeats."""
    entries = [entry for entry in text.split(",") if entry.strip()]
    if not entries:
        raise UsageError(f"{what}: {text!r} contains no count; write for example 1k,2k,4k")
    for entry in entries:
        if _CUT_OFF.fullmatch(entry.strip()):
            raise UsageError(
                f"{what}: {text!r}: commas separate counts, not thousands (before "
                f"{entry.strip()!r}); write for example 1024,2048"
            )
    return sorted({parse_count(entry, what=what, minimum=minimum) for entry in entries})


def second_reading(text: str) -> int | None:
    """Return the number that a list may have been meant as: 1536 for ``1,536``; None for most.

    `parse_counts` takes the list. Powers of two (``256,512``) and what no one number that people
    write looks like (``96,112``) are lists for sure, and so is what has a space behind its comma.
    """
    match = _EITHER.fullmatch(text.strip())
    if match is None:
        return None
    whole = int(match[1] + match[2])
    listed = all(int(entry).bit_count() == 1 for entry in match.groups())
    return whole if not listed and (whole % 10 == 0 or whole % 256 == 0) else None


def parse_share(text: str | float, *, what: str) -> float:
    """Read a share such as ``0.3``, ``.3`` or ``30%``; which shares make sense is the caller's."""
    written = str(text).strip()
    number = written.removesuffix("%")
    try:
        value = float(number) / (100 if number != written else 1)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        shown = (written if len(written) <= 40 else f"{written[:40]}…") or repr(written)
        raise UsageError(f"{what} {shown} is not a fraction; write for example 30% or 0.3")
    return value


def parse_nonzero(text: str | float, *, what: str) -> float:
    """Read a share that is above 0, and 1 at most."""
    share = parse_share(text, what=what)
    if not 0 < share <= 1:
        given = str(text).strip()[:40]
        raise UsageError(f"{what} {given} is not in (0, 1]; write for example 0.99 or 99%")
    return share


def check_rate(rate: float | None, what: str = "--rate") -> None:
    """Refuse a rate that no cache can have; name the percentage that may have been meant."""
    if rate is None or 0 <= rate < 1:
        return
    meant = f"write {rate:g}% or {rate / 100:g}" if 1 < rate < 100 else "1 stores no token"
    raise UsageError(f"{what} {rate:g} is not between 0 and 1 ({meant})")


def parse_bytes(text: str, *, what: str) -> int:
    """Read a size such as ``80GB``, ``512MiB`` or ``4096B``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a size; write for example 80GB or 512MiB")
    value = float(match[1]) * {**_FACTORS, "t": 1024**4}[match[2].lower()]
    if value > _LARGEST_SIZE:
        raise UsageError(f"{what}: {text[:20]} is too large")
    return int(value)


def format_count(value: int) -> str:
    """Write a count the way `parse_count` reads it: 8192 as ``8k``, 1500 as ``1,500``."""
    for suffix in ("g", "m", "k"):
        factor = _FACTORS[suffix]
        if value >= factor and value % factor == 0:
            return f"{value // factor}{suffix.upper() if suffix != 'k' else 'k'}"
    return f"{value:,}"


def format_bytes(value: float) -> str:
    """Write a number of bytes with a binary prefix, for example ``39.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


# --- The dtypes that a model computes and a cache is counted in, by name.


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
