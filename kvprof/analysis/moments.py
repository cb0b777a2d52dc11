"""Second moments of Q, K and V, and of what errors in them cost, in float64.

Every basis and every spectrum needs only the Gram matrices ``QᵀQ``, ``KᵀK`` and ``VᵀV`` per head
(methods: FDC §5.1, ZACK §4.3): their size depends on the head, never on the number of tokens.
The first position of each sequence is kept apart, because its key is often an attention sink
whose norm is far off the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvprof.analysis.outliers import empty_counts, magnitude_counts
from kvprof.analysis.rotary import RotaryPairs
from kvprof.errors import UsageError

__all__ = [
    "JOINT_KEYS",
    "AcrossMoments",
    "LayerMoments",
    "LossMoments",
    "Moments",
    "from_eigenvalues",
    "group_size",
    "join_heads",
    "joint_gram",
    "layer_groups",
    "resolution",
]

# --- Moments of rows across layers: a token's keys, or values, of all KV heads of several layers.


# Tokens that are widened to float64 at a time.
_BLOCK = 2048


def layer_groups(layers: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Split ascending layers into runs of `size`, the last perhaps shorter; 0 is one run."""
    step = size or max(1, len(layers))
    return tuple(layers[start : start + step] for start in range(0, len(layers), step))


@dataclass
class AcrossMoments:
    """Moments of rows that go across layers.

    Attributes
    ----------
    groups : tuple of tuple of int
        Layers that are taken together, in ascending order.
    skip : int
        First tokens of each sequence that are not counted.
    grams : dict
        By side (``keys``, ``values``) and number of the group, ``[w + 1, w + 1]`` float64: of the
        rows with a 1 behind them.
    samples : dict
        By the same, the rows ``[n, w]`` of the first sequence, which no gram counts.
    """

    groups: tuple[tuple[int, ...], ...]
    skip: int
    grams: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    samples: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _waiting: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, vectors: Mapping[str, Tensor]) -> None:
        """Take one layer of a forward pass; a group is counted when its last layer comes.

        Parameters
        ----------
        layer : int
            In ascending order within a pass.
        vectors : mapping of str to Tensor
            ``keys`` and ``values``, ``[batch, heads, T, d]``.
        """
        number = next((at for at, own in enumerate(self.groups) if layer in own), None)
        if number is None:
            return
        for side, states in vectors.items():
            rows = self._waiting.setdefault((side, number), [])
            rows.append(states[:, :, self.skip :].transpose(1, 2).flatten(2))
            if layer == self.groups[number][-1]:
                device = rows[0].device
                joined = torch.cat([one.to(device) for one in rows], dim=-1)
                del self._waiting[side, number]
                self._count((side, number), joined)

    def _count(self, key: tuple[str, int], rows: Tensor) -> None:
        width = rows.shape[-1] + 1
        if key not in self.grams:
            self.samples[key] = rows[0].clone()
            rows = rows[1:]
            self.grams[key] = torch.zeros(width, width, dtype=torch.float64, device=rows.device)
        for sequence in rows:
            for block in sequence.split(_BLOCK):
                wide = torch.nn.functional.pad(block.double(), (0, 1), value=1.0)
                self.grams[key].addmm_(wide.T, wide)


def resolution(width: int) -> float:
    """Smallest singular value, relative to the largest, that a float64 Gram matrix resolves.

    Squaring the data halves the digits: an eigenvalue carries an absolute error of some
    ``eps · sqrt(width)`` of the largest, so a singular value of about its square root. Adding up
    many sequences adds rounding of its own (``20 eps`` measured over 128K tokens), hence the
    factor 16. Anything below is rounding noise and must not be shown as signal: 2e-7 of the
    largest for a head of 128.
    """
    return float((16 * torch.finfo(torch.float64).eps * width**0.5) ** 0.5)


def from_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """Return singular values from a Gram matrix's eigenvalues ``[..., d]``, noise cut to zero."""
    values = eigenvalues.clamp_min(0.0).sqrt()
    return torch.where(values >= resolution(values.shape[-1]) * values[..., :1], values, 0.0)


