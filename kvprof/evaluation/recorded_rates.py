"""The rates at which a model's methods met a target, as frontiers measured them.

``kvprof plan --fit`` reads them. They come from the records that ship with kvprof, from the
frontiers run on this machine (which overrule where they scored as many tokens or more), and from
result files given by the user, which overrule both.

Of what ships a model takes the record of its own weights. Where there is none, that of a model of
its shape is borrowed (the weights before they were rounded, or after they were tuned), and another
one where the user names it; what is borrowed says so, and overrules nothing that was measured.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from kvprof.errors import UsageError
from kvprof.evaluation.evaluation_cache import cache_folder
from kvprof.evaluation.targets import (
    Target,
    check_baseline,
    check_metric,
    joint_interval,
    joint_rate,
)
from kvprof.models.layout import ModelLayout
from kvprof.records.files import parse_json, read_result, what_was_read, write_text_atomic
from kvprof.records.schema import refuse_first
from kvprof.scratch import alone_in

__all__ = [
    "RecordedRate",
    "ShippedRates",
    "canonical_label",
    "load_recorded_rates",
    "record_rates",
    "shipped_names",
    "shipped_rates",
]

_FORMAT = "kvprof-rates/2"
_WORDS, _SHARE = {"type": "string"}, {"type": "number", "maximum": 1}
_DATA = {
    "type": ["object", "null"],
    "properties": {"source": _WORDS, "tokens": {"type": "integer"}, "seq_len": {"type": "integer"}},
}
_ENTRIES = Draft202012Validator(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "label": _WORDS,
                "method": _WORDS,
                "options": {"type": "object"},
                "target": _SHARE,
                "metric": _WORDS,
                "max_rate": {"anyOf": [{"type": "null"}, _SHARE]},
                "context": {"type": "integer", "minimum": 1},
                "dtype": _WORDS,
                "calibration": _DATA,
                "tokens": {"type": "integer", "minimum": 0},
                "created": _WORDS,
                "origin": _WORDS,
                "also": {"type": "object", "additionalProperties": _SHARE},
            },
        },
    }
)
_KIND = "frontier"


@dataclass(frozen=True)
class RecordedRate:
    """What one method reached on one model.

    Attributes
    ----------
    label : str
        `canonical_label` of the method and its options.
    method : str
    options : dict
        Of the method.
    target : float
        Share of the baseline's metric that had to be kept.
    metric : str
    max_rate : float or None
        The largest tested rate that did; None where no tested rate did.
    context : int
        Tokens at which bytes were counted.
    dtype : str
        Of the run: the full width that the rate is relative to.
    calibration : dict or None
        ``source``, ``tokens`` and ``seq_len`` of what the bases came from; None where a method
        needs none.
    tokens : int
        Scored tokens that it rests on.
    created : str
        When, in UTC.
    origin : str
        ``shipped record of MODEL``, ``measured here``, or the file's name.
    sure : float or None
        The largest tested rate up to which the whole interval met the target: what a verdict may
        rest on. None where no tested rate did so, or nobody knows.
    also : dict
        Metric to share of other targets that held together with the first.
    borrowed : bool
        Whether it is another model's.
    """

    label: str
    method: str
    options: dict[str, Any]
    target: float
    metric: str
    max_rate: float | None
    context: int
    dtype: str
    calibration: dict[str, Any] | None
    tokens: int
    created: str
    origin: str
    sure: float | None = None
    also: dict[str, float] = field(default_factory=dict)
    borrowed: bool = False

    @property
    def targets(self) -> dict[str, float]:
        """All targets, metric to share."""
        return {self.metric: self.target, **self.also}


def canonical_label(method: str, options: Mapping[str, Any]) -> str:
    """Return one name for a method with options, however they were given.

    Parameters
    ----------
    method : str
    options : mapping
        Those that were given, for one method or for all.
    """
    written = ",".join(f"{key}={options[key]}" for key in sorted(options))
    return f"{method}:{written}" if written else method


@dataclass(frozen=True)
class ShippedRates:
    """Which of the records that ship is taken for a model.

    Attributes
    ----------
    model : str or None
        Whose rates they are; None where none is taken.
    borrowed : bool
        Whether it is another model.
    why : str
        Why this one, or none.
    result : mapping or None
        The record.
    others : tuple of str
        Models whose rates ship too.
    """

    model: str | None
    borrowed: bool
    why: str
    result: Mapping[str, Any] | None = None
    others: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """What a rate of it says of where it comes from."""
        return f"shipped record of {self.model}"

    def described(self) -> dict[str, Any]:
        """Return what a result says of it, as JSON values."""
        return {
            "model": self.model,
            "borrowed": self.borrowed,
            "why": self.why,
            "others": list(self.others),
        }


def shipped_rates(fingerprint: str, layout: ModelLayout, named: Sequence[str] = ()) -> ShippedRates:
    """Choose among the records that ship: by name, else by weights, else by shape.

    Parameters
    ----------
    fingerprint : str
        Of the model; empty of a shape without weights.
    layout : ModelLayout
        Of the model.
    named : sequence of str
        Names of shipped records that the user asks for; one at most.

    Raises
    ------
    UsageError
        For two names.
    """
    if len(named) > 1:
        raise UsageError(f"--rates {named[0]} and {named[1]} both name a shipped record; keep one")
    results = {result["inputs"]["model"]: result for result in _shipped()}
    own = next((m for m, r in results.items() if r["inputs"]["fingerprint"] == fingerprint), None)

    def taken(model: str, borrowed: bool, why: str) -> ShippedRates:
        others = tuple(name for name in sorted(results) if name != model)
        return ShippedRates(model, borrowed, why, results[model], others)

    if named and named[0] != own:
        return taken(named[0], True, "--rates names it")
    if own is not None:
        return taken(own, False, "the weights are the same")
    shape = _shape(layout)
    for model, result in results.items():
        if result["inputs"]["shape"] == shape:
            other = ", its weights are others" if fingerprint else ""
            return taken(model, True, f"its shape is the same{other}")
    each = [f"{m} ({_said(r['inputs']['shape'])})" for m, r in sorted(results.items())]
    own_shape = "its layers are unlike each other" if shape is None else f"it has {_said(shape)}"
    why = f"rates of {' and '.join(each)} ship with kvprof, and this model is of no such shape"
    return ShippedRates(None, False, f"{why}: {own_shape}")


def _shape(layout: ModelLayout) -> dict[str, int] | None:
    """Return a model's shape as records have it; None where its layers differ."""
    found = {
        (one.num_heads, one.num_kv_heads, one.qk_head_dim, one.v_head_dim) for one in layout.layers
    }
    if len(found) != 1:
        return None
    ((heads, kv_heads, width, of_values),) = found
    if width != of_values:
        return None
    return {
        "layers": len(layout.layers),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": width,
    }


