"""Which tokens leave the cache, and the scores that decide it (H2O, Keyformer, recent)."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.methods.storage import Eviction
from kvprof.methods.tokens import kept

__all__ = ["gumbel", "survivors", "token_scores"]

_CHUNK = 1024


def gumbel(
    eviction: Eviction, layer: int, units: int, start: int, stop: int, device: torch.device
) -> Tensor:
    """Return the standard Gumbel samples of the tokens `start` … `stop` of a sequence.

    They depend on the seed, the layer and the token's place only, so that a sequence is treated the
    same alone and in a batch.

    Returns
    -------
    Tensor
        ``[units, stop - start]`` float32.
    """
    pieces = []
    for chunk in range(start // _CHUNK, -(-stop // _CHUNK)):
        begin = chunk * _CHUNK
        samples = _gumbel_chunk(eviction.seed, layer, chunk, units, device)
        pieces.append(samples[:, max(start - begin, 0) : stop - begin])
    return torch.cat(pieces, dim=1)


@lru_cache(maxsize=512)
def _gumbel_chunk(seed: int, layer: int, chunk: int, units: int, device: torch.device) -> Tensor:
    """Draw on the CPU, the same everywhere, and once: each step wants one token of it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer * 8191 + chunk)
    with torch.inference_mode(False):
        uniform = torch.rand(units, _CHUNK, generator=generator).clamp(1e-20, 1 - 1e-7)
        return (-(-uniform.log()).log()).to(device)


def token_scores(
    eviction: Eviction,
    logits: Tensor,
    probabilities: Tensor,
    noise: Tensor | None,
    progress: Tensor,
    units: list[tuple[int, int]],
) -> Tensor:
    """Return what a run of queries adds to each key's score.

    Parameters
    ----------
    eviction : Eviction
    logits, probabilities : Tensor
        ``[rows, Hkv, G, t, N]`` float32, masked.
    noise : Tensor or None
        Keyformer's samples, ``[rows, units, N]``.
    progress : Tensor
        ``[t]``, from 0 for the first query of a sequence to 1 for the last that it may reach.
    units : list of (first KV head, heads)
        What is evicted together.

    Returns
    -------
    Tensor
        ``[rows, units, N]`` float32.
    """
    totals = []
    for place, (first, heads) in enumerate(units):
        if noise is None:
            share = probabilities[:, first : first + heads]
        else:
            low, high = eviction.tau
            tau = (low + (high - low) * progress).view(1, 1, 1, -1, 1)
            scores = logits[:, first : first + heads]
            samples = noise[:, place].view(noise.shape[0], 1, 1, 1, -1)
            share = torch.softmax((scores + samples) / tau, dim=-1)
        totals.append(share.sum((1, 2, 3)))
    return torch.stack(totals, dim=1)


def survivors(
    eviction: Eviction, seen: int, candidates: int, scores: Tensor | None, device: torch.device
) -> Tensor:
    """Return the places of the tokens that stay.

    Parameters
    ----------
    eviction : Eviction
    seen : int
        Tokens of the sequence so far.
    candidates : int
        Tokens that are there: stored before plus new.
    scores : Tensor or None
        ``[rows, units, candidates]``; None for ``recent``.
    device : torch.device

    Returns
    -------
    Tensor
        ``[rows, units, kept]`` (``[1, 1, kept]`` for ``recent``), ascending.
    """
    count = kept(eviction, seen)
    sink = min(eviction.sink, count)
    newest = min(math.floor(eviction.recent_share * count + 1e-9), count - sink)
    if scores is None:
        newest = count - sink
        places = torch.arange(candidates, device=device)
        return torch.cat([places[:sink], places[candidates - newest :]]).view(1, 1, -1)
    ranked = scores.clone()
    ranked[..., :sink] = torch.inf
    ranked[..., candidates - newest :] = torch.inf
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :count]
    return order.sort(dim=-1).values
