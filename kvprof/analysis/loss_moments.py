"""Second moments of what an error in a stored key or value costs the next token."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["LossMoments"]


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
