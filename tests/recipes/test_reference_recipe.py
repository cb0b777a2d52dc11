"""The recipe of the reference model: its steps do what its README says, at toy size."""

import json
import runpy
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvprof

RECIPE = Path(kvprof.__file__).parents[1] / "recipes" / "reference-model"
sys.path.insert(0, str(RECIPE))

# The recipe's own modules, behind the line that says where they lie.
import batches  # noqa: E402
import build_tokenizer  # noqa: E402
import clean  # noqa: E402
import convert  # noqa: E402
import documents  # noqa: E402
import encode  # noqa: E402
import ngram  # noqa: E402
import recipe  # noqa: E402
import splits  # noqa: E402
import tasks  # noqa: E402
import training  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

ASSETS = Path(kvprof.__file__).parent / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "reference" / "tokenizer.json"))


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> list[str]:
    text = json.dumps(
        [row["text"] for row in encode.read_lines(ASSETS / "splits/calibration/prose.jsonl")]
    )
    return tasks.single_token_words(tokenizer, Counter(text.split()), least=5)


@pytest.fixture(scope="module")
def filler(tokenizer: Tokenizer) -> np.ndarray:
    rows = encode.read_lines(ASSETS / "splits" / "calibration" / "prose.jsonl")[:30]
    texts = encode.encode_texts(tokenizer, [row["text"] for row in rows])
    return encode.join(texts, tokenizer.token_to_id("</s>"))


@pytest.fixture
def maker(tokenizer: Tokenizer, filler: np.ndarray, words: list[str]) -> tasks.TaskMaker:
    return tasks.TaskMaker(tokenizer, filler, words, seed=5)


def make_document(text: str, name: str = "a.txt", package: str = "p") -> documents.Document:
    return documents.Document(text, name, package, "1", "MIT", "prose", True)


def prose(seed: int, count: int = 400) -> str:
    rng = np.random.default_rng(seed)
    return " ".join("w" + str(i) for i in rng.integers(0, 5000, size=count))


def test_html_keeps_the_text_and_loses_the_navigation() -> None:
    page = """<html><head><title>no</title><style>no</style></head><body>
    <div class="related"><div>no</div><ul><li>no</li></ul></div>
    <h1>Title<a class="headerlink">no</a></h1><p>Some   <b>text</b>
    here &amp; there.<br></p><pre>  a = 1
    b</pre><img src="no"><nav>no</nav><ul><li><p>one</p></li><li>two</li></ul></body></html>"""
    text = convert.tidy(convert.html_to_text(page))
    assert text.startswith("Title\n\nSome text here & there.\n\n  a = 1\n    b")
    assert text.endswith("- one\n\n- two")
    assert "no" not in text.split()


def test_markup_of_other_formats_is_thinned() -> None:
    assert convert.rst_to_text("See :func:`~os.path.join` and ``x``.") == "See os.path.join and x."
    assert "bold <tag>" in convert.pod_to_text("=head1 NAME\n\nB<bold> E<lt>tagE<gt>")
    page = (
        '.TH X 1\n.SH "NAME"\nls \\- list\n.PP\nUse\n.BR grep (1)\nor \\fBls\\fP.\n.nf\na  b\n.fi\n'
    )
    assert (
        convert.tidy(convert.man_to_text(page))
        == "NAME\n\nls - list\n\nUse grep(1) or ls.\n    a  b"
    )


def test_braces_in_patterns_are_expanded() -> None:
    assert documents.expand_braces("a/{b,c}/*.{d,e}") == [
        "a/b/*.d",
        "a/b/*.e",
        "a/c/*.d",
        "a/c/*.e",
    ]


def test_copies_are_seen_once() -> None:
    text = prose(1)
    same = text.upper().replace(" ", "\n")
    nearly = text + " " + prose(2, 60)
    other = prose(3)
    kept, dropped = documents.deduplicate([make_document(t) for t in (text, same, nearly, other)])
    assert [doc.text for doc in kept] == [text, other]
    assert (dropped["exact"], dropped["near"]) == (1, 1)


def test_lines_that_frame_every_page_go() -> None:
    pages = [
        make_document(f"Site title\n\nPage {i}\n{prose(i, 20)}\nCopyright", f"{i}.html")
        for i in range(25)
    ]
    for i, doc in enumerate(documents.strip_frames(pages)):
        assert doc.text == f"Page {i}\n{prose(i, 20)}"


