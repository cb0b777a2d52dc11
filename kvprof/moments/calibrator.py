"""Collects what methods have to know of a model before they can plan, each thing once."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from kvprof.analysis.moments import LossMoments, Moments, group_size
from kvprof.errors import Interrupted, UsageError
from kvprof.methods.family import CalibrationNeeds, HeadWeights, MethodInputs, PlanFamily
from kvprof.methods.registry import (
    allocation_of,
    base_method,
    calibration_needs,
    option_of,
    plan_family,
    without_allocation,
)
from kvprof.models.load import LoadedModel
from kvprof.moments.collect import (
    CollectOptions,
    PassAbandoned,
    collect_moments,
    suitable_batch_size,
)
from kvprof.moments.files import load_moments
from kvprof.moments.fisher import FISHER_FORMS, GRADIENT_LENGTH, fisher_information
from kvprof.moments.tokens import CalibrationTokens, read_tokens
from kvprof.progress import Progress, silent
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, DEFAULT_TOKENS, Source, SourceKind, parse_source

__all__ = [
    "CalibrationOptions",
    "Calibrator",
    "MomentStore",
    "Progress",
    "batch_size_for",
]


@dataclass(frozen=True)
class CalibrationOptions:
    """What the user said about calibration.

    Attributes
    ----------
    source : Source or None
        Of ``--calibrate``; None takes each method's own default.
    tokens : int or None
        How many; None takes what the source's name asks for, else 8,192 or four sequences (of a
        text: at most that many).
    seq_len : int
        Longest sequence, the evaluation's; capped at the model's context.
    seed : int
        Of random tokens.
    batch_size : int or None
        Sequences per forward pass; None goes by the device.
    """

    source: Source | None = None
    tokens: int | None = None
    seq_len: int = DEFAULT_SEQ_LEN
    seed: int = 0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.source is None or self.tokens is None:
            return
        if self.source.kind is SourceKind.MOMENTS:
            raise UsageError(
                f"{self.source.name}: saved moments have a fixed token count; leave out "
                "--calibrate-tokens"
            )
        if self.source.tokens is not None:
            raise UsageError(
                f"both {self.source.describe()} and --calibrate-tokens {self.tokens:,} give a "
                "count; use one"
            )


# --- Moments by source, collected once and only as wide as somebody needs them.


# Tokens for each column of a Gram matrix whose every direction is kept apart: enough that its
# smaller eigenvalues are not the sample's own. Palu's groups of 4 heads of 128 are 512 columns
# wide, all 32 heads of Llama-2-7B 4,096.
_PER_COLUMN = 16


def batch_size_for(loaded: LoadedModel, options: CalibrationOptions, seq_len: int) -> int:
    """Return how many sequences of `seq_len` go through the model at a time."""
    return options.batch_size or suitable_batch_size(loaded.device, seq_len)


class MomentStore:
    """Collects moments as they are asked for, and keeps them.

    Parameters
    ----------
    loaded : LoadedModel
    options : CalibrationOptions
    progress : Progress
    should_stop : callable
        Asked before each pass and after each layer; True ends with `Interrupted`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: CalibrationOptions,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._progress = progress
        self._should_stop = should_stop
        self._expected: list[CalibrationNeeds] = []
        self._kept: dict[tuple[Source, int], list[tuple[CalibrationNeeds, Moments]]] = {}
        self._file: Moments | None = None

    def expect(self, needs: CalibrationNeeds) -> None:
        """Announce what will be asked for, so that one pass collects it too."""
        self._expected.append(needs)

    def get(self, needs: CalibrationNeeds) -> Moments:
        """Return moments that hold what is needed, collected now or before."""
        given = self._options.source
        if given is not None and given.kind is SourceKind.MOMENTS:
            moments = self._saved(given)
            if not needs.magnitudes or all(layer.magnitudes for layer in moments.layers):
                return moments
            given = None  # spectrum saves no magnitudes: they are counted on the method's own data
        else:
            needs = self._shared(needs)
        source = given or parse_source(needs.source, what="the method's own source")
        kept = self._kept.setdefault((source, self.wanted(needs)), [])
        for have, moments in kept:
            if self._covers(have, needs):
                return moments
        for other in self._expected:
            if given is None and other.source != needs.source:
                continue
            with suppress(UsageError):  # heads that cannot be grouped so are that method's matter
                if self.wanted(other) == self.wanted(needs):
                    needs = self._union(needs, other)
        moments = self._pass(source, needs)
        kept.append((needs, moments))
        return moments

    def _saved(self, source: Source) -> Moments:
        if self._file is None:
            self._file = load_moments(source.paths[0], fingerprint=self._loaded.fingerprint)
            self._file.info["moments_file"] = str(source.paths[0].resolve())
        return self._file

    def wanted(self, needs: CalibrationNeeds) -> int:
        """Return a method's calibration tokens: the user's, the paper's or the default."""
        if self._options.tokens is not None:
            return self._options.tokens
        source = self._options.source
        if source is not None and source.tokens is not None:
            return source.tokens
        least = _PER_COLUMN * self.width(needs)
        longest = min(self._options.seq_len, self._loaded.context_length)
        return needs.tokens or max(DEFAULT_TOKENS, least, 4 * longest)

    def width(self, needs: CalibrationNeeds) -> int:
        """Return the columns of the widest Gram matrix of heads kept jointly; 0 without any."""
        return max(
            heads * max(layer.qk_head_dim, layer.v_head_dim)
            for heads, layer in zip(self._sizes(needs), self._loaded.layout.layers, strict=True)
        )

    def notes(self, method: str, needs: CalibrationNeeds, moments: Moments) -> list[str]:
        """Return in words where a method got fewer tokens than it takes."""
        found = list(moments.info.get("labels", []))
        name, seen = moments.info.get("source", "the source"), moments.tokens
        # A paper's count also where the user says another; kvprof's own default is only that.
        paper = None if needs.shares else needs.tokens
        least = paper or self.wanted(needs)
        if seen < least:
            whose = "the paper's setting" if paper else "default"
            found.append(f"{method} was calibrated on {seen:,} {name} tokens ({whose}: {least:,})")
        if seen < self.width(needs):
            found.append(
                f"{method}: {seen:,} calibration tokens are fewer than {self.width(needs):,} "
                "columns, so the last directions are arbitrary; use more"
            )
        return found

    def _pass(self, source: Source, needs: CalibrationNeeds) -> Moments:
        tokens = read_tokens(
            self._loaded,
            source,
            tokens=self._options.tokens,
            most=self.wanted(needs),
            seq_len=self._options.seq_len,
            seed=self._options.seed,
        )
        count, length = tokens.count, tokens.seq_len
        options = CollectOptions(
            tokens=count,
            seq_len=length,
            batch_size=batch_size_for(self._loaded, self._options, length),
            seed=self._options.seed,
            pre_rope=needs.pre_rope,
            joint_heads=needs.joint_heads,
            magnitudes=needs.magnitudes,
            outputs=needs.outputs,
            across=needs.across,
        )
        title = f"calibrating: {source.name} tokens through {self._loaded.spec}"
        if self._should_stop():
            raise Interrupted(f"interrupted after 0 of {count:,}")
        try:
            with self._progress(title, count) as bar:
                *_, moments = collect_moments(
                    self._loaded, source, options, advance=bar.advance, abandon=self._should_stop
                )
        except PassAbandoned as left:
            said = f"interrupted after {left.tokens:,} of {count:,}"
            raise Interrupted(said) from None
        moments.info |= tokens.described()
        return moments

    def _sizes(self, needs: CalibrationNeeds) -> list[int]:
        """Return the heads kept jointly in each layer; 0 where none are asked for."""
        if needs.joint_heads is None:
            return [0] * len(self._loaded.layout.layers)
        heads = needs.joint_heads
        return [group_size(heads, layer.num_kv_heads) for layer in self._loaded.layout.layers]

    def _shared(self, needs: CalibrationNeeds) -> CalibrationNeeds:
        """Return needs that come to be met in the pass of a method which asks for its own data."""
        for other in self._expected:
            if needs.shares and not other.shares:
                try:
                    return self._union(other, needs)
                except UsageError:  # heads that cannot be grouped so are that method's matter
                    continue
        return needs

    def _covers(self, have: CalibrationNeeds, needs: CalibrationNeeds) -> bool:
        """Whether moments hold what is needed: larger groups hold smaller ones."""
        pairs = zip(self._sizes(have), self._sizes(needs), strict=True)
        joint = all(not wanted or (kept and kept % wanted == 0) for kept, wanted in pairs)
        more = (
            have.pre_rope >= needs.pre_rope
            and have.magnitudes >= needs.magnitudes
            and have.outputs >= needs.outputs
            and needs.across in (None, have.across)
        )
        return joint and more

    def _union(self, one: CalibrationNeeds, other: CalibrationNeeds) -> CalibrationNeeds:
        for own, narrow in ((one, other), (other, one)):
            wide = replace(
                own,
                pre_rope=one.pre_rope or other.pre_rope,
                magnitudes=one.magnitudes or other.magnitudes,
                outputs=one.outputs or other.outputs,
                across=one.across or other.across,
            )
            if self._covers(wide, narrow):
                return wide
        return one  # groups that do not divide each other need passes of their own