def _said(shape: Mapping[str, int]) -> str:
    return (
        f"{shape['layers']} layers, {shape['num_heads']} query and {shape['num_kv_heads']} KV "
        f"heads of {shape['head_dim']}"
    )


def load_recorded_rates(
    fingerprint: str,
    extra_files: Sequence[Path] = (),
    *,
    shipped: ShippedRates | None = None,
    targets: Sequence[Target] = (Target(),),
    cache: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, RecordedRate]:
    """Return what is known of a model, by `canonical_label`.

    Parameters
    ----------
    fingerprint : str
        Of the model.
    extra_files : sequence of Path
        Frontier results, or folders of such runs; a later one overrules.
    shipped : ShippedRates or None
        From `shipped_rates`; None takes nothing of what ships.
    targets : sequence of Target
        That had to be met together. A file given is asked for them whatever its own were, of the
        points that it has.
    cache : Path or None
        As ``--cache``.
    warn : callable
        Called with a line on a damaged record on this machine, which is then left out.

    Raises
    ------
    UsageError
        When a file given is no frontier, or one of another model, interrupted or teacher-forced.
    FailedError
        When a file given is damaged.
    """
    own: list[RecordedRate] = []
    if shipped is not None and shipped.result is not None:
        own = _rates(shipped.result, shipped.origin)
        own = [replace(entry, borrowed=shipped.borrowed) for entry in own]
    own += _kept(cache_folder(cache), fingerprint, warn)
    given: list[RecordedRate] = []
    for path in extra_files:
        result = read_result(path)
        if result["kind"] != _KIND:
            raise UsageError(
                f"{path} is a result of kind {result['kind']}; rates come from kvprof frontier"
            )
        with what_was_read(path):
            if result["inputs"]["fingerprint"] != fingerprint:
                raise UsageError(
                    f"{path} is a frontier of {result['inputs']['model']} "
                    f"({result['inputs']['fingerprint'][:12]}), not of the model given "
                    f"({fingerprint[:12]})"
                )
            if why := _unfit(result):
                raise UsageError(
                    f"{path} {why}; rates come from a frontier that decoded, to its end"
                )
            given += _rates(result, path.name, targets, what=f"{path}: --target")
    found: dict[str, RecordedRate] = {}
    for entry in own:
        known = found.get(entry.label)
        # A quick look does not overrule what was measured with care.
        weaker = known is None or known.borrowed or entry.tokens >= known.tokens
        if _same(entry, targets) and weaker:
            found[entry.label] = entry
    return found | {entry.label: entry for entry in given}


