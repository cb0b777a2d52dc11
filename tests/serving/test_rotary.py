"""Keys come to the attention as they are before RoPE, where what turned them can be done later."""

import pytest
import torch
from torch import Tensor, nn

from kvprof.errors import UsageError
from kvprof.kernels.reconstruct.reference import turned
from kvprof.serving.rotary import QueriesAlone, keep_keys

HEADS, DEPTH, WIDTH, POSITIONS = 2, 16, 12, 40


class Rotary(nn.Module):
    """An engine's rotary embedding; `by` is what it really turns by, as a factor of its table."""

    def __init__(self, neighbours: bool, by: float = 1.0) -> None:
        super().__init__()
        angles = torch.arange(POSITIONS)[:, None] / 10 ** torch.linspace(0, 1, WIDTH // 2)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.is_neox_style, self.by = not neighbours, by

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        cos, sin = (self.by * self.cos_sin_cache[positions, None]).chunk(2, dim=-1)
        return tuple(
            turned(states.unflatten(1, (-1, DEPTH)), cos, sin, WIDTH, not self.is_neox_style)
            .flatten(1)
            .to(states)
            for states in (query, key)
        )

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None) -> tuple[Tensor, None]:
        assert key is None
        return self.forward_native(positions, query, query)[0], None


def parent_of(*children: nn.Module) -> nn.Module:
    parent = nn.Module()
    for number, child in enumerate(children):
        parent.add_module(f"rope{number}", child)
    return parent


def test_a_form_is_found_out_where_another_device_is_torchs_own() -> None:
    """An engine builds its model so that what names no device lies on the GPU."""
    rotary = Rotary(False)
    parent = parent_of(rotary)
    with torch.device("meta"):
        keep_keys(parent, DEPTH, POSITIONS)
    assert parent.rope0.form.width == WIDTH


@pytest.mark.parametrize("neighbours", [False, True])
def test_queries_alone_turn(neighbours: bool) -> None:
    """Queries come out as the model has them, keys as they went in; the form is found out."""
    rotary = Rotary(neighbours)
    parent = parent_of(rotary, nn.Linear(2, 2))
    keep_keys(parent, DEPTH, POSITIONS)
    own = parent.rope0
    assert isinstance(own, QueriesAlone)
    states = torch.randn(2, 3, HEADS * DEPTH)
    positions = torch.tensor([3, 39, 0])
    query, key = own(positions, *states)
    torch.testing.assert_close(query, rotary.forward_native(positions, *states)[0])
    assert key is states[1] or torch.equal(key, states[1])
    cos, sin = (table[positions, None] for table in own.tables)
    later = own.form.rotated(key.unflatten(1, (HEADS, DEPTH)), cos, sin).flatten(1)
    torch.testing.assert_close(later, rotary.forward_native(positions, *states)[1])


@pytest.mark.parametrize(
    ("children", "longest", "words"),
    [
        ((nn.Linear(2, 2),), 40, "0 rotary embeddings"),
        ((Rotary(True), Rotary(True)), 40, "2 rotary embeddings"),
        ((Rotary(False),), 41, "smaller --max-model-len"),
        ((Rotary(False, by=1.2),), 40, "Rotary"),
    ],
)
def test_what_cannot_be_done_later_is_refused(
    children: tuple[nn.Module, ...], longest: int, words: str
) -> None:
    """One line, before weights are there."""
    with pytest.raises(UsageError, match=words) as caught:
        keep_keys(parent_of(*children), DEPTH, longest)
    assert "\n" not in str(caught.value)
