import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kvprof.evaluation.data import default_shape, text_samples
from kvprof.models.load import LoadedModel, load_model
from kvprof.sources.grammar import parse_source


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder))


def test_an_embedded_name_gives_the_evaluation_split() -> None:
    loaded = load_model("reference")
    (sample,) = text_samples(loaded, [parse_source("prose")], seq_len=64, sequences=6)
    assert sample.name == "prose"
    assert sample.ids.shape == (6, 64)
    assert set(sample.ids[:, 0].tolist()) == {0}  # <s>
    folder = resources.files("kvprof") / "assets" / "splits"
    texts = {
        split: "".join(
            json.loads(line)["text"]
            for line in (folder / split / "prose.jsonl").read_text("utf-8").splitlines()
        )
        for split in ("evaluation", "calibration")
    }
    plain = [
        text for text in map(loaded.tokenizer().decode, sample.ids[:, 1:]) if "</s>" not in text
    ]
    assert plain  # sequences of one document
    for text in plain:
        assert text in texts["evaluation"]
        assert text not in texts["calibration"]


def test_a_small_sample_is_spread_over_the_split(
    loaded: LoadedModel, short_splits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvprof.evaluation.data._SPLITS", short_splits)
    few, many = (
        text_samples(loaded, [parse_source("code")], seq_len=100, sequences=n)[0].ids
        for n in (3, 6)
    )
    # Every other sequence of the larger sample, so their distances are equal.
    assert np.array_equal(few, many[::2])


def test_a_file_is_read_from_its_start(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("abc-def.;" * 100)
    (sample,) = text_samples(loaded, [parse_source(str(path))], seq_len=11, sequences=2)
    assert loaded.tokenizer().decode(sample.ids[0, 1:]) == "abc-def.;a"
    assert sample.ids.shape == (2, 11)
    (short,) = text_samples(loaded, [parse_source(str(path))], seq_len=100, sequences=50)
    assert short.ids.shape == (9, 100)  # 901 tokens, one of them the end of the document


def test_token_ids_of_equal_length_are_taken(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "some.ids"
    path.write_text("4 5 6 7 8\n9 10\n11 12 13 14 15\n")
    (sample,) = text_samples(loaded, [parse_source(str(path))], seq_len=5, sequences=9)
    assert sample.ids.tolist() == [[4, 5, 6, 7, 8], [11, 12, 13, 14, 15]]


def test_the_digest_is_of_the_data(loaded: LoadedModel, tmp_path: Path) -> None:
    digests = set()
    for text in ("abc " * 50, "abd " * 50):
        path = tmp_path / "one.txt"
        path.write_text(text)
        for length in (10, 20):
            (sample,) = text_samples(loaded, [parse_source(str(path))], seq_len=length, sequences=2)
            digests.add(sample.digest)
    assert len(digests) == 4


def test_the_default_fits_the_context(loaded: LoadedModel) -> None:
    assert default_shape(loaded) == (32, 128)
