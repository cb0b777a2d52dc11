"""What fits, against counting token by token and against what the runtime really holds."""

from itertools import pairwise

import pytest
import torch

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, weight_bytes
from kvprof.methods.family import plan_at
from kvprof.methods.fit import Memory, fit_plan, largest_context, peak_bytes, running_weights
from kvprof.methods.quantisers import kivi, kvquant, per_token
from kvprof.methods.registry import plan_family
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.runtime.compressed import compressed
from tests.methods.models import FINE, inputs, model
from tests.methods.shapes import group, layer, layout, plan
from tests.models.tiny import token_ids

LOW = tuple(group(head, 1, 16, (5,)) for head in range(2))
TALE = tuple(group(head, 1, 16, (6, 16)) for head in range(2))
PLANS = {
    "full": plan(layer(), layer()),
    "low": plan(layer(LOW, LOW)),
    "per_token": plan(layer(LOW, LOW), quantiser=per_token((4,), group=None)),
    "kivi": plan(layer(), quantiser=kivi((2,), group=32, window=128, block=32)),
    "kvquant": plan(layer(), quantiser=kvquant((3,), block=64), levels=Levels(1)),
    "tale": plan(layer(values=TALE, levels=2), levels=Levels(4, (0.9, 0.1))),
    "tale_in_batches": plan(layer(values=TALE, levels=2), levels=Levels(4, (0.7, 0.3), 24)),
    "tale_kivi": plan(
        layer(values=TALE, levels=2),
        levels=Levels(4, (0.9, 0.1), 32),
        quantiser=kivi((2, 4), group=32, window=0, block=32),
    ),
    # The two rules fall out of step: a peak of both can lie well behind the last length that fits.
    "out_of_step": plan(
        layer(values=TALE, levels=2),
        levels=Levels(4, (0.5, 0.5), 32),
        quantiser=kivi((2, 4), group=16, window=0, block=16),
    ),
    "evicting": plan(layer(), eviction=Eviction("recent", 0.3)),
    "evicting_in_blocks": plan(
        layer(),
        quantiser=Quantiser("affine", SideQuantiser((2,)), SideQuantiser((2,)), 40, 16),
        eviction=Eviction("h2o", 0.3, recent_share=0.5),
    ),
    "windowed": plan(layer(window=9), layer()),
}  # fmt: skip


def counted(sizes, room):
    """Return the last length before the first that does not fit, of the bytes of 1, 2, … tokens."""
    return next(tokens for tokens, size in enumerate(sizes) if size > room)


@pytest.mark.parametrize("name", PLANS)
def test_the_longest_context_is_the_one_that_counting_finds(name):
    made = PLANS[name]
    sizes = [bytes_at(made, tokens, itemsize=2).total for tokens in range(1, 1200)]
    for tokens in (1, 3, 40, 131, 159, 160, 161, 300, 511, 700, 1000):
        for slack in (-1, 0, 1, 57):
            room = bytes_at(made, tokens, itemsize=2).total + slack
            assert largest_context(made, room, itemsize=2) == counted(sizes, room)


@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_the_largest_of_all_shorter_lengths(name):
    made = PLANS[name]
    for tokens in (1, 7, 129, 160, 192, 333, 1024):
        sizes = [bytes_at(made, length, itemsize=2).total for length in range(1, tokens + 1)]
        assert peak_bytes(made, tokens, itemsize=2) == max(sizes)


def test_blocks_that_are_quantised_make_the_bytes_fall():
    """Or the search above would be tested on lines only."""
    sizes = [bytes_at(PLANS["kivi"], n, itemsize=2).total for n in range(150, 400)]
    assert any(b < a for a, b in pairwise(sizes))


def test_windows_alone_have_no_limit():
    made = plan(layer(window=9))
    assert largest_context(made, 8 * 64 * 2, itemsize=2) is None
    assert largest_context(made, 8 * 64 * 2 - 1, itemsize=2) == 7
    assert largest_context(made, 100, itemsize=2) == 0


