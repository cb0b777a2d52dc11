from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from kvprof.errors import UsageError
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.fisher import fisher_information
from tests.models.tiny import tiny, token_ids

# Norms and RoPE compute in float32 even here: a smaller step drowns in their rounding.
STEP = 1e-3

# Where W_K and W_V of a KV head lie, written down by hand: [hidden, head_dim] views.
Slices = Callable[[nn.Module, int, int], dict[str, Tensor]]


def llama_slices(model: nn.Module, layer: int, head: int) -> dict[str, Tensor]:
    attention = model.get_submodule(f"model.layers.{layer}.self_attn")
    rows = slice(4 * head, 4 * head + 4)
    return {"keys": attention.k_proj.weight[rows].T, "values": attention.v_proj.weight[rows].T}


def phi3_slices(model: nn.Module, layer: int, head: int) -> dict[str, Tensor]:
    # 4 query heads of 4, then 2 key heads, then 2 value heads.
    weight = model.get_submodule(f"model.layers.{layer}.self_attn.qkv_proj").weight
    return {
        "keys": weight[16 + 4 * head : 20 + 4 * head].T,
        "values": weight[24 + 4 * head : 28 + 4 * head].T,
    }


def gpt2_slices(model: nn.Module, layer: int, head: int) -> dict[str, Tensor]:
    weight = model.get_submodule(f"transformer.h.{layer}.attn.c_attn").weight  # Conv1D: [in, out]
    return {
        "keys": weight[:, 8 + 4 * head : 12 + 4 * head],
        "values": weight[:, 16 + 4 * head : 20 + 4 * head],
    }


SMALL = {
    "Llama": (llama_slices, {"hidden_size": 8, "head_dim": 4, "num_hidden_layers": 2}),
    "Phi3": (phi3_slices, {"hidden_size": 16, "num_hidden_layers": 1}),
    "GPT2": (gpt2_slices, {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}),
}


def small(arch: str) -> LoadedModel:
    return wrap_model(tiny(arch, **SMALL[arch][1]).double())


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of each sequence."""
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    chances = logits - logits.exp().sum(-1, keepdim=True).log()
    last = ids.shape[1] - 1
    return torch.stack(
        [
            -sum(row[t, own[t + 1]] for t in range(last)) / last
            for row, own in zip(chances, ids, strict=True)
        ]
    )


def differences(model: nn.Module, weight: Tensor, ids: Tensor) -> Tensor:
    """The gradient of each sequence's loss by central differences, element by element."""
    found = torch.empty(len(ids), *weight.shape, dtype=torch.float64)
    with torch.no_grad():
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                before = weight[i, j].clone()
                weight[i, j] = before + STEP
                above = losses(model, ids)
                weight[i, j] = before - STEP
                found[:, i, j] = (above - losses(model, ids)) / (2 * STEP)
                weight[i, j] = before
    return found


@pytest.mark.parametrize("arch", SMALL)
def test_both_forms_are_what_finite_differences_give(arch: str) -> None:
    loaded = small(arch)
    ids = token_ids(2, 6)
    paper = fisher_information(loaded, [ids])
    code = fisher_information(loaded, [ids], form="code")
    assert paper is not None
    assert code is not None
    for facts in loaded.layout.layers:
        assert len(paper["keys"][facts.index]) == facts.num_kv_heads
        for head in range(facts.num_kv_heads):
            slices = SMALL[arch][0](loaded.model, facts.index, head)
            for side, weight in slices.items():
                mean = differences(loaded.model, weight, ids).square().mean(0)
                assert paper[side][facts.index][head] == pytest.approx(float(mean.sum()), rel=2e-3)
                root = float(mean.sqrt().mean())
                assert code[side][facts.index][head] == pytest.approx(root, rel=5e-3)


def test_a_batch_is_its_sequences_one_by_one() -> None:
    loaded = wrap_model(tiny("Llama"))
    ids = token_ids(3, 12)
    assert fisher_information(loaded, [ids]) == fisher_information(
        loaded, [ids[:1], ids[1:2], ids[2:]]
    )


def test_the_model_is_left_as_it_was() -> None:
    loaded = wrap_model(tiny("Llama"))
    weights = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    parameters = dict(loaded.model.named_parameters())
    for number, parameter in enumerate(parameters.values()):
        parameter.requires_grad_(number % 3 == 0)
    chosen = parameters["model.layers.1.self_attn.k_proj.weight"]
    chosen.grad = torch.ones_like(chosen)
    wanted = {name: value.requires_grad for name, value in parameters.items()}

    fisher_information(loaded, [token_ids(1, 8)])

    assert {name: value.requires_grad for name, value in parameters.items()} == wanted
    assert torch.equal(chosen.grad, torch.ones_like(chosen))
    assert all(value.grad is None for value in parameters.values() if value is not chosen)
    assert all(torch.equal(value, weights[k]) for k, value in loaded.model.state_dict().items())
    assert not loaded.model.training


def test_flags_come_back_after_an_exception() -> None:
    loaded = wrap_model(tiny("Llama"))
    loaded.model.requires_grad_(False)

    def broken() -> Iterator[Tensor]:
        yield token_ids(1, 8)
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        fisher_information(loaded, broken())
    assert not any(value.requires_grad for value in loaded.model.parameters())


def test_it_stops_when_asked() -> None:
    seen: list[int] = []
    loaded = wrap_model(tiny("Llama"))
    result = fisher_information(
        loaded, [token_ids(3, 8)], advance=seen.append, should_stop=lambda: len(seen) == 2
    )
    assert result is None
    assert seen == [8, 8]


def test_what_makes_no_sense_is_refused() -> None:
    loaded = wrap_model(tiny("Llama"))
    with pytest.raises(UsageError):
        fisher_information(loaded, [token_ids()], form="sum")
    with pytest.raises(UsageError, match="Fisher information requires text of two tokens or more"):
        fisher_information(loaded, [])
    with pytest.raises(UsageError):
        fisher_information(wrap_model(tiny("DeepseekV3")), [token_ids()])


def test_a_quantised_projection_is_refused() -> None:
    class Packed(nn.Linear):
        pass

    model = tiny("Llama")
    loaded = wrap_model(model)
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.k_proj = Packed(48, 32, bias=False)
    with pytest.raises(UsageError, match=r"k_proj \(Packed\)"):
        fisher_information(loaded, [token_ids()])