def _same(entry: RecordedRate, targets: Sequence[Target]) -> bool:
    """Whether an entry is of these targets, in any order."""
    own, asked = entry.targets, {target.metric: target.share for target in targets}
    return own.keys() == asked.keys() and all(abs(own[k] - asked[k]) < 1e-9 for k in own)


def record_rates(result: Mapping[str, Any], cache: Path | None = None) -> Path | None:
    """Keep what a complete frontier found; an entry of the same method and target is replaced.

    Parameters
    ----------
    result : mapping
        Of kind ``frontier``.
    cache : Path or None
        As ``--cache``.

    Returns
    -------
    Path or None
        The file; None for an incomplete result and a teacher-forced one, of which nothing is kept:
        a single pass does not show what quantising and eviction cost.

    Raises
    ------
    FailedError
        When it cannot be written.
    """
    if _unfit(result):
        return None
    folder = cache_folder(cache)
    fingerprint = result["inputs"]["fingerprint"]
    with contextlib.suppress(OSError):  # what is wrong with the folder shows when it is written to
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        return _record(result, folder, fingerprint)


def _record(result: Mapping[str, Any], folder: Path, fingerprint: str) -> Path:
    entries = {
        (entry.label, *sorted(entry.targets.items())): entry
        for entry in (
            *_kept(folder, fingerprint, lambda _: None),
            *_rates(result, "measured here"),
        )
    }
    path = _file(folder, fingerprint)
    content = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "rates": [_written(entry) for entry in entries.values()],
    }
    write_text_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n", force=True)
    return path


def _written(entry: RecordedRate) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key != "borrowed"}


def _unfit(result: Mapping[str, Any]) -> str | None:
    """Say why a frontier's rates are not to be planned with; None where they are."""
    if not result["complete"]:
        return "was interrupted"
    if result["inputs"].get("protocol") == "teacher_forced":
        return "is teacher-forced"
    return None


def _rates(
    result: Mapping[str, Any],
    origin: str,
    targets: Sequence[Target] | None = None,
    *,
    what: str = "",
) -> list[RecordedRate]:
    """Return one entry per method that was evaluated; one that does not fit has none.

    Without `targets` the record's own; other ones are looked for among its points, which were
    chosen for its own.
    """
    data = result["data"]
    own = [Target(one["metric"], float(one["target"])) for one in data.get("targets", [data])]
    asked = own if targets is None else list(targets)
    if same := {*asked} == {*own}:
        asked = own
    else:
        for target in asked:
            check_metric(target.metric, list(data["baseline"]["tasks"]), what=what)
            check_baseline(target.metric, data["baseline"], what=what)
    entries = []
    for method in data["methods"]:
        points = method["points"]
        if not points:
            continue
        if same:
            largest, bounds = method["max_rate"], method["max_rate_interval"]
        else:
            largest, bounds = joint_rate(points, asked), joint_interval(points, asked)
        entries.append(
            RecordedRate(
                label=canonical_label(method["method"], method["options"]),
                method=method["method"],
                options=dict(method["options"]),
                target=asked[0].share,
                metric=asked[0].metric,
                max_rate=largest,
                context=int(data["context"]),
                dtype=data["dtype"],
                calibration=result["inputs"]["calibration"].get(method["label"]),
                tokens=min(point["decoded_tokens"] for point in points),
                created=result["created"],
                origin=origin,
                sure=(bounds or (None,))[0],
                also={target.metric: target.share for target in asked[1:]},
            )
        )
    return entries


def _kept(folder: Path, fingerprint: str, warn: Callable[[str], None]) -> list[RecordedRate]:
    path = _file(folder, fingerprint)
    if not path.is_file():
        return []
    try:
        stored = parse_json(path.read_bytes())
        if stored["format"] != _FORMAT or stored["fingerprint"] != fingerprint:
            raise ValueError("it is of another version or another model")
        refuse_first(_ENTRIES.iter_errors(stored["rates"]), "rates")
        entries = [RecordedRate(**entry) for entry in stored["rates"]]
    except (OSError, ValueError, LookupError, TypeError) as cause:
        warn(f"{path}: damaged record of rates is left out ({cause})")
        return []
    return [replace(entry, origin="measured here") for entry in entries]


def _file(folder: Path, fingerprint: str) -> Path:
    # A fingerprint may hold what a file name cannot.
    name = "".join(c if c.isalnum() else "-" for c in fingerprint)
    return folder / f"rates-{name[:64]}.json"


def shipped_names() -> list[str]:
    """Return the models of which a record ships."""
    folder = resources.files("kvprof") / "assets" / "frontier"
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def _shipped() -> list[dict[str, Any]]:
    folder = resources.files("kvprof") / "assets" / "frontier"
    results = []
    for name in shipped_names():
        with resources.as_file(folder / f"{name}.json") as path:
            results.append(read_result(path))
    return results