def test_held_out_documents_are_whole_shippable_and_in_one_split_only() -> None:
    docs = [make_document(prose(i, 500), f"{i}", f"p{i % 4}") for i in range(60)]
    secret = documents.Document(prose(99), "s", "p0", "1", "GPL", "prose", False)
    chosen = clean.hold_out([*docs, secret], seed=1)
    picked = [doc for group in chosen.values() for doc in group]
    assert len(picked) == len({doc.sha256 for doc in picked}) > 0
    assert secret not in picked
    assert set(picked) <= set(docs)


def test_a_training_document_that_overlaps_a_split_is_found() -> None:
    rng = np.random.default_rng(0)
    held = rng.integers(3, 6000, size=500).astype(np.uint16)
    apart = rng.integers(3, 6000, size=500).astype(np.uint16)
    quoting = np.concatenate([apart, held[100:150]])
    assert encode.overlapping([held, apart, quoting], [held]).tolist() == [True, False, True]
    assert splits.overlap(apart, encode.gram_hashes(held)) == 0.0
    assert splits.overlap(quoting, encode.gram_hashes(held)) == pytest.approx(38 / 488)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.bin.xz"])
def test_tokens_survive_the_disk(tmp_path: Path, name: str) -> None:
    ids = np.arange(6144, dtype=np.uint16)
    encode.save_tokens(tmp_path / name, ids)
    assert (encode.load_tokens(tmp_path / name) == ids).all()


def test_the_tokenizer_recipe_gives_bos_single_digits_and_whole_text(tmp_path: Path) -> None:
    made = build_tokenizer.make_tokenizer(iter([prose(i) for i in range(5)]), vocabulary=300)
    build_tokenizer.save_tokenizer(made, tmp_path)
    encoded = made.encode("Ab 12\n")
    assert encoded.tokens[0] == "<s>"
    assert [t for t in encoded.tokens if t.isdigit()] == ["1", "2"]
    assert made.decode(encoded.ids) == "Ab 12\n"


def statements(text: str, first: str) -> list[list[str]]:
    return [line.rstrip(".").split() for line in text.split("\n") if line.startswith(first)]


def test_needle_answers_are_in_the_prompt(maker: tasks.TaskMaker) -> None:
    for _ in range(20):
        item = maker.draw("needle", 300)
        prompt, answer = (maker.tokenizer.decode(ids) for ids in (item.prompt, item.answer))
        key = prompt.rsplit("code of ", 1)[1].split("?")[0]
        codes = {line[4]: line[6] for line in statements(prompt, "Note: the code of")}
        assert answer == " " + codes[key]
        assert item.length <= 300


def test_variable_answers_follow_the_assignments(maker: tasks.TaskMaker) -> None:
    for _ in range(20):
        item = maker.draw("variables", 600)
        prompt, answer = (maker.tokenizer.decode(ids) for ids in (item.prompt, item.answer))
        holder = prompt.rsplit("names hold ", 1)[1].split("?")[0]
        steps = statements(prompt, "Put") + statements(prompt, "Copy")
        following = {line[1]: line[3] for line in steps if len(line) == 4 and line[2] == "into"}
        names = []
        while holder in following:
            holder = following[holder]
            names.append(holder)
        assert answer.split() == names


def test_frequent_words_are_the_three_most_frequent(maker: tasks.TaskMaker) -> None:
    for length in (128, 512, 1536):
        item = maker.draw("frequent_words", length)
        prompt, answer = (maker.tokenizer.decode(ids) for ids in (item.prompt, item.answer))
        counts = Counter(word for line in statements(prompt, "Words:") for word in line[1:])
        (a, x), (b, y), (c, z), (_, rest) = counts.most_common(4)
        assert answer.split() == [a, b, c]
        assert x > y > z > rest


def test_copies_repeat_the_passage(maker: tasks.TaskMaker) -> None:
    for _ in range(10):
        item = maker.draw("copy", 400)
        prompt, answer = (maker.tokenizer.decode(ids) for ids in (item.prompt, item.answer))
        key = prompt.rsplit("Repeat passage ", 1)[1].rstrip(":")
        assert f"\nPassage {key}:{answer}\nEnd of passage." in prompt


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_stands_at_the_depth_asked_for(maker: tasks.TaskMaker, depth: float) -> None:
    places = []
    for _ in range(10):
        prompt = maker.tokenizer.decode(maker.draw("needle", 1024, depth).prompt)
        key = prompt.rsplit("code of ", 1)[1].split("?")[0]
        places.append(prompt.index(f"the code of {key} is") / prompt.index("\nQuestion:"))
    assert np.mean(places) == pytest.approx(depth, abs=0.12)


