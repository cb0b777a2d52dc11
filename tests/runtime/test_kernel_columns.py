"""Columns with bits of their own on the kernels say what the torch path says of the same plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.storage import Levels, Quantiser, SideQuantiser
from kvprof.models.load import LoadedModel
from kvprof.runtime.backends.support import kernel_reasons
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_cache import holes_go_on, rows_move
from tests.runtime.test_kernel_generation import error, generated, in_pieces, model_of
from tests.runtime.test_kernel_segments import A_FEW_CODES

RUNS = (((16, 3), (16, 0)), ((16, 4), (16, 2)), ((16, 8), (16, 3)), ((32, 3),), ((32, 2),))


def by_column(
    arch: str = "Llama",
    *,
    model: LoadedModel | None = None,
    window: int = 5,
    runs: Any = RUNS,
    **options: Any,
) -> Plan:
    side = SideQuantiser(())
    quantiser = Quantiser(
        "uniform-rms", side, side, window=window, scale_dtype="float8_e4m3fn", **options
    )
    plan = make_plan(model or model_of(arch), levels=Levels(2))
    number = iter(range(10**6))

    def own(groups: tuple[HeadGroup, ...]) -> tuple[HeadGroup, ...]:
        return tuple(replace(x, column_bits=runs[next(number) % len(runs)]) for x in groups)

    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=own(layer.keys.groups)),
            values=replace(layer.values, groups=own(layer.values.groups)),
        )
        for layer in plan.layers
    ]
    return replace(plan, layers=tuple(layers), quantiser=quantiser)


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "GPT2"])
@pytest.mark.parametrize("window", [0, 5])
def test_it_says_what_the_torch_path_says(arch: str, window: int) -> None:
    """Batch of 3 with left padding."""
    plan = by_column(arch, window=window)
    found, wanted = (generated(model_of(arch), plan, kernels) for kernels in ("on", "off"))
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < A_FEW_CODES
    assert found.nbytes == wanted.nbytes


@pytest.mark.parametrize("capacity", [None, 40])
def test_a_prompt_may_come_in_pieces(capacity: int | None) -> None:
    plan, cuts = by_column(), [0, 4, 13, 14, 27, 28, 29]
    found, *sizes = in_pieces(model_of("Llama"), plan, "on", cuts, capacity)
    wanted, *others = in_pieces(model_of("Llama"), plan, "off", cuts, capacity)
    assert float((found - wanted).norm() / wanted.norm()) < A_FEW_CODES
    assert sizes[0] == others[0]


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}])
def test_other_ways_to_decode_agree_too(options: dict[str, Any]) -> None:
    plan = by_column()
    found, wanted = (
        generated(model_of("Llama"), plan, kernels, **options) for kernels in ("on", "off")
    )
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < A_FEW_CODES


def test_rows_take_everything_with_them() -> None:
    mask = torch.ones(3, 14, dtype=torch.long)
    mask[1, :4] = 0
    rows_move(model_of("Llama"), by_column(), "on", mask)


def test_a_step_that_no_kernel_runs_goes_on_with_the_same_codes() -> None:
    """A row that was quantised has another root mean square: its scale is taken along."""
    holes_go_on(model_of("Llama"), by_column())


def test_bytes_are_those_of_the_account() -> None:
    model, plan = model_of("Llama"), by_column()
    with compressed(model, plan, "on") as session, torch.inference_mode():
        cache = session.new_cache()
        model.model(token_ids(1, 50), past_key_values=cache)
        assert cache.nbytes == bytes_at(plan, 50, itemsize=4).total


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"runs": (((16, 2), (16, 4)),)}, "bits of KV head 0"),
        ({"runs": (((16, 0), (16, 4)),)}, "bits of KV head 0"),
        ({"runs": (((24, 4), (8, 2)),)}, "24 columns"),
        ({"block": 8}, "blocks of 8"),
    ],
)
def test_what_the_kernels_do_not_know_is_said(options: dict[str, Any], reason: str) -> None:
    loaded, plan = model_of("Llama"), by_column(**options)
    (found,) = set(kernel_reasons(plan, loaded.layout, loaded.device, loaded.dtype, loaded))
    assert reason in found
