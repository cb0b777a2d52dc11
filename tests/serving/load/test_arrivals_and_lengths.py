"""Loads: arrivals at a rate, lengths from wherever, and what a damaged file is answered with."""

import json
import math

import numpy as np
import pytest

from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.serving.load.arrivals import Arrivals, parse_arrivals, scaled_times
from kvprof.serving.load.lengths import arriving, load_lengths
from kvprof.serving.load.trace_files import read_trace_file


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("gamma:cv=2", 2.0), ("gamma:cv=0", 0)])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(text, cv):
    gaps = parse_arrivals(text).gaps(40_000, seed=3)
    assert gaps.mean() == pytest.approx(1, rel=1e-12)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-12)
    assert (gaps == parse_arrivals(text).gaps(40_000, seed=3)).all()
    if cv:
        assert (gaps != parse_arrivals(text).gaps(40_000, seed=4)).any()


@pytest.mark.parametrize("text", ["weibull", "gamma", "gamma:cv=x", "gamma:cv=-1", "poisson:cv=2"])
def test_other_arrivals_are_refused_with_what_was_written(text):
    with pytest.raises(UsageError, match=f"--arrivals {text}") as refused:
        parse_arrivals(text)
    assert "\n" not in str(refused.value)


def test_rates_differ_in_nothing_but_their_pace():
    lengths = load_lengths("fdc/arxiv")
    slow = arriving(lengths, Arrivals(), 1.0, 100, seed=5)
    fast = arriving(lengths, Arrivals(), 4.0, 100, seed=5)
    assert [one.prompt for one in slow] == [one.prompt for one in fast]
    assert [one.arrival for one in slow] == pytest.approx([4 * one.arrival for one in fast])
    assert slow[-1].arrival == pytest.approx(100)
    for count in (1, 7):
        few = arriving(lengths, parse_arrivals("gamma:cv=100"), 2.0, count, seed=5)
        assert few[-1].arrival == pytest.approx(count / 2)
    assert [one.number for one in slow] == list(range(100))


def test_recorded_times_are_stretched_to_the_rate():
    times = scaled_times([10.0, 11.0, 15.0], 0.5)
    assert np.diff(times) == pytest.approx([0.8, 3.2])  # 2 gaps in 4 seconds: one in two seconds
    with pytest.raises(UsageError):
        scaled_times([1.0, 1.0], 2.0)


def test_lengths_by_name_and_by_number():
    assert load_lengths("arxiv").name == "fdc/arxiv"
    assert load_lengths("zack/cocktail").trace.input.average == round(16.2 * 1024)
    fixed = load_lengths("in=8k,out=256").draw(3, 0)
    assert [(one.prompt, one.output) for one in fixed] == [(8192, 256)] * 3
    for wrong in ("in=8k", "in=8k,out=x", "in=8k,out=1,out=2", "wikipedia"):
        with pytest.raises(UsageError, match="--lengths"):
            load_lengths(wrong)


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "trace.jsonl"
    entries = [
        (2000, 1500, 20, [1, 2, 3]),
        (0, 1000, 10, [1, 7]),
        (4000, 1600, 30, [1, 2, 9, 10]),
        (9000, 700, 5, [40, 41]),
    ]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text(
        "\n".join(json.dumps(dict(zip(names, one, strict=True))) for one in entries) + "\n\n"
    )
    return path


def test_mooncake_tells_times_lengths_and_what_begins_alike(mooncake):
    found = read_trace_file(mooncake)
    assert (found.format, found.timed, found.skipped) == ("mooncake", True, 0)
    one, two, three, alone = found.requests
    assert [request.arrival for request in found.requests] == [0, 2, 4, 9]
    assert (one.prefix, two.prefix, three.prefix, alone.prefix) == (512, 1024, 1024, 0)
    assert (one.session, two.session, three.session, alone.session) == (1, 1, 1, None)
    assert three.blocks == (1, 2, 9, 10)
    assert two.blocks == (1, 2, 3)


@pytest.mark.parametrize("block", [16, 64, 512, 1024])
@pytest.mark.parametrize("rounded", [math.ceil, math.floor])
def test_blocks_have_the_size_that_fits_every_line(tmp_path, block, rounded):
    path = tmp_path / "trace.jsonl"

    def write(*lines):
        entry = '{{"timestamp": 0, "input_length": {}, "output_length": 9, "hash_ids": {}}}\n'
        path.write_text("".join(entry.format(*line) for line in lines))

    ids = [list(range(rounded(prompt / block))) for prompt in (4200, 8000)]
    write((4200, ids[0]), (8000, ids[1]))
    for one in read_trace_file(path).requests:
        assert (one.block, one.prefix) == (block, min(len(ids[0]) * block, one.prompt))
    write((4200, ids[0]), (8000, ids[0]))
    with pytest.raises(FailedError) as told:
        read_trace_file(path)
    assert "line 2" in str(told.value)
    assert "8,000" in str(told.value)


def test_a_file_that_is_too_short_begins_again_with_other_prompts(mooncake):
    lengths = load_lengths(str(mooncake))
    drawn = lengths.draw(9, seed=0)
    assert [one.prompt for one in drawn] == [1000, 1500, 1600, 700] * 2 + [1000]
    assert not set(drawn[0].blocks) & set(drawn[4].blocks)
    assert drawn[4].session == drawn[5].session != drawn[0].session
    arrivals = [one.arrival for one in arriving(lengths, Arrivals("trace"), 2.0, 9, 0)]
    assert arrivals == sorted(arrivals)
    assert (arrivals[-1] - arrivals[0]) / 8 == pytest.approx(0.5)


