"""The matrices that rebuild keys, sorted as the kernel reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP, chunks
from kvprof.kernels.reconstruct.form import Form

__all__ = ["arranged", "flat", "halves"]


def halves(width: int, interleaved: bool) -> tuple[slice, slice]:
    """Return which of `width` rotated columns are the first and the second of their pairs."""
    if interleaved:
        return slice(0, width, 2), slice(1, width, 2)
    return slice(0, width // 2), slice(width // 2, width)


def flat(up: Sequence[Tensor], form: Form) -> Tensor:
    """Return every group's `up`, row after row, in one buffer.

    Parameters
    ----------
    up : sequence of Tensor
        Per group ``[n·d, r_k]``, the rows of KV head j from ``j·d`` on (`kvprof.methods.plan`).
    form : Form

    Raises
    ------
    UsageError
        When shapes or dtypes do not fit.
    """
    wanted = [(form.heads * form.head_dim, width) for width in form.key_widths]
    shapes = [tuple(matrix.shape) for matrix in up]
    if shapes != wanted:
        raise UsageError(f"matrices {shapes} rebuild no keys of a layer that wants {wanted}")
    if len({matrix.dtype for matrix in up}) > 1:
        raise UsageError("the matrices that rebuild keys differ in dtype")
    return torch.cat([matrix.reshape(-1) for matrix in up])


def arranged(up: Sequence[Tensor], form: Form) -> Tensor:
    """Return every group's `up` in one buffer, block after block of columns.

    Per group and KV head: for every block of rotated pairs the rows of the first halves and then of
    the second, after them the blocks of rows that RoPE leaves alone. Blocks past a half's end are
    filled with zeros; every block is cut into the chunks of the latent's width, each dense.

    Parameters
    ----------
    up : sequence of Tensor
        As in `flat`, which checks them.
    form : Form
    """
    first, second = halves(form.rotary_dim, form.interleaved)
    parts: list[Tensor] = []
    for matrix, width in zip(up, form.key_widths, strict=True):
        for head in matrix.reshape(form.heads, form.head_dim, width):
            turned, rest = head[: form.rotary_dim], head[form.rotary_dim :]
            pairs = [torch.split(_filled(turned[half]), list(form.paired)) for half in
                     (first, second)]  # fmt: skip
            blocks = [block for pair in zip(*pairs, strict=True) for block in pair]
            blocks += torch.split(_filled(rest), list(form.plain))
            parts += [
                chunk.reshape(-1)
                for block in blocks
                for chunk in torch.split(block, list(chunks(width)), dim=1)
            ]
    return torch.cat(parts)


def _filled(rows: Tensor) -> Tensor:
    """Fill up with zero rows to a multiple of 16."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % STEP))