@dataclass
class LayerMoments:
    """Gram matrices of one layer, float64, on the layer's device.

    Attributes
    ----------
    rest, first : dict of str to Tensor
        ``q`` and ``q_pre`` are ``[num_heads, d, d]``, ``k``, ``v`` and ``k_pre``
        ``[num_kv_heads, d, d]``; `first` holds position 0 of every sequence, `rest` the others.
        ``o``, where kept, is ``[num_heads, d_v, d_v]``, of what each query head puts out.
        ``v_joint`` and ``k_pre_joint``, where kept, are ``[groups, n*d, n*d]`` over the n heads
        of a group (`kvprof.analysis.moments`).
    c_o : Tensor or None
        ``Σ_h W_O^h W_O^hᵀ`` over the query heads of each KV head, ``[num_kv_heads, d_v, d_v]``;
        None where W_O has no slice per head (gated attention).
    c_wv : Tensor or None
        ``W_VᵀW_V`` of each KV head, ``[num_kv_heads, d_v, d_v]``; None where V is no plain
        projection of the layer's input (MLA, normalised values).
    magnitudes : dict of str to Tensor
        Where kept, of ``k`` and ``v`` how many values have which magnitude, ``[num_kv_heads,
        bins]``, all positions together (`kvprof.analysis.outliers`).
    pairs : RotaryPairs or None
        How the layer rotates keys; None where that is not known, and then the two below are too.
    cross : Tensor or None
        ``Σ k_j c_jᵀ`` of keys after RoPE and ``c_j`` of `RotaryPairs.angles`, all positions
        together: ``[num_kv_heads, d, 2F + 1]``.
    table : Tensor or None
        ``Σ c_j c_jᵀ``, ``[2F + 1, 2F + 1]``.
    sums : dict of str to Tensor
        Of ``v`` and, where kept, ``o`` the sum over all positions, ``[heads, d_v]``.
    biases : dict of str to Tensor
        Of ``k`` and ``v`` what their projections add, ``[num_kv_heads, d]``; empty without.
    """

    rest: dict[str, Tensor]
    first: dict[str, Tensor]
    c_o: Tensor | None = None
    c_wv: Tensor | None = None
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    pairs: RotaryPairs | None = None
    cross: Tensor | None = None
    table: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        shapes: Mapping[str, tuple[int, int]],
        device: torch.device,
        *,
        c_o: Tensor | None = None,
        c_wv: Tensor | None = None,
        magnitudes: bool = False,
        pairs: RotaryPairs | None = None,
        biases: Mapping[str, Tensor] | None = None,
    ) -> "LayerMoments":
        """Return moments with nothing counted yet.

        Parameters
        ----------
        shapes : mapping of str to (heads, width)
            Which vectors to keep.
        device : torch.device
            Where to keep them.
        c_o, c_wv : Tensor or None
            The weights' own moments, as in the class.
        magnitudes : bool
            Count how large the values of K and V are too.
        pairs : RotaryPairs or None
            Keep moments of keys against positions.
        biases : mapping or None
            As in the class.
        """

        def zeros() -> dict[str, Tensor]:
            return {
                key: torch.zeros(heads, width, width, dtype=torch.float64, device=device)
                for key, (heads, width) in shapes.items()
            }

        counts = {key: empty_counts(shapes[key][0], device) for key in ("k", "v") if magnitudes}
        empty = cls(rest=zeros(), first=zeros(), c_o=c_o, c_wv=c_wv, magnitudes=counts)
        empty.biases = {key: bias.to(device) for key, bias in (biases or {}).items()}
        if pairs is not None:
            size = 2 * pairs.count + 1
            empty.pairs = pairs.to(device)
            empty.cross = torch.zeros(*shapes["k"], size, dtype=torch.float64, device=device)
            empty.table = torch.zeros(size, size, dtype=torch.float64, device=device)
        empty.sums = {
            key: torch.zeros(*shapes[key], dtype=torch.float64, device=device)
            for key in ("v", "o")
            if key in shapes
        }
        return empty

    def copy(self) -> "LayerMoments":
        """Return an independent copy; weights' moments are shared."""
        return replace(
            self,
            rest={key: value.clone() for key, value in self.rest.items()},
            first={key: value.clone() for key, value in self.first.items()},
            magnitudes={key: value.clone() for key, value in self.magnitudes.items()},
            cross=None if self.cross is None else self.cross.clone(),
            table=None if self.table is None else self.table.clone(),
            sums={key: value.clone() for key, value in self.sums.items()},
        )

    def gram(self, key: str) -> Tensor:
        """Return the Gram matrices of `key` over all positions, ``[heads, d, d]``."""
        return self.rest[key] + self.first[key]

    def output_gram(self) -> Tensor:
        """Return `c_o`.

        Raises
        ------
        UsageError
            Where W_O has no slice per head.
        """
        if self.c_o is None:
            raise UsageError(
                "vo: this model gates or normalises head outputs, so W_O cannot be split by "
                "head; use the pair v, the method svd-kv or the option values=svd-v"
            )
        return self.c_o

    def grouped(self, key: str) -> Tensor:
        """Return the Gram matrices of `key` per KV head, query heads of a group summed."""
        gram = self.gram(key)
        num_kv_heads = self.rest["k"].shape[0]
        return gram.view(num_kv_heads, -1, *gram.shape[1:]).sum(1)