def test_azure_tells_times_of_seven_digits_and_of_zones(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
        "2023-11-16 18:15:51.6805900+00:00,879,55\n"
    )
    found = read_trace_file(path)
    assert [(one.prompt, one.output) for one in found.requests] == [(374, 44), (879, 55)]
    assert found.requests[1].arrival == pytest.approx(5.0, abs=1e-5)
    assert found.skipped == 1


CHATS = [
    {"conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"}]},
    {"conversations": [{"from": "gpt", "value": "hello"}]},
    {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": "one two three four"},
            {"role": "assistant", "content": "five"},
        ]
    },
    {"prompt": "p q", "completion": "r s t"},
]


@pytest.mark.parametrize("form", ["array", "lines"])
def test_chats_are_as_long_as_the_tokenizer_says(tmp_path, form):
    path = tmp_path / "chats.json"
    text = json.dumps(CHATS) if form == "array" else "\n".join(map(json.dumps, CHATS))
    path.write_text(text)
    found = read_trace_file(path, count=lambda text: len(text.split()))
    assert [(one.prompt, one.output) for one in found.requests] == [(3, 2), (4, 1), (2, 3)]
    assert (found.timed, found.skipped) == (False, 1)
    with pytest.raises(UsageError, match="tokenizer"):
        read_trace_file(path)
    lengths = load_lengths(str(path), lambda text: len(text.split()))
    assert sorted(one.prompt for one in lengths.draw(3, 1)) == [2, 3, 4]
    with pytest.raises(UsageError):
        arriving(lengths, Arrivals("trace"), 1.0, 3, 0)


def test_halves_of_a_character_are_no_text_that_a_tokenizer_meets(tmp_path):
    path, met = tmp_path / "chats.jsonl", []
    path.write_text(r'{"prompt": "a \ud83d\ude00 b \ud800", "completion": "\udfff c"}')
    found = read_trace_file(path, lambda text: met.append(text) or len(text))
    assert len(found.requests) == 1
    for text in met:
        text.encode()  # raises for a half
    assert met[0].startswith("a \U0001f600 b ")


def test_another_file_of_the_same_name_has_another_digest(tmp_path):
    path, found = tmp_path / "chats.jsonl", []
    for text in ("one two", "one two", "one two three"):
        path.write_text(json.dumps({"prompt": text, "completion": "yes"}))
        found.append(load_lengths(str(path), lambda text: len(text.split())).described()["digest"])
    assert found[0] == found[1] != found[2]
    assert load_lengths("arxiv").described()["digest"] is None


def test_what_some_call_an_end_of_a_line_is_text_in_json(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps({"prompt": "a\u2028b\x85c", "output": "d"}, ensure_ascii=False)] * 2
    path.write_text("\n".join(lines), encoding="utf-8")
    assert len(read_trace_file(path, count=len).requests) == 2


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 5}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("a,b,c\n1,2,3\n", "unknown format"),
        ("[1, 2", "line 1"),
        ("[1,\n", "line 2"),
        ("[1, 2]", "entry 1"),
        ('[{"text": "x"}]', "entry 1 has no conversations"),
        ('[{"conversations": 5}]', "conversations is 5"),
        ('[{"prompt": 5, "output": "x"}]', "entry 1: 5"),
        (GOOD + '{"timestamp"', "line 2"),
        (GOOD + '{"timestamp": 0, "input_length": -5, "output_length": 5}', "line 2: input_length"),
        (GOOD + '{"timestamp": 0, "input_length": 5}', "line 2 has no output_length"),
        (GOOD + '{"timestamp": "x", "input_length": 5, "output_length": 5}', "line 2: timestamp"),
        (GOOD.replace("0", '0, "hash_ids": ["a"]'), "line 1: hash_ids"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5\n", "line 2 has 2 cells"),
        (AZURE + "2023-11-16 18:15:46,5,5,\n2023-11-16 18:15:46,3,74,4\n", "line 3 has 4 cells, n"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "TIMESTAMP is 'yesterday'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,x\n", "GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,5\n", "no request"),
        ("\n\nTIMESTAMP,ContextTokens,GeneratedTokens\nx,5\n", "line 4 has 2 cells"),
        (f"{AZURE}{'x' * 200_000},5,5\n", "line 2"),
        (f"{AZURE}2023-11-16 18:15:46,5,{'9' * 5000}\n", "GeneratedTokens"),
    ],
)
def test_a_damaged_file_is_answered_in_one_line_that_names_line_and_value(tmp_path, text, said):
    path = tmp_path / "damaged"
    path.write_text(text)
    with pytest.raises(KvprofError) as told:
        read_trace_file(path, count=len)
    assert said in str(told.value)
    assert "\n" not in str(told.value)
    assert len(str(told.value).replace(str(path), "")) < 250


@pytest.mark.parametrize("text", ["[1, 2]", '{"a": 1}', "[[[", '[{"prompt": 5, "output": "x"}]'])
def test_what_holds_no_texts_is_not_said_to(tmp_path, text):
    """Without a tokenizer too, which would not mend it."""
    path = tmp_path / "damaged"
    path.write_text(text)
    with pytest.raises(FailedError) as told:
        read_trace_file(path)
    assert "tokenizer" not in str(told.value)
    path.write_text('[{"prompt": "a", "output": "b"}]')
    with pytest.raises(UsageError):
        read_trace_file(path)
    with pytest.raises(UsageError, match="is a folder"):
        read_trace_file(tmp_path)


def test_a_file_that_is_no_text_is_told_so(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FailedError, match="not UTF-8"):
        read_trace_file(path)
