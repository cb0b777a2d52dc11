"""Finding the plan of a byte rate by the method's own knob."""

from dataclasses import replace

import pytest

from kvprof.errors import UsageError
from kvprof.methods.accounting import dim_rate, rate
from kvprof.methods.family import PlanFamily, check_reached, plan_at, plan_for_rate
from kvprof.methods.registry import plan_family
from tests.methods.models import FINE, inputs
from tests.methods.shapes import group, layer, plan


def made(rank):
    """One layer of 100 columns each; only values are cut."""
    from tests.methods.shapes import whole

    return plan(layer(keys=whole(1, 100), values=(group(0, 1, 100, (rank,)),)))


STEPS = PlanFamily("steps", "cut", lambda cut: made(100 - int(cut * 90)))


@pytest.mark.parametrize("wanted", [0.0, 0.001, 0.005, 0.2, 0.333, 0.45])
def test_the_least_compression_that_reaches_the_rate(wanted):
    found = plan_for_rate(STEPS, wanted, 1000)
    rank = found.layers[0].values.groups[0].rank
    assert rate(found, 1000) >= wanted - 1e-9
    if rank < 100:
        assert rate(made(rank + 1), 1000) < wanted


@pytest.mark.parametrize("ask", [plan_for_rate, check_reached])
def test_what_no_rank_reaches_is_refused_with_the_range(ask):
    message = "steps reaches rates from 0.000 to 0.450 at 1,000 tokens, not 0.46"
    with pytest.raises(UsageError, match=message):
        ask(STEPS, 0.46, 1000)


def test_a_rate_is_looked_at_without_a_search():
    built = []
    watched = replace(STEPS, build=lambda cut: built.append(cut) or STEPS.build(cut))
    assert check_reached(watched, 0.333, 1000) is None
    assert built == [0.0, 1.0]


@pytest.mark.parametrize("ask", [plan_for_rate, check_reached])
@pytest.mark.parametrize("wanted", [-0.1, 1.0, float("nan")])
def test_a_rate_is_a_share(wanted, ask):
    with pytest.raises(UsageError, match="is not between 0 and 1"):
        ask(STEPS, wanted, 1000)


@pytest.mark.parametrize(("wanted", "bits"), [(0.375, 8), (0.5, 4), (0.65, 3), (0.7, 2)])
def test_a_quantisers_knob_is_its_bits(wanted, bits):
    family = plan_family("per-token", inputs("Llama"))
    found = plan_for_rate(family, wanted, 4096)
    assert found.quantiser.keys.bits == (bits,)
    assert found.made["bits"] == bits


def test_the_context_decides_the_rate():
    family = plan_family("tale", inputs("Llama"), **FINE)
    found = plan_for_rate(family, 0.3, 64)
    later = plan_for_rate(family, 0.3, 100_000)
    assert found.layers[0].values.groups[0].ranks[0] < later.layers[0].values.groups[0].ranks[0]


@pytest.mark.parametrize("ask", [plan_for_rate, check_reached])
def test_one_setting_has_one_rate_alone_and_its_own_among_several(ask):
    family = plan_family("hadamard-int4", inputs("Llama"))
    own = rate(family.build(4.0), 4096)
    ask(family, float(f"{own:.3f}"), 4096)
    with pytest.raises(UsageError, match=f"has one rate, {own:.3f} at 4,096 tokens, not 0.3"):
        ask(family, 0.3, 4096)
    ask(family, 0.3, 4096, alone=False)


@pytest.mark.parametrize("allocation", ["removal", "uniform", "tail"])
def test_every_allocation_reaches_a_rate_on_its_grid(allocation):
    family = plan_family("kq", inputs("Llama"), allocation=allocation, grid=4, minimum=4)
    found = plan_for_rate(family, 0.4, 1000)
    assert 0.4 <= dim_rate(found) < 0.6
    ranks = {g.rank for x in found.layers for s in (x.keys, x.values) for g in s.groups}
    assert all(rank % 4 == 0 for rank in ranks)


def test_the_knob_itself_is_checked_and_recorded():
    family = plan_family("fdc", inputs("Llama"), **FINE)
    assert plan_at(family, 0.05).made["removal_rate"] == 0.05
    with pytest.raises(UsageError, match=r"fdc: removal_rate 1.5 is not between 0 and 1"):
        plan_at(family, 1.5)
    with pytest.raises(UsageError, match=r"kivi: bits 5 .* 8, 4, 3, 2"):
        plan_at(plan_family("kivi", inputs("Llama")), 5)
