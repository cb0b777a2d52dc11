"""What it costs to store one layer's keys or values, or one head's, in fewer bits or dimensions.

Every cell is one part of the cache (`Part`) at one setting (`Setting`), everything else as the
model stores it, measured on held-out text as decoding would see it (`kvprof.evaluation.stored`).
From the cells follow what each part needs and, as if their divergences added up, which setting each
should take at a size; what is recommended is then measured as a whole, because they do not quite.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvprof.analysis.cheapest import Choice, cheapest
from kvprof.analysis.quality import draws, ratio_interval
from kvprof.errors import FailedError, UsageError
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.scores import Pair, TokenScores, score_tokens, text_figures
from kvprof.evaluation.stored import SIDES, Assignment, HeadSide, Stored, StoredPasses
from kvprof.evaluation.workload import TextBatch, Workload
from kvprof.methods.accounting import layer_bytes
from kvprof.methods.family import MethodInputs, PlanFamily, plan_at
from kvprof.methods.full import full_plan
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.quantisers import quantised
from kvprof.methods.registry import plan_family
from kvprof.models.load import LoadedModel

__all__ = ["FULL", "Part", "Sensitivity", "Setting", "SettingSpec", "settings_of"]

#: The setting that changes nothing.
FULL = "full"
_RESAMPLES = 1000
_SEED = 0


@dataclass(frozen=True)
class SettingSpec:
    """What a setting is, as a result says it.

    Attributes
    ----------
    name : str
        ``8 bits``, ``fp8``, ``rank 64``.
    bits : int or None
        Of a quantised value; None at a rank.
    rank : int or None
    exact_first : int
        First tokens left as they are beyond what the quantiser itself leaves.
    """

    name: str
    bits: int | None
    rank: int | None
    exact_first: int = 0


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting and how it is carried out."""

    spec: SettingSpec
    stored: Stored


@dataclass(frozen=True, order=True)
class Part:
    """What is stored otherwise in a cell: all KV heads of a layer's side, or one.

    Attributes
    ----------
    layer : int
    side : str
        ``keys`` or ``values``.
    kv_head : int or None
        None for all heads of the layer.
    """

    layer: int
    side: str
    kv_head: int | None = None


def settings_of(
    loaded: LoadedModel,
    quantiser: str,
    bits: Sequence[str],
    ranks: Sequence[int],
    exact_first: int,
    family: PlanFamily | None,
) -> list[Setting]:
    """Return the settings to measure, those with exact first tokens last.

    Parameters
    ----------
    loaded : LoadedModel
    quantiser : str
        One of `kvprof.methods.quantisers.QUANTISERS`.
    bits : sequence of str
        ``fp8``, or a number of bits of the quantiser.
    ranks : sequence of int
        Kept dimensions of a head, fewer than it has.
    exact_first : int
        How many first tokens are exact where bits below 8 are measured again; 0 for not again.
    family : PlanFamily or None
        Of `kq`, where ranks are asked for.

    Raises
    ------
    UsageError
        For bits that the quantiser does not have, or a rank that is none.
    LackingError
        When the quantiser is a library's and the library is missing.
    """
    inputs = MethodInputs(loaded.layout, loaded.fingerprint)
    plain = full_plan(inputs)
    found: list[Setting] = []
    for name in bits:
        if name == "fp8":
            # As an engine casts: its flags are what comes of this.
            family_of_cast = plan_family("fp8", inputs, scale="none")
            plan, spec = plan_at(family_of_cast, 8.0), SettingSpec("fp8", 8, None)
        else:
            plan = quantised(plain, quantiser, int(name))
            spec = SettingSpec(f"{name} bits", int(name), None)
        found.append(Setting(spec, Stored(plan, {})))
    for rank in ranks:
        assert family is not None  # the caller has calibrated
        assert family.at_ranks is not None
        groups = _groups_of(family.at_ranks([rank] * len(family.targets)))
        found.append(Setting(SettingSpec(f"rank {rank}", None, rank), Stored(plain, groups)))
    if exact_first:
        found += [
            _with_exact_first(one, exact_first)
            for one in found
            if one.spec.bits is not None and one.spec.bits < 8
        ]
    return found


