"""Compiling ahead is one thread's own, and leaves a prompt and its steps nothing to compile."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.kernels.dispatch import EARLY_ROWS, compiling_ahead, launching
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Levels
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan

#: What a prompt and a step import: before anything is faked, or a fake would stay.
RUN = ("decode.step", "prefill.rows", "prefill.step", "quantized.moving", "quantized.step")


class Kernel:
    """Says what it was asked for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[], str]:
        return lambda: "launched"

    def warmup(self, grid: tuple[int, ...]) -> str:
        return "compiled"


def asked() -> Any:
    return launching(Kernel(), (1,))()


def interrupted(other: ThreadPoolExecutor) -> None:
    with compiling_ahead():
        assert (asked(), other.submit(asked).result()) == ("compiled", "launched")
        raise KeyboardInterrupt


def test_other_threads_go_on_launching() -> None:
    with ThreadPoolExecutor(1) as other, pytest.raises(KeyboardInterrupt):
        interrupted(other)
    assert asked() == "launched"


def test_nothing_is_compiled_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("Llama", head_dim=32)
    with compressed(model, make_plan(model), "off") as session:
        monkeypatch.setitem(sys.modules, "kvprof.kernels.dispatch", None)
        assert session.compile_ahead() == 0


def asked_of_triton(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return what Triton compiles a launch for."""
    found: list[Any] = [kernel.__name__, *sorted((name, str(x)) for name, x in named.items())]
    for parameter, own in zip(kernel.params, arguments, strict=False):
        blind = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if isinstance(own, Tensor):
            found.append((own.dtype, not blind and own.data_ptr() % 16 == 0))
        elif isinstance(own, int) and not parameter.do_not_specialize:
            found.append((own == 1, own % 16 == 0))
        else:
            found.append(type(own))
    return tuple(found)


def sixteens(layer: int, side: str, first: int, width: int) -> tuple[int, ...]:
    """Give heads of a layer different widths: several kinds, which have counters."""
    return (width // 2 + 16 * ((layer + first + (side == "keys")) % 3 - 1),)


# By heads and tokens a layer's tables end at no multiple of 16 bytes.
@pytest.mark.parametrize(("bits", "heads", "tokens"), [(None, 2, 37), (4, 3, 193)])
def test_a_prompt_and_its_steps_compile_nothing_more(
    bits: int | None, heads: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"num_attention_heads": 2 * heads, "num_key_value_heads": heads}
    model = loaded("Llama", head_dim=64, **counts)
    quantiser = None if bits is None else replace(per_token((bits,)), window=5)
    plan = make_plan(model, ranks=sixteens, levels=Levels(2 if bits else 0), quantiser=quantiser)
    noted: list[Any] = []

    def noting(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: noted.append(asked_of_triton(kernel, given, named))

    def early(device: torch.device, rows: int) -> dict[str, bool]:
        return {"DEPENDENT": rows <= EARLY_ROWS}

    with compressed(model, plan, "on") as session, torch.inference_mode():
        # As on a GPU.
        for name in RUN:
            import_module(f"kvprof.kernels.{name}")
        ours = [own for name, own in sys.modules.items() if name.startswith("kvprof.")]
        fakes = {"launching": noting, "early_launch": early, "uses_triton": lambda _: True}
        fakes |= {"multiprocessors_of": lambda _: 132}
        for name, fake in fakes.items():
            for module in ours:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake)
        route = session.route
        for layer in route._layers:
            assert layer is not None
            layer.rehearse(route.configs, 1, torch.device("cpu"), torch.float32)
        ahead = set(noted)
        noted.clear()
        cache = session.new_cache()
        for count in (tokens, 1, 1):
            model.model(token_ids(1, count), past_key_values=cache)
    assert noted
    assert set(noted) <= ahead
