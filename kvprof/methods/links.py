"""The speeds of links that a cache may be moved over: those of standards, and those that are given.

A speed is one direction's, in bytes a second, and links are sold in powers of ten. Of a standard
it is the nominal one: what the wires carry after their line coding, and nothing of what packets,
copies and a busy host take.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvprof.errors import UsageError

__all__ = ["COMMON_LINKS", "Link", "parse_link", "parse_links"]

#: Taken where no link is named.
COMMON_LINKS = ("pcie4x16", "pcie5x16", "nvlink4", "100Gbit/s")

# Transfers per second and lane, and which share of their bits is data: 128b/130b from generation
# 3 on, and of generation 6's units of 256 bytes the 242 that no check takes.
_PCIE = {"3": (8e9, 128 / 130), "4": (16e9, 128 / 130), "5": (32e9, 128 / 130)} | {
    "6": (64e9, 242 / 256)
}
# One direction of one GPU, all its links together: half of what data sheets state (V100 300, A100
# 600, H100 and H200 900, B200 1,800 GB/s; Grace and Hopper 900).
_NVLINK = {"nvlink2": 150e9, "nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9} | {
    "nvlink-c2c": 450e9
}
_LANES = re.compile(r"pcie([3-6])x(1|2|4|8|16)")
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)(i?)(bit|b|B)(?:/s|ps)")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_LONGEST_NAME = 24
_FASTEST = 1e15  # bytes a second


@dataclass(frozen=True)
class Link:
    """One direction of a link."""

    name: str
    bytes_per_s: float
    nominal: bool  # of a standard; otherwise it is what the user says

    def seconds(self, size: float) -> float:
        """Return what `size` bytes take, in seconds; neither latency nor packing is in it."""
        return size / self.bytes_per_s


def parse_link(text: str) -> Link:
    """Read a link: a standard's name, a speed, or a name with the speed that was measured of it."""
    name, named, speed = text.strip().rpartition("=")
    if not named:
        key = speed.lower()
        if key in _NVLINK:
            return Link(key, _NVLINK[key], nominal=True)
        if (lanes := _LANES.fullmatch(key)) is not None:
            transfers, data = _PCIE[lanes[1]]
            return Link(key, transfers * data / 8 * int(lanes[2]), nominal=True)
    match = _SPEED.fullmatch(speed.strip())
    if match is None or (named and not 0 < len(name.strip()) <= _LONGEST_NAME):
        raise UsageError(
            f"--link: {text[:40]!r} is unknown; use pcie3x16 to pcie6x16 (or fewer lanes), "
            f"{', '.join(_NVLINK)}, a speed (100Gbit/s, 25GB/s) or NAME=SPEED (rdma=46.2GB/s, "
            f"name up to {_LONGEST_NAME} letters)"
        )
    base = 1024 if match[3] else 1000
    size = float(match[1]) * base ** _POWERS[match[2]] / (1 if match[4] == "B" else 8)
    if not 1 <= size <= _FASTEST:
        raise UsageError(f"--link: the speed {text[:40]!r} is out of range")
    return Link(name.strip() if named else speed.strip().replace(" ", ""), size, nominal=False)


def parse_links(texts: Sequence[str]) -> list[Link]:
    """Read several links, `COMMON_LINKS` where none is named."""
    links = [parse_link(text) for text in texts or COMMON_LINKS]
    names = [link.name for link in links]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--link: {twice[0]} is named twice; leave one out")
    return links