def _with_exact_first(setting: Setting, tokens: int) -> Setting:
    plan = setting.stored.plan
    levels = replace(plan.levels, sink=plan.levels.sink + tokens)
    return Setting(
        replace(setting.spec, exact_first=tokens), Stored(replace(plan, levels=levels), {})
    )


def _groups_of(plan: Plan) -> dict[HeadSide, HeadGroup]:
    return {
        HeadSide(index, side, group.first): group
        for index, layer in enumerate(plan.layers)
        for side in SIDES
        for group in getattr(layer, side).groups
    }


class Sensitivity:
    """Measures any assignment of settings to parts on one sample.

    Parameters
    ----------
    loaded : LoadedModel
    samples : list of TextSample
        Held out; sequences of one length.
    batch_size : int or None
        Sequences at once; None by device and memory.

    Raises
    ------
    UsageError
        When the model has layers that attend to another layer's keys and values.
    """

    def __init__(
        self, loaded: LoadedModel, samples: list[TextSample], batch_size: int | None
    ) -> None:
        if any(facts.shared for facts in loaded.layout.layers):
            raise UsageError(
                f"{loaded.layout.architecture} has layers that read another layer's keys and "
                "values, which cannot be stored otherwise for one layer alone; eval takes it"
            )
        self.loaded, self.samples = loaded, samples
        self.workload = Workload(loaded, samples, [], batch_size)
        self._passes = StoredPasses(loaded)
        self._started: TextBatch | None = None

    @property
    def context(self) -> int:
        """Mean number of tokens before a decoded one: where bytes are counted."""
        return self.workload.context

    def parts(self, layers: Sequence[int], *, by_head: bool) -> list[Part]:
        """Return the parts of layers, keys before values, layer by layer."""
        facts = self.loaded.layout.layers
        return [
            Part(layer, side, head)
            for layer in layers
            for side in SIDES
            for head in (range(facts[layer].num_kv_heads) if by_head else (None,))
        ]

    def head_sides(self, part: Part) -> list[HeadSide]:
        """Return the heads of a part."""
        heads = range(self.loaded.layout.layers[part.layer].num_kv_heads)
        chosen = heads if part.kv_head is None else (part.kv_head,)
        return [HeadSide(part.layer, part.side, head) for head in chosen]

    def assignment(self, chosen: Mapping[Part, Setting]) -> dict[HeadSide, Stored]:
        """Return what is stored how when each part takes its setting."""
        return {
            head_side: setting.stored
            for part, setting in chosen.items()
            for head_side in self.head_sides(part)
        }

    def bytes_per_token(self, part: Part, setting: Setting | None) -> float:
        """Return what a part stores per token of context; as the model does without a setting."""
        whole = full_plan(MethodInputs(self.loaded.layout, self.loaded.fingerprint))
        plan, cut = (setting.stored.plan, setting.stored.groups) if setting else (whole, {})
        layer = whole.layers[part.layer]
        # The other side stores nothing, and a head as much as the others.
        groups = {
            side: tuple(
                cut.get(HeadSide(part.layer, side, group.first), group)
                for group in getattr(layer, side).groups
                if side == part.side
            )
            for side in SIDES
        }
        alone = replace(
            layer,
            keys=replace(layer.keys, groups=groups["keys"]),
            values=replace(layer.values, groups=groups["values"]),
        )
        itemsize, tokens = self.loaded.dtype.itemsize, self.context
        own = layer_bytes(plan, alone, tokens, itemsize=itemsize).total
        heads = 1 if part.kv_head is None else self.loaded.layout.layers[part.layer].num_kv_heads
        return own / tokens / heads

    @torch.inference_mode()
    def measure(self, assignment: Assignment) -> dict[str, Any]:
        """Return what an assignment costs on the whole sample.

        Returns
        -------
        dict
            ``kl`` (mean nats per decoded token), ``kl_interval``, ``kl_p999``, ``kl_worst``,
            ``accuracy``, ``baseline_accuracy``, ``relative_accuracy`` and its interval,
            ``decoded_tokens``.

        Raises
        ------
        FailedError
            When logits are not finite.
        """
        scores = []
        for batch in self.workload.text:
            if self._started is not batch:
                batch.logits = self._passes.baseline(batch.ids)
                batch.base = self._scored(batch, batch.logits, None)
                if self._started is not None:
                    self._started.logits = None  # one batch's are held at a time
                self._started = batch
            found = self._scored(batch, self._passes.logits(batch.ids, assignment), batch.logits)
            scores.append((batch, found))
        return self._figures(scores)

    def _scored(
        self, batch: TextBatch, logits: torch.Tensor, base: torch.Tensor | None
    ) -> TokenScores:
        targets = batch.ids[:, self.workload.start :]
        scores = score_tokens(logits.unbind(1), targets, base, lambda _: None)
        if not scores.finite:
            raise FailedError(f"logits of {self.loaded.spec} are not finite; try --dtype float32")
        return scores

    def _figures(self, scores: Iterable[tuple[TextBatch, TokenScores]]) -> dict[str, Any]:
        pairs: dict[str, Pair] = {}
        every = list(scores)
        for index, sample in enumerate(self.samples):
            own = [(batch, found) for batch, found in every if batch.sample == index]
            bases = [batch.base for batch, _ in own if batch.base is not None]
            pairs[sample.name] = Pair(
                TokenScores.joined(bases), TokenScores.joined(found for _, found in own)
            )
        figures = text_figures(pairs, _RESAMPLES, _SEED)
        kl = np.concatenate([pair.found.kl for pair in pairs.values()])
        counts = draws([len(pair.found.kl) for pair in pairs.values()], _RESAMPLES, _SEED)
        interval = ratio_interval(counts, kl.sum(axis=1), np.full(len(kl), float(kl.shape[1])))
        names = ("accuracy", "baseline_accuracy", "relative_accuracy", "decoded_tokens")
        return {
            "kl": figures["kl"]["mean"],
            "kl_interval": None if interval is None else list(interval),
            "kl_p999": figures["kl"]["p999"],
            "kl_worst": figures["kl"]["worst"],
            **{name: figures[name] for name in names},
            "relative_accuracy_interval": figures["relative_accuracy_interval"],
        }

    def cells(
        self,
        parts: Sequence[Part],
        settings: Sequence[Setting],
        *,
        advance: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Measure every part at every setting, one setting after the other.

        Returns
        -------
        tuple of list of dict and bool
            A row per cell, as the schema of ``kvprof sensitivity`` documents it, and whether all of
            them were measured.
        """
        rows: list[dict[str, Any]] = []
        for setting in settings:
            for part in parts:
                if should_stop():
                    return rows, False
                rows.append(
                    {
                        "layer": part.layer,
                        "side": part.side,
                        "kv_head": part.kv_head,
                        "setting": setting.spec.name,
                        "bits": setting.spec.bits,
                        "rank": setting.spec.rank,
                        "exact_first": setting.spec.exact_first,
                        "bytes_per_token": self.bytes_per_token(part, setting),
                        **self.measure(self.assignment({part: setting})),
                    }
                )
                advance(1)
        return rows, True

    def allocation(
        self,
        rows: Sequence[Mapping[str, Any]],
        parts: Sequence[Part],
        settings: Sequence[Setting],
        size: float,
    ) -> tuple[dict[Part, Setting | None], float] | None:
        """Choose a setting for each part, by measured divergence per byte saved.

        Parameters
        ----------
        rows : sequence of mapping
            Of `cells`.
        parts, settings
            That were measured; settings with exact first tokens are not chosen.
        size : float
            Bytes per token of all parts, at most.

        Returns
        -------
        tuple or None
            Part to setting (None: as the model stores it), and the summed divergence; None where
            the parts cannot be made that small.
        """
        measured = {
            (Part(row["layer"], row["side"], row["kv_head"]), row["setting"]): row
            for row in rows
            if not row["exact_first"]
        }
        named = {one.spec.name: one for one in settings if not one.spec.exact_first}
        offered = [
            [
                Choice(FULL, self.bytes_per_token(part, None), 0.0),
                *(
                    Choice(name, row["bytes_per_token"], row["kl"])
                    for name in named
                    if (row := measured.get((part, name))) is not None
                ),
            ]
            for part in parts
        ]
        found = cheapest(offered, size)
        if found is None:
            return None
        chosen = {part: named.get(choice.name) for part, choice in zip(parts, found, strict=True)}
        return chosen, sum(choice.cost for choice in found)
