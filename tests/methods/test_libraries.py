"""HQQ and quanto without the libraries: what they would store, and what is said when they lack."""

import sys

import pytest

from kvprof.errors import LackingError, UsageError
from kvprof.methods.accounting import bytes_at, paper_rate, rate
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import describe
from kvprof.methods.quantisers import from_library
from kvprof.methods.registry import calibration_needs, plan_family
from kvprof.methods.storage import (
    LIBRARIES,
    Quantiser,
    RowLayout,
    SideQuantiser,
    load_library,
    row_layout,
)
from kvprof.runtime.codecs import codec_for
from tests.methods.models import inputs
from tests.methods.shapes import group, layer, plan


@pytest.mark.parametrize(
    ("kind", "bits", "columns", "wanted"),
    [
        ("hqq", 4, 128, RowLayout(2, 64, 32, 1, True)),
        ("hqq", 4, 64, RowLayout(1, 64, 32, 1, True)),
        # Two groups of 40, not one of 64 and one of 16 filled up.
        ("hqq", 4, 80, RowLayout(2, 40, 20, 1, True)),
        ("hqq", 2, 50, RowLayout(1, 52, 13, 1, True)),
        ("hqq", 8, 5, RowLayout(1, 5, 5, 1, True)),
        # Ten codes of 3 bits in a word of 32: 64 need seven words, 28 bytes where 24 would do.
        ("hqq", 3, 64, RowLayout(1, 64, 7, 4, True)),
        ("hqq", 3, 1, RowLayout(1, 1, 1, 4, True)),
        ("quanto", 4, 1, RowLayout(1, 2, 1, 1, True)),
        ("quanto", 2, 65, RowLayout(2, 36, 9, 1, True)),
        # Symmetric: a scale and no zero.
        ("quanto", 8, 128, RowLayout(2, 64, 64, 1, False)),
    ],
)
def test_how_a_row_is_cut_and_packed(kind, bits, columns, wanted):
    assert row_layout(kind, bits, columns, 64) == wanted


@pytest.mark.parametrize("columns", range(1, 140))
def test_every_column_has_a_place_and_no_group_is_all_filling(columns):
    for kind, library in LIBRARIES.items():
        for bits in library.bits:
            for most in (1, 2, 5, 64, None):
                layout = row_layout(kind, bits, columns, most)
                assert layout.groups * layout.width >= columns > (layout.groups - 1) * layout.width
                assert layout.words * layout.word_bytes * 8 >= layout.width * bits
                if most is not None and bits == 8:
                    assert layout.width <= most


def test_the_account_by_hand():
    values = (group(0, 1, 128, (80,)), group(1, 1, 128, (128,)))
    keys = (group(0, 2, 128, (50,)),)
    made = plan(layer(keys, values), quantiser=from_library("hqq", (4,)))
    stored = bytes_at(made, 10, itemsize=2)
    assert stored.keys == 10 * 25
    assert stored.values == 10 * (2 * 20 + 64)
    assert stored.scales == stored.zeros == 10 * 2 * (1 + 2 + 2)
    assert stored.total == stored.keys + stored.values + stored.scales + stored.zeros
    # Scales and zeros are in the model's own dtype.
    assert bytes_at(made, 10, itemsize=4).scales == 2 * stored.scales
    eight = bytes_at(plan(layer(), quantiser=from_library("quanto", (8,))), 10, itemsize=2)
    assert (eight.zeros, eight.scales, eight.keys) == (0, 10 * 2 * 2 * 2, 10 * 2 * 16)


def test_four_bits_of_a_head_of_128_are_4_5_bits_in_bytes():
    made = plan(
        layer((group(0, 1, 128, (128,)),), (group(0, 1, 128, (128,)),)),
        quantiser=from_library("hqq", (4,)),
    )
    assert rate(made, 1000) == pytest.approx(1 - 4.5 / 16)
    assert paper_rate(made) == pytest.approx(1 - 4 / 16)


def test_it_is_described_and_saved_without_the_library(tmp_path):
    made = plan(layer(), quantiser=from_library("quanto", (8,)))
    told = describe(made, 100)["sentences"]
    wanted = "8 bits (quanto, per token); up to 64 columns share a scale in the model's dtype."
    assert f"Keys have {wanted}" in told
    four = plan(layer(), quantiser=from_library("hqq", (3,)))
    assert any(
        "a scale and a zero point in the model's dtype" in x
        for x in describe(four, 100)["sentences"]
    )
    save_plan(made, tmp_path / "plan.safetensors")
    assert load_plan(tmp_path / "plan.safetensors").quantiser == made.quantiser


@pytest.mark.parametrize("kind", LIBRARIES)
def test_what_lacks_is_said_before_anything_is_run(kind, monkeypatch):
    # None in sys.modules is what an import of a missing package comes to.
    monkeypatch.setitem(sys.modules, LIBRARIES[kind].module, None)
    package = LIBRARIES[kind].package
    message = rf"{kind} requires the package {package}.*-m pip install .*{package}"
    side = SideQuantiser((4,), "token", 64)
    for act in (
        lambda: load_library(kind),
        lambda: calibration_needs(kind),
        lambda: calibration_needs(f"kq+{kind}"),
        lambda: plan_family(kind, inputs("Llama")),
        lambda: plan_family(f"kq+{kind}", inputs("Llama")),
        lambda: codec_for(Quantiser(kind, side, side, scale_dtype="model"), side, 0),
    ):
        with pytest.raises(LackingError, match=message) as raised:
            act()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("quantiser", "message"),
    [
        (lambda: from_library("quanto", (3,)), "quanto .* 3 bits; .* 2, 4, 8"),
        (
            lambda: Quantiser("hqq", SideQuantiser((4,), "channel", 8), None, 0, 8, 0.0, "model"),
            "hqq .* channel",
        ),
        (
            lambda: Quantiser("hqq", SideQuantiser((4,)), None),
            "hqq .*'float16'; use model",
        ),
        (
            lambda: Quantiser("affine", SideQuantiser((4,)), None, scale_dtype="model"),
            "affine .*'model'; use float16 or bfloat16 or float32",
        ),
        (
            lambda: Quantiser("hqq", SideQuantiser((4,)), None, outliers=0.1, scale_dtype="model"),
            "hqq .* outliers",
        ),
    ],
)
def test_contradictions_are_refused(quantiser, message):
    with pytest.raises(UsageError, match=message):
        plan(layer(), quantiser=quantiser())