@dataclass
class Moments:
    """Moments of a whole model and where they come from.

    Attributes
    ----------
    layers : list of LayerMoments
        One per attention layer, in order.
    fingerprint : str
        Of the model that was run.
    tokens : int
        Tokens that were counted, first positions included.
    sequences : int
        Number of sequences, so of first positions counted in `tokens`.
    info : dict
        JSON values that describe the run: source, seed, lengths, positions, dtype, revision.
    complete : bool
        False when the run was interrupted; what was counted is consistent all the same.
    across : AcrossMoments or None
        Of several layers together, where they were asked for; no file has them.
    centred : bool
        Whether they are of keys and values without their means; no file has such either.
    """

    layers: list[LayerMoments]
    fingerprint: str
    tokens: int = 0
    sequences: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    across: AcrossMoments | None = None
    centred: bool = False

    def output_weight(self, layer: int) -> Tensor:
        """Return what weighs errors of V alone: W_O, or the identity where some layer has none."""
        found = self.layers[layer]
        if all(one.c_o is not None for one in self.layers):
            return found.output_gram()
        value = found.gram("v")
        return torch.eye(value.shape[-1], dtype=value.dtype, device=value.device).expand_as(value)

    def add(
        self,
        layer: int,
        vectors: Mapping[str, Tensor],
        *,
        angles: Tensor | None = None,
        skip_first: int = 0,
    ) -> None:
        """Accumulate one forward pass of one layer.

        Parameters
        ----------
        layer : int
            Index into `layers`.
        vectors : mapping of str to Tensor
            For each key kept, ``[batch, heads, T, d]`` in any dtype; multiplied in float64.
        angles : Tensor or None
            ``[batch or 1, T, 2F + 1]`` of `RotaryPairs.angles`, where the layer keeps moments of
            keys against positions.
        skip_first : int
            Leave out this many positions at the start of every sequence.
        """
        store = self.layers[layer]
        for key, rest in store.rest.items():
            vector = vectors[key]
            if skip_first == 0:
                _accumulate(store.first[key], vector[:, :, :1])
            _accumulate(rest, vector[:, :, max(1, skip_first) :])
        for key, counts in store.magnitudes.items():
            counts += magnitude_counts(vectors[key][:, :, skip_first:])
        for key, total in store.sums.items():
            total += vectors[key][:, :, skip_first:].sum((0, 2), dtype=torch.float64)
        if store.cross is not None and store.table is not None and angles is not None:
            for keys, own in zip(
                vectors["k"], angles.expand(len(vectors["k"]), -1, -1), strict=True
            ):
                _accumulate_crossed(
                    store.cross, store.table, keys[:, skip_first:], own[skip_first:]
                )

    def count(self, batch: int, length: int, *, skip_first: int = 0) -> None:
        """Count the tokens of a batch of `batch` sequences of `length` tokens once."""
        self.tokens += batch * max(0, length - skip_first)
        self.sequences += batch if skip_first == 0 and length else 0

    def snapshot(self) -> "Moments":
        """Return an independent copy of the current state; weights' moments are shared."""
        return replace(self, layers=[layer.copy() for layer in self.layers], info=dict(self.info))


# Tokens that are widened to float64 at a time: enough for full speed, little memory.
_BLOCK = 8192


