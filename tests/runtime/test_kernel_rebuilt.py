"""Keys rebuilt before RoPE, and latents that heads share, on the kernels as on the torch path."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import Placement
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.runtime.backends import slots, state
from kvprof.runtime.backends.rebuilt import FoldedKernelLayer, RebuiltKernelLayer
from kvprof.runtime.compressed import compressed
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_cache import rows_move
from tests.runtime.test_kernel_generation import error, generated

# Two groups of two; QK-norm; QK-norm and neighbours as pairs; partial RoPE; one layer without RoPE;
# no RoPE; sinks; soft-caps.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4,
              "num_hidden_layers": 2},
    "Qwen3": {"head_dim": 32, "num_hidden_layers": 2},
    "Cohere": {"head_dim": 32, "num_hidden_layers": 2},
    "GPTNeoX": {"num_attention_heads": 2, "num_hidden_layers": 2},
    "SmolLM3": {"head_dim": 32},
    "GPT2": {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2},
    "GptOss": {"head_dim": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "Gemma2": {"head_dim": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
}  # fmt: skip


def part(layer: int, side: str, first: int, width: int) -> tuple[int, ...]:
    """Keep 16 to `width` columns, other ones for each layer, side and group."""
    return (16 * (1 + (layer + first + (side == "keys")) % (width // 16)),)


PLANS: dict[str, dict[str, Any]] = {
    "palu": {"heads": 2, "ranks": part, "fold_keys": True},
    "online": {"heads": 2, "ranks": part, "fold_values": (False, False)},
    "turned_back": {"heads": 2, "ranks": part, "fold_values": (True, False)},
    "alone": {"heads": 1, "ranks": part},
    "whole_values": {"heads": 1, "ranks": part, "project_values": False},
}


@cache
def model_of(arch: str) -> LoadedModel:
    return wrap_model(tiny(arch, **CONFIGS[arch]))


def palu(model: LoadedModel, name: str = "palu", **options: Any) -> Any:
    return make_plan(model, **{"placement": Placement.PRE_ROPE, **PLANS[name], **options})


@pytest.mark.parametrize("arch", CONFIGS)
def test_greedy_tokens_logits_and_bytes_are_those_of_the_torch_path(arch: str) -> None:
    """Batch of 3 with left padding."""
    model = model_of(arch)
    names = {"Llama": [*PLANS], "Qwen3": ["palu", "online"]}.get(arch, ["palu"])
    for name in names:
        plan = palu(model, name)
        found, wanted = generated(model, plan, "on"), generated(model, plan, "off")
        assert torch.equal(found.sequences, wanted.sequences), name
        assert error(found, wanted) < 1e-5, name
        assert found.nbytes == wanted.nbytes, name


def test_full_rank_says_what_the_model_says() -> None:
    model = model_of("Llama")
    plan = palu(model, ranks=lambda *given: (given[3],))
    found, wanted = generated(model, plan, "on"), generated(model, None, "off")
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-4


def test_heads_that_share_latents_after_rope_run_too() -> None:
    model = model_of("Llama")
    for fold in (True, True), (False, False):
        plan = palu(model, placement=Placement.POST_ROPE, fold_keys=False, fold_values=fold)
        found, wanted = generated(model, plan, "on"), generated(model, plan, "off")
        assert error(found, wanted) < 1e-5
        assert found.nbytes == wanted.nbytes


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "num_beams": 2},
        {"use_cache": False},
    ],
    ids=["beams", "beam_sampled", "static", "static_beams", "no_cache"],
)
def test_other_ways_to_decode_agree_too(options: dict[str, Any]) -> None:
    model = model_of("Llama")
    plan = palu(model)
    found, wanted = (generated(model, plan, kernels, **options) for kernels in ("on", "off"))
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-5


def run(
    model: LoadedModel,
    plan: Any,
    kernels: str,
    cuts: list[int],
    *,
    capacity: int | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Return the logits of a batch that comes in pieces, and its cache."""
    shown = torch.ones(3, cuts[-1], dtype=torch.long) if mask is None else mask
    ids, found = token_ids(3, cuts[-1]), []
    with compressed(model, plan, kernels) as session, torch.inference_mode():
        session.route.least_tokens = 0
        made = session.new_cache(capacity)
        for start, stop in pairwise(cuts):
            given: dict[str, Any] = {} if mask is None else {"attention_mask": mask[:, :stop]}
            if positions is not None:
                given["position_ids"] = positions[:, start:stop]
            found.append(model.model(ids[:, start:stop], past_key_values=made, **given).logits)
    return torch.cat(found, 1)[shown.bool()], made


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def padded(length: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, :9] = 0
    mask[2, :1] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(
    ("arch", "capacity"),
    [("Llama", None), ("Llama", 40), ("GPT2", 40)],
    ids=["dynamic", "static", "folded_static"],
)
def test_any_pieces_of_any_length_agree(arch: str, capacity: int | None) -> None:
    """Rows that begin in a later piece; bytes are the account's."""
    model = model_of(arch)
    plan = palu(model)
    mask, positions = padded(40)
    wanted, _ = run(model, plan, "off", [0, 40], mask=mask, positions=positions)
    account = sum(bytes_at(plan, tokens, itemsize=4).total for tokens in (40, 31, 39))
    for cuts in ([0, 40], [0, 3, 6, 7, 8, 11, 40], [0, 21, 22, 23, 25, 40], list(range(41))):
        found, made = run(
            model, plan, "on", cuts, capacity=capacity, mask=mask, positions=positions
        )
        assert apart(found, wanted) < 1e-5, cuts
        assert made.nbytes == account
        if capacity is not None:
            assert made.allocated_bytes == 3 * bytes_at(plan, 40, itemsize=4).total


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0,
             "original_max_position_embeddings": 16},
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_keys_turn_by_the_angles_of_their_own_pass(rope: str) -> None:
    """Frequencies that change once the sequence is long, and tables with a factor in them."""
    config = {**CONFIGS["Llama"], "max_position_embeddings": 16, "rope_parameters": ROPES[rope]}
    model = wrap_model(tiny("Llama", **config))
    plan = palu(model)
    mask, positions = padded(40)
    cuts = [0, 14, 15, 20, *range(21, 41)]
    wanted, _ = run(model, plan, "off", cuts, mask=mask, positions=positions)
    found, _ = run(model, plan, "on", cuts, mask=mask, positions=positions)
    assert apart(found, wanted) < 1e-5
    if rope == "dynamic":  # or the case would be none
        whole, _ = run(model, plan, "off", [0, 40], mask=mask, positions=positions)
        assert apart(whole, wanted) > 1e-2


