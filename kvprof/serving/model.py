"""The layers that a rank serves, made ready for the pages that the engine has given them."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import FailedError
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.dispatch import EARLY_ROWS, compiling_ahead
from kvprof.kernels.planes import STEP
from kvprof.kernels.prefill.rows import rows_step
from kvprof.runtime.backends.route import few_configs
from kvprof.serving.captured_step import CudaGraphStep, captured_step
from kvprof.serving.quantised import own_pages, quantised_steps
from kvprof.serving.ragged_pages import RaggedSteps
from kvprof.serving.rebuilt import rebuilt_steps
from kvprof.serving.steps import EngineStep, ServedLayer, attend, cut_key

__all__ = ["ServedModel"]

#: Tokens that a rehearsed prompt has when it goes on.
_BEGUN = 16
#: Tokens of a rehearsed step in which one sequence decodes beside a prompt.
_FEW_TOKENS = 32


@dataclass(eq=False)
class ServedModel:
    """The layers of this rank, and what they share."""

    layers: list[ServedLayer] = field(default_factory=list)
    #: Decoding steps whose work one launch cuts, with their tables, by what they have in common.
    alike: dict[Any, tuple[list[Any], Tensor]] = field(default_factory=dict)
    _met: set[tuple[int, int]] = field(default_factory=set)
    _reserved: Tensor | None = None

    @cached_property
    def configs(self) -> tuple[tuple[int, int], ...]:
        """The head configurations of all layers whose queries meet latents."""
        own = (layer.configs for layer in self.layers if layer.rebuilding is None)
        return tuple(sorted(set().union(*own)))

    @cached_property
    def rebuilt_configs(self) -> tuple[tuple[int, int], ...]:
        """The head configurations of all layers whose keys are rebuilt."""
        own = (layer.whole(1, STEP) for layer in self.layers if layer.rebuilding is not None)
        pairs = (zip(one.key_widths, one.value_widths, strict=True) for one in own)
        return tuple(sorted(set().union(*pairs)))

    def reserve(self, like: Tensor, values: int) -> None:
        """Allocate the memory that layers share, so that the engine's memory profile counts it."""
        if self.layers and self.layers[0].steps is not None:
            return  # a step without attention, of an engine that warms up: layers hold their own
        if self._reserved is None or len(self._reserved) < values:
            self._reserved = None
            self._reserved = like.new_empty(values)

    def bind(
        self,
        page: int,
        most_tokens: int,
        longest: int,
        table: int | None = None,
        captured: tuple[int, int] = (0, 0),
    ) -> None:
        """Prepare every layer's steps over the pages that the engine has given it."""
        if all(
            layer.steps is not None and layer.steps.pages == len(layer.attention.kv_cache)
            for layer in self.layers
        ):
            return
        if captured[0]:  # a step is rehearsed that may have more room than any that is captured
            captured = max(captured[0], _FEW_TOKENS), max(captured[1], 2)
        self._prepare(page, most_tokens, longest, captured)
        # An engine may measure its graphs over a smaller cache first.
        self._met.clear()
        together: dict[Any, list[Any]] = {}
        for layer in self.layers:
            assert layer.steps is not None
            if (decode := layer.steps.decode) is not None:
                together.setdefault(cut_key(decode), []).append(decode)
        self.alike = {
            key: (steps, torch.stack([step.cut_table for step in steps]))
            for key, steps in together.items()
        }
        if self.layers[0].attention.kv_cache.device.type == "cuda":
            # All kernels at once, and each of them loaded before a graph is captured.
            columns = -(-longest // page) if table is None else table
            prompt = min(most_tokens, longest)
            with compiling_ahead():
                self._rehearse(columns, most_tokens, prompt, captured)
            self._rehearse(columns, most_tokens, prompt, captured)

    def _prepare(
        self, page: int, most_tokens: int, longest: int, captured: tuple[int, int]
    ) -> None:
        # What steps over other pages had worked in goes first, and what stood for it.
        self._reserved = None
        for layer in self.layers:
            layer.steps = None
        shared = few_configs(set(self.configs))
        scratch: Tensor | None = None
        rebuilt: Tensor | None = None
        for layer in self.layers:
            cache = layer.attention.kv_cache
            if cache.dim() != 2:
                raise FailedError(f"{layer.attention.layer_name} was given no KV cache pages")
            if layer.rebuilding is not None:
                if rebuilt is None:
                    whole = -(-longest // page) * page
                    rooms = (one.working(whole) for one in self.layers if one.rebuilding)
                    rebuilt = layer.keys.packed.new_empty(max(rooms))
                layer.steps = rebuilt_steps(layer, page, longest, self.rebuilt_configs, rebuilt)
                continue
            if layer.codes is not None:
                if scratch is None:
                    own = (own_pages(one, most_tokens, captured) for one in self.layers)
                    scratch = layer.keys.packed.new_zeros(max(pool.elements for pool in own))
                layer.steps = quantised_steps(
                    layer, page, most_tokens, captured, scratch, shared, self.configs
                )
                continue
            layout, device = layer.layout(len(cache), page), cache.device
            layer.steps = RaggedSteps(
                layer,
                layout,
                decode_step(layout, device, page_tokens=page, rows=1, pairs=shared),
                rows_step(
                    layout, device, cache.dtype, page_tokens=page, rows=1, pairs=self.configs
                ),
            )

    def _rehearse(self, pages: int, most: int, prompt: int, captured: tuple[int, int]) -> None:
        """Run every layer on every form of step, padding only, so that all kernels are compiled."""
        device = self.layers[0].attention.kv_cache.device
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        begun = min(_BEGUN, prompt - 1)
        few = min(_FEW_TOKENS - 1, prompt - begun)
        cases = [
            ([1, 1], 0), ([1, few], 0), ([prompt], 0), ([1, few], begun),
            ([prompt - begun], begun),
        ]  # fmt: skip
        if most > EARLY_ROWS:
            cases.append(([1] * (EARLY_ROWS + 1), 0))
        for news, past in cases:
            starts, rows = [0, *accumulate(news)], len(news)
            lengths = [new if new == 1 else past + new for new in news]
            step = EngineStep(
                self.alike,
                torch.full((starts[-1],), -1, dtype=torch.int64, device=device),
                torch.zeros(rows, pages, **numbers),
                torch.tensor(starts, **numbers),
                torch.tensor(lengths, **numbers),
                decodes=sum(new == 1 for new in news),
                rows=rows,
                host_starts=starts,
                host_lengths=lengths,
            )
            self._run(step)
            if len(news) > 1 and captured[0] >= starts[-1] and captured[1] >= rows:
                given = step.slots, step.table, step.starts, step.lengths
                self._run(captured_step(self.alike, *given))

    def captured_step(
        self, slots: Tensor, table: Tensor, starts: Tensor, lengths: Tensor
    ) -> CudaGraphStep:
        """Return a step to capture, run once per layer: no kernel can load during a capture."""

        def made() -> CudaGraphStep:
            return captured_step(self.alike, slots, table, starts, lengths)

        room = (len(slots), len(lengths))
        if room not in self._met and slots.device.type == "cuda":
            self._run(made())
        self._met.add(room)
        return made()

    def _run(self, step: EngineStep) -> None:
        """Run every layer on a step of padding."""
        count = len(step.slots)
        for layer in self.layers:
            (heads, depth), group = layer.heads, layer.group
            if layer.rebuilding is not None:
                group //= layer.rebuilding.heads
            query, key, value = (
                layer.keys.packed.new_zeros(count, number, depth)
                for number in (heads * group, heads, heads)
            )
            attend(layer, step, query, key, value, 1.0)
