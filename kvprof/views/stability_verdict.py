"""What a stability result says in words: is the rotation a property of the model?"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.views.numbers import count
from kvprof.views.spectrum_data import rate_text
from kvprof.views.stability_data import (
    Curve,
    cost_rank,
    curves_of,
    datasets,
    noise_of,
    ratio_text,
    share_text,
    source_words,
    worst,
)

__all__ = ["advice", "verdict"]

#: The papers' own limit for an average difference (FDC §6.7, ZACK §6.6).
_SAME_ELEMENTS = 0.005


def verdict(
    result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]] | None = None
) -> list[str]:
    """Return paragraphs: the answer in one line, what it rests on per pair, and the yardsticks.

    Figures are averages at the largest token count and the given rank nearest half the width.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.
    pairs : mapping of str to sequence of Curve, optional
        From `curves_of`, when the caller already has them.
    """
    chosen = curves_of(result) if pairs is None else pairs
    judged = {pair: datasets(curves) for pair, curves in chosen.items() if datasets(curves)}
    if not judged:
        return ["Nothing was compared."]
    limit = result["data"].get("negligible_cost", 0.01)
    answers = [f"{pair}: {_answer(chosen[pair], limit)}." for pair in judged]
    source = source_words(result["inputs"]["source"])
    question = f"Is the rotation a property of this model, the same from {source} as from data?"
    text = [" ".join([question, *answers])]
    text += [f"{pair}: {_evidence(result, pair, chosen[pair])}" for pair in judged]
    unrelated = _unrelated(result)
    text.append(
        "For comparison, two unrelated bases give a ratio of about "
        f"{ratio_text(unrelated['unaligned'])} (√2) as they stand and 1.34–1.36 with signs "
        f"aligned; a basis that costs up to {rate_text(limit)} of extra lost energy is taken to "
        "cost nothing."
    )
    return text


def _unrelated(result: Mapping[str, Any]) -> Mapping[str, float]:
    fallback = {"unaligned": 2**0.5, "sign_aligned": 1.35}
    named: Mapping[str, float] = result["data"].get("unrelated_ratio", fallback)
    return named


def _answer(curves: Sequence[Curve], limit: float) -> str:
    known = [curve for curve in datasets(curves) if curve.cost is not None]
    if not known:
        return "it cannot be told, no cost was measured"
    costly = [curve for curve in known if (curve.cost or 0.0) > limit]
    ratios = [curve.at_cost_rank()["ratio_sign_aligned"] for curve in known]
    if not costly:
        same = all(ratio is not None and ratio < _SAME_ELEMENTS for ratio in ratios)
        return "yes" if same else "by its elements no, but the difference costs nothing"
    noise = noise_of(curves)
    floor = None if noise is None else noise.cost
    if floor is not None and all((curve.cost or 0.0) <= floor for curve in costly):
        return "it cannot be told, another seed costs as much as another source"
    if len(costly) < len(known):
        cheap = [curve.target for curve in known if curve not in costly]
        return f"for {_listed(cheap)} yes in what it costs, for {_targets(costly)} no"
    return "no" if len(known) > 1 else f"no, not for {_targets(known)}"


def _evidence(result: Mapping[str, Any], pair: str, curves: Sequence[Curve]) -> str:
    every = datasets(curves)
    first = every[0]
    basis = f"the basis from {count(max(first.counts))} tokens of {first.source}"
    if first.source == "random":
        basis = f"the basis from {count(max(first.counts))} random tokens"
    costs = sorted((c for c in every if c.cost is not None), key=lambda c: c.cost or 0.0)
    sentences = []
    if costs:
        most, least = costs[-1], costs[0]
        text = (
            f"kept at rank {cost_rank(result, pair)}, {basis} loses "
            f"{share_text(most.cost)} more energy than the data's own on {most.target}"
        )
        own = most.at_cost_rank().get("own_energy_loss")
        if own is not None:
            text += f" (whose own loses {share_text(own)} of all)"
        if least is not most:
            where = "the least" if len(costs) > 2 else "the other"
            text += f" and {share_text(least.cost)} more on {least.target}, {where}"
        sentences.append(text + ".")
    noise = noise_of(curves)
    if noise is None:
        sentences.append("There is no noise floor to hold that against.")
    else:
        sentences.append(
            f"Random tokens with another seed cost {share_text(noise.cost)}: the noise floor."
        )
    sentences.append(_ratios(result, every, noise))
    return " ".join(sentence for sentence in sentences if sentence)


def _ratios(result: Mapping[str, Any], curves: Sequence[Curve], noise: Curve | None) -> str:
    known = {
        curve.target: ratio
        for curve in curves
        if (ratio := curve.at_cost_rank()["ratio_sign_aligned"]) is not None
    }
    if not known:
        return ""
    figures = ", ".join(f"{ratio_text(ratio)} on {target}" for target, ratio in known.items())
    text = f"With signs aligned its elements differ by {figures}, relative to their mean size"
    floor = None if noise is None else noise.at_cost_rank()["ratio_sign_aligned"]
    if floor is not None:
        text += f", against {ratio_text(floor)} between two seeds"
    return text + "."


def _targets(curves: Sequence[Curve]) -> str:
    return _listed([curve.target for curve in curves])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def advice(result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Return in words how many tokens to calibrate with, and what that does not buy.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.
    pairs : mapping of str to sequence of Curve
        From `curves_of`.
    """
    found = result["data"]["recommendation"]
    if found is None:
        return ["No recommendation: it takes a sweep of two token counts or more."]
    source = source_words(result["inputs"]["source"])
    tokens = count(found["tokens"])
    if found["stopped_falling"]:
        lines = [
            f"Calibrate with {tokens} tokens ({source}): that is where the extra lost energy stops "
            "falling for every pair."
        ]
    else:
        lines = [
            f"At least {tokens} tokens ({source}): at the sweep's end the extra lost energy was "
            "still falling, so a longer sweep (--tokens) may recommend more."
        ]
    lines += [f"{pair}: {_steps(entry)}" for pair, entry in found["pairs"].items()]
    limit = result["data"].get("negligible_cost", 0.01)
    for pair, entry in found["pairs"].items():
        top = worst(pairs.get(pair, ()))
        if entry["stopped_falling"] and top is not None and (top.cost or 0.0) > limit:
            lines.append(
                f"{pair}: more tokens of this source do not help any further, yet "
                f"{share_text(top.cost)} of extra lost energy stays on {top.target}; calibrate "
                "on such data to lose it."
            )
    return lines


def _steps(entry: Mapping[str, Any]) -> str:
    """Say how much of the cost the doublings on both sides of the recommendation removed."""
    share = rate_text(entry["threshold"])
    before = [step for step in entry["evidence"] if step["to"] <= entry["tokens"]]
    after = [step for step in entry["evidence"] if step["from"] >= entry["tokens"]]
    if not entry["stopped_falling"]:
        removed = share_text(before[-1]["removed_per_doubling"])
        return f"still falling at {count(entry['tokens'])}; the last doubling removed {removed}."
    most = share_text(max(step["removed_per_doubling"] for step in after))
    text = f"{count(entry['tokens'])}; a doubling after it removes {most} at most, under {share}"
    if before:
        text += f"; the one before it removed {share_text(before[-1]['removed_per_doubling'])}"
    return text + "."