def test_memory_goes_to_the_reserve_and_the_weights_first():
    made, facts = plan(layer()), layout()  # 128 bytes per token
    memory = Memory(total=100_000, reserve=10_000, weights=77_200)
    fit = fit_plan(made, memory, facts, itemsize=2, batches=(1, 8, 200), contexts=(10, 100, 101))
    assert fit.room == 12_800
    assert fit.contexts == {1: 100, 8: 12, 200: 0}
    assert fit.batches == {10: 10, 100: 1, 101: 0}
    short = Memory(total=100_000, reserve=10_000, weights=95_000)
    assert short.lacking == 5_000
    none = fit_plan(made, short, facts, itemsize=2, batches=(1,), contexts=(10,))
    assert (none.room, none.contexts, none.batches) == (-5_000, {1: 0}, {10: 0})


def test_sizes_that_make_no_sense_are_refused():
    for total, reserve in ((0, 0), (-5, 0), (10, 10), (10, -1)):
        with pytest.raises(UsageError):
            Memory(total, reserve, 0)
    memory = Memory(1000, 0, 0)
    for asked in ({"batches": (0,), "contexts": ()}, {"batches": (), "contexts": (4, -1)}):
        with pytest.raises(UsageError, match="makes no sense"):
            fit_plan(plan(layer()), memory, layout(), itemsize=2, **asked)


def test_input_projections_keep_their_width_and_w_o_does_not():
    facts = layout()  # 8 query heads, 2 KV heads of 16, hidden 128
    values = tuple(group(head, 1, 16, (6,)) for head in range(2))
    made = plan(layer(values=values, fold_values=(True, True)))
    weights = running_weights(made, facts, itemsize=2)
    assert weights.added == 2 * 128 * 8 * (6 - 16)
    assert weights.added > weight_bytes(made, facts, itemsize=2).total
    # The model's own W_V and W_O, and the bases that were folded.
    assert weights.beside == 2 * (128 * 2 * 16 + 128 * 8 * 16 + 2 * 2 * 16 * 6)


@pytest.mark.parametrize("arch", ["Llama", "Phi3", "GPT2", "Qwen3"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("fdc", {}), ("kq", {}), ("palu", {"heads": 2}), ("tale", {"heads": 2}), ("full", None)],
)
def test_the_runtime_holds_what_is_counted(arch, method, options):
    loaded = model(arch)
    settings = {} if options is None else {**FINE, **options}
    made = plan_at(plan_family(method, inputs(arch), **settings), 0.3 if settings else 0.0)
    BIASES.clear()  # another model's may have lain where a weight of this one lies now
    before = tensors_of(loaded.model)
    with compressed(loaded, made) as session:
        inside = tensors_of(loaded.model)
        # Weights that left the model for the while are kept to be put back.
        held = {**before, **inside}
        loaded.model(token_ids(1, 4))  # bases go to the device with the first pass
        bundles = [
            bundle
            for part in session._layers
            for sides in part._bundles.values()
            for side in sides
            for bundle in side
        ]
        for bundle in bundles:
            for matrix in (bundle.down, bundle.up):
                if matrix is not None:
                    held[matrix.data_ptr()] = matrix.nbytes
        weights = running_weights(made, loaded.layout, itemsize=4)
        biases = sum(size for at, size in inside.items() if at not in before and at in BIASES)
        grown = sum(held.values()) - sum(before.values()) - biases
        assert weights.added + weights.beside == grown


BIASES: dict[int, int] = {}


def tensors_of(module: torch.nn.Module) -> dict[int, int]:
    found = {}
    for name, weight in module.named_parameters():
        found[weight.data_ptr()] = weight.nbytes
        if name.endswith("bias"):
            BIASES[weight.data_ptr()] = weight.nbytes
    return found