def _accumulate(gram: Tensor, vector: Tensor) -> None:
    """Add ``XᵀX`` of ``[batch, heads, T, d]`` to ``[heads, d, d]``, one sequence at a time."""
    for sequence in vector:
        for block in sequence.split(_BLOCK, dim=1):
            wide = block.to(torch.float64)
            if wide.is_cuda:
                gram.baddbmm_(wide.transpose(1, 2), wide)
            else:
                # One product per head: twice as fast as the batched one on a CPU.
                for head, rows in enumerate(wide):
                    gram[head].addmm_(rows.T, rows)


def _accumulate_crossed(cross: Tensor, table: Tensor, keys: Tensor, angles: Tensor) -> None:
    """Add ``Σ k cᵀ`` and ``Σ c cᵀ`` of one sequence's ``[heads, T, d]`` and ``[T, C]``."""
    for block, own in zip(keys.split(_BLOCK, dim=1), angles.split(_BLOCK), strict=True):
        wide = own.to(torch.float64)
        table.addmm_(wide.T, wide)
        for head, rows in enumerate(block.to(torch.float64)):
            cross[head].addmm_(rows.T, wide)


# --- Moments of several KV heads together, for bases that a group of heads shares (Palu, TALE).


#: What is kept jointly, and the vectors it is made of.
JOINT_KEYS = {"v_joint": "v", "k_pre_joint": "k_pre"}


def group_size(heads: int, num_kv_heads: int) -> int:
    """Return how many heads a group has: `heads`, or all there are where a layer has fewer.

    Raises
    ------
    UsageError
        When the layer's heads cannot be split into such groups.
    """
    size = min(heads, num_kv_heads)
    if size < 1 or num_kv_heads % size:
        raise UsageError(f"{num_kv_heads} KV heads are not divisible into groups of {heads}")
    return size


def join_heads(vectors: Tensor, heads: int) -> Tensor:
    """Lay the heads of each group side by side.

    Parameters
    ----------
    vectors : Tensor
        ``[batch, num_kv_heads, T, d]``.
    heads : int
        Heads per group.

    Returns
    -------
    Tensor
        ``[batch, num_kv_heads / heads, T, heads * d]``.
    """
    batch, count, length, width = vectors.shape
    grouped = vectors.view(batch, count // heads, heads, length, width)
    return grouped.transpose(2, 3).reshape(batch, count // heads, length, heads * width)


def joint_gram(moments: LayerMoments, vector: str, heads: int) -> Tensor:
    """Return the Gram matrices of groups of heads, ``[groups, heads*d, heads*d]`` float64.

    Moments of larger groups hold those of smaller ones as diagonal blocks.

    Parameters
    ----------
    moments : LayerMoments
    vector : str
        ``v`` or ``k_pre``.
    heads : int
        Heads per group, a divisor of the layer's KV heads.

    Raises
    ------
    UsageError
        When the moments were not kept for such groups.
    """
    count = moments.rest["k"].shape[0]
    if heads == 1 and vector in moments.rest:
        return moments.gram(vector)
    name = f"{vector}_joint"
    if name in moments.rest:
        gram = moments.gram(name)
        stored = count // gram.shape[0]
        if stored % heads == 0:
            parts = stored // heads
            size = gram.shape[-1] // parts
            corners = [part * size for part in range(parts)]
            blocks = [gram[:, at : at + size, at : at + size] for at in corners]
            return torch.stack(blocks, dim=1).flatten(0, 1)
    raise UsageError(
        f"the moments have no {vector} for groups of {heads} heads; calibrate with that group size"
    )


@dataclass(frozen=True, eq=False)
class LossMoments:
    """Per token, how the predicted distribution turns away when a stored vector is off by ``e``.

    To second order the divergence from the unchanged model is ``½ eᵀ F e``, in nats, with F the
    Fisher information of the vector: the second moment of the gradient of the log-likelihood,
    tokens drawn from the model's own distribution. Errors of tokens that are independent of each
    other add up.

    Attributes
    ----------
    keys : tuple of Tensor
        Of each layer ``[num_kv_heads, d, d]`` float64 on the CPU, of keys as they are stored (after
        RoPE).
    values : tuple of Tensor
        Of each layer ``[H * d, H * d]``, of the values of all its KV heads side by side: what two
        heads lose together is in it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