@pytest.mark.parametrize("capacity", [None, 24], ids=["dynamic", "static"])
def test_rows_may_have_positions_of_their_own(capacity: int | None) -> None:
    """Given late: until then one row of angles serves all."""
    model = model_of("Llama")
    plan = palu(model)
    steps = torch.tensor([[1], [3], [2]]) * torch.arange(24)
    for positions in (steps, torch.where(torch.arange(24) < 9, torch.arange(24), steps)):
        cuts = [0, 9, 10, 11, 15, *range(16, 25)]
        one, other = (
            run(model, plan, kernels, cuts, positions=positions, capacity=capacity)[0]
            for kernels in ("on", "off")
        )
        assert apart(one, other) < 1e-5
    ids, found = token_ids(3, 24), []
    for kernels in ("on", "off"):
        with compressed(model, plan, kernels) as session, torch.inference_mode():
            made, logits = session.new_cache(capacity), []
            for start, stop in pairwise([0, 9, 10, 16, 17]):
                given = {"position_ids": steps[:, start:stop]} if start >= 10 else {}
                output = model.model(ids[:, start:stop], past_key_values=made, **given)
                logits.append(output.logits)
            found.append(torch.cat(logits, 1))
    assert apart(found[0], found[1]) < 1e-5


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_rows_take_everything_with_them(kernels: str) -> None:
    model = model_of("Llama")
    mask, _ = padded(14)
    rows_move(model, palu(model), kernels, mask)


def test_tokens_can_be_taken_back() -> None:
    model = model_of("Llama")
    ids = token_ids(2, 12)
    with compressed(model, palu(model), "on") as session, torch.inference_mode():
        wanted = model.model(ids, past_key_values=session.new_cache()).logits
        made = session.new_cache()
        model.model(ids[:, :5], past_key_values=made)
        other = token_ids(2, 6, seed=7)
        model.model(other, position_ids=torch.arange(40, 46)[None], past_key_values=made)
        made.crop(-6)
        found = [model.model(ids[:, t : t + 1], past_key_values=made).logits for t in range(5, 12)]
    assert torch.allclose(torch.cat(found, 1), wanted[:, 5:], atol=1e-5)


