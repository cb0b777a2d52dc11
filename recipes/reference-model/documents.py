"""Read the unpacked packages as documents: convert, filter, and see every text once."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from zlib import crc32

import numpy as np
from convert import CONVERTERS, tidy

MAX_DOCUMENT = 300_000  # characters
MAX_PYPI_PACKAGE = 3_500_000  # characters of code taken from one wheel
SHINGLE = 10  # words
SAMPLE = 8  # one shingle in eight is compared
LEAST_WORDS = 40


@dataclass(frozen=True)
class Document:
    """One text with where it came from."""

    text: str
    document: str
    package: str
    version: str
    licence: str
    kind: str
    may_ship: bool

    @property
    def sha256(self) -> str:
        """Hash of the text, the identity of a document in the manifests."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def row(self) -> dict[str, str]:
        """Return the line that a split file holds."""
        row = asdict(self)
        del row["kind"], row["may_ship"]
        return {**row, "sha256": self.sha256}


def expand_braces(pattern: str) -> list[str]:
    """``a/{b,c}/d`` as ``[a/b/d, a/c/d]``."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [
        whole for part in match.group(1).split(",") for whole in expand_braces(head + part + tail)
    ]


def find_jobs(sources: dict, versions: dict, unpacked: Path) -> Iterator[tuple]:
    """Every file to convert, in an order that does not depend on the machine."""
    for entry in sources["debian"]:
        name = entry["package"]
        root = unpacked / "debian" / name
        for take in entry["take"]:
            found: set[Path] = set()
            for pattern in expand_braces(take["glob"]):
                found.update(root.glob("**/" + pattern))
            for path in sorted(found):
                inside = path.relative_to(root).as_posix()
                if path.is_symlink() or not path.is_file():
                    continue
                if any(word in inside for word in take.get("skip", ())):
                    continue
                yield (
                    path,
                    inside,
                    take["via"],
                    name,
                    versions["debian"][name],
                    entry["licence"],
                    entry.get("split", False),
                )
    shipping = set(sources["split"]["code"])
    for licence, names in sources["pypi"].items():
        for name in names:
            root = unpacked / "pypi" / name
            paths = [p for p in root.rglob("*.py") if p.is_file() and p.stat().st_size > 1500]
            paths.sort(key=lambda p: crc32(p.relative_to(root).as_posix().encode()))
            size = 0
            for path in paths:
                size += path.stat().st_size
                if size > MAX_PYPI_PACKAGE:
                    break
                yield (
                    path,
                    path.relative_to(root).as_posix(),
                    "code",
                    name,
                    versions["pypi"][name],
                    licence,
                    name in shipping,
                )


def is_readable(text: str, kind: str) -> bool:
    """Whether a text is English prose or code and not a table of data."""
    if not 400 <= len(text) <= MAX_DOCUMENT:
        return False
    sample = text[:20_000]
    letters = sum(map(str.isalpha, sample))
    ascii_share = len(sample.encode("ascii", "ignore")) / len(sample)
    lines = text.count("\n") + 1
    if ascii_share < 0.98 or letters < (0.4 if kind == "code" else 0.5) * len(
        sample.replace(" ", "")
    ):
        return False
    return not (kind == "code" and len(text) / lines > 90)


def convert_job(job: tuple) -> Document | None:
    """Convert one file, or ``None`` where it holds nothing worth reading."""
    path, inside, via, name, version, licence, may_ship = job
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    if len(raw) > 3_000_000:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    text = tidy(CONVERTERS[via](text))
    kind = "code" if via == "code" else "prose"
    if not is_readable(text, kind):
        return None
    return Document(text, inside, name, version, licence, kind, may_ship)


def convert_all(jobs: Iterable[tuple], processes: int) -> list[Document]:
    """Convert every file with a few processes, keeping the order."""
    with Pool(processes) as pool:
        return [doc for doc in pool.imap(convert_job, jobs, chunksize=32) if doc is not None]


def strip_frames(documents: list[Document], edge: int = 6, share: float = 0.2) -> list[Document]:
    """Drop the lines that frame the pages of one package: site titles, copyright, links.

    A line among the first or last ``edge`` lines of a page is a frame when it stands there in
    more than ``share`` of the package's pages.
    """
    pages = Counter(d.package for d in documents if d.document.endswith(".html"))
    frames: Counter = Counter()
    for doc in documents:
        if pages[doc.package] >= 20 and doc.document.endswith(".html"):
            lines = [line for line in doc.text.split("\n") if line]
            frames.update({(doc.package, line) for line in lines[:edge] + lines[-edge:]})

    def is_frame(package: str, line: str) -> bool:
        return not line or frames[(package, line)] > share * pages[package] > 0

    stripped = []
    for doc in documents:
        lines = doc.text.split("\n")
        while lines and is_frame(doc.package, lines[0]):
            lines.pop(0)
        while lines and is_frame(doc.package, lines[-1]):
            lines.pop()
        stripped.append(replace(doc, text="\n".join(lines)))
    return stripped


def shingles(text: str) -> np.ndarray:
    """Hash the runs of ten words, letter case and layout ignored; keep a sample."""
    words = re.findall(rb"[a-z0-9_]+", text.lower().encode())
    hashes = np.array([crc32(word) for word in words], dtype=np.uint64)
    if len(hashes) < SHINGLE:
        return np.unique(hashes)
    total = np.zeros(len(hashes) - SHINGLE + 1, dtype=np.uint64)
    for i in range(SHINGLE):
        total = (total ^ hashes[i : len(hashes) - SHINGLE + 1 + i]) * np.uint64(0x9E3779B97F4A7C15)
    total ^= total >> np.uint64(29)
    return np.unique(total[total % np.uint64(SAMPLE) == 0])


def deduplicate(documents: list[Document], share: float = 0.4) -> tuple[list[Document], dict]:
    """Keep a document when most of it was not seen before.

    Parameters
    ----------
    documents : list of Document
        In order of preference: the first of two copies is kept.
    share : float
        A document goes when more than this share of its sampled shingles is known already.
        Exact copies (normalised words equal) go first.

    Returns
    -------
    kept : list of Document
    dropped : dict
        Counts and characters of the exact and the near copies.
    """
    kept: list[Document] = []
    seen_exact: set[bytes] = set()
    seen: set[int] = set()
    dropped = {"exact": 0, "near": 0, "short": 0, "characters": 0}
    for doc in documents:
        words = re.findall(r"\w+", doc.text.lower())
        digest = hashlib.blake2b(" ".join(words).encode(), digest_size=16).digest()
        reason = None
        if len(words) < LEAST_WORDS:
            reason = "short"
        elif digest in seen_exact:
            reason = "exact"
        else:
            marks = shingles(doc.text).tolist()
            known = sum(mark in seen for mark in marks)
            if marks and known > share * len(marks):
                reason = "near"
        if reason:
            dropped[reason] += 1
            dropped["characters"] += len(doc.text)
            continue
        seen_exact.add(digest)
        seen.update(marks)
        kept.append(doc)
    return kept, dropped
