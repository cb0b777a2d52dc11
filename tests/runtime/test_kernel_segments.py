"""Quantised latents and levels on the kernels say what the torch path says of the same plan."""

import gc
import weakref
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from kvprof.errors import UsageError
from kvprof.kernels.decode.step import DecodeStep
from kvprof.kernels.quantized import append
from kvprof.kernels.quantized.codes import Quantised, quantise
from kvprof.kernels.quantized.step import SegmentsStep
from kvprof.methods.low_rank import identity_layer
from kvprof.methods.plan import HeadGroup, Placement, Plan
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Levels, Quantiser, SideQuantiser
from kvprof.models.load import LoadedModel
from kvprof.runtime import retention
from kvprof.runtime.backends import segments, stages
from kvprof.runtime.codecs import Codec, codec_for
from kvprof.runtime.compressed import compressed
from tests.kernels.dequantised import dequantised
from tests.models.tiny import token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_cache import holes_go_on, rows_move
from tests.runtime.test_kernel_generation import error, generated, half, in_pieces, model_of

TWO = Levels(2, (0.7, 0.3))
# What float32 rounds otherwise may lie at the border of two codes; a token in a wrong slot, or
# rounded twice, makes fifty times as much.
A_FEW_CODES = 5e-4


def aging(layer: int, side: str, first: int, width: int) -> tuple[int, ...]:
    """Lose 16 of 32 columns with age, some heads none."""
    return (16 if (layer + first) % 3 else 32, 32)


def fp8(**options: Any) -> Quantiser:
    side = SideQuantiser((8,))
    return Quantiser("fp8", side, side, **options)


PLANS: dict[str, dict[str, Any]] = {
    "tale": {"ranks": aging, "placement": Placement.NONE, "levels": TWO, "lazy": True,
             "fold_values": (False, True)},
    "tale_turned_back": {"ranks": aging, "levels": TWO, "lazy": True,
                         "fold_values": (False, False)},
    "levels": {"ranks": aging, "levels": TWO},
    "no_recent_level": {"ranks": aging, "levels": Levels(3, (1.0, 0.0))},
}  # fmt: skip
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"placement": Placement.NONE, "project_values": False, "quantiser": fp8()},
    "fp8 scaled": {"placement": Placement.NONE, "project_values": False, "quantiser": fp8(),
                   "scaled": True},
    "8-bit": {"ranks": half, "quantiser": per_token((8,))},
    "k8v4": {"ranks": half, "quantiser": replace(per_token((8,)), values=per_token((4,)).values)},
    "k4v8": {"ranks": half, "quantiser": replace(per_token((4,)), values=per_token((8,)).values)},
    "left_out": {"ranks": half, "quantiser": per_token((8,)), "left_out": True},
    "window": {"ranks": half, "quantiser": replace(per_token((8,), group=None), window=5),
               "levels": Levels(2)},
    "uncompressed": {"ranks": half, "quantiser": per_token((8,)), "prefill_uncompressed": True},
    "values": {"ranks": half, "quantiser": replace(per_token((8,), group=16), keys=None)},
    "levels": {"ranks": aging, "levels": TWO, "quantiser": per_token((8, 8))},
    "tale": {"ranks": aging, "placement": Placement.NONE, "levels": TWO, "lazy": True,
             "quantiser": per_token((8, 8)), "fold_values": (False, True)},
    "by_layer": {"ranks": half, "by_layer": ((8, None), (None, 8), (None, None))},
}  # fmt: skip


def model_for(arch: str, options: dict[str, Any]) -> LoadedModel:
    return model_of(arch, len(options.get("by_layer", ())) or 2)


def plan_of(arch: str, options: dict[str, Any]) -> Plan:
    return plan_for(model_for(arch, options), options)


def plan_for(model: LoadedModel, options: dict[str, Any]) -> Plan:
    """Build a plan of the tables above, which have words that `make_plan` does not know."""
    turned = {key: options[key] for key in ("scaled", "left_out", "by_layer") if key in options}
    plan = make_plan(model, **{k: v for k, v in options.items() if k not in turned})
    if "by_layer" in turned:
        plan = with_own_bits(plan, turned["by_layer"])
    if "left_out" in turned:
        facts = model.layout.layers[-1]
        last = replace(identity_layer(facts, len(plan.levels.shares)), left_out=True)
        plan = replace(plan, layers=(*plan.layers[:-1], last))
    return with_scales(plan) if "scaled" in turned else plan


