"""The projection's CPU path: what the kernel's cases ask, and torch.compile through it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import basis_set
from kvprof.kernels.project.step import (
    keys_operator,
    project_keys,
    project_queries,
    project_step,
    project_values,
    queries_operator,
    step_operator,
    store_values,
    values_operator,
)
from tests.kernels.cases.project_cases import (
    PROMPT,
    Case,
    Pass,
    Rope,
    check_first_block,
    check_one_by_one,
    check_step,
    few,
    passes,
)

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.float32, torch.bfloat16]


@few
@given(passes(), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_any_pass(case, dtype, seed):
    check_step(case, dtype, CPU, seed)
    check_one_by_one(case, dtype, CPU, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("folded", [True, False])
def test_the_first_block_of_a_segment(dtype, folded):
    check_first_block([(112, 48), (144, 16), (16, 128)], 3, 20, folded, dtype, CPU, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_several_blocks(dtype, monkeypatch):
    monkeypatch.setattr("kvprof.kernels.project.cpu._ROWS", 64)
    check_step(PROMPT, dtype, CPU)


LAYOUT = RaggedLayout((112, 32), (48, 64), 2, 2, 40)


@pytest.mark.parametrize("folded", [True, False])
def test_a_compiled_layer_does_the_same(folded):
    case = Case(LAYOUT, 64, 3, (5, 9), value_depth=0 if folded else 80, rope=Rope(32, full=True))
    made = Pass(case, torch.float32, CPU, 1)

    def layer(query, keys, values, buffer, start, cos, sin):
        queries = project_step(
            query,
            keys * 1,
            values,
            made.bases,
            LAYOUT,
            buffer,
            start,
            value_bases=made.value_bases,
            cos=cos,
            sin=sin,
            rotary_dim=32,
        )
        return queries * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = compiled(
        made.query, made.keys, made.values, made.buffer, made.start, made.cos, made.sin
    )
    made.check_queries(found / 2, made.bases)
    made.check_buffer()


def test_each_operator_compiles():
    case = Case(LAYOUT, 64, 3, (5, 9), value_depth=80, valid=(0, 1))
    made = Pass(case, torch.float32, CPU, 2)

    def layer(query, keys, values, buffer, start, valid):
        project_keys(keys, made.bases, LAYOUT, buffer, start, valid=valid)
        project_values(values, made.value_bases, LAYOUT, buffer, start, valid=valid)
        return project_queries(query, made.bases, LAYOUT)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    valid = made.places["valid"]
    found = compiled(made.query, made.keys, made.values, made.buffer, made.start, valid)
    made.check_queries(found, made.bases)
    made.check_buffer()


def test_operators_say_what_they_write():
    case = Case(LAYOUT, 64, 3, (5, 9), rope=Rope(64, full=True), gap=0)
    made = Pass(case, torch.float32, CPU, 3)
    bases, turn = made.bases.packed, [64, 0, 0]
    widths = (list(LAYOUT.key_widths), list(LAYOUT.value_widths))
    place = (made.buffer, *widths, LAYOUT.batch, LAYOUT.capacity, made.start, None, None)
    rope = (made.cos, made.sin, turn)
    checks = {
        queries_operator: (made.query, bases, widths[0]),
        keys_operator: (made.keys, bases, *place),
        values_operator: (made.values, None, *place),
        step_operator: (
            made.query,
            made.keys,
            made.values,
            bases,
            bases,
            None,
            *place,
            *rope,
            1,
            512,
        ),
    }
    for operator, arguments in checks.items():
        torch.library.opcheck(operator, arguments)


def test_a_basis_set_holds_its_bases():
    made = [torch.randn(24, width) for width in (16, 48, 32)]
    packed = basis_set(made, dtype=torch.float16)
    for head, basis in enumerate(made):
        assert torch.equal(packed.head(head), basis.half())
    for bad, said in (
        ([], "none"),
        ([torch.ones(24, 16), torch.ones(32, 16)], r"\(32, 16\)"),
        ([torch.ones(24, 40)], "40"),
        ([torch.ones(24, 16, dtype=torch.float64)], "float64"),
    ):
        with pytest.raises(UsageError, match=said):
            basis_set(bad)


def refusals():
    """Name each thing that does not fit, what it does to a good call, and what is said."""
    bases = basis_set([torch.ones(64, 96), torch.ones(64, 32)])
    yield "heads", lambda c: c | {"keys": c["keys"][:, :, :1]}, "keys"
    yield "dtype", lambda c: c | {"keys": c["keys"].half()}, "float16"
    yield "strides", lambda c: c | {"keys": c["keys"].mT.contiguous().mT}, "contiguous"
    yield "widths", lambda c: c | {"bases": bases}, "96"
    yield "cache", lambda c: c | {"buffer": c["buffer"][:-1]}, "cache"
    yield "batch", lambda c: c | {"layout": RaggedLayout((112, 32), (48, 64), 2, 1, 80)}, "2 seq"
    yield "start", lambda c: c | {"start": c["start"].long()}, "int64"
    yield "valid", lambda c: c | {"valid": c["start"][:1]}, "valid"
    yield "slots", lambda c: c | {"slots": c["start"]}, "slots"
    slots = torch.zeros(2 * 3, dtype=torch.int64)
    yield "both", lambda c: c | {"slots": slots}, "exclude"
    yield "neither", lambda c: c | {"start": None}, "give start, or slots"


def rotary_refusals():
    """The same of RoPE's tables."""
    yield "sin", lambda c: c | {"sin": None}, "both"
    yield "no tables", lambda c: c | {"cos": None, "sin": None}, "cos and sin"
    yield "tables", lambda c: c | {"cos": c["cos"][:, :2]}, "cos has shape"
    yield "sin's width", lambda c: c | {"sin": c["sin"][..., :16]}, "entries per token"
    yield "odd", lambda c: c | {"rotary_dim": 31}, "31"
    yield "too far", lambda c: c | {"offset": 48}, "48"


