"""What a plan adds to the weights, against what the runtime really holds."""

import pytest
import torch

from kvprof.methods.accounting import running_weights, weight_bytes
from kvprof.methods.family import plan_at
from kvprof.methods.registry import plan_family
from kvprof.runtime.compressed import compressed
from tests.methods.models import FINE, inputs, model
from tests.methods.shapes import group, layer, layout, plan
from tests.models.tiny import token_ids


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
        stacks = [
            stack
            for part in session._layers
            for sides in part._stacks.values()
            for side in sides
            for stack in side
        ]
        for stack in stacks:
            for matrix in (stack.down, stack.up):
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
