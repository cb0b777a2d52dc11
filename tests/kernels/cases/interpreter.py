"""Triton's interpreter without what it asks again at every operation.

What types two sides have decides what an operation makes of them, and a kernel has few types: each
is asked once of the interpreter itself, and afterwards numpy is called with what was answered.
Whatever is not among the plain numbers below goes the interpreter's own way.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy
import pytest
from triton.language import core
from triton.runtime import interpreter

SEMANTIC = interpreter.interpreter_semantic
BUILDER = interpreter.interpreter_builder
Checker = interpreter.TritonSemantic
Handle, Block, Tensor = interpreter.TensorHandle, core.block_type, core.tensor
#: The types whose numbers numpy has under the same rules.
INTEGERS = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})
FLOATS = frozenset({"fp16", "fp32"})
#: What numpy's `astype` makes of numbers of a type is what the interpreter makes of them.
BECOME = {
    **dict.fromkeys({"int1", *INTEGERS}, INTEGERS | FLOATS),
    "fp32": INTEGERS | {"fp16"},
    "fp16": {"fp32"},
}
EVERY = slice(None)
new = object.__new__


def quotient(one: Any, two: Any) -> Any:
    """Divide whole numbers as the interpreter does: towards zero."""
    return (one - numpy.fmod(one, two)) // two


class Operation(NamedTuple):
    """An operation of two sides: its name, numpy's function, and the types it is plain for."""

    name: str
    work: Any
    types: frozenset[str] = INTEGERS | FLOATS
    compares: bool = False
    mirrored: bool = True


OPERATIONS = (
    Operation("add", numpy.add),
    Operation("sub", numpy.subtract),
    Operation("mul", numpy.multiply),
    Operation("floordiv", quotient, INTEGERS),
    Operation("mod", numpy.fmod, INTEGERS),
    Operation("and", numpy.bitwise_and, INTEGERS | {"int1"}),
    Operation("or", numpy.bitwise_or, INTEGERS | {"int1"}),
    Operation("lshift", numpy.left_shift, INTEGERS, mirrored=False),
    Operation("rshift", numpy.right_shift, INTEGERS, mirrored=False),
    *(
        Operation(name, work, compares=True, mirrored=False)
        for name, work in (
            ("lt", numpy.less),
            ("le", numpy.less_equal),
            ("gt", numpy.greater),
            ("ge", numpy.greater_equal),
            ("eq", numpy.equal),
            ("ne", numpy.not_equal),
        )
    ),
)


class Sides(NamedTuple):
    """What two sides of known types become before they are joined."""

    kind: Any  # of the result of arithmetic
    truth: Any  # of the result of a comparison
    left: Any  # numpy's dtype, where that side becomes another
    right: Any


class Beside(NamedTuple):
    """A number as it is beside tensors of a type, which stay what they are."""

    kind: Any
    truth: Any
    data: Any


common = Checker.binary_op_type_checking_impl
dtype_of, cast, new_block = interpreter._get_np_dtype, Checker.cast, Block.__init__
patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
# What was answered, by the names of types.
dtypes: dict[str, Any] = {}
blocks: dict[tuple[int, ...], dict[str, Any]] = {}
shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
typed: dict[tuple[str, str], Any] = {}
sides: dict[tuple[str, str], Sides] = {}
addresses: dict[tuple[str, str], tuple[Any, int] | None] = {}
loaded: dict[str, tuple[Any, Any] | None] = {}
indexed: dict[tuple[Any, ...], Any] = {}
whole: dict[tuple[Any, ...], Any] = {}
numbers: dict[tuple[Any, ...], Beside | None] = {}
patched: dict[frozenset[str], Any] = {}


def np_dtype(kind: Any) -> Any:
    """Return numpy's dtype for the numbers of a type; the table of all is made once."""
    name = kind.scalar.name
    if name not in dtypes:
        dtypes[name] = dtype_of(kind.scalar)
    return dtypes[name]


def block_of_known_shape(block: Any, element: Any, shape: Any) -> None:
    measures = tuple(getattr(size, "value", size) for size in shape)
    if measures not in blocks:
        new_block(block, element, shape)
        blocks[measures] = {"shape": block.shape, "numel": block.numel}
    block.__dict__.update(blocks[measures], element_ty=element, name=f"<{measures}, {element}>")