def test_the_same_seed_draws_the_same_instances(
    tokenizer: Tokenizer, filler: np.ndarray, words: list[str]
) -> None:
    first, again, other = (
        [tasks.TaskMaker(tokenizer, filler, words, seed).draw(task, 256) for task in tasks.TASKS]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_task_row_that_cannot_fit_is_refused(maker: tasks.TaskMaker) -> None:
    with pytest.raises(ValueError, match="no needle instance fits"):
        maker.draw("needle", 12)


def test_task_rows_weigh_answers_up_and_padding_out(maker: tasks.TaskMaker) -> None:
    ids, weights = batches.task_rows(maker, rows=4)
    assert ids.shape == weights.shape == (4, batches.CONTEXT + 1)
    assert (ids[:, 0] == batches.BOS).all()
    assert (weights[ids == batches.PAD] == 0).all()
    heavy = weights >= batches.LONG_ANSWER_WEIGHT
    assert 0.002 < heavy.mean() < 0.1
    assert (weights[ids == batches.BOS] == 0).all()


def test_every_window_of_text_is_seen_once_in_an_epoch() -> None:
    tokens = (np.arange(20 * batches.CONTEXT) % 5000 + 3).astype(np.uint16)
    stream = training.TextStream(tokens, torch.device("cpu"), seed=3)
    rows = stream.take(0, stream.windows)
    assert (rows[:, 0] == batches.BOS).all()
    assert len({tuple(row.tolist()) for row in rows}) == stream.windows
    assert torch.equal(stream.take(stream.windows - 1, 2)[0], rows[-1])
    assert not torch.equal(stream.take(stream.windows, stream.windows), rows)


def test_the_5_gram_baseline_is_a_distribution_and_finds_its_mode() -> None:
    rng = np.random.default_rng(4)
    vocabulary = 7
    ids = rng.choice(vocabulary, size=3000, p=rng.dirichlet(np.ones(vocabulary))).astype(np.uint16)
    ids[::5] = ids[1::5]
    model = ngram.KneserNey(ids, vocabulary)
    histories = rng.integers(0, vocabulary**4, size=200).astype(np.uint64)
    table = np.stack(
        [model.probability(5, histories, np.full(200, word)) for word in range(vocabulary)], axis=1
    )
    assert table.sum(axis=1) == pytest.approx(np.ones(200))
    best = model.best(5, histories, chunk=33)
    assert table[np.arange(200), best] == pytest.approx(table.max(axis=1))
    scores = model.evaluate([ids[:500]], separator=0)
    assert 1 < scores["perplexity"] < vocabulary


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, filler: np.ndarray, words: list[str]) -> Path:
    """Make a work folder as ``recipe.py text`` leaves it, from text that ships."""
    folder = tmp_path_factory.mktemp("work")
    encode.save_tokens(folder / "train.bin", filler)
    (folder / "words.txt").write_text("\n".join(words))
    (folder / "splits").symlink_to(ASSETS / "splits")
    (folder / "tokenizer").symlink_to(ASSETS / "reference")
    return folder


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return what runs a program of the recipe here, where torch is loaded, as a script of its own.

    Its own children are processes that load nothing but what they need.
    """

    def run(name: str, *options: Any) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        runpy.run_path(str(RECIPE / f"{name}.py"), run_name="__main__")

    monkeypatch.setattr(recipe, "step", run)
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng():
        yield run
    torch.set_float32_matmul_precision(precision)


@pytest.mark.slow
def test_training_exporting_and_evaluating_run_from_end_to_end(
    work: Path, step: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = work / "runs" / "tiny"
    asked = ("train", "--work", str(work), "--model", "tiny", "--smoke")
    monkeypatch.setattr(sys, "argv", ["recipe", *asked])
    recipe.main()
    shutil.copy(run / "training-log.csv", run / "first-log.csv")
    more = ("--rows", 2, "--micro-rows", 2, "--workers", 1, "--no-compile", "--log-every", 1)
    step("train", "--work", work, "--out", run, *more, "--model", "tiny", "--steps", 4, "--resume")
    for name, last in (("first", 3), ("training", 4)):
        log = (run / f"{name}-log.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in log] == ["step", *map(str, range(1, last + 1))]
    assert (run / "export" / "model.safetensors").exists()
    report = json.loads((run / "evaluation.json").read_text())
    assert set(report["tasks"]) == set(tasks.TASKS)