def with_own_bits(plan: Plan, bits: tuple[tuple[Any, Any], ...]) -> Plan:
    """Give a layer's keys and values bits of their own, by head where there are several."""

    def groups(own: Any, old: tuple[HeadGroup, ...]) -> tuple[HeadGroup, ...]:
        every = own if isinstance(own, tuple) else (own,) * len(old)
        return tuple(
            replace(x, quantised=False) if n is None else replace(x, column_bits=((x.rank, n),))
            for x, n in zip(old, every, strict=True)
        )

    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=groups(own[0], layer.keys.groups)),
            values=replace(layer.values, groups=groups(own[1], layer.values.groups)),
        )
        for layer, own in zip(plan.layers, bits, strict=False)
    ]
    return replace(plan, layers=tuple(layers), quantiser=per_token((), group=16))


def with_scales(plan: Plan) -> Plan:
    """Give every head's keys and values a scale of their own."""

    def groups(layer: int, side: int, old: tuple[HeadGroup, ...]) -> tuple[HeadGroup, ...]:
        return tuple(
            replace(group, scale=2.0 ** ((3 * layer + 5 * group.first + side) % 9 - 5))
            for group in old
        )

    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=groups(index, 0, layer.keys.groups)),
            values=replace(layer.values, groups=groups(index, 1, layer.values.groups)),
        )
        for index, layer in enumerate(plan.layers)
    ]
    return replace(plan, layers=tuple(layers))


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "GPT2"])
@pytest.mark.parametrize("name", PLANS)
def test_levels_say_what_the_torch_path_says(arch: str, name: str) -> None:
    """Batch of 3 with left padding; nothing is rounded but by float32."""
    plan = plan_of(arch, PLANS[name])
    found, wanted = (generated(model_of(arch), plan, kernels) for kernels in ("on", "off"))
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-5
    assert found.nbytes == wanted.nbytes


