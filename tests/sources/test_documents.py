"""Documents and token ids as they stand in files, and what a damaged file says."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import FailedError, UsageError
from kvprof.sources import windows as documents
from kvprof.sources.grammar import file_source
from kvprof.sources.windows import ModelTokens, read_documents, read_token_ids, windows
from tests.sources.complaint import complaint


def texts(path, chat=None) -> list[str]:
    return ["".join(document) for document in read_documents(path, chat)]


def every_id(path):
    """Return the token ids of a file, sequence by sequence."""
    return [np.concatenate(list(pieces)) for pieces in read_token_ids(path)]


def written(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")
    return path


def test_a_text_file_is_one_document_whatever_its_length(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_PIECE", 10)
    text = "".join(f"line {i}\n" for i in range(20)) + "no end of line"
    path = written(tmp_path, "a.txt", text)
    (document,) = [list(pieces) for pieces in read_documents(path)]
    assert "".join(document) == text
    assert len(document) > 5
    assert all(piece.endswith("\n") for piece in document[:-1]), "cut at ends of lines only"


def test_rows_of_json_lines(tmp_path):
    rows = [
        {"text": "one", "other": 1},
        {"prompt": "two", "answer": "!"},
        {"prompt": "three", "answer": 4},
        {"prompt": "five"},
    ]
    content = "\n".join(map(json.dumps, rows)) + "\n\n   \n"
    for name in ("a.jsonl", "a.ndjson"):
        assert texts(written(tmp_path, name, content)) == ["one", "two!", "three4", "five"]


def test_chat_logs_go_through_the_models_template(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = written(tmp_path, "a.jsonl", json.dumps({"messages": messages}))
    assert texts(path, lambda rows: "|".join(row["content"] for row in rows)) == ["hi|yes"]
    with pytest.raises(UsageError, match=r"^a\.jsonl:1: a chat log, but"):
        texts(path)


def test_a_template_that_refuses_a_row_is_told_with_its_line(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"text": "x"}\n{"messages": [{"role": "nobody"}]}')

    def template(rows):
        raise KeyError(rows[0]["role"])

    with pytest.raises(FailedError):
        texts(path, template)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "a.jsonl:2: "),
        ("[" * 100_000, "a.jsonl:2: "),
        ("9" * 5000, "a.jsonl:2: "),
        ('{"text": "\\ud800"}', "a.jsonl:2: "),
    ],
)
def test_a_damaged_row_is_named(tmp_path, line, words):
    path = written(tmp_path, "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(FailedError, match=words):
        texts(path)


@pytest.mark.parametrize("row", ["{}", "[1]", "3", "null", '{"text": 3}', '{"prompt": [1]}'])
def test_a_row_without_text_says_what_is_wanted(tmp_path, row):
    path = written(tmp_path, "a.jsonl", row)
    with pytest.raises(UsageError, match=r"needs 'text', 'prompt' .* or 'messages'"):
        texts(path)


def test_what_is_no_utf8_and_what_cannot_be_read(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(FailedError, match="not UTF-8"):
            texts(written(tmp_path, name, b"fine\n\xff\xfe\n"))
    with pytest.raises(FailedError):
        texts(tmp_path)
    with pytest.raises(FailedError, match=r"a\.ids"):
        every_id(written(tmp_path, "a.ids", b"\xff\xfe\x00"))


def test_documents_are_read_as_far_as_they_are_needed(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"text": "first"}\nthis is no JSON\n')
    stream = read_documents(path)
    assert "".join(next(stream)) == "first"


def test_token_ids_from_npy(tmp_path):
    for array in (np.arange(6), np.arange(6).reshape(2, 3), np.arange(6, dtype=np.uint16)):
        path = tmp_path / "a.npy"
        np.save(path, array)
        found = every_id(path)
        assert [row.tolist() for row in found] == np.atleast_2d(array).tolist()
        assert all(row.dtype == array.dtype for row in found)  # widened window by window


@pytest.mark.parametrize(
    "array", [np.ones(3), np.array(3), np.zeros((2, 2, 2), int), np.array(["a"]), np.ones(3, bool)]
)
def test_npy_of_something_else_is_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(FailedError):
        every_id(tmp_path / "a.npy")


def test_pickles_and_archives_are_not_opened(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(FailedError):
        every_id(path)
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))
    with pytest.raises(FailedError):
        every_id(path)


@settings(max_examples=100)
@given(cut=st.integers(0, 200), flip=st.integers(0, 127), byte=st.integers(0, 255))
def test_a_damaged_npy_file_is_refused_in_one_line_or_read(tmp_path_factory, cut, flip, byte):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.arange(10))
    content = bytearray(path.read_bytes())
    content[flip] = byte
    path.write_bytes(content[:cut] if cut < 200 else content)
    said = complaint(every_id, path)
    assert said is None or said.startswith("a.npy: ")


def test_token_ids_line_by_line(tmp_path):
    path = written(tmp_path, "a.ids", "1 2 3\n\n4,5, 6\n7\n")
    assert [row.tolist() for row in every_id(path)] == [[1, 2, 3], [4, 5, 6], [7]]


@settings(max_examples=100)
@given(
    lines=st.lists(st.lists(st.integers(0, 99_999), max_size=30), max_size=4),
    between=st.sampled_from([" ", ",", "  ,\t"]),
    part=st.integers(6, 40),
    seq_len=st.integers(1, 9),
)
def test_a_line_of_ids_may_be_longer_than_what_is_read_at_once(
    tmp_path_factory, lines, between, part, seq_len
):
    text = "\n".join(between.join(map(str, line)) for line in lines)
    path = written(tmp_path_factory.mktemp("ids"), "a.ids", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_LINE", part)
        assert [row.tolist() for row in every_id(path)] == [line for line in lines if line]
        model = ModelTokens(100_000, frozenset(), tuple, tuple, tuple)
        source = file_source([path], token_ids=True)
        if any(lines):
            found = windows(source, model, tokens=None, seq_len=seq_len)
            cut = [line[at : at + seq_len] for line in lines for at in range(0, len(line), seq_len)]
            assert [window.tolist() for window in found] == cut


def test_one_line_of_ids_is_read_only_as_far_as_it_is_needed(tmp_path):
    path = written(tmp_path, "a.ids", "12 345,6 " * 500_000 + "and this is none")
    first = next(iter(next(read_token_ids(path))))
    assert first[:4].tolist() == [12, 345, 6, 12]
    assert len(first) < 600_000  # of 1,500,000
    with pytest.raises(FailedError):
        every_id(path)
    endless = written(tmp_path, "b.ids", "1" * 3_000_000)
    with pytest.raises(FailedError):
        every_id(endless)


def test_a_row_that_is_too_long_to_be_held_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_ROW", 1000)
    path = written(tmp_path, "a.jsonl", '{"text": "fine"}\n{"text": "' + "long " * 300 + '"}\n')
    with pytest.raises(FailedError):
        texts(path)


@pytest.mark.parametrize("line", ["1 two 3", "1.5", "99999999999999999999999", "9" * 5000])
def test_a_line_that_is_no_sequence_of_ids_is_named(tmp_path, line):
    path = written(tmp_path, "a.ids", f"1 2\n{line}\n")
    with pytest.raises(FailedError):
        every_id(path)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_no_bytes_bring_anything_but_a_clear_error(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("bytes")
    for name, read in (
        ("a.txt", texts),
        ("a.jsonl", texts),
        ("a.npy", every_id),
        ("a.ids", every_id),
    ):
        path = written(folder, name, content)
        said = complaint(read, path)
        assert said is None or said.startswith((f"{name}:", str(path)))


def test_an_array_stays_on_disk(tmp_path):
    path = tmp_path / "large.npy"
    np.save(path, np.zeros((4, 1000), dtype=np.int32))
    for (row,) in read_token_ids(path):
        owner = row
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert isinstance(owner, np.memmap)