# Figures per head, and what a plan keeps about how they were measured.
_Weighed = tuple[HeadWeights, dict[str, Any]]


class Calibrator:
    """Runs a model over calibration data as methods ask for it, and never twice for the same.

    Moments are kept by source; those before RoPE and those of several heads jointly are collected
    only for methods that need them. Fisher information, sensitivities and moments of the loss
    (``allocation`` ``fisher``, ``budget`` and ``loss``) are measured on text: on the user's, or
    where that is random tokens or saved moments, on the embedded calibration split. Random tokens
    would say what matters for predicting noise.

    Parameters
    ----------
    loaded : LoadedModel
    options : CalibrationOptions
    progress : Progress, optional
        Called once per stage; silent by default.
    should_stop : callable
        Asked after each batch; True ends with `Interrupted`.
    notice : callable
        Called once with what plans carry in ``made["notes"]``: where calibration got less than it
        takes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: CalibrationOptions,
        *,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._progress = progress or silent
        self._should_stop = should_stop
        self._notice = notice
        self._noticed: set[str] = set()
        self._moments = MomentStore(loaded, options, self._progress, should_stop)
        self._fisher: dict[tuple[str, int], _Weighed] = {}
        self._loss: dict[tuple[int, int, int], tuple[LossMoments, dict[str, Any]]] = {}
        self._sensitivities: dict[tuple[object, ...], _Weighed] = {}

    def expect(self, method: str, **options: Any) -> None:
        """Announce a method, so that one pass collects what all announced ones need."""
        needs = calibration_needs(method, **options)
        if needs is not None:
            self._moments.expect(needs)

    def inputs(self, method: str, **options: Any) -> MethodInputs:
        """Return what `plan_family` needs for a method with these options."""
        loaded, allocation = self._loaded, allocation_of(method, options)
        form = options.pop("fisher_form", None)
        if form is not None and (allocation != "fisher" or form not in FISHER_FORMS):
            raise UsageError(
                f"fisher_form {form!r} requires allocation fisher and one of "
                f"{', '.join(FISHER_FORMS)}"
            )
        needs = calibration_needs(method, **options)
        made = {
            "model": loaded.spec,
            "architecture": loaded.layout.architecture,
            "revision": loaded.revision,
            "dtype": str(loaded.dtype).removeprefix("torch."),
        }
        inputs = MethodInputs(loaded.layout, loaded.fingerprint, made=made)
        if needs is not None:
            moments = self._moments.get(needs)
            inputs = replace(inputs, moments=moments)
            inputs = self._noted(inputs, self._moments.notes(method, needs, moments))
        if allocation == "loss":
            sink, window = (int(option_of(method, options, x) or 0) for x in ("sink", "window"))
            return self._with_loss(inputs, sink, window)
        if allocation in ("fisher", "budget"):
            base, own = base_method(method, options)
            family = self._shared_out(base, inputs, own)
            if allocation == "fisher":
                asked = needs.fisher_tokens if needs is not None else None
                return self._with_fisher(inputs, form or FISHER_FORMS[0], asked)
            return self._with_sensitivities(inputs, base, family)
        return inputs

    def family(self, method: str, **options: Any) -> PlanFamily:
        """Return the plans of a method, calibrated."""
        inputs = self.inputs(method, **options)
        own = {key: value for key, value in options.items() if key != "fisher_form"}
        return plan_family(method, inputs, **own)

    def _noted(self, inputs: MethodInputs, notes: Sequence[str]) -> MethodInputs:
        """Let every plan carry what has to be said about its calibration, and say it."""
        if not notes:
            return inputs
        for note in notes:
            if note not in self._noticed:
                self._noticed.add(note)
                self._notice(note)
        known = inputs.made.get("notes", [])
        return replace(inputs, made={**inputs.made, "notes": [*known, *notes]})

    # Fisher information and sensitivities.

    def text(self, most: int, longest: int) -> CalibrationTokens:
        """Read at most so many tokens of the user's text, or of the embedded calibration split."""
        source = self._options.source
        if source is None or source.kind in (SourceKind.RANDOM, SourceKind.MOMENTS):
            source = parse_source("calibration")
        length = min(self._options.seq_len, longest)
        return read_tokens(self._loaded, source, tokens=None, most=most, seq_len=length)

    def _shared_out(self, base: str, inputs: MethodInputs, own: Mapping[str, Any]) -> PlanFamily:
        """Return the method's plans with its own allocation: what could have ranks at all."""
        # The name of the option is refused here where the method has none.
        family = plan_family(base, inputs, **without_allocation(base, own))
        if not family.targets or family.at_ranks is None:
            raise UsageError(
                f"{base} does not allocate ranks; leave out --allocation {own['allocation']}"
            )
        return family

    def _with_fisher(self, inputs: MethodInputs, form: str, asked: int | None) -> MethodInputs:
        wanted = self._options.tokens or asked or DEFAULT_TOKENS
        key = form, wanted
        if key not in self._fisher:
            text = self.text(wanted, GRADIENT_LENGTH)
            title = f"gradients of {text.source.name} text"
            with self._progress(title, text.count) as bar:
                weights = fisher_information(
                    self._loaded,
                    text.batches(1),
                    form=form,
                    advance=bar.advance,
                    should_stop=self._should_stop,
                )
            if weights is None:
                raise Interrupted("interrupted while computing gradients")
            self._fisher[key] = weights, {"form": form, **_about(text)}
        weights, made = self._fisher[key]
        notes = []
        if made["tokens"] < max(wanted, asked or 0):
            whose = "requested" if self._options.tokens == max(wanted, asked or 0) else "wanted"
            notes.append(
                f"Fisher information was computed on {made['tokens']:,} tokens of "
                f"{made['source']}, not {max(wanted, asked or 0):,} ({whose})"
            )
        inputs = replace(inputs, fisher=weights, made={**inputs.made, "fisher": made})
        return self._noted(inputs, notes)

    def _with_loss(self, inputs: MethodInputs, sink: int, window: int) -> MethodInputs:
        from kvprof.moments.loss import loss_moments

        wanted = self._options.tokens or DEFAULT_TOKENS
        key = sink, window, wanted
        if key not in self._loss:
            text = self.text(wanted, GRADIENT_LENGTH)
            with self._progress(f"gradients of {text.source.name} text", text.count) as bar:
                moments = loss_moments(
                    self._loaded,
                    text.batches(1),
                    sink=sink,
                    window=window,
                    seed=self._options.seed,
                    advance=bar.advance,
                    should_stop=self._should_stop,
                )
            if moments is None:
                raise Interrupted("interrupted while computing gradients")
            self._loss[key] = moments, _about(text)
        moments, made = self._loss[key]
        return replace(inputs, loss=moments, made={**inputs.made, "loss": made})

    def _with_sensitivities(
        self, inputs: MethodInputs, base: str, family: PlanFamily
    ) -> MethodInputs:
        from kvprof.moments.sensitivity import PROBED_LENGTH, PROBED_TOKENS, measure_sensitivities

        # The same bases predict the same errors, whatever hands out ranks or bits of them.
        bases = sha256(b"".join(target.errors.numpy().tobytes() for target in family.targets))
        key = (bases.hexdigest(), id(inputs.moments))
        if key not in self._sensitivities:
            most = min(PROBED_TOKENS, self._options.tokens or PROBED_TOKENS)
            text = self.text(most, PROBED_LENGTH)
            title = f"probing {len(family.targets)} targets of {base} on {text.source.name} text"
            with self._progress(title, len(family.targets)) as bar:
                found = measure_sensitivities(
                    self._loaded,
                    family,
                    list(text.batches(batch_size_for(self._loaded, self._options, text.seq_len))),
                    advance=bar.advance,
                    should_stop=self._should_stop,
                )
            if found is None:
                raise Interrupted("interrupted while probing heads")
            self._sensitivities[key] = found.weights, {**found.described, **_about(text)}
        weights, made = self._sensitivities[key]
        inputs = replace(inputs, sensitivities=weights, made={**inputs.made, "sensitivity": made})
        asked = self._options.tokens or 0
        if asked <= made["tokens"]:
            return inputs
        return self._noted(
            inputs,
            [
                f"sensitivities were probed on {made['tokens']:,} tokens of {made['source']}, not "
                f"{asked:,}, to save time"
            ],
        )


def _about(text: CalibrationTokens) -> dict[str, Any]:
    return {
        "source": text.source.name,
        "tokens": text.count,
        "seq_len": text.seq_len,
        **text.described(),
    }
