"""Plans on disk come back as they were, and what is not right is refused in one line."""

import json
import re
import time
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.methods import plan_files
from kvprof.methods.family import plan_at
from kvprof.methods.plan_files import load_plan, save_plan, structure
from kvprof.methods.plan_report import compare_plans
from kvprof.methods.registry import plan_family
from kvprof.methods.storage import Eviction
from kvprof.runtime.compressed import compressed
from kvprof.tensor_files import FORMER_NOTE, load_tensors, save_tensors
from tests.methods.models import FINE, inputs, model
from tests.models.tiny import token_ids
from tests.records.hostile import mutations

NAMES = [
    "full",
    "fp8",
    "fdc",
    "palu",
    "tale+kivi",
    "strawman",
    "fdc+keyformer",
    "kq+snapkv",
    "kq-4bit",
    "kq-wf",
    "kvquant",
    "kvtc",
    "xkv",
    "hadamard-int4",  # centred, and read by age
]


def made(name):
    ranked = name.startswith(("fdc", "palu", "tale", "kq", "strawman"))
    options = {**(FINE if ranked else {}), **({"heads": 2} if name == "palu" else {})}
    if name == "kq-wf":
        options = {"grid": 4, "allocation": "output"}
    family = plan_family(name, inputs("Llama"), **options)
    return plan_at(family, family.settings[0] if family.settings else 0.3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "p.safetensors"
    save_plan(made("fdc+keyformer"), path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_what_was_saved_comes_back(name, tmp_path):
    before = made(name)
    save_plan(before, tmp_path / "p")
    after = load_plan(tmp_path / "p", fingerprint=before.fingerprint)
    assert compare_plans(before, after) == {}
    assert structure(after) == structure(before)
    for a, b in zip(before.layers, after.layers, strict=True):
        assert (a.centre is None) is (b.centre is None)
        if a.centre is not None and b.centre is not None:
            assert torch.equal(a.centre.keys, b.centre.keys)
            assert torch.equal(a.centre.values, b.centre.values)
    for a, b in zip(before.layers, after.layers, strict=True):
        for x, y in zip(a.keys.groups, b.keys.groups, strict=True):
            assert (x.down is None) == (y.down is None)
            assert y.down is None or (y.down.dtype, y.down.is_contiguous()) == (torch.float32, True)


def test_another_models_plan_is_refused(saved):
    with pytest.raises(UsageError) as caught:
        load_plan(saved, fingerprint="0" * 32)
    assert re.match(r"p.safetensors: .* Llama \(", str(caught.value))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_plan_of_before_fits_any_model_of_its_shape(number, tmp_path):
    """It has a fingerprint of the values of weights, which nothing computes now."""
    loaded = model("Llama")
    save_plan(replace(made("kq"), fingerprint="0" * 32), tmp_path / "new")
    told = {"what": "plans", "made_by": "kvprof plan"}
    tensors, metadata = load_tensors(tmp_path / "new", format_name="kvprof-plan/4", **told)
    save_tensors(tmp_path / "old", tensors, metadata, format_name=f"kvprof-plan/{number}")
    plan = load_plan(tmp_path / "old", fingerprint=loaded.fingerprint, layout=loaded.layout)
    assert [layer.centre for layer in plan.layers] == [None] * len(plan.layers)
    assert plan.made["notes"] == [FORMER_NOTE]
    with compressed(loaded, plan), torch.inference_mode():
        assert loaded.model(token_ids(1, 9)).logits.isfinite().all()
    with pytest.raises(UsageError):
        load_plan(tmp_path / "old", layout=model("GPT2").layout)


def test_other_files_are_told_apart(saved, tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(FailedError):
        load_plan(tmp_path / "other")
    save_tensors(tmp_path / "new", {"x": torch.zeros(1)}, {}, format_name="kvprof-plan/9")
    with pytest.raises(FailedError):
        load_plan(tmp_path / "new")
    (tmp_path / "result.json").write_text('{"schema": "kvprof/1"}')
    with pytest.raises(FailedError):
        load_plan(tmp_path / "result.json")
    with pytest.raises(UsageError, match="--force"):
        save_plan(made("full"), saved)


_EVICTION = asdict(Eviction("recent", 0.5))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("layers"),
        lambda plan: plan["levels"].update(shares=[0.5]),
        lambda plan: plan["layers"][0]["keys"].update(placement="nowhere"),
        lambda plan: plan["layers"][0]["keys"]["groups"][0].update(ranks=[99]),
        lambda plan: plan.update(quantiser={"kind": "affine"}),
        lambda plan: plan.update(eviction={**_EVICTION, "kind": "9" * 5000}),
        lambda plan: plan["layers"][0]["keys"].update(placement="9" * 5000),
    ],
)
def test_a_plan_that_contradicts_itself_is_damaged(tmp_path, change):
    stored = structure(made("full"))
    change(stored)
    save_tensors(tmp_path / "p", {}, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4")
    with pytest.raises(KvprofError) as caught:
        load_plan(tmp_path / "p")
    assert isinstance(caught.value, FailedError)
    assert str(caught.value).startswith("p: damaged plan: ")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "sample", [{}, {"tokens": None}, {"tokens": "x"}, {"tokens": 0}, {"tokens": 9, "source": []}]
)
def test_a_plan_whose_bytes_were_measured_on_nothing_is_damaged(tmp_path, sample):
    save_plan(made("kvtc"), tmp_path / "p")
    tensors, metadata = load_tensors(
        tmp_path / "p", format_name="kvprof-plan/4", what="plans", made_by="plan"
    )
    stored = json.loads(metadata["plan"])
    stored["across"]["sample"] = sample
    save_tensors(tmp_path / "q", tensors, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4")
    with pytest.raises(FailedError, match="q: damaged plan: "):
        load_plan(tmp_path / "q")


@pytest.mark.parametrize("name", ["fdc", "svd-kv", "kq", "palu"])
def test_full_rank_can_be_saved_though_both_sides_are_one_tensor(name, tmp_path):
    options = {**FINE, **({"heads": 2} if name == "palu" else {})}
    before = plan_at(plan_family(name, inputs("Llama"), **options), 0.0)
    save_plan(before, tmp_path / "p")
    assert compare_plans(before, load_plan(tmp_path / "p")) == {}


_WHOLE = structure(made("fdc+keyformer"))
_BASES = {
    f"layers.{index}.{name}.{number}.{which}": getattr(group, which)
    for index, layer in enumerate(made("fdc+keyformer").layers)
    for name, side in (("keys", layer.keys), ("values", layer.values))
    for number, group in enumerate(side.groups)
    for which in ("down", "up")
}


def read_or_refused_in_one_line(folder, bases, stored):
    path = folder / "p"
    save_tensors(path, bases, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4")
    try:
        plan = load_plan(path)
    except FailedError as problem:
        told = str(problem)
    else:
        told = "p: "
        assert structure(plan)["layers"] == stored["layers"]
    assert told.startswith("p: ")
    assert "\n" not in told
    assert len(told) < 500


@settings(max_examples=60)
@given(stored=mutations(_WHOLE))
def test_a_forged_plan_is_read_or_refused_in_one_line(tmp_path_factory, stored):
    read_or_refused_in_one_line(tmp_path_factory.mktemp("forged"), _BASES, stored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda basis: basis * float("nan"), "NaN"),
        (lambda basis: basis / 0, "infinity"),
        (lambda basis: basis.to(torch.int32), "int32"),
        (lambda basis: basis[None, None], "float32"),
        (lambda basis: basis[:0], "float32"),
    ],
)
def test_bases_are_finite_matrices(tmp_path, change, said):
    name = min(_BASES)
    save_tensors(
        tmp_path / "p",
        {**_BASES, name: change(_BASES[name])},
        {"plan": json.dumps(_WHOLE)},
        format_name="kvprof-plan/4",
    )
    with pytest.raises(FailedError, match=said):
        load_plan(tmp_path / "p")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"layers": ' + "9" * 5000 + "}", "[]", "null"])
def test_a_plan_that_no_parser_should_see(tmp_path, text):
    save_tensors(tmp_path / "p", {}, {"plan": text}, format_name="kvprof-plan/4")
    with pytest.raises(FailedError, match="p: damaged plan: "):
        load_plan(tmp_path / "p")


def test_a_plan_of_other_layers_is_refused_though_it_names_the_model(tmp_path):
    layout, plan = inputs("Llama").layout, made("full")
    save_plan(plan, tmp_path / "whole")
    assert load_plan(tmp_path / "whole", layout=layout).method == "full"
    save_plan(replace(plan, layers=plan.layers[:-1]), tmp_path / "p")
    with pytest.raises(UsageError, match=r"^p: the plan has"):
        load_plan(tmp_path / "p", fingerprint=plan.fingerprint, layout=layout)


@pytest.mark.parametrize("kinds", ["1", 1.5, -1, True, [1], 10**30])
def test_a_plan_says_its_kinds_of_head_as_a_number(tmp_path, kinds):
    stored = json.loads(json.dumps(_WHOLE))
    stored["made"].setdefault("options", {})["kinds"] = kinds
    save_tensors(tmp_path / "p", _BASES, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4")
    with pytest.raises(FailedError, match="p: damaged plan: "):
        load_plan(tmp_path / "p")


@pytest.mark.parametrize("flag", ["yes", 1, None])
def test_what_only_some_plans_have_is_of_its_type(tmp_path, flag):
    for change in (
        lambda layer: layer.update(shared=flag),
        lambda layer: layer["keys"].update(per_query_head=flag),
    ):
        stored = json.loads(json.dumps(_WHOLE))
        change(stored["layers"][0])
        save_tensors(
            tmp_path / "p",
            _BASES,
            {"plan": json.dumps(stored)},
            format_name="kvprof-plan/4",
            force=True,
        )
        with pytest.raises(FailedError, match=r"p: damaged plan: layers\[0\].* is not of type"):
            load_plan(tmp_path / "p")


def test_a_plan_of_very_many_groups_is_read_in_time(tmp_path):
    """20,000 took 12 s, and minutes with a limit of kinds: every head asked every group."""
    stored = json.loads(json.dumps(_WHOLE))
    groups = [
        {"first": head, "heads": 1, "head_dim": 4, "ranks": [1 + head % 3], "based": False}
        for head in range(3000)
    ]
    side = {"groups": groups, "fold_down": False, "fold_up": False}
    keys = {"placement": "post_rope", **side}
    stored |= {
        "layers": [{"keys": keys, "values": side, "sliding_window": None}],
        "levels": {"sink": 0, "shares": [1.0], "batch": 1},
        "online_bases": True,
        "quantiser": None,
        "eviction": None,
        "made": {"options": {"kinds": 3}},
    }
    start = time.process_time()
    for change, said in (
        ({}, ""),
        ({"first": 7.0}, r"groups\[2999\].first"),
        ({"heads": True}, "heads"),
        ({"ranks": [1.0]}, r"ranks\[0\]"),
        ({"ranks": []}, "ranks"),
        ({"based": 1}, "based"),
        ({"head_dim": 2**31}, "head_dim"),
        ({"ranks": [4]}, "4 head shapes, .*kinds=3"),
    ):
        last = {**groups[-1], **change}
        stored["layers"][0]["keys"]["groups"] = [*groups[:-1], last]
        path = tmp_path / "p"
        save_tensors(
            path, {}, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4", force=True
        )
        if said:
            with pytest.raises(FailedError, match=f"^p: damaged plan: .*{said}"):
                load_plan(path)
        else:
            assert len(load_plan(path).layers[0].keys.groups) == 3000
    assert time.process_time() - start < 8


def test_a_group_that_the_quick_look_doubts_hides_no_later_one(tmp_path):
    """A first head of 2^31 - 1 is sound to the schema; the look at the groups ended there."""
    stored = json.loads(json.dumps(_WHOLE))
    groups = stored["layers"][0]["keys"]["groups"]
    stored["layers"][0]["keys"]["groups"] = [
        {**groups[0], "first": 2**31 - 1},
        {**groups[0], "heads": "two"},
    ]
    save_tensors(tmp_path / "p", _BASES, {"plan": json.dumps(stored)}, format_name="kvprof-plan/4")
    with pytest.raises(FailedError, match=r"groups\[1\].heads"):
        load_plan(tmp_path / "p")


_GOOD = {"first": 0, "heads": 1, "head_dim": 4, "ranks": [1, 2], "based": False}
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=2),
    st.sampled_from([-1, 0, 1, 2**31 - 2, 2**31 - 1, 2**31]),
    st.lists(st.one_of(st.integers(-1, 2), st.floats(), st.booleans()), max_size=2),
    st.just([1] * 65),
)


@given(
    st.dictionaries(st.sampled_from([*_GOOD, "more"]), _ODD, max_size=3),
    st.sets(st.sampled_from([*_GOOD]), max_size=1),
)
def test_the_quick_look_passes_only_what_the_schema_passes(changes, left_out):
    group = {key: value for key, value in (_GOOD | changes).items() if key not in left_out}
    if plan_files._is_group(group):
        Draft202012Validator(plan_files._GROUP).validate(group)
