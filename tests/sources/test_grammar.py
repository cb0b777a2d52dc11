"""One grammar for every option that names a source."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.sources.grammar import EMBEDDED, Source, SourceKind, file_source, parse_source
from tests.sources.complaint import complaint


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("random", None),
        ("random:8k", 8192),
        ("random:100k", 102_400),
        ("random:1M", 1 << 20),
        ("random:777", 777),
    ],
)
def test_random_tokens_may_bring_their_count(text, tokens):
    assert parse_source(text) == Source(SourceKind.RANDOM, "random", tokens=tokens)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_samples_go_by_their_names(name):
    assert parse_source(name) == Source(SourceKind.EMBEDDED, name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", SourceKind.TEXT),
        ("a.jsonl", SourceKind.TEXT),
        ("README", SourceKind.TEXT),
        ("a.npy", SourceKind.TOKEN_IDS),
        ("a.ids", SourceKind.TOKEN_IDS),
        ("a.safetensors", SourceKind.MOMENTS),
    ],
)
def test_files_are_told_apart_by_their_suffix(tmp_path, name, kind):
    path = tmp_path / name
    path.write_bytes(b"")
    assert parse_source(str(path)) == Source(kind, name, (path,))


def test_a_file_wins_over_nothing_but_not_over_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prose", "random"):
        Path(name).write_text("x")
    assert parse_source("prose").kind is SourceKind.EMBEDDED
    assert parse_source("random").kind is SourceKind.RANDOM
    assert parse_source("./prose").kind is SourceKind.TEXT


@given(st.text(max_size=30).filter(lambda t: not t.startswith("random") and t not in EMBEDDED))
def test_what_is_no_source_is_refused_in_one_line_and_never_otherwise(text):
    said = complaint(parse_source, text, what="--against")
    if said is not None:
        assert said.startswith("--against: ")
        assert "random:8k" in said


def test_a_path_that_the_system_refuses_is_no_traceback(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="is not a file"):
        parse_source("x" * 5000)

    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", lambda *_args, **_kwargs: forbidden(_args))
    with pytest.raises(UsageError, match="is not a file"):
        parse_source("/somewhere/closed.txt")


def test_several_files_make_one_source(tmp_path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text("x")
    source = file_source(paths, token_ids=False)
    assert (source.name, source.paths) == ("a.txt and 2 more", tuple(paths))
    with pytest.raises(UsageError, match=": no such file"):
        file_source([paths[0], tmp_path / "d.txt"], token_ids=False)


def test_a_source_is_written_as_a_person_would():
    assert parse_source("random:8192").describe() == "random:8k"
    assert parse_source("prose").describe() == "prose"
