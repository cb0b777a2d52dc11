"""Verdicts and the recommended token count on curves that are made up."""

import numpy as np
import pytest

from kvprof.analysis.stability_study import (
    CLAIMS,
    NEGLIGIBLE_COST,
    Comparison,
    given_rank,
    judge,
    recommend_tokens,
)


def comparison(
    by_tokens: dict[int, tuple[float, float]],
    *,
    heads: int = 8,
    rank: int = 32,
    jitter: float = 0.0,
) -> Comparison:
    """One seed: at each token count a sign-aligned δ/ε and an extra lost energy."""
    made = Comparison(width=64)
    for tokens, (ratio, cost) in by_tokens.items():
        for head in range(heads):
            own = ratio * (1 + jitter * (-1) ** head)
            for asked, removal_rate, its_cost in (
                (rank, None, cost),
                (16, None, 9.0),
                (None, 0.1, 9.0),
            ):
                made.rows.append(
                    {
                        "tokens": tokens,
                        "rank": asked or 30,
                        "removal_rate": removal_rate,
                        "extra_energy_loss": its_cost,
                        "layer": 0,
                        "kv_head": head,
                    }
                )
                # δ as it stands is large: only the aligned one may count.
                made.weights.append((1.4, own * 0.1, None, 0.1))
                made.asked.append(asked)
    return made


def verdicts(random_source=True, **targets):
    comparisons = {("qk", name): [one] for name, one in targets.items()}
    return judge(comparisons, random_source=random_source)


def by_paper(entries, paper):
    return [entry for entry in entries if entry["paper"].startswith(paper)]


@pytest.mark.parametrize(
    ("ratio", "cost", "holds", "words"),
    [
        (0.001, 0.0, True, "holds"),
        (0.001, 0.2, True, "holds by the paper's metric but costs +20.0% lost energy"),
        (
            0.3,
            0.001,
            False,
            "does not hold by the paper's metric, but costs nothing (+0.1% lost energy)",
        ),
        (0.3, 0.2, False, "does not hold (+20.0% lost energy)"),
        (0.001, -0.05, True, "holds"),
    ],
)
def test_each_kind_of_verdict(ratio, cost, holds, words):
    entries = verdicts(prose=comparison({1024: (0.9, 0.9), 8192: (ratio, cost)}))
    assert len(entries) == 2
    for entry in entries:
        assert entry["holds"] is holds
        assert entry["verdict"] == words
        assert entry["tokens"] == 8192
        assert entry["measured"] == pytest.approx(ratio)
        assert entry["cost"] == pytest.approx(cost)


def test_the_thresholds_are_the_papers():
    found = {
        (
            c.paper.split(",")[0].split(" §")[0],
            c.pair,
            c.threshold,
            c.minimum_tokens,
            c.random_source,
        )
        for c in CLAIMS
    }
    assert found == {
        ("FDC", "qk", 0.0034, 1, True),
        ("FDC", "qk", 0.005, 8192, True),
        ("ZACK", "qk", 0.0034, 1, False),
        ("ZACK", "qk", 0.005, 16384, False),
        ("ZACK", "vo", 0.0034, 1, False),
        ("ZACK", "vo", 0.005, 16384, False),
    }
    on_the_line = verdicts(prose=comparison({8192: (0.0034, 0.0)}))
    assert by_paper(on_the_line, "FDC §3.2")[0]["holds"] is False, "below means below"


def test_a_claim_about_8k_tokens_needs_8k_tokens():
    entry = by_paper(verdicts(prose=comparison({4096: (0.001, 0.0)})), "FDC §6.7")[0]
    assert (entry["holds"], entry["measured"], entry["interval"], entry["cost"]) == (None,) * 4
    assert entry["verdict"] == "not testable: needs 8,192 tokens or more"


def test_from_8k_on_means_at_every_count_from_there():
    sweep = {4096: (0.9, 0.9), 8192: (0.004, 0.0), 16384: (0.03, 0.0), 32768: (0.001, 0.0)}
    entries = verdicts(prose=comparison(sweep))
    entry = by_paper(entries, "FDC §6.7")[0]
    assert (entry["tokens"], entry["holds"]) == (16384, False)
    # A claim without a count gets its best chance.
    assert by_paper(entries, "FDC §3.2")[0]["tokens"] == 32768


def test_any_dataset_is_judged_one_by_one_and_the_average_over_all():
    entries = verdicts(
        prose=comparison({8192: (0.001, 0.0)}), code=comparison({8192: (0.008, 0.0)}, heads=24)
    )
    each = by_paper(entries, "FDC §3.2")
    assert [(e["target"], e["holds"]) for e in each] == [("prose", True), ("code", False)]
    (mean,) = by_paper(entries, "FDC §6.7")
    assert mean["target"] == "prose and code"
    # The mean over datasets of their ratios, however many heads each row count has.
    assert mean["measured"] == pytest.approx(0.0045)
    assert mean["holds"] is True


