"""The same step without a GPU: keys are rebuilt, rotated and used block by block of tokens."""

import torch
from torch import Tensor

from kvprof.kernels.planes import of_sequence
from kvprof.kernels.reconstruct.rebuild_config import RebuildConfig, halves

__all__ = ["reconstruct_cpu"]

#: Tokens whose keys are rebuilt at once: what a block makes should stay in a core's cache.
_BLOCK = 512


def reconstruct_cpu(
    query: Tensor,  # as `kvprof.kernels.reconstruct.step.ReconstructStep.run` takes them
    buffer: Tensor,
    up: Tensor | None,  # from `rebuild_config.flat`; None where nothing is rebuilt
    config: RebuildConfig,
    lengths: Tensor,  # `[rows]` int32, on the CPU
    cos: Tensor | None,
    sin: Tensor | None,
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return ``[rows, Σ_groups n·G·r_v]`` in the dtype of `query`, computed in float32."""
    layout = config.layout
    output = query.new_zeros(config.rows, layout.output_offsets[-1])
    groups = torch.split(query.float() * scaling, _query_widths(config), dim=1)
    for group, queries in enumerate(groups):
        planes = layout.planes(buffer, group)
        rebuild = None if up is None else _Rebuild(up, config, group)
        place = slice(*layout.output_offsets[group : group + 2])
        for row, length in enumerate(lengths.tolist()):
            sink = None if sinks is None else sinks[group].float()
            keys, values = (
                [of_sequence(plane, row, table, length) for plane in side] for side in planes
            )
            state = _Softmax(config.queries, layout.value_widths[group], sink)
            for start in range(0, length, _BLOCK):
                at = slice(start, min(start + _BLOCK, length))
                latents = torch.cat([plane[at] for plane in keys], -1).float()
                if rebuild is None or cos is None or sin is None:
                    scores = queries[row].view(config.queries, -1) @ latents.T
                else:
                    rebuilt = rebuild(latents, _angles(cos, row, at), _angles(sin, row, at))
                    own = queries[row].view(config.heads, config.group, config.head_dim)
                    scores = (own @ rebuilt.permute(1, 2, 0)).flatten(0, 1)
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                state.add(scores, torch.cat([plane[at] for plane in values], -1).float())
            output[row, place] = state.result().flatten().to(query.dtype)
    return output


def _query_widths(config: RebuildConfig) -> list[int]:
    return [config.queries * (config.head_dim or width) for width in config.key_widths]


def _angles(table: Tensor, row: int, at: slice) -> Tensor:
    """Return a block of a table as ``[tokens, 1, rotary_dim / 2]`` float32."""
    own = table[row] if table.dim() == 3 else table
    return own[at].float()[:, None]


class _Rebuild:
    """Rebuilds and rotates one group's keys."""

    def __init__(self, up: Tensor, config: RebuildConfig, group: int) -> None:
        sizes = [config.heads * config.head_dim * width for width in config.key_widths]
        matrix = torch.split(up, sizes)[group]
        self.matrix = matrix.view(-1, config.key_widths[group]).float().T
        self.config = config

    def __call__(self, latents: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[tokens, n, d]`` float32."""
        config = self.config
        keys: Tensor = (latents @ self.matrix).view(len(latents), config.heads, config.head_dim)
        first, second = halves(config.rotary_dim, config.interleaved)
        one, other = keys[..., first], keys[..., second]
        turned = one * cos - other * sin
        keys[..., second] = other * cos + one * sin
        keys[..., first] = turned
        return keys


class _Softmax:
    """Softmax of scores that come in blocks, over values that come with them."""

    def __init__(self, rows: int, width: int, sink: Tensor | None) -> None:
        # Finite, so that the first block's fade is exp of something and not of inf - inf.
        self.top = torch.full((rows, 1), -1e30) if sink is None else sink.reshape(rows, 1)
        self.total = torch.full((rows, 1), 0.0 if sink is None else 1.0)
        self.sum = torch.zeros(rows, width)

    def add(self, scores: Tensor, values: Tensor) -> None:
        higher = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        fade = torch.exp(self.top - higher)
        weights = torch.exp(scores - higher)
        self.total = self.total * fade + weights.sum(-1, keepdim=True)
        self.sum = torch.addmm(self.sum * fade, weights, values)
        self.top = higher

    def result(self) -> Tensor:
        return self.sum / torch.where(self.total > 0, self.total, 1.0)
