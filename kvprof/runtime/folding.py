"""Fold a plan's bases into copies of the projections, and restore the model's own modules."""

from collections.abc import Sequence

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from kvprof.errors import UsageError
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.models.projections import head_columns, output_slices
from kvprof.models.weights import projection_matrix
from kvprof.runtime.tensors import unflatten

__all__ = ["OutputSwitch", "folded_modules"]


class OutputSwitch(nn.Module):
    """W_O for exact heads beside W_O for latents; the attention says which one comes next."""

    def __init__(self, own: nn.Module, folded: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.folded = folded
        self.exact = False

    def forward(self, heads: Tensor) -> Tensor:
        """Project what the heads put out."""
        result: Tensor = self.own(heads) if self.exact else self.folded(heads)
        return result


def folded_modules(loaded: LoadedModel, plan: Plan) -> dict[str, nn.Module]:
    """Build every projection that a plan folds something into."""
    modules: dict[str, nn.Module] = {}
    for layer, facts in zip(plan.layers, loaded.layout.layers, strict=True):
        for name, changes in _changes(loaded, layer, facts).items():
            module = loaded.model.get_submodule(name)
            modules[name] = _changed(module, loaded.layout.hidden_size, changes)
        if layer.values.fold_up:
            name = f"{facts.attention}.{facts.output_projection}"
            own = loaded.model.get_submodule(name)
            folded = _folded_output(loaded, layer, facts, own)
            modules[name] = OutputSwitch(own, folded) if plan.lazy else folded
    return modules


_Change = tuple[Tensor, Tensor]


def _changes(loaded: LoadedModel, layer: LayerPlan, facts: LayerLayout) -> dict[str, list[_Change]]:
    """Say, per projection, which output columns are multiplied with what."""
    found: dict[str, list[_Change]] = {}

    def add(kind: str, heads: Sequence[int], matrix: Tensor) -> None:
        name, columns = head_columns(loaded.model, facts, kind, heads)
        found.setdefault(name, []).append((columns, matrix))

    sides = (
        ("k", layer.keys.fold_down, layer.keys.groups),
        ("v", layer.values.fold_down, layer.values.groups),
    )
    for kind, fold, groups in sides:
        for group in groups if fold else ():
            if group.down is not None:
                add(kind, range(group.first, group.first + group.heads), _padded(group.down))
    for group in layer.keys.groups if layer.keys.fold_up else ():
        if group.up is None:
            continue
        if group.rank > group.head_dim:
            raise UsageError(
                f"layer {facts.index}: a latent of {group.rank} columns does not fit in a query "
                f"head of {group.head_dim}; leave out fold_up or use smaller head groups"
            )
        for head, up in _by_query_head(group, facts):
            add("q", [head], _padded(up))
    return found


def _by_query_head(group: HeadGroup, facts: LayerLayout) -> list[tuple[int, Tensor]]:
    assert group.up is not None
    blocks = unflatten(group.up, 0, (group.heads, group.head_dim))
    return [
        (head, blocks[head // facts.group - group.first])
        for head in range(group.first * facts.group, (group.first + group.heads) * facts.group)
    ]


def _padded(matrix: Tensor) -> Tensor:
    """Pad a basis with zero columns, so that the projection keeps its width."""
    return torch.cat([matrix, matrix.new_zeros(len(matrix), len(matrix) - matrix.shape[1])], dim=1)


def _bias(module: nn.Module) -> Tensor | None:
    with align_module_device(module):
        bias = getattr(module, "bias", None)
        return bias.detach().clone() if isinstance(bias, Tensor) else None


def _linear(matrix: Tensor, bias: Tensor | None, like: Tensor) -> nn.Linear:
    """Make ``y = x @ matrix + bias`` a module in the dtype of `like`."""
    # Its own constructor draws weights first, on the meta device too, where that is slow.
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = matrix.shape
    weight = matrix.T.contiguous().to(like.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        bias = nn.Parameter(bias.to(like.device, like.dtype), requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear.eval()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _changed(module: nn.Module, width: int, changes: Sequence[_Change]) -> nn.Module:
    own = projection_matrix(module, width)
    matrix, bias = _wide(own).clone(), _bias(module)
    if bias is not None:
        bias = _wide(bias.to(own.device)).clone()
    for columns, basis in changes:
        where, rotation = columns.to(own.device), basis.to(matrix)
        matrix[:, where] = matrix[:, where] @ rotation
        if bias is not None:
            bias[where] = bias[where] @ rotation
    return _linear(matrix, bias, own)


def _folded_output(
    loaded: LoadedModel, layer: LayerPlan, facts: LayerLayout, own: nn.Module
) -> nn.Module:
    heads = output_slices(loaded.model, loaded.layout, facts.index)
    blocks = list(_wide(heads))
    for group in layer.values.groups:
        if group.up is not None:
            for head, up in _by_query_head(group, facts):
                blocks[head] = up.T.to(blocks[head]) @ blocks[head]
    return _linear(torch.cat(blocks), _bias(own), heads)