@pytest.mark.parametrize("arch", ["Llama", "Cohere", "SmolLM3"])
def test_a_mask_with_holes_takes_keys_and_angles_to_the_torch_path(arch: str) -> None:
    model = model_of(arch)
    plan = palu(model)
    mask, positions = padded(24)
    torn = mask.clone()
    torn[0, 8:11] = 0
    cuts = [0, 14, 15, 17, *range(18, 25)]

    def logits(kernels: str) -> tuple[Tensor, Any]:
        ids, found = token_ids(3, 24), []
        with compressed(model, plan, kernels) as session, torch.inference_mode():
            session.route.least_tokens = 0
            made = session.new_cache()
            for start, stop in pairwise(cuts):
                shown = (torn if start >= 15 else mask)[:, :stop]
                found.append(
                    model.model(
                        ids[:, start:stop],
                        attention_mask=shown,
                        past_key_values=made,
                        position_ids=positions[:, start:stop],
                    ).logits
                )
            return torch.cat(found, 1)[torn.bool()], made

    (wanted, old), (found, new) = logits("off"), logits("auto")
    assert apart(found, wanted) < 1e-5
    assert new.nbytes == old.nbytes
    assert "the attention mask hides more" in new.left


def test_layers_with_windows_run_beside_layers_on_the_kernels() -> None:
    """Which rotate by other angles (Gemma 3)."""
    model = wrap_model(tiny("Gemma3", head_dim=32))
    plan = palu(model)
    mask, positions = padded(20)
    cuts = [0, 12, 13, 14, 18, 19, 20]
    wanted, old = run(model, plan, "off", cuts, mask=mask, positions=positions)
    found, new = run(model, plan, "auto", cuts, mask=mask, positions=positions)
    assert [layer.planes is not None for layer in new.layers] == [False, True, False]
    assert apart(found, wanted) < 1e-5
    assert new.nbytes == old.nbytes
    with (
        pytest.raises(UsageError, match=r"layer 0 cannot run .*before RoPE in a sliding"),
        compressed(model, plan, "on"),
    ):
        pass


def test_each_layer_has_its_own_way() -> None:
    model = model_of("SmolLM3")  # the second layer has no RoPE
    with compressed(model, palu(model), "on") as session:
        kinds = [type(layer) for layer in session.route._layers]
    assert kinds == [RebuiltKernelLayer, FoldedKernelLayer, RebuiltKernelLayer]


def test_a_table_that_means_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of a table that differ: no pair has an angle of its own."""
    model = model_of("Llama")
    embedding = model.model.model.rotary_emb
    whole = type(embedding).forward

    def unlike(self: Any, *given: Any, **named: Any) -> Any:
        cos, sin = whole(self, *given, **named)
        return cos, torch.cat([sin[..., :16], -sin[..., 16:]], dim=-1)

    monkeypatch.setattr(type(embedding), "forward", unlike)
    with (
        compressed(model, palu(model), "on"),
        torch.inference_mode(),
        pytest.raises(FailedError),
    ):
        model.model(token_ids(2, 9))


def test_half_precision_runs() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = wrap_model(tiny("Llama", **CONFIGS["Llama"]).to(dtype))
        found, wanted = (generated(model, palu(model), kernels) for kernels in ("on", "off"))
        first = (found.logits[0] - wanted.logits[0]).norm() / wanted.logits[0].norm()
        assert first < 3e-2
        assert found.nbytes == wanted.nbytes


def test_a_graph_reads_angles_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as kvprof's own runner gives them: no positions first, one for all rows then."""
    model = model_of("Llama")
    padded = torch.ones(2, 13, dtype=torch.long)
    padded[1, :4] = 0
    with compressed(model, palu(model), "on") as session, torch.no_grad():
        cache = session.new_cache(40)
        model.model(token_ids(2, 13), past_key_values=cache)
        model.model(token_ids(2, 1), past_key_values=cache)
        with monkeypatch.context() as capturing:
            for module in (slots, state):
                capturing.setattr(module, "is_capturing", lambda device: True)
            position = torch.full((1, 1), 14)
            model.model(token_ids(2, 1), position_ids=position, past_key_values=cache)
        where = cache.kernels.tables._of[0].both.data_ptr()
        cache.reset()
        model.model(token_ids(2, 13), past_key_values=cache)
        assert cache.kernels.tables._of[0].both.data_ptr() == where
        cache.reset()
        with pytest.raises(UsageError, match="make a new cache"):
            model.model(token_ids(2, 13), attention_mask=padded, past_key_values=cache)
