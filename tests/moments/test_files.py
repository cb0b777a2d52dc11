"""Moments on disk come back exactly, and a file that is not right is refused in one line."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.analysis.pairs import PAIRS, pair_gram
from kvprof.analysis.rotary import RotaryPairs
from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.methods.plan_report import compare_plans
from kvprof.methods.registry import plan_family
from kvprof.moments import files
from kvprof.moments.files import FORMAT, load_moments, save_moments
from kvprof.tensor_files import FORMER_NOTE, load_tensors, save_tensors
from tests.methods.models import FINE, inputs
from tests.sources.complaint import complaint


def example(*, w_v: bool = True, w_o: bool = True) -> Moments:
    """Two layers of unlike shape with random contents."""
    generator = torch.Generator().manual_seed(0)

    def gram(heads: int, width: int):
        rows = torch.randn(heads, 8, width, generator=generator, dtype=torch.float64)
        return rows.mT @ rows

    layers = []
    for heads, kv_heads, d, d_v in ((4, 2, 6, 5), (3, 3, 4, 4)):
        shapes = {"q": (heads, d), "k": (kv_heads, d), "v": (kv_heads, d_v)}
        shapes |= {"q_pre": (heads, d), "k_pre": (kv_heads, d), "o": (heads, d_v)}
        layer = LayerMoments.empty(
            shapes,
            torch.device("cpu"),
            c_o=gram(kv_heads, d_v) if w_o else None,
            c_wv=gram(kv_heads, d_v) if w_v else None,
            # The second layer has no RoPE.
            pairs=RotaryPairs.of([(0, 2, 1, 0), (1, 3, -1, 1)] if heads == 4 else []),
        )
        layer.cross, layer.table = (torch.rand_like(x) for x in (layer.cross, layer.table))
        layer.sums = {key: torch.rand_like(one) for key, one in layer.sums.items()}
        for part in (layer.rest, layer.first):
            for key, (count, width) in shapes.items():
                part[key] = gram(count, width)
        layers.append(layer)
    info = {"model": "tiny", "seq_len": 64, "positions": "0-63", "labels": ["a", "é"], "seed": None}
    return Moments(layers, "f" * 32, tokens=4096, sequences=64, info=info)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("moments") / "m.safetensors"
    save_moments(example(), path)
    return path


def test_moments_of_before_serve_any_model_of_their_shape_without_its_means(tmp_path):
    own = inputs("Llama")
    save_moments(replace(own.moments, fingerprint="0" * 32), tmp_path / "new")
    told = {"what": "moments", "made_by": "kvprof spectrum"}
    tensors, metadata = load_tensors(tmp_path / "new", format_name=FORMAT, **told)
    since = ("pairs", "cross", "table", "sums")
    kept = {key: x for key, x in tensors.items() if key.split(".")[2] not in since}
    save_tensors(tmp_path / "old", kept, metadata, format_name="kvprof-moments/1")
    moments = load_moments(tmp_path / "old", fingerprint=own.fingerprint)
    assert moments.info["labels"][-1] == FORMER_NOTE
    plan = plan_family("kq", replace(own, moments=moments), **FINE).build(0.3)
    assert compare_plans(plan, plan_family("kq", own, **FINE, centre=False).build(0.3)) == {}
    for whose, options in ((own, {"centre": True}), (inputs("GPT2"), {})):
        with pytest.raises(UsageError):
            plan_family("kq", replace(whose, moments=moments), **options)


def test_what_was_saved_comes_back_to_the_last_bit(saved):
    before, after = example(), load_moments(saved, fingerprint="f" * 32)
    assert (after.fingerprint, after.tokens, after.sequences) == ("f" * 32, 4096, 64)
    assert after.info == before.info
    assert len(after.layers) == 2
    for ours, theirs in zip(after.layers, before.layers, strict=True):
        for a, b in ((ours.rest, theirs.rest), (ours.first, theirs.first)):
            assert set(a) == set(b)
            for key in a:
                assert a[key].dtype == torch.float64
                assert torch.equal(a[key], b[key])
        assert torch.equal(ours.c_o, theirs.c_o)
        assert torch.equal(ours.c_wv, theirs.c_wv)
        assert torch.equal(ours.pairs.sign, theirs.pairs.sign)
        assert torch.equal(ours.pairs.column, theirs.pairs.column)
        assert ours.sums.keys() == theirs.sums.keys()
    for pair in PAIRS:
        assert torch.equal(pair_gram(after, 1, pair), pair_gram(before, 1, pair))


def test_a_model_without_value_weights_comes_back_without(tmp_path):
    save_moments(example(w_v=False), tmp_path / "m.safetensors")
    assert load_moments(tmp_path / "m.safetensors").layers[0].c_wv is None


def test_nothing_is_overwritten_unasked(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_text("precious")
    with pytest.raises(UsageError):
        save_moments(example(), path)
    assert path.read_text() == "precious"
    save_moments(example(), path, force=True)
    assert load_moments(path).tokens == 4096


def test_moments_of_another_model_are_refused(saved):
    with pytest.raises(UsageError, match=r"m\.safetensors .* tiny \(ffffffffffff\)"):
        load_moments(saved, fingerprint="0" * 32)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError):
        load_moments(tmp_path / "none.safetensors")
    with pytest.raises(UsageError):
        load_moments(tmp_path)


@settings(max_examples=50)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(saved, tmp_path_factory, share):
    path = tmp_path_factory.mktemp("cut") / "m.safetensors"
    content = saved.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    said = complaint(load_moments, path)
    assert said is not None
    assert said.startswith("m.safetensors: ")


@settings(max_examples=120)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), header=st.booleans())
def test_a_flipped_bit_anywhere_is_refused(saved, tmp_path_factory, share, bit, header):
    path = tmp_path_factory.mktemp("flip") / "m.safetensors"
    content = bytearray(saved.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little") if header else len(content)
    place = int(share * end)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    said = complaint(load_moments, path)
    if said is None:  # only what changes nothing at all, such as a space of padding
        assert header
        loaded, original = load_moments(path), example()
        assert (loaded.info, loaded.tokens) == (original.info, original.tokens)
    else:
        assert said.startswith("m.safetensors: ")


def test_numbers_in_the_metadata_are_guarded_too(saved, tmp_path):
    for old, new in ((b'"tokens":"4096"', b'"tokens":"4097"'), (b"f" * 32, b"f" * 31 + b"e")):
        content = saved.read_bytes()
        assert old in content
        path = tmp_path / "m.safetensors"
        path.write_bytes(content.replace(old, new))
        with pytest.raises(FailedError, match="damaged"):
            load_moments(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": ""}])
def test_other_safetensors_files_are_no_moments(tmp_path, metadata):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path, metadata)
    with pytest.raises(FailedError):
        load_moments(path)


def test_a_newer_format_is_named(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FORMAT", "kvprof-moments/3")
    save_moments(example(), tmp_path / "new.safetensors")
    monkeypatch.undo()
    with pytest.raises(FailedError):
        load_moments(tmp_path / "new.safetensors")


def test_a_file_of_the_right_format_with_missing_parts_is_damaged(tmp_path):
    for metadata in ({}, {"digest": "0", "layers": "many"}, {"digest": "0", "layers": "1"}):
        path = tmp_path / "m.safetensors"
        save_file({"weight": torch.ones(3)}, path, {"format": files.FORMAT, **metadata})
        with pytest.raises(FailedError, match="damaged"):
            load_moments(path)


@settings(max_examples=60)
@given(st.binary(max_size=120))
def test_no_bytes_bring_anything_but_a_clear_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(KvprofError):
        load_moments(path)


def test_the_description_is_json_for_any_reader(saved):
    content = saved.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    described = header["__metadata__"]
    assert described["format"] == "kvprof-moments/2"
    assert json.loads(described["info"])["positions"] == "0-63"
    assert header["layers.1.first.k_pre"]["shape"] == [3, 4, 4]


def test_a_model_whose_outputs_are_gated_loses_one_pair_only(tmp_path):
    before = example(w_o=False)
    save_moments(before, tmp_path / "m.safetensors")
    moments = load_moments(tmp_path / "m.safetensors")
    assert torch.equal(pair_gram(moments, 0, "v"), pair_gram(before, 0, "v"))
    with pytest.raises(UsageError, match="gates"):
        pair_gram(moments, 0, "vo")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": "1000000"}, "1,000,000 layers"),
        ({"layers": "9" * 5000}, "not a count"),
        ({"layers": "-1"}, "not a count"),
        ({"tokens": "0"}, "no tokens"),
        ({"tokens": "1.5"}, "not a count"),
        ({"info": "[" * 200_000}, "nested too deeply"),
        ({"info": '{"seq_len": "long"}'}, "seq_len"),
        ({"info": '{"source": null}'}, "source"),
        ({"info": "[]"}, "not a JSON object"),
    ],
)
def test_what_a_forger_says_of_moments_is_not_believed(saved, tmp_path, change, said):
    tensors, metadata = load_tensors(saved, format_name=FORMAT, what="moments", made_by="")
    save_tensors(tmp_path / "m", tensors, {**metadata, **change}, format_name=FORMAT)
    with pytest.raises(FailedError, match=said):
        load_moments(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own: own * float("nan"), "NaN"),
        (lambda own: -own, "negative"),
        (lambda own: own[:, :1], "square"),
        (lambda own: own[:1], "heads|differs in shape"),
        (lambda own: own.float(), "square"),
        (lambda own: None, "lacks moments|said to be"),
    ],
)
@pytest.mark.parametrize("name", ["layers.0.rest.k", "layers.1.first.q", "layers.0.c_o"])
def test_forged_moments_are_refused(saved, tmp_path, name, change, said):
    tensors, metadata = load_tensors(saved, format_name=FORMAT, what="moments", made_by="")
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    elif name.endswith("c_o"):
        return  # a model without a slice of W_O per head has none
    save_tensors(tmp_path / "m", tensors, metadata, format_name=FORMAT)
    with pytest.raises(FailedError, match=said):
        load_moments(tmp_path / "m")
