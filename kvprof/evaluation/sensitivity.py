"""What it costs to store one layer's keys or values, or one head's, in fewer bits or dimensions.

Every cell is the plan of one part of the cache (`Part`) at one setting (`Setting`), everything else
as the model stores it, evaluated on held-out text. From the cells follow what each part needs and,
as if their divergences added up, which setting each should take at a size; what is recommended is
then measured as a whole, because they do not quite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvprof.analysis.stats import ratio_interval
from kvprof.errors import Interrupted, UsageError
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.evaluation.scores import text_figures
from kvprof.methods.budget import plan_of
from kvprof.methods.family import MethodInputs
from kvprof.methods.low_rank import full_plan
from kvprof.methods.settings import FULL, Part, Setting, bytes_per_token
from kvprof.models.layout import ModelLayout
from kvprof.models.load import LoadedModel

__all__ = ["Sensitivity", "answers", "layers_that_stay", "part_of", "refuse_shared"]


def refuse_shared(layout: ModelLayout) -> None:
    """Refuse layers that attend to another layer's keys and values."""
    if any(facts.shared for facts in layout.layers):
        raise UsageError(
            f"{layout.architecture} shares keys and values across layers, so no single layer can "
            "be tested"
        )


class Sensitivity:
    """Measures any choice of settings for parts on one sample."""

    def __init__(
        self, loaded: LoadedModel, samples: list[TextSample], batch_size: int | None
    ) -> None:
        refuse_shared(loaded.layout)
        self.loaded, self.samples = loaded, samples
        self._evaluator = Evaluator(loaded, samples, [], EvaluationSettings(batch_size=batch_size))
        self._whole = full_plan(self.inputs)

    @property
    def context(self) -> int:
        """Mean number of tokens before a decoded one: where bytes are counted."""
        return self._evaluator.context

    @property
    def inputs(self) -> MethodInputs:
        """What settings and plans of this model are made of."""
        return MethodInputs(self.loaded.layout, self.loaded.fingerprint)

    def bytes_per_token(self, part: Part, setting: Setting | None) -> float:
        """Return what a part stores per token of context; as the model does without a setting."""
        return bytes_per_token(self._whole, part, setting, self.context)

    def measure(self, chosen: Mapping[Part, Setting | None]) -> dict[str, Any]:
        """Return what a choice costs on the whole sample; what has no setting stays as it is."""
        measured = self._evaluator.found(plan_of(self.inputs, chosen, {}))
        if not measured.complete:
            raise Interrupted
        pairs = measured.pairs(self.samples)
        figures = text_figures(pairs)
        kl = np.concatenate([pair.found.kl for pair in pairs.values()])
        sizes = [len(pair.found.kl) for pair in pairs.values()]
        interval = ratio_interval(kl.mean(axis=1), np.ones(len(kl)), sizes)
        names = ("accuracy", "baseline_accuracy", "relative_accuracy", "decoded_tokens")
        return {
            "kl": figures["kl"]["mean"],
            "kl_interval": interval,
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
        """Measure every part at every setting, one setting after the other."""
        rows: list[dict[str, Any]] = []
        for setting in settings:
            for part in parts:
                if should_stop():
                    return rows, False
                try:
                    measured = self.measure({part: setting})
                except Interrupted:
                    return rows, False
                rows.append(
                    {
                        **asdict(part),
                        "setting": setting.spec.name,
                        "bits": setting.spec.bits,
                        "rank": setting.spec.rank,
                        "exact_first": setting.spec.exact_first,
                        "bytes_per_token": self.bytes_per_token(part, setting),
                        **measured,
                    }
                )
                advance(1)
        return rows, True


# --- What the cells say. All of it takes the divergences of single parts to add up.


Row = Mapping[str, Any]
# Sums of two sides this near to each other are not told apart.
_ALIKE = 1.25


def part_of(row: Row) -> Part:
    """Return the part that a cell is of."""
    return Part(row["layer"], row["side"], row["kv_head"])


def answers(rows: Sequence[Row], parts: Sequence[Part], limit: float) -> dict[str, Any]:
    """Return the answers that complete settings allow."""
    settings: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        settings.setdefault((row["setting"], row["exact_first"]), []).append(row)
    whole = {key: own for key, own in settings.items() if len(own) == len(parts)}
    plain = {name: own for (name, first), own in whole.items() if not first}
    return {
        "sides": [_sides(name, own) for name, own in plain.items()],
        "layers": [
            {"setting": name, "kl": _sum(own), **_stay(own, limit)} for name, own in plain.items()
        ],
        "needed": _needed(list(plain.values()), parts, limit),
        "first_tokens": [
            _first_tokens(name, first, plain[name], own)
            for (name, first), own in whole.items()
            if first and name in plain
        ],
    }


def layers_that_stay(rows: Sequence[Row], limit: float) -> list[int]:
    """Return the fewest layers without which the sum of a setting's cells is within a limit."""
    costs: dict[int, float] = {}
    for row in rows:
        costs[row["layer"]] = costs.get(row["layer"], 0.0) + row["kl"]
    left = sum(costs.values())
    stay = []
    for layer in sorted(costs, key=lambda index: (-costs[index], index)):
        if left <= limit:
            break
        left -= costs[layer]
        stay.append(layer)
    return sorted(stay)


def _sum(rows: Sequence[Row]) -> float:
    return float(sum(row["kl"] for row in rows))


def _sides(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    keys, values = (
        _sum([row for row in rows if row["side"] == side]) for side in ("keys", "values")
    )
    more = None
    if max(keys, values) > _ALIKE * min(keys, values):
        more = "keys" if keys > values else "values"
    ratio = keys / values if values > 0 else None
    return {"setting": name, "keys": keys, "values": values, "ratio": ratio, "more": more}


def _stay(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    stay = layers_that_stay(rows, limit)
    return {"stay": stay, "kl_left": _sum([row for row in rows if row["layer"] not in stay])}


def _needed(
    settings: Sequence[Sequence[Row]], parts: Sequence[Part], limit: float
) -> list[dict[str, Any]]:
    """Return the smallest quantised form of each part within an equal share of the limit."""
    share = limit / max(1, len(parts))
    found = []
    quantised = [row for rows in settings for row in rows if row["bits"] is not None]
    if not quantised:
        return []
    for part in parts:
        own = [row for row in quantised if part_of(row) == part and row["kl"] <= share]
        best = min(own, key=lambda row: row["bytes_per_token"], default=None)
        found.append(
            {
                **asdict(part),
                "setting": FULL if best is None else best["setting"],
                "bits": None if best is None else best["bits"],
            }
        )
    return found


def _first_tokens(
    name: str, first: int, plain: Sequence[Row], exact: Sequence[Row]
) -> dict[str, Any]:
    before, after = _sum(plain), _sum(exact)
    by_side = {}
    for side in ("keys", "values"):
        own, other = (_sum([row for row in rows if row["side"] == side]) for rows in (plain, exact))
        by_side[side] = 1 - other / own if own > 0 else None
    return {
        "setting": name,
        "exact_first": first,
        "kl": before,
        "kl_exact": after,
        "explained": 1 - after / before if before > 0 else None,
        "explained_by_side": by_side,
    }
