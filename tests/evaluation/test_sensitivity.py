"""One pass per cell shows what decoding shows, and what follows from cells is what they say."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvprof.analysis.rank_allocation import Choice, cheapest
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.sensitivity import Sensitivity, answers
from kvprof.methods.settings import Part, settings_of
from kvprof.models.load import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu", dtype="float32")


def ids_of(loaded: LoadedModel, rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, loaded.vocab_size, (rows, tokens), generator=generator)


def stepwise(model: Any, ids: Tensor, layer: int, head: int, bits: int) -> Iterator[Tensor]:
    """Step with the model's own cache in float64, rounding one head's keys after every token."""
    cache = DynamicCache()
    for token in range(ids.shape[1] - 1):
        output = model(ids[:, token : token + 1], past_key_values=cache, use_cache=True)
        keys = cache.layers[layer].keys
        for row in range(keys.shape[0]):
            values = keys[row, head, token].tolist()  # 16 wide: one group
            low = float(torch.tensor(min(values)).half())
            step = float(torch.tensor((max(values) - min(values)) / (2**bits - 1)).half())
            codes = [min(2**bits - 1, max(0, round((v - low) / step))) for v in values]
            keys[row, head, token] = torch.tensor([low + step * code for code in codes])
        if token >= ids.shape[1] // 2 - 1:
            yield output.logits[:, -1]


def test_a_cell_is_its_divergence_in_float64(loaded: LoadedModel, tiny_folder: Path) -> None:
    ids = ids_of(loaded, 2, 32)
    measuring = Sensitivity(loaded, [TextSample("x", ids)], None)
    (setting,) = settings_of(measuring.inputs, "per-token", ["2"], [], 0, None)
    part = Part(1, "keys", 1)
    found = measuring.measure({part: setting})
    wide = AutoModelForCausalLM.from_pretrained(tiny_folder).double()
    with torch.inference_mode():
        exact = wide(ids[:, :-1]).logits[:, 15:].log_softmax(-1)
        other = torch.stack(list(stepwise(wide, ids, 1, 1, 2)), 1).log_softmax(-1)
    total = sum(
        math.exp(p) * (p - q)
        for p, q in zip(exact.flatten().tolist(), other.flatten().tolist(), strict=True)
    )
    assert found["kl"] == pytest.approx(total / (2 * 16), rel=1e-3)
    assert measuring.measure({})["kl"] < 1e-9


sizes = st.integers(1, 20)


@given(st.lists(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_choice_of_the_same_size_is_cheaper(given_parts: list[list[tuple[int, int]]]) -> None:
    parts = [
        [Choice("full", 21.0, 0.0), *(Choice(str(i), float(s), float(c)) for i, (s, c) in own)]
        for own in (list(enumerate(part)) for part in given_parts)
    ]
    every: list[tuple[float, float]] = [(0.0, 0.0)]
    for part in parts:
        every = [(s + c.size, k + c.cost) for s, k in every for c in part]
    for size in {size for size, _ in every}:
        found = cheapest(parts, size)
        assert found is not None
        own = sum(choice.size for choice in found)
        assert own <= size
        assert sum(c.cost for c in found) == min(k for s, k in every if s <= own)
    assert cheapest(parts, min(size for size, _ in every) - 1) is None


def test_answers_follow_from_the_cells() -> None:
    costs = {(0, "keys"): 0.5, (0, "values"): 0.004, (1, "keys"): 0.004, (1, "values"): 0.001}
    parts = [Part(layer, side) for layer, side in costs]

    def row(part: Part, name: str, bits: int, first: int, kl: float) -> dict[str, Any]:
        return {
            **{"layer": part.layer, "side": part.side, "kv_head": None, "setting": name},
            **{"bits": bits, "exact_first": first, "bytes_per_token": float(bits), "kl": kl},
        }

    rows = [row(p, "4 bits", 4, 0, costs[p.layer, p.side]) for p in parts]
    rows += [row(p, "8 bits", 8, 0, costs[p.layer, p.side] / 1000) for p in parts]
    rows += [row(p, "4 bits", 4, 1, 0.0) for p in parts[:2]]
    found = answers(rows, parts, 0.012)
    assert [one["more"] for one in found["sides"]] == ["keys", "keys"]
    assert found["layers"][0]["stay"] == [0]
    assert found["layers"][1]["stay"] == []
    assert [one["setting"] for one in found["needed"]] == ["8 bits", "8 bits", "8 bits", "4 bits"]
    assert found["first_tokens"] == []  # not all of its parts were measured