def test_random_sources_meet_fdcs_claims_and_text_meets_zacks():
    sweep = comparison({16384: (0.001, 0.0)})
    both = {("qk", "prose"): [sweep], ("vo", "prose"): [sweep]}
    random = judge(both, random_source=True)
    text = judge(both, random_source=False)
    assert {(e["paper"].split()[0], e["pair"]) for e in random} == {("FDC", "qk")}
    assert {(e["paper"].split()[0], e["pair"]) for e in text} == {("ZACK", "qk"), ("ZACK", "vo")}
    assert len(text) == 4


def test_the_interval_is_over_heads_and_repeatable():
    spread = comparison({8192: (0.002, 0.0)}, heads=40, jitter=0.5)
    first, again = (verdicts(prose=spread)[0] for _ in range(2))
    assert first == again
    low, high = first["interval"]
    # ± 1.96 standard errors of forty heads at 0.001 or 0.003.
    half = 1.96 * 0.001 / np.sqrt(40)
    assert (low, high) == pytest.approx((0.002 - half, 0.002 + half), abs=0.15 * half)
    # Seeds share a head's basis: asking for one seed three times over narrows nothing.
    thrice = judge({("qk", "prose"): [spread] * 3}, random_source=True)[0]
    assert thrice["interval"] == pytest.approx([low, high])
    flat = verdicts(prose=comparison({8192: (0.002, 0.0)}))[0]
    assert flat["interval"] == pytest.approx([0.002, 0.002])


def test_the_cost_is_read_at_the_given_rank_nearest_half_the_width():
    made = comparison({8192: (0.001, 0.0)}, rank=40)
    assert given_rank(made) == 40  # 16 and 40 are given, 32 is asked for
    entry = verdicts(prose=made)[0]
    assert entry["cost"] == 0.0


def test_a_dataset_that_an_interrupted_study_did_not_reach_is_left_out():
    partly = comparison({8192: (0.002, 0.0), 16384: (0.001, 0.0)})
    short = comparison({8192: (0.004, 0.0)})
    (entry,) = by_paper(verdicts(prose=partly, code=short), "FDC §6.7")
    assert entry["measured"] == pytest.approx(0.003)


def test_negligible_is_one_percent():
    assert NEGLIGIBLE_COST == 0.01


def recommended(*points):
    found = recommend_tokens(points)
    return found["tokens"], found["stopped_falling"]


def test_the_count_after_which_a_doubling_removes_less_than_a_twentieth():
    assert recommended((1024, 1.0), (2048, 0.5), (4096, 0.25), (8192, 0.24)) == (4096, True)
    # Exactly a twentieth still counts as falling, a hair less does not.
    assert recommended((1024, 1.0), (2048, 0.9499)) == (2048, False)
    assert recommended((1024, 1.0), (2048, 0.9501)) == (1024, True)
    assert recommended((1024, 1.0), (2048, 0.5), (4096, 0.2)) == (4096, False)


def test_steps_that_are_no_doubling_are_judged_per_doubling():
    # A factor of 8 that removes 10 % in all removes 3.5 % per doubling.
    assert recommended((1024, 1.0), (8192, 0.9)) == (1024, True)
    assert recommended((1024, 1.0), (8192, 0.8)) == (8192, False)
    # Half a doubling that removes 4 % removes 7.8 % per doubling.
    step = round(1024 * 2**0.5)
    assert recommended((1024, 1.0), (step, 0.96)) == (step, False)
    evidence = recommend_tokens([(1024, 1.0), (8192, 0.512)])["evidence"]
    assert evidence[0]["removed_per_doubling"] == pytest.approx(0.2)
    assert (evidence[0]["from"], evidence[0]["to"]) == (1024, 8192)


def test_one_flat_step_does_not_end_the_fall():
    assert recommended((1, 1.0), (2, 0.99), (4, 0.4), (8, 0.39)) == (4, True)
    assert recommended((1, 1.0), (2, 0.99), (4, 0.98), (8, 0.97)) == (1, True)


def test_costs_that_rise_or_vanish_have_stopped_falling():
    assert recommended((1, 0.5), (2, 0.6), (4, 0.7)) == (1, True)
    assert recommended((1, 0.5), (2, 0.0), (4, 0.0)) == (2, True)
    assert recommended((1, -0.1), (2, -0.2)) == (1, True)


def test_the_order_of_the_points_does_not_matter():
    assert recommended((4096, 0.25), (1024, 1.0), (8192, 0.24), (2048, 0.5)) == (4096, True)
