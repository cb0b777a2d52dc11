"""Rows of a cache can be reordered, picked and repeated, whatever is stored for them."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kvprof.methods.plan import Placement
from kvprof.methods.storage import Eviction
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.codecs import PLAIN
from kvprof.runtime.compressed import Compression, compressed
from kvprof.runtime.rows import Part, remembered_rows
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import loaded, make_plan, ragged
from tests.runtime.test_memory import PLANS

KEYFORMER = {
    "ranks": ragged,
    "placement": Placement.PRE_ROPE,
    "eviction": Eviction("keyformer", 0.4, sink=1, recent_share=0.3),
}


def prompt() -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :6] = 0
    return token_ids(3, 20), mask


def prefilled(session: Compression, order: list[int], *, static: bool) -> CompressedCache:
    ids, mask = prompt()
    made = session.new_cache(capacity=40 if static else None)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    session.loaded.model(
        ids[order], attention_mask=mask[order], position_ids=positions[order], past_key_values=made
    )
    return made


def decoded(session: Compression, cache: CompressedCache, order: list[int]) -> Tensor:
    """Decode two more tokens of the rows in `order`; the second reads what the first left."""
    _, mask = prompt()
    found = []
    for step in range(2):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        found.append(
            session.loaded.model(
                token_ids(3, 1, seed=step)[order],
                attention_mask=mask[order],
                position_ids=mask.sum(1, keepdim=True)[order] - 1,
                past_key_values=cache,
            ).logits
        )
    return torch.cat(found, dim=1)


# Of more layers each stores as these do.
_LAYERS = 2


@cache
def wide() -> LoadedModel:
    return wrap_model(tiny("Llama", num_hidden_layers=_LAYERS).double())


@pytest.mark.parametrize("name", [*PLANS, "keyformer_under_rebuilt_keys"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_rows_take_everything_with_them(name: str, static: bool) -> None:
    # in float64, where a batch's rounding does not tip a quantiser's
    model = wide()
    plan = make_plan(model, **PLANS.get(name, KEYFORMER))
    every = [0, 1, 2]
    with compressed(model, plan) as session, torch.inference_mode():
        wanted = decoded(session, prefilled(session, every, static=static), every)

        moved = prefilled(session, [2, 0, 1], static=static)
        moved.reorder_cache(torch.tensor([1, 2, 0]))
        assert torch.allclose(decoded(session, moved, every), wanted, atol=1e-6)

        beams = prefilled(session, every, static=static)
        beams.reorder_cache(torch.tensor([0, 1, 1]))  # a beam dies, another splits
        found = decoded(session, beams, [0, 1, 1])
        assert torch.allclose(found, wanted[[0, 1, 1]], atol=1e-6)

        some = prefilled(session, every, static=static)
        some.batch_select_indices(torch.tensor([2, 1]))
        some.batch_repeat_interleave(2)
        found = decoded(session, some, [2, 2, 1, 1])
        assert torch.allclose(found, wanted[[2, 2, 1, 1]], atol=1e-6)
        some.reset()
        assert some.get_seq_length() == 0
        assert some.nbytes == 0


@pytest.mark.parametrize("name", PLANS)
def test_what_is_remembered_is_what_is_stored(name: str) -> None:
    model = loaded("Llama", num_hidden_layers=_LAYERS)
    plan = make_plan(model, **PLANS[name])
    ids = token_ids(2, 39)

    def stepped(session: Compression) -> tuple[Tensor, CompressedCache]:
        made = session.new_cache()
        passes = [ids[:, :30], *ids[:, 30:].split(1, dim=1)]
        found = [model.model(one, past_key_values=made).logits for one in passes]
        made.reorder_cache(torch.tensor([1, 0]))
        found.append(model.model(ids[:, :1], past_key_values=made).logits)
        return torch.cat(found, dim=1), made

    with compressed(model, plan, kernels="off") as session, torch.inference_mode():
        wanted, plain = stepped(session)
        with remembered_rows():
            found, kept = stepped(session)
    assert torch.equal(found, wanted)
    assert kept.nbytes == plain.nbytes
    for part in _parts(kept):
        assert part.remembered is not None
        assert torch.equal(part.remembered, replace(part, remembered=None).rows())
    assert all(part.remembered is None for part in _parts(plain))


def _parts(cache: CompressedCache) -> list[Part]:
    """Return what is stored by a quantiser."""
    return [
        part
        for layer in cache.layers
        for row_group in layer.row_groups
        for side in (row_group.keys, row_group.values)
        for parts in side
        for part in parts
        if part.codec is not PLAIN
    ]
