"""Tables that kernels read: columns have names, and no number stands for one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvprof.kernels
from kvprof.kernels.decode import cuts
from kvprof.kernels.planes import chunks
from kvprof.kernels.prefill import tuning
from kvprof.kernels.quantized import tables as quantized
from kvprof.kernels.reconstruct import rebuild_config
from kvprof.kernels.tables import Chunks, Kind, Output, chunk_columns, column, columns, joined_rows

FOLDER = Path(kvprof.kernels.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if "@triton.jit" in path.read_text())


def kernels(source: str) -> Iterator[ast.FunctionDef]:
    """Give the functions that Triton compiles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node


def addresses(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Give what is read or written: pointers, and places in compile-time tables."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            yield node.args[0]
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).isupper():
            yield node.slice


def bare(address: ast.expr) -> bool:
    """Tell whether a written number is a term or a factor of an address."""
    if isinstance(address, ast.BinOp) and isinstance(address.op, ast.Add | ast.Sub | ast.Mult):
        return bare(address.left) or bare(address.right)
    return isinstance(address, ast.Constant) and isinstance(address.value, int)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_kernel_reads_a_column_by_its_number(path):
    found = [
        f"{function.name}: {ast.unparse(address)}"
        for function in kernels(path.read_text())
        for address in addresses(function)
        if bare(address)
    ]
    assert found == []


@pytest.mark.parametrize("address", ["KINDS[at + 6]", "tl.load(units + n * 5 + _A)", "KINDS[3]"])
def test_a_number_in_an_address_is_seen(address):
    source = f"@triton.jit\ndef kernel(units, n, KINDS):\n    return {address}\n"
    assert any(bare(each) for each in addresses(next(kernels(source))))


def test_tables_that_share_a_reader_begin_alike():
    # What joins parts reads `Output` of any table of heads, and chunks are counted in every kind.
    for heads in (cuts.Head, quantized.Unit, rebuild_config.Group):
        assert heads._fields[:2] == Output._fields
    for kinds in (Kind, tuning.Kind):
        assert columns(kinds)[:8] == Chunks._fields


def test_a_column_is_found_by_its_name_and_rows_are_told_one_after_another():
    assert [column(Kind, name) for name in columns(Kind)] == list(range(9))
    with pytest.raises(ValueError, match="tuple"):
        column(Kind, "width")
    found = chunk_columns(112, 512)
    assert tuple(filter(None, found[:4])) == chunks(112) == (64, 32, 16)
    assert found[4:] == (512, 0, 0, 0)
    assert joined_rows([found, found]) == (*found, *found)
    assert joined_rows([Kind(found, 64), Kind(found, 32)]) == (*found, 64, *found, 32)
