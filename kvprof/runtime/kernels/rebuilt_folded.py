"""Latents that KV heads share and that queries meet as they are, on kvprof's kernels.

Palu without RoPE (eq. 7): ``up`` is folded into the queries, and what is left is plain attention
over latents as keys and values (`kvprof.kernels.reconstruct.folded`).
"""

from typing import Any

from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.runtime.clock import part
from kvprof.runtime.kernels.rebuilt_latents import LatentKernelLayer, prefilled
from kvprof.runtime.kernels.state import KernelPass, KernelState

__all__ = ["FoldedKernelLayer"]


class FoldedKernelLayer(LatentKernelLayer):
    """A layer whose shared latents are never rebuilt."""

    def _attended(
        self, layout: RaggedLayout, buffer: Tensor, state: KernelState, passing: KernelPass,
        query: Tensor, scoring: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        from kvprof.kernels.project.step import project_queries  # Triton is for Linux only

        if scoring["sinks"] is not None:
            scoring = {**scoring, "sinks": scoring["sinks"].reshape(layout.heads, layout.group)}
        matrices = self._latents(query.device, query.dtype)
        # Every KV head has rows of its own in its group's matrix.
        widths = matrices.queries.widths
        by_head = RaggedLayout(widths, widths, self.facts.group, layout.batch, layout.capacity)
        with part(self._storing):
            turned = project_queries(query.transpose(1, 2), matrices.queries, by_head)
        if passing.tokens > 1:
            return prefilled(turned, buffer, layout, state, passing, scoring)
        step = state.step(layout, query.device, None)

        def cut() -> Any:
            with part("schedule"):
                return step.cut(passing.lengths(None))

        schedule = passing.once((layout, None), cut)
        output: Tensor = step.run(turned[:, 0], buffer, schedule, **scoring)
        return output.unsqueeze(1)