def named(cases):
    """Return what parametrizes a test with cases that bring their names."""
    return [pytest.param(*rest, id=name) for name, *rest in cases]


def good_call(rope):
    made = Pass(Case(LAYOUT, 64, 3, (5, 9), rope=rope), torch.float32, CPU, 4)
    good = {
        "keys": made.keys,
        "bases": made.bases,
        "layout": LAYOUT,
        "buffer": made.buffer,
        "start": made.start,
        **made.rotary,
    }
    return made, good


@pytest.mark.parametrize(("change", "said"), named(refusals()))
def test_what_does_not_fit_is_refused(change, said):
    _, good = good_call(None)
    project_keys(**good)
    with pytest.raises(UsageError, match=said):
        project_keys(**change(good))


@pytest.mark.parametrize(("change", "said"), named(rotary_refusals()))
def test_rope_that_does_not_fit_is_refused(change, said):
    made, good = good_call(Rope(32, full=True))
    project_step(made.query, values=made.values, **good)
    with pytest.raises(UsageError, match=said):
        project_step(made.query, values=made.values, **change(good))


def test_values_and_passes_that_do_not_fit_are_refused():
    made = Pass(Case(LAYOUT, 64, 3, (5, 9)), torch.float32, CPU, 5)
    place = (LAYOUT, made.buffer, made.start)
    with pytest.raises(UsageError, match="112"):
        store_values(made.values[..., :-16], *place)
    for changed in ({"query": made.query[:, :2]}, {"values": made.values.half()}):
        given = {"query": made.query, "keys": made.keys, "values": made.values} | changed
        with pytest.raises(UsageError, match="same pass"):
            project_step(*given.values(), made.bases, *place)
    narrow = basis_set([torch.ones(32, 112), torch.ones(32, 32)])
    with pytest.raises(UsageError):
        project_step(
            made.query[..., :32], made.keys, made.values, made.bases, *place, query_bases=narrow
        )
