from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kvprof.analysis.rank_allocation import RankTarget
from kvprof.errors import UsageError
from kvprof.methods.family import PlanFamily
from kvprof.methods.registry import plan_family
from kvprof.models.load import LoadedModel
from kvprof.moments.sensitivity import measure_sensitivities, probe_rank
from tests.methods.models import FINE, inputs, model
from tests.models.tiny import tiny, token_ids

IDS = token_ids(3, 24, seed=5)
HEADS, WIDTH, LAYERS = 2, 16, 2


@cache
def family(method: str) -> PlanFamily:
    options = {"heads": 1} if method == "palu" else {}
    return plan_family(method, inputs("Llama"), **FINE, **options)


def measured(method: str, loaded: LoadedModel | None = None) -> dict[str, list[list[float]]]:
    found = measure_sensitivities(loaded or model("Llama"), family(method), [IDS[:2], IDS[2:]])
    assert found is not None
    return {side: [list(row) for row in rows] for side, rows in found.weights.items()}


def divergence(weight: str, head: int, turn: Tensor) -> float:
    """KL by hand: a float64 model whose head's projection goes through the cut basis and back."""
    exact, cut = (tiny("Llama", num_hidden_layers=LAYERS).double() for _ in range(2))
    with torch.no_grad():
        rows = cut.get_submodule(weight).weight[WIDTH * head : WIDTH * (head + 1)]
        rows.copy_(turn.T @ rows)
        p = exact(input_ids=IDS).logits.softmax(-1)
        q = cut(input_ids=IDS).logits.softmax(-1)
    return float((p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize(
    ("method", "side", "projection"),
    [("kq", "values", "v_proj"), ("palu", "keys", "k_proj"), ("palu", "values", "v_proj")],
)
def test_figures_are_the_divergence_per_predicted_error(
    method: str, side: str, projection: str
) -> None:
    found = measured(method)
    assert {key: [len(row) for row in rows] for key, rows in found.items()} == {
        "keys": [HEADS] * LAYERS,
        "values": [HEADS] * LAYERS,
    }
    whole = family(method).at_ranks([WIDTH] * 2 * LAYERS * HEADS)  # type: ignore[misc]  # there for low-rank methods
    for target in family(method).targets:
        if target.side != side:
            continue
        group = getattr(whole.layers[target.layer], side).groups[target.group]
        down, up = group.down[:, : WIDTH // 2].double(), group.up[:, : WIDTH // 2].double()
        name = f"model.layers.{target.layer}.self_attn.{projection}"
        lost = divergence(name, target.group, down @ up.T)
        expected = lost / float(target.errors[WIDTH // 2])
        # Noise is subtracted, and float32 rounds.
        assert found[side][target.layer][target.group] == pytest.approx(expected, rel=1e-3)


def test_keys_after_rope_count_too_and_heads_differ() -> None:
    figures = [x for row in measured("kq")["keys"] for x in row]
    assert min(figures) > 0
    assert max(figures) > 1.2 * min(figures)


def test_a_lazy_plan_is_probed_as_one_that_is_not() -> None:
    found = measured("tale")
    assert min(x for row in found["values"] for x in row) > 1e-6
    assert found["keys"] == [[]] * LAYERS


def test_a_target_that_has_nothing_to_lose_weighs_nothing() -> None:
    base = family("kq")
    empty = replace(base.targets[2], errors=torch.zeros(WIDTH + 1, dtype=torch.float64))
    changed = replace(base, targets=(*base.targets[:2], empty, *base.targets[3:]))
    found = measure_sensitivities(model("Llama"), changed, [IDS])
    assert found is not None
    assert found.weights["keys"][1][0] == 0.0
    assert found.weights["keys"][1][1] > 0


def test_what_drowns_in_noise_counts_as_much_as_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0.5, 0.4, 0.7, 2.0])
    monkeypatch.setattr("kvprof.moments.sensitivity._divergence", lambda *arguments: next(answers))
    base = family("kq")
    three = tuple(
        replace(target, errors=torch.linspace(2, 0, WIDTH + 1)) for target in base.targets[:3]
    )
    build = base.at_ranks
    assert build is not None
    rest = [WIDTH] * (len(base.targets) - 3)
    few = replace(base, targets=three, at_ranks=lambda ranks: build([*ranks, *rest]))
    found = measure_sensitivities(model("Llama"), few, [IDS])
    assert found is not None
    # 0.4 and 0.7 are -0.1 and 0.2 above a noise of 0.5: neither could be seen.
    assert found.weights["keys"] == [[0.5, 0.5], [1.5]]
    assert found.described == {"probe_share": 0.5, "noise": 0.5, "below_noise": 2}


def test_the_probe_goes_below_what_the_calibration_spans() -> None:
    values = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    errors = torch.tensor([14.0, 5.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert probe_rank(RankTarget(0, "keys", 0, values, errors, values)) == 2
    full = torch.arange(8.0, -1.0, -1.0)
    assert probe_rank(RankTarget(0, "keys", 0, values, full, values)) == 4


def test_it_stops_when_asked_and_needs_text() -> None:
    done: list[int] = []
    result = measure_sensitivities(
        model("Llama"), family("kq"), [IDS], advance=done.append, should_stop=lambda: True
    )
    assert result is None
    assert done == [1]
    with pytest.raises(UsageError):
        measure_sensitivities(model("Llama"), family("kq"), [])


def test_the_model_is_left_as_it_was() -> None:
    loaded = model("Llama")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    measured("palu")
    assert all(torch.equal(before[k], v) for k, v in loaded.model.state_dict().items())
