from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.models.interface import AttentionCall, intercept
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.loss import loss_moments
from tests.models.tiny import tiny, token_ids

SINK, WINDOW, LENGTH = 1, 2, 7
SMALL = {"hidden_size": 8, "head_dim": 4, "num_hidden_layers": 2}
ARCHES = {
    "Llama": SMALL,
    "Gemma2": {
        **SMALL,
        "num_hidden_layers": 1,
        "sliding_window": 64,
        "attn_logit_softcapping": 0.5,
    },
    "GptOss": {**SMALL, "num_hidden_layers": 3, "sliding_window": 64},
}


def small(arch: str) -> LoadedModel:
    model = tiny(arch, **ARCHES[arch])
    # GptOss's experts multiply in float32 and narrower alone.
    return wrap_model(model if arch == "GptOss" else model.double())


@contextmanager
def stored_otherwise(
    loaded: LoadedModel, layer: int, keys: Tensor, values: Tensor
) -> Iterator[None]:
    """Let queries read a layer's tokens with an error, but for the first and the newest."""
    module = loaded.model.get_submodule(loaded.layout.layers[layer].attention)

    def observe(call: AttentionCall) -> Tensor | None:
        if call.module is not module:
            return None
        rows, each = [], call.query.shape[1] // call.key.shape[1]
        for head in range(call.query.shape[1]):
            own = head // each
            for i in range(call.query.shape[2]):
                far = torch.tensor([SINK <= t < i - WINDOW for t in range(i + 1)]).unsqueeze(-1)
                read = [
                    x[0, own, : i + 1] + far * error[own, : i + 1]
                    for x, error in ((call.key, keys), (call.value, values))
                ]
                scores = read[0] @ call.query[0, head, i].to(read[0]) * call.options["scaling"]
                if cap := call.options.get("softcap"):
                    scores = cap * torch.tanh(scores / cap)
                if (sinks := call.options.get("s_aux")) is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].to(scores)])
                rows.append(scores.softmax(-1)[: i + 1] @ read[1])
        shape = (call.query.shape[1], call.query.shape[2], -1)
        return torch.stack(rows).view(shape).transpose(0, 1).unsqueeze(0).to(call.output)

    with intercept(loaded.model, observe, rotary=False):
        yield


def log_chances(loaded: LoadedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = loaded.model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    return found


def errors(loaded: LoadedModel, layer: int, make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    facts = loaded.layout.layers[layer]
    keys, values = (
        make(facts.num_kv_heads, LENGTH, width, dtype=torch.float64)
        for width in (facts.qk_head_dim, facts.v_head_dim)
    )
    return keys, values


@pytest.mark.parametrize("arch", ARCHES)
def test_moments_are_those_of_finite_differences(arch: str) -> None:
    loaded, ids = small(arch), token_ids(1, LENGTH)[0]
    found = loss_moments(loaded, [ids[None]], sink=SINK, window=WINDOW, seed=5)
    assert found is not None
    chances, step = log_chances(loaded, ids), 1e-2 if arch != "GptOss" else 0.1
    drawn = torch.multinomial(chances.exp().float(), 1, generator=torch.Generator().manual_seed(5))
    pair = errors(loaded, 0, torch.zeros)
    slopes = errors(loaded, 0, torch.zeros)
    with stored_otherwise(loaded, 0, *pair):
        torch.testing.assert_close(log_chances(loaded, ids), chances, rtol=1e-4, atol=1e-4)
        for error, slope in zip(pair, slopes, strict=True):
            for place in range(SINK, LENGTH - WINDOW - 1):
                for head, column in torch.cartesian_prod(*map(torch.arange, error[:, 0].shape)):
                    sides = []
                    for sign in (1, -1):
                        error[head, place, column] = sign * step
                        sides.append(float(log_chances(loaded, ids).gather(-1, drawn).sum()))
                    error[head, place, column] = 0
                    slope[head, place, column] = (sides[1] - sides[0]) / (2 * step)
    count = LENGTH - SINK - WINDOW - 1
    joined = slopes[1].transpose(0, 1).flatten(1)
    assert float(joined.abs().max()) > 1e-3
    for moment, wanted in (
        (found.keys[0], slopes[0].mT @ slopes[0] / count),
        (found.values[0], joined.mT @ joined / count),
    ):
        assert float((moment - wanted).norm() / wanted.norm()) < 0.02


def test_they_predict_the_divergence_of_small_errors() -> None:
    """Half of tr(F Σ), summed over tokens, is the divergence that noise in K and V brings."""
    loaded, ids, size = small("Llama"), token_ids(1, LENGTH)[0], 1e-2
    seen = [loss_moments(loaded, [ids[None]], sink=SINK, window=WINDOW, seed=x) for x in range(100)]
    traces = [
        float(x.keys[0].diagonal(dim1=-2, dim2=-1).sum() + x.values[0].trace())
        for x in seen
        if x is not None
    ]
    predicted = 0.5 * size**2 * sum(traces) / len(traces) * (LENGTH - SINK - WINDOW - 1)
    exact = log_chances(loaded, ids)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(80):
        pair = errors(
            loaded, 0, lambda *shape, dtype: torch.randn(shape, generator=generator, dtype=dtype)
        )
        with stored_otherwise(loaded, 0, *(size * x for x in pair)):
            other = log_chances(loaded, ids)
        found.append(float((exact.exp() * (exact - other)).sum()))
    assert sum(found) / len(found) == pytest.approx(predicted, rel=0.25)


def test_the_model_is_left_as_it_was_and_the_batch_does_not_matter() -> None:
    loaded = wrap_model(tiny("Llama", **SMALL))
    parameters = dict(loaded.model.named_parameters())
    for number, parameter in enumerate(parameters.values()):
        parameter.requires_grad_(number % 3 == 0)
    wanted = {name: value.requires_grad for name, value in parameters.items()}
    ids = token_ids(3, 12)
    one = loss_moments(loaded, [ids])
    other = loss_moments(loaded, [ids[:1], ids[1:]])
    assert one is not None
    assert other is not None
    assert all(torch.equal(a, b) for a, b in zip(one.keys, other.keys, strict=True))
    assert {name: value.requires_grad for name, value in parameters.items()} == wanted
    assert all(value.grad is None for value in parameters.values())


def test_it_stops_when_asked_and_needs_text() -> None:
    loaded = wrap_model(tiny("Llama", **SMALL))
    assert loss_moments(loaded, [token_ids(1, 8)], should_stop=lambda: True) is None
    with pytest.raises(UsageError, match="sequences of more than 5 tokens"):
        loss_moments(loaded, [token_ids(1, 4)], sink=2, window=2)
