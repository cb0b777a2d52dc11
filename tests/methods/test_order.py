"""At every rank the optimal pairs lose least on their own calibration data: a property."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.methods.pair_bases import KEY_BASES, VALUE_BASES, SideBases
from tests.methods.shapes import layer_layout

HIDDEN = 20


def vectors(random, heads, tokens, width, decay, fill):
    """Vectors with a decaying spectrum in a turned frame that fill a part of the directions."""
    scales = 10.0 ** (-decay * np.arange(width) / width) * (np.arange(width) < max(1, fill * width))
    turns = np.linalg.qr(random.normal(size=(heads, width, width)))[0]
    return random.normal(size=(heads, tokens, width)) * scales @ turns


def lost(left, right, basis: SideBases, head: int, rank: int) -> float:
    """Squared error of ``left @ right.T`` when `right` goes through the basis' first columns."""
    down, up = (x[head, :, :rank].double().numpy() for x in (basis.down, basis.up))
    return float(((left @ (right - right @ down @ up.T).T) ** 2).sum())


@example(seed=66, width=2, heads=1, group=1, tokens=4, decay=0.0, fill_left=0.5, fill_right=0.5)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    width=st.sampled_from([2, 5, 8, 16]),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    tokens=st.integers(4, 40),
    decay=st.floats(0.0, 4.0),
    fill_left=st.floats(0.2, 1.0),
    fill_right=st.floats(0.2, 1.0),
)
def test_kq_and_vo_opt_lose_least_at_every_rank(
    seed, width, heads, group, tokens, decay, fill_left, fill_right
):
    random = np.random.default_rng(seed)
    q = vectors(random, heads * group, tokens, width, decay, fill_left)
    k = vectors(random, heads, tokens, width, decay, fill_right)
    v = vectors(random, heads, tokens, width, decay, fill_right)
    w_o = vectors(random, heads * group, HIDDEN, width, decay, fill_left).swapaxes(1, 2)
    w_v = random.normal(size=(heads, HIDDEN, width))
    c_o = (w_o @ w_o.swapaxes(1, 2)).reshape(heads, group, width, width).sum(1)
    shapes = {"q": (heads * group, width), "k": (heads, width), "v": (heads, width)}
    moments = Moments(
        [
            LayerMoments.empty(
                shapes,
                torch.device("cpu"),
                c_o=torch.from_numpy(c_o),
                c_wv=torch.from_numpy(w_v.swapaxes(1, 2) @ w_v),
            )
        ],
        "model",
    )
    moments.add(0, {key: torch.from_numpy(x)[None] for key, x in (("q", q), ("k", k), ("v", v))})
    moments.count(1, tokens)
    facts = layer_layout(heads=heads * group, kv_heads=heads, width=width, scaling=0.3)

    any_basis = torch.from_numpy(np.linalg.qr(random.normal(size=(heads, width, width)))[0])
    by_chance = SideBases(1, any_basis, any_basis, any_basis[..., 0], any_basis[..., 0])
    for best, known in (("kq", KEY_BASES), ("vo-opt", VALUE_BASES)):
        bases = {name: make(moments, facts) for name, make in known.items()}
        for head in range(heads):
            own = slice(head * group, (head + 1) * group)
            if best == "kq":
                left, right = 0.3 * np.concatenate(list(q[own])), k[head]
                scale = tokens**-2.0
            else:
                left, right = np.concatenate(list(w_o[own].swapaxes(1, 2))), v[head]
                scale = 1.0 / tokens
            total = float(((left @ right.T) ** 2).sum())
            # What bases lose is predicted from moments in float64 and, here, found on the vectors
            # with the float32 matrices that a plan holds.
            # Queries that hardly see keys leave of either's moments little, and their rounding.
            exact = 1e-12 * float((left**2).sum() * (right**2).sum()) * scale
            slack = 1e-5 * total
            for rank in range(width + 1):
                least = float(bases[best].errors[head, rank])
                found = lost(left, right, bases[best], head, rank)
                assert abs(found * scale - least) <= slack * scale
                assert found <= lost(left, right, by_chance, head, rank) + slack
                for name, basis in bases.items():
                    if basis.per_query_head:
                        continue  # a target is one query head, and stores a key of its own
                    assert least <= float(basis.errors[head, rank]) + exact, (name, rank)
                    assert found <= lost(left, right, basis, head, rank) + slack, (name, rank)