def facts_of(kind: Any) -> tuple[Any, Any, Any]:
    """Return a type's numbers, its shape and how many they are; the type keeps them."""
    measures = kind.shape if type(kind) is Block else ()
    if type(measures) is not tuple:
        measures = tuple(measures.values)
    if measures not in shapes:
        number = core.constexpr(math.prod(measures))
        shapes[measures] = core.tuple([core.constexpr(size) for size in measures]), number
    kind.facts = kind.scalar, *shapes[measures]
    facts: tuple[Any, Any, Any] = kind.facts
    return facts


def tensor_of_known_shape(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.dtype, tensor.shape, tensor.numel = kind.__dict__.get("facts") or facts_of(kind)
    tensor.handle, tensor.type = handle, kind


def made(data: Any, kind: Any) -> Any:
    """Return a tensor, without asking whether its numbers are as wide as their type: they are."""
    element, shape, number = kind.__dict__.get("facts") or facts_of(kind)
    handle, tensor = new(Handle), new(Tensor)
    handle.data, handle.dtype, handle.attr = data, element, {}
    tensor.handle, tensor.type, tensor.dtype = handle, kind, element
    tensor.shape, tensor.numel = shape, number
    return tensor


def same_type(kind: Any, other: Any) -> bool:
    if kind is other:
        return True
    other = core._unwrap_if_constexpr(other)
    return isinstance(other, core.dtype) and kind.name == other.name


def with_element(block: Any, element: Any) -> Any:
    known = block.name, element.name
    if known not in typed:
        typed[known] = Block(element, block.shape)
    return typed[known]


def sides_of(left: Any, right: Any) -> Sides:
    """Ask the interpreter what two tensors of plain types become."""
    one, two = common(SEMANTIC, left, right)
    changed = (
        None if old.dtype.name == new.dtype.name else np_dtype(new.type)
        for old, new in ((left, one), (right, two))
    )
    truth = SEMANTIC._bool_like(one)
    return Sides(one.type, truth, *changed)


def number_beside(tensor: Any, number: Any) -> Beside | None:
    """Return a number as what it is beside a tensor, or None where it changes the tensor's type."""
    # Written out where it is zero: 0.0 and -0.0 are equal.
    known = tensor.type.name, type(number), number or repr(number)
    if known not in numbers:
        one, two = common(SEMANTIC, tensor, number)
        numbers[known] = None
        if one is tensor:
            two.handle.data.flags.writeable = False
            numbers[known] = Beside(one.type, SEMANTIC._bool_like(one), two.handle.data)
    return numbers[known]


def both_of(left: Any, right: Any, types: frozenset[str]) -> tuple[Any, Any, Any] | None:
    """Return two sides as numpy's, and the types that they make, where these are plain."""
    if left.dtype.name not in types:
        return None
    other = type(right)
    if other is core.constexpr:
        right = right.value
        other = type(right)
    if other is Tensor:
        if right.dtype.name not in types:
            return None
        asked = left.type.name, right.type.name
        both = sides.get(asked)
        if both is None:
            both = sides[asked] = sides_of(left, right)
        # numpy gives both the shape that the type of the result says.
        one, two = left.handle.data, right.handle.data
        if both.left is not None:
            one = one.astype(both.left)
        if both.right is not None:
            two = two.astype(both.right)
        return one, two, both
    if other is not int and other is not float:
        return None
    beside = number_beside(left, right)
    return beside and (left.handle.data, beside.data, beside)


def joined_by(operation: Operation, name: str, swapped: bool) -> Any:
    """Return an operator of tensors; `swapped` for the one that a number on the left asks for."""
    known = getattr(Tensor, name)
    work, types, compares = operation.work, operation.types, operation.compares
    adds = operation.name == "add"

    def joined(left: Any, right: Any, _semantic: Any = SEMANTIC) -> Any:
        if adds and left.dtype.is_ptr():
            moved = further(left, right)
            return known(left, right, _semantic=_semantic) if moved is None else moved
        found = both_of(left, right, types)
        if found is None:
            return known(left, right, _semantic=_semantic)
        one, two, both = found
        data = work(two, one) if swapped else work(one, two)
        return made(data, both.truth if compares else both.kind)

    return joined


def further(pointer: Any, offset: Any) -> Any:
    """Add whole numbers to pointers; None where the offset is no plain one."""
    other = type(offset)
    if other is core.constexpr:
        offset = offset.value
        other = type(offset)
    if other is int:
        width = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        moved = numpy.int64(width * offset).astype(numpy.uint64)
        return made(pointer.handle.data + moved, pointer.type)
    if other is not Tensor:
        return None
    asked = pointer.type.name, offset.type.name
    if asked not in addresses:
        addresses[asked] = address_of(pointer, offset)
    if addresses[asked] is None:
        return None
    kind, width = addresses[asked]
    return made(pointer.handle.data + width * offset.handle.data.astype(numpy.uint64), kind)


def where_by(known: Any) -> Any:
    def where(condition: Any, one: Any, two: Any, _semantic: Any = SEMANTIC) -> Any:
        found = None
        if type(condition) is Tensor and condition.dtype.name == "int1":
            if type(one) is Tensor:
                found = both_of(one, two, INTEGERS | FLOATS)
            elif type(two) is Tensor and (found := both_of(two, one, INTEGERS | FLOATS)):
                found = found[1], found[0], found[2]
        if found is not None:
            left, right, both = found
            data = numpy.where(condition.handle.data, left, right)
            if both.kind.is_block() and data.shape == tuple(both.kind.shape):
                return made(data, both.kind)
        return known(condition, one, two, _semantic=_semantic)

    return where


def extreme_by(known: Any, of_floats: Any, of_integers: Any) -> Any:
    """Return `minimum` or `maximum`, which leave out what is no number unless asked for it."""

    def extreme(one: Any, two: Any, *how: Any, _semantic: Any = SEMANTIC, **more: Any) -> Any:
        found = None
        if not how and not more and type(one) is Tensor:
            found = both_of(one, two, INTEGERS | FLOATS)
        if found is None:
            return known(one, two, *how, _semantic=_semantic, **more)
        left, right, both = found
        work = of_floats if both.kind.scalar.name in FLOATS else of_integers
        return made(work(left, right), both.kind)

    return extreme


def address_of(pointer: Any, offset: Any) -> tuple[Any, int] | None:
    """Return what pointers and whole numbers make, and how many bytes lie between neighbours."""
    if offset.dtype.name not in INTEGERS:
        return None
    kind = common(SEMANTIC, pointer, offset, True, True)[0].type
    return kind, max(1, kind.scalar.element_ty.primitive_bitwidth // 8)


def casted(self: Any, tensor: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
    own, wanted = tensor.dtype.name, kind.scalar.name
    if own == wanted:
        return tensor
    if fp_downcast_rounding is None and wanted in BECOME.get(own, ()):
        result = with_element(tensor.type, kind.scalar) if tensor.type.is_block() else kind.scalar
        return made(tensor.handle.data.astype(np_dtype(kind)), result)
    return cast(self, tensor, kind, fp_downcast_rounding)


def alike_by(known: Any) -> Any:
    """Return what gives tensors one shape; those that have it are left as they are."""

    def alike(self: Any, *tensors: Any) -> Any:
        # Types of one shape share it (`block_of_known_shape`).
        if len({id(one.type.shape) if one.type.is_block() else None for one in tensors}) == 1:
            return tensors
        return known(self, *tensors)

    return alike


def to_by(known: Any) -> Any:
    def to(tensor: Any, dtype: Any, *how: Any, _semantic: Any = SEMANTIC, **more: Any) -> Any:
        if how or more or type(dtype) is not core.dtype:
            return known(tensor, dtype, *how, _semantic=_semantic, **more)
        return casted(SEMANTIC, tensor, dtype)

    return to


def full_of(data: Any, number: Any, dtype: Any) -> Any:
    """Return an array like another that holds one number and is only read."""
    known = data.shape, dtype.char, number or repr(number)
    if known not in whole:
        whole[known] = numpy.full(data.shape, number, dtype)
    return whole[known]


def load_by(known: Any) -> Any:
    """Return `load`: where numbers are read as they lie, and what is masked is one number."""

    def plain(pointer: Any) -> tuple[Any, Any] | None:
        element = pointer.dtype.element_ty if pointer.dtype.is_ptr() else core.int1
        if element.name == "int1":
            return None
        block = pointer.type.is_block()
        return np_dtype(element), with_element(pointer.type, element) if block else element

    def loaded_from(pointer: Any, mask: Any, fill: Any) -> Any:
        kind = pointer.type.name
        if kind not in loaded:
            loaded[kind] = plain(pointer)
        if loaded[kind] is None or type(fill) not in (int, float):
            return None
        dtype, result = loaded[kind]
        if fill and result.scalar.name not in BECOME:
            return None  # numpy has other bits for that number
        data = pointer.handle.data
        if mask is None:
            there = full_of(data, True, numpy.dtype(bool))
        elif type(mask) is Tensor and mask.dtype.name == "int1":
            there = mask.handle.data
            if there.shape != data.shape:
                if numpy.broadcast_shapes(there.shape, data.shape) != data.shape:
                    return None
                there = numpy.broadcast_to(there, data.shape)
        else:
            return None
        beside = full_of(data, fill, dtype)
        return made(interpreter._interpreter.load(data, there, beside, dtype), result)

    def load(
        pointer: Any, mask: Any = None, other: Any = None, *, _semantic: Any = SEMANTIC, **more: Any
    ) -> Any:
        # How what is read is kept in caches means nothing here.
        found = loaded_from(pointer, mask, 0 if other is None else other)
        if found is None:
            return known(pointer, mask, other, _semantic=_semantic, **more)
        return found

    return load


def index_by(known: Any) -> Any:
    """Return `tensor[:, None]` and the like."""

    def index(tensor: Any, places: Any, _semantic: Any = SEMANTIC) -> Any:
        if type(places) is not tuple or any(one is not None and one != EVERY for one in places):
            return known(tensor, places, _semantic=_semantic)
        asked = (tensor.type.name, *(one is None for one in places))
        if asked not in indexed:
            indexed[asked] = known(tensor, places, _semantic=_semantic).type
        return made(tensor.handle.data[places], indexed[asked])

    return index


@cache
def modules(function: Any) -> frozenset[str]:
    known = (interpreter.tl, interpreter.tl.core)
    found = [value for value in function.__globals__.values() if value in known]
    return frozenset(one.__name__ for one in found)


def patch_once(function: Any) -> Any:
    """Patch a language module once, and not in every call of a function of a grid."""
    own = modules(function)
    if own not in patched:
        patched[own] = patch_lang(function)
    return interpreter._LangPatchScope()  # which has nothing to restore


def called(function: Any, *arguments: Any, **options: Any) -> Any:
    if function.fn not in function.rewritten_fn:
        function.rewrite()
    patch_once(function.fn)
    return function.rewritten_fn[function.fn](*arguments, **options)


def run_fresh(executor: Any, *arguments: Any, **options: Any) -> Any:
    numbers.clear()  # blocks of what one launch counted and scaled
    whole.clear()
    return run_grid(executor, *arguments, **options)


def remember(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter answer what it answered before; `forget` undoes what it patched itself.

    Sums of integers, too, are worked out a second time as int64 and compared with what their type
    holds, which without `debug` nobody looks at.
    """
    assert not BUILDER.options.debug
    patch.setattr(BUILDER, "options", replace(BUILDER.options, sanitize_overflow=False))
    patch.setattr(Block, "__init__", block_of_known_shape)
    patch.setattr(Tensor, "__init__", tensor_of_known_shape)
    patch.setattr(Block, "with_element_ty", with_element)
    patch.setattr(core.dtype, "__eq__", same_type)
    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.InterpretedFunction, "__call__", called)
    patch.setattr(interpreter.GridExecutor, "__call__", run_fresh)
    patch.setattr(interpreter, "_get_np_dtype", np_dtype)
    patch.setattr(Checker, "cast", casted)
    patch.setattr(Checker, "broadcast_tensors", alike_by(Checker.broadcast_tensors))
    for operation in OPERATIONS:
        for prefix in ("", "r")[: 1 + operation.mirrored]:
            name = f"__{prefix}{operation.name}__"
            patch.setattr(Tensor, name, joined_by(operation, name, bool(prefix)))
    patch.setattr(Tensor, "to", to_by(Tensor.to))
    patch.setattr(Tensor, "__getitem__", index_by(Tensor.__getitem__))
    functions = {
        "load": load_by(core.load),
        "where": where_by(core.where),
        "minimum": extreme_by(core.minimum, numpy.fmin, numpy.minimum),
        "maximum": extreme_by(core.maximum, numpy.fmax, numpy.maximum),
    }
    for module in (core, interpreter.tl):
        for name, function in functions.items():
            patch.setattr(module, name, function)


def forget() -> None:
    """Undo what the interpreter patched."""
    for scope in reversed(patched.values()):
        scope.restore()
