"""Exact ids of every window, for every kind of source."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import FailedError, UsageError
from kvprof.sources import windows as documents
from kvprof.sources import windows as windows_module
from kvprof.sources.grammar import Source, SourceKind, file_source, parse_source
from kvprof.sources.windows import batches, windows
from tests.sources.vocabulary import BOS, EOS, ids, model

RANDOM = Source(SourceKind.RANDOM, "random")


def lists(source, its_model, **options) -> list[list[int]]:
    return [window.tolist() for window in windows(source, its_model, **options)]


def text_source(tmp_path, *contents: str, suffix: str = ".txt") -> Source:
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / f"{number}{suffix}")
        paths[-1].write_text(content, encoding="utf-8")
    return file_source(paths, token_ids=False)


def rows(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_text_is_cut_into_windows_that_each_begin_with_bos(tmp_path):
    source = text_source(tmp_path, "abcdefg")
    assert lists(source, model(), tokens=None, seq_len=4) == [
        [BOS, *ids("abc")],
        [BOS, *ids("def")],
        [BOS, *ids("g"), EOS],
    ]


def test_documents_are_joined_by_eos(tmp_path):
    source = text_source(tmp_path, rows("ab", "cde"), rows("f"), suffix=".jsonl")
    assert lists(source, model(), tokens=None, seq_len=6) == [
        [BOS, *ids("ab"), EOS, *ids("cd")],
        [BOS, *ids("e"), EOS, *ids("f"), EOS],
    ]


def test_a_tokenizer_without_bos_and_eos_adds_nothing(tmp_path):
    source = text_source(tmp_path, rows("ab", "cde"), suffix=".jsonl")
    bare = model(prefix=(), separator=())
    assert lists(source, bare, tokens=None, seq_len=3) == [ids("abc"), ids("de")]


def test_a_long_text_file_has_no_eos_inside(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_PIECE", 4)
    text = "ab\ncd\nef\ngh\n" * 3
    source = text_source(tmp_path, text, "z")
    found = [i for w in lists(source, model(), tokens=None, seq_len=7) for i in w if i != BOS]
    assert found == [*ids(text), EOS, *ids("z"), EOS]


def test_the_last_window_is_cut_at_the_token_count(tmp_path):
    source = text_source(tmp_path, "abcdefghij")
    assert lists(source, model(), tokens=6, seq_len=4) == [[BOS, *ids("abc")], [BOS, *ids("d")]]
    assert lists(source, model(), tokens=4, seq_len=4) == [[BOS, *ids("abc")]]


def test_chat_logs_reach_the_template_of_the_model(tmp_path):
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    source = text_source(tmp_path, row, suffix=".jsonl")
    spoken = model(chat=lambda messages: messages[0]["content"] + "you")
    assert lists(source, spoken, tokens=None, seq_len=9) == [[BOS, *ids("hiyou"), EOS]]


def test_a_window_needs_room_beside_bos(tmp_path):
    with pytest.raises(UsageError, match="--seq-len 1 leaves no room"):
        lists(text_source(tmp_path, "abc"), model(), tokens=None, seq_len=1)


def test_an_empty_source_is_refused(tmp_path):
    empty = text_source(tmp_path, "", suffix=".jsonl")
    with pytest.raises(UsageError, match="has 0 tokens"):
        lists(empty, model(), tokens=None, seq_len=4)
    (tmp_path / "none.ids").write_text("\n")
    ids_source = file_source([tmp_path / "none.ids"], token_ids=True)
    with pytest.raises(UsageError, match="has 0 tokens"):
        lists(ids_source, model(), tokens=None, seq_len=4)


def test_token_ids_keep_their_sequences_and_long_ones_are_cut(tmp_path):
    path = tmp_path / "a.ids"
    path.write_text("5 6 7 8 9\n10 11\n12 13 14\n")
    source = file_source([path], token_ids=True)
    assert lists(source, model(), tokens=None, seq_len=3) == [
        [5, 6, 7],
        [8, 9],
        [10, 11],
        [12, 13, 14],
    ]
    assert lists(source, model(), tokens=6, seq_len=3) == [[5, 6, 7], [8, 9], [10]]
    array = tmp_path / "b.npy"
    np.save(array, np.arange(8, dtype=np.int32).reshape(2, 4))
    both = file_source([path, array], token_ids=True)
    assert lists(both, model(), tokens=None, seq_len=8)[-2:] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("wrong", [40, -1, 10**12])
def test_ids_outside_the_vocabulary_are_named(tmp_path, wrong):
    path = tmp_path / "a.ids"
    path.write_text(f"1 2\n3 {wrong} 4\n")
    source = file_source([path], token_ids=True)
    with pytest.raises(UsageError):
        lists(source, model(), tokens=None, seq_len=4)


@settings(max_examples=50)
@given(
    tokens=st.integers(1, 200),
    seq_len=st.integers(1, 70),
    seed=st.integers(0, 5),
    special=st.frozensets(st.integers(0, 39), max_size=30),
)
def test_random_tokens_are_ordinary_ones_of_the_exact_number(tokens, seq_len, seed, special):
    its_model = model(special=special)
    found = lists(RANDOM, its_model, tokens=tokens, seq_len=seq_len, seed=seed)
    assert [len(window) for window in found[:-1]] == [seq_len] * (len(found) - 1)
    flat = [i for window in found for i in window]
    assert len(flat) == tokens
    assert not special & set(flat)
    assert 0 <= min(flat) <= max(flat) < 40
    again = lists(RANDOM, its_model, tokens=tokens, seq_len=seq_len, seed=seed)
    assert again == found
    # A longer run begins with the shorter one, so a snapshot equals a run of its own.
    longer = lists(RANDOM, its_model, tokens=tokens + 64, seq_len=seq_len, seed=seed)
    assert [i for window in longer for i in window][:tokens] == flat


def test_random_tokens_are_spread_evenly_and_differ_by_seed():
    flat = np.concatenate(list(windows(RANDOM, model(), tokens=37_000, seq_len=1000, seed=3)))
    counts = np.bincount(flat, minlength=40)
    assert counts[:3].tolist() == [0, 0, 0]
    assert np.abs(counts[3:] - 1000).max() < 6 * 1000**0.5
    assert lists(RANDOM, model(), tokens=50, seq_len=50, seed=0) != lists(
        RANDOM, model(), tokens=50, seq_len=50, seed=1
    )


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_random_tokens_may_follow_what_the_tokenizer_adds(tokens):
    behind = parse_source("random-bos:33")
    assert (behind.kind, behind.tokens) == (SourceKind.RANDOM, 33)
    its_model = model(special=frozenset({BOS}))
    found = lists(behind, its_model, tokens=tokens, seq_len=16)
    plain = lists(RANDOM, its_model, tokens=tokens, seq_len=16)
    assert [len(one) for one in found] == [len(one) for one in plain]
    assert all(one[0] == BOS and BOS not in one[1:] for one in found)
    assert lists(behind, model(prefix=()), tokens=tokens, seq_len=16) == lists(
        RANDOM, model(prefix=()), tokens=tokens, seq_len=16
    )
    with pytest.raises(UsageError):
        lists(behind, its_model, tokens=8, seq_len=1)


def test_random_tokens_need_a_count_and_something_to_draw():
    with pytest.raises(UsageError):
        lists(RANDOM, model(), tokens=None, seq_len=4)
    with pytest.raises(UsageError, match="special tokens only"):
        lists(RANDOM, model(special=range(40)), tokens=4, seq_len=4)


def embedded(monkeypatch, texts: dict[str, list[str]]):
    monkeypatch.setattr(
        windows_module, "embedded_documents", lambda kind: [(text,) for text in texts[kind]]
    )


def test_an_embedded_sample_goes_by_its_name(monkeypatch):
    embedded(monkeypatch, {"code": ["abc", "d"]})
    source = Source(SourceKind.EMBEDDED, "code")
    assert lists(source, model(), tokens=None, seq_len=7) == [
        [BOS, *ids("abc"), EOS, *ids("d"), EOS]
    ]


def test_calibration_takes_the_three_samples_in_turn_and_their_ends_last(monkeypatch):
    embedded(monkeypatch, {"prose": ["aaaaaaa"], "code": ["b"], "tasks": ["cccc"]})
    source = Source(SourceKind.EMBEDDED, "calibration")
    bare = model(separator=())
    assert lists(source, bare, tokens=None, seq_len=4) == [
        [BOS, *ids("aaa")],
        [BOS, *ids("ccc")],
        [BOS, *ids("aaa")],
        [BOS, *ids("b")],
        [BOS, *ids("c")],
        [BOS, *ids("a")],
    ]


def test_a_missing_embedded_sample_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(documents.resources, "files", lambda _: tmp_path)
    source = Source(SourceKind.EMBEDDED, "prose")
    with pytest.raises(FailedError):
        lists(source, model(), tokens=None, seq_len=4)


def arrays(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length) + 100 * i for i, length in enumerate(lengths)]


def shapes(sequences, batch_size, stops=()):
    return [batch.shape for batch in batches(sequences, batch_size, stops)]


def test_batches_hold_sequences_of_one_length():
    assert shapes(arrays(4, 4, 4, 4, 4), 2) == [(2, 4), (2, 4), (1, 4)]
    assert shapes(arrays(4, 4, 3, 3, 4), 3) == [(2, 4), (2, 3), (1, 4)]
    assert shapes([], 2) == []


def test_batches_end_where_a_snapshot_is_due():
    assert shapes(arrays(*[4] * 6), 4, [4, 12]) == [(1, 4), (2, 4), (3, 4)]
    assert shapes(arrays(*[4] * 6), 2, [8, 24, 8]) == [(2, 4), (2, 4), (2, 4)]
    assert shapes(arrays(4, 4, 2), 4, [8, 10]) == [(2, 4), (1, 2)]
    assert shapes(arrays(4, 4), 4, [100]) == [(2, 4)]


@given(
    lengths=st.lists(st.sampled_from([1, 2, 5]), max_size=20),
    batch_size=st.integers(1, 6),
    stop_after=st.sets(st.integers(1, 20)),
)
def test_batches_keep_every_sequence_in_order(lengths, batch_size, stop_after):
    sequences = arrays(*lengths)
    ends = np.cumsum(lengths)
    stops = [int(ends[i - 1]) for i in stop_after if i <= len(lengths)]
    found = list(batches(sequences, batch_size, stops))
    assert [row.tolist() for batch in found for row in batch] == [s.tolist() for s in sequences]
    assert all(len(batch) <= batch_size for batch in found)
    reached = set(np.cumsum([batch.size for batch in found]).tolist())
    assert set(stops) <= reached
