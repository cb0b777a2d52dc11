"""Evaluations on disk, each written as soon as it is done, so that a second run resumes.

An evaluation is found again by the digest of its plan (what is stored and with which matrices, not
how the plan came about), the digest of the data and settings, and `EVALUATION_VERSION`. Two methods
whose plans are the same, bit for bit, share one evaluation. Calibration on the same tokens with the
same number of threads gives the same bits again; with another number the last bits differ, and such
plans are measured again rather than taken for what they are not.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from kvprof.errors import FailedError, KvprofError
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import structure
from kvprof.records.files import ensure_writable, parse_json, write_text_atomic
from kvprof.records.result import to_plain
from kvprof.results.base import validated
from kvprof.results.eval import Evaluation

__all__ = ["BASELINE", "EVALUATION_VERSION", "EvaluationCache", "cache_folder", "plan_digest"]

#: Grows when the same plan and data would give other figures; older files are then measured again.
EVALUATION_VERSION = 4

#: Stands for a plan's digest where the uncompressed model was evaluated.
BASELINE = "baseline"

_FORMAT = "kvprof-evaluation/1"
_VARIABLE = "KVPROF_CACHE"


def cache_folder(given: Path | None = None) -> Path:
    """Return where evaluations and recorded rates are kept."""
    if given is not None:
        return given
    if stated := os.environ.get(_VARIABLE):
        return Path(stated)
    return user_cache_path("kvprof") / "evaluations"


def plan_digest(plan: Plan) -> str:
    """Return a SHA-256 of what a plan stores: its structure and its matrices.

    The method's name and how the plan was made (the rate asked for, the knob) are left out: two
    rates between which the grid has no rank give the same plan, and so do two methods at times.
    """
    described = structure(plan)
    del described["method"], described["made"]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    matrices = [
        matrix
        for layer in plan.layers
        for side in (layer.keys, layer.values)
        for group in side.groups
        for matrix in (group.down, group.up)
    ]
    centres = [layer.centre for layer in plan.layers if layer.centre is not None]
    matrices += [mean for centre in centres for mean in (centre.keys, centre.values)]
    matrices += [layer.key_mean for layer in plan.layers]
    if plan.across is not None:
        matrices += [matrix for x in plan.across.groups for matrix in (x.basis, x.mean)]
    for matrix in matrices:
        if matrix is not None:
            digest.update(f"{tuple(matrix.shape)}".encode())
            whole = matrix.detach().to("cpu", torch.float32).contiguous()
            digest.update(whole.numpy().tobytes())
    return digest.hexdigest()


class EvaluationCache:
    """Evaluations of one set of data and settings.

    Parameters
    ----------
    folder : Path or None
        Where they are; None keeps them for this process alone (``--no-cache``).
    data_digest : str
        Of the data, the settings, the model, its dtype, the processor and the libraries.
    warn : callable
        Called with one line on a file that is damaged or cannot be written; the work goes on.
    """

    def __init__(
        self, folder: Path | None, data_digest: str, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self._folder = folder
        self._data = data_digest
        self._warn = warn
        self._known: dict[str, dict[str, Any]] = {}
        self._writable = folder is not None
        #: Why evaluations are no longer kept; None as long as they are.
        self.failure: str | None = None
        #: How many were found on disk.
        self.found = 0

    def check(self) -> None:
        """Refuse, before any work is done, a folder that nothing can be written to."""
        if self._folder is None:
            return
        try:
            ensure_writable(self._folder / "probe", force=True)
        except KvprofError as cause:
            raise FailedError(f"{cause}; give another folder with --cache, or --no-cache") from None

    def __len__(self) -> int:
        """How many evaluations of this data and these settings are on disk."""
        if self._folder is None or not self._data_folder.is_dir():
            return 0
        return sum(1 for path in self._data_folder.glob("*.json"))

    def get(self, digest: str) -> dict[str, Any] | None:
        """Return the evaluation of a plan, or None where there is none that can be used."""
        if digest in self._known:
            return dict(self._known[digest])
        path = self._path(digest)
        if path is None or not path.is_file():
            return None
        try:
            stored = parse_json(path.read_bytes())
            if stored["format"] != _FORMAT or stored["digest"] != _digest(stored["evaluation"]):
                raise ValueError("its content does not match its digest")
            if (stored["plan"], stored["data"]) != (digest, self._data):
                raise ValueError("it belongs to another plan or other data")
            validated(Evaluation, stored["evaluation"])
        except (OSError, ValueError, LookupError, TypeError) as cause:
            self._warn(f"{path} is damaged ({cause}); measuring again")
            return None
        self.found += 1
        self._known[digest] = stored["evaluation"]
        return dict(stored["evaluation"])

    def put(self, digest: str, evaluation: dict[str, Any]) -> None:
        """Keep an evaluation; a folder that is full by now costs a warning, not the run."""
        plain = to_plain(evaluation, "evaluation")
        self._known[digest] = plain
        path = self._path(digest)
        if path is None or not self._writable:
            return
        stored = {
            "format": _FORMAT,
            "plan": digest,
            "data": self._data,
            "digest": _digest(plain),
            "evaluation": plain,
        }
        try:
            write_text_atomic(path, json.dumps(stored, allow_nan=False), force=True)
        except KvprofError as cause:
            self._writable = False
            self.failure = f"{cause}; evaluations are no longer cached"
            self._warn(self.failure)

    def _path(self, digest: str) -> Path | None:
        if self._folder is None:
            return None
        return self._data_folder / f"{digest[:40]}.json"

    @property
    def _data_folder(self) -> Path:
        """One folder per data and version, so that what is there can be counted."""
        assert self._folder is not None
        key = hashlib.sha256(f"{EVALUATION_VERSION}:{self._data}".encode()).hexdigest()
        return self._folder / key[:32]


def _digest(evaluation: Any) -> str:
    return hashlib.sha256(json.dumps(evaluation, sort_keys=True).encode()).hexdigest()
