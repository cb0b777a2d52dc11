"""Triton's interpreter, which does again at every call what it needs to do once."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest

from kvprof.kernels.dispatch import interpreted


@pytest.fixture(scope="session", autouse=True)
def _interpreter_that_remembers() -> Iterator[None]:
    """Let a language module be patched once, and not in every call of a function of a grid.

    What is patched already is found by going through all its members, and left as it is: a quarter
    of the time of these tests. The table of dtypes, too, is made anew for every tensor, and so are
    shapes, of which a kernel has few. And sums of integers are worked out a second time as int64
    and compared with what their type holds, which without `debug` nobody looks at: 40 % of what is
    left. Then, what an operation does with its two sides is decided by their types alone: whether
    one becomes another type or shape is asked once, and a number is written out as a block once.
    What is added or multiplied has the type of its two sides where these have one.
    """
    if not interpreted():
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    dtype_of = interpreter._get_np_dtype
    patched: dict[frozenset[str], Any] = {}
    dtypes: dict[str, Any] = {}

    @cache
    def modules(function: Any) -> frozenset[str]:
        known = (interpreter.tl, interpreter.tl.core)
        found = [value for value in function.__globals__.values() if value in known]
        return frozenset(one.__name__ for one in found)

    def patch_once(function: Any) -> Any:
        own = modules(function)
        if own not in patched:
            patched[own] = patch_lang(function)
        return interpreter._LangPatchScope()  # which has nothing to restore

    def run_fresh(executor: Any, *arguments: Any, **options: Any) -> Any:
        numbers.clear()  # blocks of what one launch counted and scaled
        return run_grid(executor, *arguments, **options)

    def named(kind: Any) -> Any:
        name = str(kind.scalar)
        if name not in dtypes:
            dtypes[name] = dtype_of(kind.scalar)
        return dtypes[name]

    new_block = core.block_type.__init__
    blocks: dict[tuple[int, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_of_known_shape(block: Any, element: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in blocks:
            new_block(block, element, shape)
            blocks[sizes] = {"shape": block.shape, "numel": block.numel}
        block.__dict__.update(blocks[sizes], element_ty=element, name=f"<{sizes}, {element}>")

    def tensor_of_known_shape(tensor: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in shapes:
            number = core.constexpr(math.prod(sizes))
            shapes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), number
        tensor.shape, tensor.numel = shapes[sizes]
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar

    semantic = interpreter.TritonSemantic
    common, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    same_type, with_element = core.dtype.__eq__, core.block_type.with_element_ty
    typed: dict[tuple[str, str], Any] = {}
    numbers: dict[tuple[Any, ...], Any] = {}
    kinds: dict[tuple[str, str, Any], tuple[Any, ...]] = {}

    def sides_of_known_types(self: Any, left: Any, right: Any, *more: Any, **options: Any) -> Any:
        asked = (*more, *options.items())
        tensors = type(left) is core.tensor, type(right) is core.tensor
        if tensors == (True, True):
            divides = len(more) > 3 or "div_or_mod" in options  # small floats become float32
            if left.type.name == right.type.name and not (left.dtype.is_ptr() or divides):
                return left, right
            return become(self, left, right, asked, lambda *sides: common(*sides, *more, **options))
        if True in tensors:
            tensor, number = (left, right) if tensors[0] else (right, left)
            # Written out: 0.0 and -0.0 are equal.
            known = tensor.type.name, tensors, type(number), repr(number), asked
            if known not in numbers:
                both = common(self, left, right, *more, **options)
                if tensor is not both[not tensors[0]]:
                    return both
                numbers[known] = both[tensors[0]]
                numbers[known].handle.data.flags.writeable = False
            block = numbers[known]
            return (tensor, block) if tensors[0] else (block, tensor)
        return common(self, left, right, *more, **options)

    def sides_of_known_shapes(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:  # as `tensor_of_known_shape` gives them
            return left, right
        return become(self, left, right, "shapes", broadcast)

    def become(self: Any, left: Any, right: Any, asked: Any, ask: Any) -> Any:
        """Give two sides the types that sides of their types were given before."""
        known = left.type.name, right.type.name, asked
        if known not in kinds:
            both = ask(self, left, right)
            pairs = zip(both, (left, right), strict=True)
            kinds[known] = tuple(None if new is old else new.type for new, old in pairs)
            return both
        pairs = zip((left, right), kinds[known], strict=True)
        return tuple(side if kind is None else of_kind(self, side, kind) for side, kind in pairs)

    def of_kind(self: Any, side: Any, kind: Any) -> Any:
        if side.dtype.name != kind.scalar.name:
            side = self.cast(side, kind.scalar)
        return side if side.type.name == kind.name else in_shape(self, side, kind)

    def in_shape(self: Any, side: Any, kind: Any) -> Any:
        make = self.builder
        if side.type.is_block():
            return self.make_tensor(make.create_broadcast(side.handle, kind.shape), kind)
        return self.make_tensor(make.create_splat(kind, side.handle), kind)

    def is_one(kind: Any, other: Any) -> bool:
        return kind is other or same_type(kind, other)

    def with_element_once(block: Any, element: Any) -> Any:
        known = block.name, element.name
        if known not in typed:
            typed[known] = with_element(block, element)
        return typed[known]

    def joined_by(name: str, work: Any, swapped: bool) -> Any:
        known = getattr(core.tensor, name)

        def joined(left: Any, right: Any, **options: Any) -> Any:
            other = type(right)
            if left.dtype.name in own_type and (other is core.tensor or other in plain):
                sides = (right, left) if swapped else (left, right)
                one, two = sides_of_known_types(interpreter.interpreter_semantic, *sides)
                kind = one.type
                if kind.scalar.name in own_type and kind.name == two.type.name:
                    made = handle(work(one.handle.data, two.handle.data), kind.scalar)
                    return core.tensor(made, kind)
            return known(left, right, **{"_semantic": interpreter.interpreter_semantic, **options})

        return joined

    handle = interpreter.TensorHandle
    own_type, plain = {"fp16", "fp32", "int32", "int64"}, {int, float}
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(core.block_type, "__init__", block_of_known_shape)
        patch.setattr(core.tensor, "__init__", tensor_of_known_shape)
        patch.setattr(core.block_type, "with_element_ty", with_element_once)
        patch.setattr(core.dtype, "__eq__", is_one)
        patch.setattr(semantic, "binary_op_type_checking_impl", sides_of_known_types)
        patch.setattr(semantic, "broadcast_impl_value", sides_of_known_shapes)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_fresh)
        patch.setattr(interpreter, "_get_np_dtype", named)
        for name, work in (("add", numpy.add), ("sub", numpy.subtract), ("mul", numpy.multiply)):
            for prefix in ("", "r"):
                own = f"__{prefix}{name}__"
                patch.setattr(core.tensor, own, joined_by(own, work, bool(prefix)))
        yield
        for scope in reversed(patched.values()):
            scope.restore()
