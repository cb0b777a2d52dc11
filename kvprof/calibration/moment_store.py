"""Moments by source, collected once and only as wide as somebody needs them."""

from collections.abc import Callable
from dataclasses import replace

from kvprof.analysis.collect import CollectOptions, collect_moments, suitable_batch_size
from kvprof.analysis.joint import group_size
from kvprof.analysis.moment_files import load_moments
from kvprof.analysis.moments import Moments
from kvprof.calibration.options import CalibrationInterrupted, CalibrationOptions, Progress
from kvprof.calibration.tokens import read_tokens
from kvprof.methods.family import CalibrationNeeds
from kvprof.models.load import LoadedModel
from kvprof.sources.defaults import DEFAULT_TOKENS
from kvprof.sources.grammar import Source, SourceKind, parse_source

__all__ = ["MomentStore", "batch_size_for"]

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
        Asked after each batch; True ends with `CalibrationInterrupted`.
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

    def expect(self, needs: CalibrationNeeds) -> None:
        """Announce what will be asked for, so that one pass collects it too."""
        self._expected.append(needs)

    def get(self, needs: CalibrationNeeds) -> Moments:
        """Return moments that hold what is needed, collected now or before.

        Raises
        ------
        UsageError
            When the source is too short, heads cannot be grouped so, or saved moments are of
            another model.
        CalibrationInterrupted
            When the user asked for the end.
        """
        source = self._options.source or parse_source(needs.source)
        kept = self._kept.setdefault((source, self.wanted(needs)), [])
        for have, moments in kept:
            if source.kind is SourceKind.MOMENTS or self._covers(have, needs):
                return moments
        if source.kind is SourceKind.MOMENTS:
            moments = load_moments(source.paths[0], fingerprint=self._loaded.fingerprint)
            moments.info["moments_file"] = str(source.paths[0].resolve())
        else:
            for other in self._expected:
                same = self._options.source is not None or other.source == needs.source
                if same and self.wanted(other) == self.wanted(needs):
                    needs = self._union(needs, other)
            moments = self._pass(source, needs)
        kept.append((needs, moments))
        return moments

    def wanted(self, needs: CalibrationNeeds) -> int:
        """Return how many tokens a method is calibrated on where its source has as many.

        What the user says, else the paper's own count; else `DEFAULT_TOKENS`, and for joint moments
        `_PER_COLUMN` for each column of the widest Gram matrix.
        """
        if self._options.tokens is not None:
            return self._options.tokens
        source = self._options.source
        if source is not None and source.tokens is not None:
            return source.tokens
        return needs.tokens or max(DEFAULT_TOKENS, _PER_COLUMN * self.width(needs))

    def width(self, needs: CalibrationNeeds) -> int:
        """Return the columns of the widest Gram matrix of heads kept jointly; 0 without any."""
        return max(
            heads * max(layer.qk_head_dim, layer.v_head_dim)
            for heads, layer in zip(self._sizes(needs), self._loaded.layout.layers, strict=True)
        )

    def notes(self, method: str, needs: CalibrationNeeds, moments: Moments) -> list[str]:
        """Return in words where a method got fewer tokens than it takes.

        Parameters
        ----------
        method : str
            Its name.
        needs : CalibrationNeeds
            Of the method.
        moments : Moments
            That `get` returned for them.
        """
        found = []
        name, seen = moments.info.get("source", "the source"), moments.tokens
        # A paper's count also where the user says another; kvprof's own default is only that.
        least = needs.tokens or self.wanted(needs)
        if seen < least:
            whose = "the paper's setting" if needs.tokens else method
            found.append(
                f"{method} is calibrated on {seen:,} tokens of {name}, and {whose} takes {least:,}"
            )
        if seen < self.width(needs):
            found.append(
                f"{method}: {seen:,} tokens cannot fill a Gram matrix of {self.width(needs):,} "
                "columns, so its last directions are arbitrary; calibrate on more"
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
        )
        title = f"calibrating: {source.name} tokens through {self._loaded.spec}"
        with self._progress(title, count) as bar:
            *_, moments = collect_moments(
                self._loaded, source, options, advance=bar.advance, should_stop=self._should_stop
            )
        if not moments.complete:
            raise CalibrationInterrupted(f"interrupted after {moments.tokens:,} of {count:,}")
        moments.info |= tokens.described()
        return moments

    def _sizes(self, needs: CalibrationNeeds) -> list[int]:
        """Return the heads kept jointly in each layer; 0 where none are asked for."""
        if needs.joint_heads is None:
            return [0] * len(self._loaded.layout.layers)
        heads = needs.joint_heads
        return [group_size(heads, layer.num_kv_heads) for layer in self._loaded.layout.layers]

    def _covers(self, have: CalibrationNeeds, needs: CalibrationNeeds) -> bool:
        """Whether moments hold what is needed: larger groups hold smaller ones."""
        pairs = zip(self._sizes(have), self._sizes(needs), strict=True)
        joint = all(not wanted or (kept and kept % wanted == 0) for kept, wanted in pairs)
        return joint and (have.pre_rope or not needs.pre_rope)

    def _union(self, one: CalibrationNeeds, other: CalibrationNeeds) -> CalibrationNeeds:
        for wide, narrow in ((one, other), (other, one)):
            if self._covers(replace(wide, pre_rope=True), replace(narrow, pre_rope=False)):
                return replace(wide, pre_rope=one.pre_rope or other.pre_rope)
        return one  # groups that do not divide each other need passes of their own
