"""A step of an engine over pages of ragged latents as they are."""

from dataclasses import dataclass, replace

from torch import Tensor

from kvprof.kernels.decode.step import DecodeStep
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.rows import RowsStep
from kvprof.kernels.project.step import project_step
from kvprof.serving.captured_step import CudaGraphStep
from kvprof.serving.steps import EngineStep, ServedLayer, filled_up

__all__ = ["RaggedSteps"]


@dataclass(frozen=True, eq=False)
class RaggedSteps:
    """What a layer runs over pages of latents as they are."""

    layer: ServedLayer
    layout: RaggedLayout  # of the pool
    decode: DecodeStep  # of one sequence; `replace` makes them for others
    rows: RowsStep

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.layout.batch

    def attend(
        self, step: EngineStep, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""
        layer, cache = self.layer, self.layer.attention.kv_cache
        projected = project_step(
            query[None],
            key[None],
            value[None],
            layer.keys,
            self.layout,
            cache,
            None,
            query_bases=layer.queries,
            slots=step.slots[: len(query)],
        )[0]
        if isinstance(step, CudaGraphStep):
            return self._captured(step, projected, scale)
        found = []
        if step.decodes:
            found.append(self._decoded(step, projected, scale))
        if step.rows > step.decodes:
            own = projected[step.decodes :]
            rows = replace(self.rows, rows=step.rows - step.decodes)
            cut = step.cut(rows, len(own), step.decodes, step.rows)
            table = step.pages_of(step.decodes, step.rows)
            found.append(rows.run(own, cache, cut, scale, table=table))
        return filled_up(found, len(query))

    def _captured(self, step: CudaGraphStep, projected: Tensor, scale: float) -> Tensor:
        """Attend from all tokens twice, as of one that decodes and as of one of several."""
        decoded = self._decoded(step, projected, scale)
        rows = replace(self.rows, rows=step.rows)
        cut = step.cut_rows(rows, step.lengths)
        cache = self.layer.attention.kv_cache
        found = rows.run(projected, cache, cut, scale, table=step.table)
        return step.joined(decoded, found)

    def _decoded(self, step: EngineStep, projected: Tensor, scale: float) -> Tensor:
        decode = replace(self.decode, rows=step.decodes)
        schedule, table = step.schedule(self.decode), step.table[: step.decodes]
        own, cache = projected[: step.decodes], self.layer.attention.kv_cache
        found: Tensor = decode.run(own, cache, schedule, scale, table=table)
        return found