@dataclass(frozen=True)
class _FromTheMiddle(Codec):
    """The kernels' own rule of rounding, as the torch path keeps rows."""

    bits: int
    group: int | None

    def encode(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return quantise(rows, self.bits, self.group)._asdict()

    def decode(
        self, stored: dict[str, torch.Tensor], columns: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return dequantised(Quantised(**stored), self.bits, self.group).to(dtype)


@pytest.fixture
def from_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round as the kernels do, so that nothing else may differ."""

    def chosen(
        quantiser: Quantiser,
        side: SideQuantiser | None,
        level: int,
        column_bits: tuple[tuple[int, int], ...] = (),
    ) -> Codec:
        if side is None or quantiser.kind == "fp8":
            return codec_for(quantiser, side, level, column_bits)
        bits = column_bits[0][1] if column_bits else side.bits[level]
        return _FromTheMiddle(bits, side.group)

    monkeypatch.setattr(retention, "codec_for", chosen)


@pytest.mark.parametrize("arch", ["Llama", "GPT2"])
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.usefixtures("from_the_middle")
def test_quantised_latents_say_what_they_say_on_torch(arch: str, name: str) -> None:
    model = model_for(arch, QUANTISED[name])
    plan = plan_for(model, QUANTISED[name])
    found, wanted = (generated(model, plan, kernels) for kernels in ("on", "off"))
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < A_FEW_CODES


@pytest.mark.parametrize("name", ["8-bit", "window", "levels"])
def test_torch_rounds_other_numbers_as_far(name: str) -> None:
    """A group counts from its middle instead of its minimum: as much is lost, at other places."""
    model, cuts = model_of("Llama"), [0, 20, *range(21, 30)]
    options = {**QUANTISED[name]}
    exact = in_pieces(model, make_plan(model, **{**options, "quantiser": None}), "off", cuts)[0]
    found, wanted = (in_pieces(model, make_plan(model, **options), k, cuts) for k in ("on", "off"))
    lost = float((wanted[0] - exact).norm())
    assert 0.8 * lost < float((found[0] - exact).norm()) < 1.25 * lost
    assert float((found[0] - wanted[0]).norm()) < 2 * lost
    assert found[1] == wanted[1]


@cache
def said_off_the_kernels(name: str, cuts: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """Return logits and bytes of a plan of `PLANS` or `QUANTISED` on the torch path, made once."""
    options = {**PLANS, **{f"quantised {key}": own for key, own in QUANTISED.items()}}[name]
    model = model_for("Llama", options)
    return in_pieces(model, plan_for(model, options), "off", [*cuts])[:2]


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("name", [*PLANS, *(f"quantised {name}" for name in QUANTISED)])
@pytest.mark.usefixtures("from_the_middle")
def test_a_prompt_may_come_in_pieces(name: str, capacity: int | None) -> None:
    quantised = name.startswith("quantised ")
    options = QUANTISED[name.removeprefix("quantised ")] if quantised else PLANS[name]
    model = model_for("Llama", options)
    plan = plan_for(model, options)
    cuts = [0, 4, 13, 14, 27, 28, 29]
    found, *sizes = in_pieces(model, plan, "on", cuts, capacity)
    wanted, nbytes = said_off_the_kernels(name, tuple(cuts))
    assert float((found - wanted).norm() / wanted.norm()) < (A_FEW_CODES if quantised else 1e-5)
    assert quantised or sizes[0] == nbytes


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "num_beams": 2},
    ],
    ids=["beams", "static", "static_beams"],
)
@pytest.mark.parametrize("name", ["tale", "levels"])
def test_other_ways_to_decode_agree_too(name: str, options: dict[str, Any]) -> None:
    plan = plan_of("Llama", PLANS[name])
    found, wanted = (
        generated(model_of("Llama"), plan, kernels, **options) for kernels in ("on", "off")
    )
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.usefixtures("from_the_middle")
def test_few_bits_lose_what_they_lose_on_torch(bits: int) -> None:
    """The model says something else, and both ways say the same else."""
    model = model_of("Llama")
    coarse = make_plan(model, quantiser=per_token((bits,), group=16))
    found, wanted = (generated(model, coarse, kernels) for kernels in ("on", "off"))
    assert error(wanted, generated(model, make_plan(model), "off")) > 0.02
    assert error(found, wanted) < A_FEW_CODES


@pytest.mark.parametrize("name", ["tale", "levels"])
def test_rows_take_everything_with_them(name: str) -> None:
    mask = torch.ones(3, 14, dtype=torch.long)
    mask[1, :4] = 0
    rows_move(model_of("Llama"), plan_of("Llama", PLANS[name]), "on", mask)


@pytest.mark.parametrize("name", ["tale", "levels"])
def test_a_mask_with_holes_goes_on_with_what_the_kernels_stored(name: str) -> None:
    holes_go_on(model_of("Llama"), plan_of("Llama", PLANS[name]))


def test_three_bits_lie_in_the_container_of_four_and_say_so() -> None:
    model = model_of("Llama")
    plans = {bits: make_plan(model, quantiser=per_token((bits,), group=16)) for bits in (3, 4)}
    sizes = {}
    for bits, plan in plans.items():
        with compressed(model, plan, "on") as session, torch.inference_mode():
            cache = session.new_cache()
            model.model(token_ids(1, 20), past_key_values=cache)
            sizes[bits] = cache.nbytes
            assert session.kernel_notes == (
                ["the kernels store 3-bit values in 4 bits"] if bits == 3 else []
            )
    assert sizes[3] == sizes[4]
    own = with_own_bits(make_plan(model), ((3, 4), (4, 4), (4, 4)))
    with compressed(model, own, "on") as session:
        assert session.kernel_notes == ["the kernels store 3-bit values in 4 bits"]


def test_heads_of_a_layer_with_unlike_bits_run_on_torch_and_it_is_said() -> None:
    model = model_of("Llama", 3)
    unlike = with_own_bits(make_plan(model), (((8, 4), 8), (8, (8, None)), ((None, None), None)))
    with compressed(model, unlike) as session:
        reasons = [str(reason) for reason in session.kernel_reasons]
    assert "keys" in reasons[0]
    assert "values" in reasons[1]
    assert "different bits" not in reasons[2]
    with pytest.raises(UsageError), compressed(model, unlike, "on"):
        pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantiser": replace(per_token((4,)), block=8)}, "blocks of 8"),
        ({"quantiser": per_token((4,), group=20)}, "groups of 20 columns share a scale"),
        ({"ranks": aging, "levels": Levels(2, (0.7, 0.3), 4)}, "batches of 4"),
        ({"ranks": lambda *_: (7, 32), "levels": TWO}, "7 columns"),
    ],
)
def test_what_the_kernels_do_not_know_is_said(options: dict[str, Any], reason: str) -> None:
    model = model_of("Llama")
    with compressed(model, make_plan(model, **options)) as session:
        assert all(reason in str(own) for own in session.kernel_reasons)


def test_e4m3_has_no_groups() -> None:
    """A group of columns that no scale has asks for nothing."""
    side = SideQuantiser((8,), group=20)
    model, plan = model_of("Llama"), plan_of("Llama", {"quantiser": Quantiser("fp8", side, side)})
    found, wanted = (generated(model, plan, kernels) for kernels in ("on", "off"))
    assert error(found, wanted) < A_FEW_CODES


def test_layers_of_unlike_heads_share_the_kinds_of_the_model() -> None:
    model = model_of("Llama", 3)
    options = {"ranks": lambda layer, _, first, __: (16 if layer == first else 32,)}
    plan = plan_for(model, {**options, "quantiser": per_token((8,))})
    with compressed(model, plan, "on") as session, torch.no_grad():
        cache = session.new_cache()
        model.model(token_ids(1, 13), past_key_values=cache)
        model.model(token_ids(1, 1), past_key_values=cache)
        steps = [step for _, step in cache.kernels.prepared_steps()]
        assert len({step.layout.configs for step in steps}) > 1
        assert {step.configs for step in steps} == {session.route.configs.segments}


@pytest.mark.parametrize("quantised", [True, False])
def test_unlike_layers_are_cut_together_from_their_second_step_on(
    quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("Llama")
    options: dict[str, Any] = {
        "ranks": lambda layer, _, first, __: (16 if layer == first else 32,),
        **({"quantiser": per_token((8,))} if quantised else {}),
    }
    kind = SegmentsStep if quantised else DecodeStep
    seen, whole = [], kind.cut_alike

    def watched(step: Any, tables: torch.Tensor, *lengths: torch.Tensor) -> Any:
        seen.append(len(tables))
        return whole(step, tables, *lengths)

    monkeypatch.setattr(kind, "cut_alike", watched)
    with compressed(model, plan_of("Llama", options), "on") as session, torch.no_grad():
        cache = session.new_cache()
        model.model(token_ids(1, 13), past_key_values=cache)
        for _ in range(3):
            model.model(token_ids(1, 1), past_key_values=cache)
    unlike = seen.count(1)
    assert unlike > 1
    assert seen == [*([1] * unlike), unlike, unlike]


def test_what_a_captured_step_reads_lives_as_long_as_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Constants lie in caches that forget; a graph that is replayed goes on reading them."""
    model = model_of("Llama")
    with compressed(model, plan_of("Llama", QUANTISED["levels"]), "on") as session, torch.no_grad():
        cache = session.new_cache(40)
        model.model(token_ids(2, 13), past_key_values=cache)
        model.model(token_ids(2, 1), past_key_values=cache)
        monkeypatch.setattr(segments, "is_capturing", lambda device: True)
        model.model(token_ids(2, 1), past_key_values=cache)
        step_plan = [held[0] for held in cache.kernels.held]
        read = step_plan[0].newest.keys.columns.first, step_plan[0].step.tables[0]
        known = [weakref.ref(tensor) for tensor in read]
        del step_plan, read
        append._stored.cache_clear()
        stages._on.cache_clear()
        gc.collect()
        assert all(ref() is not None for ref in known)
        del cache, session.cache
        gc.collect()
    assert all(ref() is None for ref in known)


def test_a_cache_that_a_graph_writes_into_stays_where_it_is() -> None:
    model = model_of("Llama")
    for options in (QUANTISED["8-bit"], {"ranks": half}):
        with compressed(model, plan_of("Llama", options), "on") as session, torch.no_grad():
            cache = session.new_cache(40)
            model.model(token_ids(2, 13), past_key_values=cache)
            for layer in cache.layers:
                layer.planes.captured = True
            where = cache.layers[0].planes.buffer.data_ptr()
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.reset()
            model.model(token_ids(2, 7), past_key_values=cache)
            assert cache.layers[0].planes.buffer.data_ptr() == where
            with pytest.raises(UsageError, match="make a new cache"):
                cache.batch_repeat_interleave(2)
            cache.reset()
            with pytest.raises(UsageError):
                model.model(token_ids(3, 7), past_key_values=cache)


def test_a_cache_that_left_the_kernels_comes_back_when_it_is_emptied() -> None:
    model = model_of("Llama")
    with compressed(model, plan_of("Llama", {"ranks": half}), "auto") as session, torch.no_grad():
        session.route.least_tokens = 10
        cache = session.new_cache(40)
        model.model(token_ids(1, 5), past_key_values=cache)
        assert cache.kernels is None
        assert cache.left
        cache.reset()
        model.model(token_ids(1, 12), past_key_values=cache)
        assert cache.kernels is not None
        assert session.kernel_reasons == [None] * len(session.plan.layers)
