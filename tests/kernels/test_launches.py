"""A launch that is remembered is the one that Triton would have made, without a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

# Where there is no Triton the file is skipped before these are looked for.
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kvprof.kernels.dispatch import argument_key, interpreted, launching  # noqa: E402

tl = triton.language

pytestmark = pytest.mark.skipif(interpreted(), reason="Triton interprets its kernels")


# mypy: disable-error-code="no-untyped-def, untyped-decorator, name-defined"
# Triton's functions are compiled from their source; types mean nothing to its compiler.


@triton.jit(do_not_specialize=["count"])
def _kernel(target, source, number, count, factor, FIXED: tl.constexpr, KINDS: tl.constexpr):
    lane = tl.arange(0, 16)
    if source is not None:
        found = tl.load(source + lane * number).to(tl.float32)
        tl.store(target + lane, found * factor, mask=lane < count)
    else:
        tl.store(target + lane, lane + KINDS[0], mask=lane < FIXED)


class Driver:
    """Compiles for an H100, and notes launches instead of making them."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        # No module, so that nothing is unloaded at the end.
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, 0, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def launcher_cls(self, _: Any, metadata: Any) -> Any:
        def run(*arguments: Any) -> None:
            # All but what is made anew for hooks of Triton's.
            self.launches.append((metadata.hash, (*arguments[:6], *arguments[7:])))

        return run

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7 + device


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr("kvprof.kernels.dispatch._compiled", {})
    _kernel.device_caches.clear()
    yield found
    _kernel.device_caches.clear()


ROOM = torch.zeros(4096)
TENSORS = [
    ROOM.to(dtype)[begin:]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.uint8)
    for begin in (0, 1, 8, 16)
]
EDGES = (0, 1, 2, 15, 16, 17, 2**31, 2**32, 2**63)
NUMBERS = [sign * edge + by for edge in EDGES for sign in (1, -1) for by in (-1, 0, 1)]
ARGUMENTS = st.one_of(
    st.sampled_from(TENSORS),
    st.sampled_from(NUMBERS),
    st.integers(-(2**63), 2**63),
    st.sampled_from([None, True, False, 0.0, 1.0, 16.0, -0.5]),
)


def test_what_has_the_same_key_is_the_same_to_triton(without_gpu: Driver) -> None:
    binder = _kernel.device_caches[0][-1]
    found: dict[Any, Any] = {}

    def check(argument: Any) -> None:
        key = argument_key(argument)
        if type(key) is object:
            return
        _, classified, _ = binder(argument, None, argument, argument, 0.0, 1, ())
        assert found.setdefault(key, classified) == classified

    given(ARGUMENTS)(check)()
    for argument in (*TENSORS, *NUMBERS, torch.nn.Parameter(ROOM)):
        check(argument)
    # Two of tensors for each dtype, and three of numbers.
    assert len(found) >= 2 * 5 + 3


CALLS = [
    (arguments, constants)
    for arguments in (
        (ROOM, ROOM, 16, 16, 1.0),
        (ROOM, ROOM[1:], 16, 7, 2.0),
        (ROOM[1:], ROOM, 3, 1, 1.0),
        (ROOM, ROOM[8:].half(), 1, 16, 3.0),
        (ROOM, None, 2**31, 16, 3.0),
        (ROOM, None, 32, 2**31 + 16, 3.0),
    )
    for constants in (
        {"FIXED": 3, "KINDS": (1, 2), "num_warps": 1},
        {"FIXED": 3, "KINDS": (1, 3), "num_warps": 2},
    )
]


def test_launches_are_those_that_triton_makes(
    without_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = (5, 2)
    for arguments, constants in CALLS:
        _kernel[grid](*arguments, **constants)
    wanted = list(without_gpu.launches)
    assert len({launch[0] for launch in wanted}) > 8
    for _ in range(3):
        without_gpu.launches.clear()
        for arguments, constants in CALLS:
            launching(_kernel, grid)(*arguments, **constants)
        for seen, ordinary in zip(without_gpu.launches, wanted, strict=True):
            assert seen[0] == ordinary[0]
            assert all(
                a is b if isinstance(a, torch.Tensor) else a == b
                for a, b in zip(seen[1], ordinary[1], strict=True)
            )

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("Triton was asked again")

    monkeypatch.setattr(JITFunction, "run", refused)
    arguments, constants = CALLS[0]
    launching(_kernel, grid)(*(*arguments[:2], 48, 32, 0.5), **constants)
    assert without_gpu.launches[-1][1][:4] == (5, 2, 1, 7)
    # Another multiple, and what it may not be taken for.
    for number in (1, 2**31):
        with pytest.raises(AssertionError, match="asked again"):
            launching(_kernel, grid)(*(*arguments[:2], number, 32, 0.5), **constants)


def test_numbers_given_by_name_go_tritons_way(without_gpu: Driver) -> None:
    for count in (16, 5):
        launching(_kernel, (1,))(ROOM, ROOM, 16, count=count, factor=1.0, FIXED=1, KINDS=(1,))
        assert without_gpu.launches[-1][1][-4] == count
    for fixed in (4, 5):
        launching(_kernel, (1,))(ROOM, None, 16, 2, 1.0, fixed, KINDS=(1,))
        assert without_gpu.launches[-1][1][-2] == fixed
