"""After any sequence of appends the stored levels equal the paper's rule computed from scratch."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvprof.methods.plan import Placement
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Levels
from kvprof.runtime.codecs import PLAIN
from kvprof.runtime.layer import LayerRuntime
from kvprof.runtime.retention import OwnTokens
from kvprof.runtime.rows import RowGroup
from tests.runtime.plans import loaded, make_plan

RANKS = (5, 11, 32)
BITS = (2, 4, 8)


def rule_from_scratch(tokens: int, sink: int, shares: tuple[float, ...], batch: int) -> list[int]:
    """Return each token's level, -1 for the first tokens (TALE §2.2.1, appendix A).

    The newest tokens have the highest level; a level and those above it hold at most their share
    of the tokens after the sinks, and a token leaves only with a whole batch.
    """
    rest = tokens - sink
    levels = [-1] * min(sink, tokens)
    below = []
    for level in range(len(shares) - 1):
        room = math.floor(sum(shares[level + 1 :]) * rest + 1e-9)
        below.append((rest - room) // batch * batch)
    for place in range(max(0, rest)):
        levels.append(sum(place >= end for end in below))
    return levels


class Appends(RuleBasedStateMachine):
    """One layer's cache under prefills and steps of any length."""

    @initialize(
        sink=st.integers(0, 5),
        recent=st.sampled_from([0.1, 0.3, 0.5]),
        three=st.booleans(),
        batch=st.integers(1, 6),
        quantised=st.booleans(),
        lazy=st.booleans(),
    )
    def start(
        self, sink: int, recent: float, three: bool, batch: int, quantised: bool, lazy: bool
    ) -> None:
        self.shares = (0.9 - recent, recent, 0.1) if three else (1 - recent, recent)
        self.ranks = RANKS if three else RANKS[1:]
        self.bits = BITS if three else BITS[1:]
        self.sink, self.batch = sink, batch
        model = loaded("Llama")
        plan = make_plan(
            model,
            heads=2,
            placement=Placement.NONE,
            oblique=False,
            lazy=lazy,
            levels=Levels(sink, self.shares, batch),
            ranks=lambda *a: self.ranks,
            fold_values=(False, False),
            quantiser=per_token(self.bits, group=None) if quantised else None,
        )
        self.quantised = quantised
        self.group = plan.layers[0].values.groups[0]
        self.runtime = LayerRuntime(plan, 0, model.layout.layers[0], {})
        self.row_group = RowGroup([0, 1])
        self.values = torch.zeros(2, 2, 0, 16)

    @rule(tokens=st.sampled_from([1, 1, 1, 2, 7, 19]))
    def append(self, tokens: int) -> None:
        seed = self.values.shape[2]
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(2, 4, tokens, 16, generator=generator)
        k, v = (torch.randn(2, 2, tokens, 16, generator=generator) for _ in range(2))
        past = self.row_group.stored
        visible = torch.ones(tokens, past + tokens).tril(past).bool().expand(2, 1, -1, -1)
        own = OwnTokens(q, k, v, None, visible, past, tokens > 1, {}, None, None, 128)
        output = self.runtime.run(self.row_group, own)
        assert output.isfinite().all()
        self.values = torch.cat([self.values, v], dim=2)

    @invariant()
    def levels_are_the_rules(self) -> None:
        if not hasattr(self, "row_group") or not self.row_group.values:
            return
        seen = self.values.shape[2]
        expected = rule_from_scratch(seen, self.sink, self.shares, self.batch)
        parts = self.row_group.values[0]
        assert sum(part.tokens for part in parts) == seen
        latents = self.latents()
        place = 0
        for part in parts:
            for token in range(place, place + part.tokens):
                level = expected[token]
                assert part.width == self.ranks[level]
                plain = level < 0 or not self.quantised
                assert (part.codec == PLAIN) == plain
                if not plain:
                    assert part.codec.bits == self.bits[level]
            wanted = latents[:, :, place : place + part.tokens, : part.width]
            if not self.quantised or part.codec == PLAIN:
                assert torch.allclose(part.rows(), wanted, atol=1e-5)
            place += part.tokens

    def latents(self) -> Tensor:
        joined = torch.cat(list(self.values.unbind(1)), dim=-1)
        return (joined @ self.group.down).unsqueeze(1)


Appends.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestAppends = Appends.TestCase
