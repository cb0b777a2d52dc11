"""The widths of a saved plan, for the shape that is measured."""

from pathlib import Path

from kvprof.benchmark.shapes import Shape
from kvprof.errors import UsageError
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.plan_files import load_plan

__all__ = ["plan_pairs"]


def plan_pairs(file: Path, shape: Shape) -> tuple[list[tuple[int, int]], str]:
    """Return the ranks of K and of V per KV head of a plan's middle layer by bytes, and its words.

    One layer is measured; of a plan with layers of unlike ranks it is the one whose bytes are
    nearest to the mean over the layers without a sliding window.

    Parameters
    ----------
    file : Path
        From ``kvprof plan --save``.
    shape : Shape

    Raises
    ------
    UsageError
        When the plan is for heads of another number or width, shares latents between heads, or has
        token levels (no width per head stands for it).
    """
    plan = load_plan(file)
    layers = []
    for layer in plan.layers:
        groups = (*layer.keys.groups, *layer.values.groups)
        heads = layer.kv_heads
        if layer.keys.per_query_head:
            raise UsageError(
                f"--ranks {file.name}: it stores a key per query head, and what is measured here "
                "shares one per KV head"
            )
        widths = {group.head_dim for group in groups}
        if heads != shape.num_kv_heads or widths != {shape.head_dim}:
            raise UsageError(
                f"--ranks {file.name}: a plan for {heads} KV heads of "
                f"{'/'.join(map(str, sorted(widths)))} dimensions, and {shape.name} has "
                f"{shape.num_kv_heads} of {shape.head_dim}"
            )
        if layer.sliding_window is None:
            layers.append(layer)
    _refuse_levels(plan, file)
    if not layers:
        raise UsageError(f"--ranks {file.name}: every layer of the plan has a sliding window")
    pairs = [
        list(zip(_ranks(layer.keys.groups, file), _ranks(layer.values.groups, file), strict=True))
        for layer in layers
    ]
    sums = [sum(map(sum, layer)) for layer in pairs]
    mean = sum(sums) / len(sums)
    chosen = min(range(len(sums)), key=lambda place: (abs(sums[place] - mean), place))
    return pairs[chosen], (
        f"the plan {file.name} ({plan.method}), the layer nearest to its mean bytes"
    )


def _refuse_levels(plan: Plan, file: Path) -> None:
    if len(plan.levels.shares) > 1:
        raise UsageError(
            f"--ranks {file.name}: a plan with token levels has no one width per head; run "
            "--methods tale"
        )


def _ranks(groups: tuple[HeadGroup, ...], file: Path) -> list[int]:
    if any(group.heads > 1 for group in groups):
        raise UsageError(
            f"--ranks {file.name}: its KV heads share latents, so it has no width per head; run "
            "--methods palu"
        )
    return [group.rank for group in groups]
