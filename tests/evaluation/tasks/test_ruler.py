"""Questions of RULER: what its definitions ask of each, and of all of them their length."""

import hashlib
import random
import re
from collections import Counter

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.data import Question, Scoring, scored
from kvprof.evaluation.tasks import ruler
from kvprof.evaluation.tasks.registry import GROUPS, TASKS, parse_tasks, select_tasks
from kvprof.evaluation.tasks.ruler import RULER
from kvprof.models.load import LoadedModel, load_model

NEEDLE = re.compile(r"One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    return load_model("reference")


def drawn(name: str, size: int, *, length: int = 1024, seed: int = 0) -> Question:
    return RULER[name].draw(random.Random(seed), size, length)


def needles(question: Question) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for _, key, value in NEEDLE.findall(question.turns[0]):
        found.setdefault(key, []).append(value)
    return found


def asked(question: Question) -> list[str]:
    (query,) = re.findall(r"for (.*) mentioned in the provided text\?", question.turns[0])
    assert f" for {query} mentioned in the provided text " in question.prefix
    return re.split(r", and |, ", query)


@pytest.mark.parametrize(
    ("name", "keys", "values", "queries", "others"),
    [
        ("niah_single_1", 1, 1, 1, 0), ("niah_single_2", 1, 1, 1, 0), ("niah_single_3", 1, 1, 1, 0),
        ("niah_multikey_1", 4, 1, 1, 0), ("niah_multikey_2", 1, 1, 1, 60),
        ("niah_multikey_3", 1, 1, 1, 60), ("niah_multivalue", 1, 4, 1, 0),
        ("niah_multiquery", 4, 1, 4, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(5))
def test_needles_are_those_of_the_definition(
    name: str, keys: int, values: int, queries: int, others: int, seed: int
) -> None:
    question = drawn(name, 60, seed=seed)
    hidden = needles(question)
    assert len(hidden) == keys + others
    wanted = asked(question)
    assert len(wanted) == len(set(wanted)) == queries
    for key in wanted:
        assert len(hidden[key]) == values  # the key that is asked for, exactly that often
        assert question.turns[0].count(f" for {key} is: ") == values
    assert sorted(question.references) == sorted(value for key in wanted for value in hidden[key])
    one = queries * values == 1
    assert question.turns[0].startswith("A special magic" if one else "Some special magic")
    assert question.prefix.endswith(" is" if one else " are")
    for key, found in hidden.items():
        for value in found:
            assert (
                UUID if name in ("niah_single_3", "niah_multikey_3") else re.compile(r"[1-9]\d{6}")
            ).fullmatch(value)
        words = re.compile(r"[a-z]{4,9}-[a-z]{4,9}")
        assert (UUID if name == "niah_multikey_3" else words).fullmatch(key)
    every = (keys + others) * values
    expected = len(question.references) / every
    assert question.chance == (0 if expected == 1 else expected)
    single = keys * values == 1
    assert (question.depth is not None) == single
    if single:
        text = question.turns[0]
        place = text.index(question.references[0]) / len(text)
        assert abs(place - question.depth) < 0.3


def test_one_needle_is_asked_for_as_ruler_rewrites_its_template() -> None:
    """``niah.py`` there: the same replacements, in its order, where one value is asked for."""
    pairs = {ruler._NIAH: ruler._NIAH_ONE, ruler._NIAH_PREFIX: ruler._NIAH_ONE_PREFIX}
    for several, single in pairs.items():
        rewritten = several
        for old, new in (("Some", "A"), ("are all", "is"), ("are", "is")):
            rewritten = rewritten.replace(old, new)
        assert rewritten == single


#: SHA-256 of RULER's templates with their prefixes (its ``scripts/data/synthetic/constants.py``),
#: filled with CONTEXT, QUERY, numbers and 5. Taken from its text, not from kvprof's.
TEMPLATES = {
    "niah": "2d87913adb9aec1eb2e18d6bb58a597e4f5422171b5f190464c39c9b4649e7f4",
    "vt": "27c2f64923cd4413badbdbb962954306641878921c789be11fdda0a571b93222",
    "cwe": "07425c62b2f3cc50e59526d1832cf6c2d78a837c6b4206e218f9183b87663b04",
    "fwe": "4119b6f531854cc62a9a79ded95765877b89f44d5dcae6c83866730f5755a151",
}


def test_templates_are_rulers_letter_for_letter() -> None:
    niah = {"kind": "numbers", "context": "CONTEXT", "query": "QUERY"}
    chain = {"context": "CONTEXT", "query": "QUERY", "number": 5}
    filled = {
        "niah": ruler._NIAH.format(**niah) + ruler._NIAH_PREFIX.format(**niah),
        "vt": ruler._VT.format(**chain) + ruler._VT_PREFIX.format(**chain),
        "cwe": (ruler._CWE + ruler._CWE_PREFIX).format(context="CONTEXT"),
        "fwe": (ruler._FWE + ruler._FWE_PREFIX).format(context="CONTEXT"),
    }
    assert {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in filled.items()
    } == TEMPLATES


NOISE = re.escape(
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
KEY, NUMBER = r"[a-z]+-[a-z]+", r"[1-9]\d{6}"
ID = UUID.pattern


def _needle(key: str = KEY, value: str = NUMBER, kind: str = "numbers") -> str:
    return rf"One of the special magic {kind} for {key} is: {value}\."


def _lines(line: str) -> str:
    return rf"{line}(?:\n{line})*"


def _niah_form(context: str, kind: str = "numbers", one: bool = True, key: str = KEY) -> str:
    """Return the form of a whole question: what surrounds the text is held by its digest."""
    said = kind.removesuffix("s") if one else kind
    some, are, are_all = ("A", "is", "is") if one else ("Some", "are", "are all")
    query = key if one or kind != "numbers" else rf"{key}(?:, {key}, {key}, and {key})?"
    return (
        rf"{some} special magic {said} {are} hidden within the following text\. Make sure to "
        rf"memorize it\. I will quiz you about the {said} afterwards\.\n{context}\n"
        rf"What {are_all} the special magic {said} for {query} mentioned in the provided text\? "
        rf"The special magic {said} for {query} mentioned in the provided text {are}"
    )


def _chain_form(letters: int) -> str:
    piece = rf"(?:{NOISE}\n|VAR [A-Z]{{{letters}}} = (?:\d{{5}}|VAR [A-Z]{{{letters}}} ))"
    return (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text"
        rf"\.\n\n{piece}(?: {piece})*\nQuestion: Find all variables that are assigned the value "
        r"\d{5} in the text above\. Answer: According to the chain\(s\) of variable assignment in "
        r"the text above, 5 variables are assgined the value \d{5}, they are: "
    )


_LIST = (
    r"Below is a numbered list of words\. In these words, some appear more often than others\. "
    r"Memorize the ones that appear most often\.\n1\. \w+(?: \d+\. \w+)*\nQuestion: What are the "
    r"10 most common words in the above list\? Answer: The top 10 words that appear most often in "
    r"the list are:"
)
_TEN = " ".join(rf"{number}\. \w+" for number in range(1, 11))

#: Of each task the form of a whole question, to the last blank, with the prefix of its answer: what
#: RULER's generators write has it too, as their text says (``scripts/data/synthetic/`` there).
FORMS = {
    "niah_single_1": _niah_form(_lines(rf"(?:{NOISE}|{_needle()})")),
    "niah_single_2": _niah_form(r"[^\n]+"),
    "niah_single_3": _niah_form(r"[^\n]+", "uuids"),
    "niah_multikey_1": _niah_form(r"[^\n]+"),
    "niah_multikey_2": _niah_form(_lines(_needle())),
    "niah_multikey_3": _niah_form(_lines(_needle(ID, ID, "uuids")), "uuids", key=ID),
    "niah_multivalue": _niah_form(r"[^\n]+", one=False),
    "niah_multiquery": _niah_form(r"[^\n]+", one=False),
    "vt": rf"{_chain_form(3)} [A-Z]{{3}}(?: [A-Z]{{3}}){{4}}\n\n\n\n{_chain_form(5)}",
    "cwe": rf"{_LIST}{_TEN}\n{_LIST}",
    "fwe": (
        r"Read the following coded text and track the frequency of each coded word\. Find the "
        r"three most frequently appeared coded words\. (?:[a-z]{6}|\.{3})(?: (?:[a-z]{6}|\.{3}))*"
        r"\nQuestion: Do not provide any explanation\. Please ignore the dots '\.\.\.\.'\. What "
        r"are the three most frequently appeared words in the above coded text\? Answer: According "
        r"to the coded text above, the three most frequently appeared words are:"
    ),
}


@pytest.mark.parametrize("name", RULER)
@pytest.mark.parametrize("length", [1024, 8192])
def test_a_whole_question_has_the_form_of_rulers(name: str, length: int) -> None:
    for seed in range(3):
        question = drawn(name, 40, length=length, seed=seed)
        (text,) = question.turns
        assert re.fullmatch(FORMS[name], text + question.prefix)


def test_haystacks() -> None:
    noise = drawn("niah_single_1", 30).turns[0]
    assert noise.count("The grass is green. The sky is blue. The sun is yellow.") == 30
    essay = drawn("niah_single_2", 200).turns[0].split("\n")[1]
    words = NEEDLE.sub("", essay).split()
    assert len(words) == 200
    assert (
        words == NEEDLE.sub("", drawn("niah_single_2", 200, seed=9).turns[0]).split("\n")[1].split()
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_of_variables_has_four_hops_among_noise(seed: int) -> None:
    question = drawn("vt", 25, seed=seed)
    example, text = question.turns[0].split("\n\n\n\n")
    first = re.findall(r"VAR (\w+) = (\d{5}) ", text)
    links = re.findall(r"VAR (\w+) = VAR (\w+) ", text)
    ((name, value),) = first
    assert f"assigned the value {value} in the text above" in text
    chain = [name]
    while followed := [new for new, old in links if old == chain[-1]]:
        chain += followed
    assert tuple(chain) == question.references
    assert len(set(chain)) == 5
    # In the order of the chain, so that one reading is enough.
    assert [new for new, _ in links] == chain[1:]
    assert all(re.fullmatch("[A-Z]{5}", one) for one in chain)
    assert text.count("The grass is green.") == 25
    # The example shows how to answer, and gives nothing of it away.
    assert not set(chain) & set(example.split())
    shown = example.split("they are: ")[1].split()
    assert len(shown) == 5
    assert all(f"VAR {one} = " in example for one in shown)
    assert question.prefix.endswith(f"5 variables are assgined the value {value}, they are: ")


@pytest.mark.parametrize(("length", "often", "seldom"), [(1024, 6, 1), (4096, 30, 3)])
def test_ten_words_are_common(length: int, often: int, seldom: int) -> None:
    question = drawn("cwe", 50, length=length)
    listed = question.turns[0].split("appear most often.\n")[-1].split("\nQuestion")[0]
    numbers, words = zip(*re.findall(r"(\d+)\. (\w+)", listed), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(words) + 1))
    counts = Counter(words)
    assert len(counts) == 50
    assert {word for word, count in counts.items() if count == often} == set(question.references)
    assert set(counts.values()) == {often, seldom}
    assert len(question.references) == 10
    assert question.chance == 10 / 50
    assert question.turns[0].count("Answer: The top 10 words") == 1  # of the example


@pytest.mark.parametrize("size", [RULER["fwe"].least, 100, 333, 2000])
@pytest.mark.parametrize("length", [1024, 8192])
def test_three_coded_words_are_most_frequent(size: int, length: int) -> None:
    question = drawn("fwe", size, length=length)
    coded = question.turns[0].split("coded words. ")[1].split("\nQuestion")[0].split()
    counts = Counter(coded)
    dots = counts.pop("...")
    ranked = [count for _, count in counts.most_common()]
    assert {word for word, _ in counts.most_common(3)} == set(question.references)
    assert len(ranked) == 3 or ranked[2] > ranked[3]
    assert dots > ranked[0]
    assert dots == int(size * 6 / 3.141592653589793**2)
    assert ranked[0] == int(size / 4 * 6 / 3.141592653589793**2)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.draw is not None])
def test_questions_fill_the_length_asked_for_and_are_the_same_again(
    reference: LoadedModel, name: str
) -> None:
    chosen = select_tasks(reference, [name], 4, (1024, 1536))
    assert [item.length for item in chosen.items] == [1024, 1536, 1024, 1536]
    tokenizer = reference.tokenizer()
    for item in chosen.items:
        taken = len(item.prompt) + item.limit
        assert 0.93 * item.length < taken <= item.length
        assert item.prompt[0] == tokenizer.bos_token_id
        text = tokenizer.decode(item.prompt)
        perfect = " and ".join(item.references)
        assert scored(item, perfect.upper()) == scored(item, f"It is {perfect}.") == 1
        assert scored(item, "") == scored(item, text[-8:]) == 0
        if item.scoring is Scoring.STRINGS and len(item.references) > 1:
            assert scored(item, item.references[0]) == 1 / len(item.references)
    assert len({tuple(item.prompt) for item in chosen.items}) == 4
    again = select_tasks(reference, [name], 2, (1024, 1536)).items
    assert again == chosen.items[:2]


def test_lengths_that_do_not_fit_are_refused(reference: LoadedModel) -> None:
    for lengths, says in (
        ((1024, 4096), "--task-lengths 4,096 exceeds the context of reference, 2,048"),
        ((200,), "--task-lengths 200: niah_single_1 needs at least 2.. tokens with"),
    ):
        with pytest.raises(UsageError, match=says):
            select_tasks(reference, ["niah_single_1"], 1, lengths)
    with pytest.raises(UsageError, match="requires a generated task"):
        select_tasks(reference, ["needle"], 1, (1024,))


def test_names_and_groups() -> None:
    assert parse_tasks("ruler") == GROUPS["ruler"] == tuple(RULER)
    assert len(RULER) == 11
    assert parse_tasks("vt,needle,niah-single-1") == ("needle", "niah_single_1", "vt")
    assert parse_tasks("arithmetic,arithmetic-2")[0] == "arithmetic_2"
    for name, data in (("qa_1", "SQuAD"), ("qa-2", "HotpotQA")):
        with pytest.raises(UsageError, match=f"{data}, which kvprof does not ship"):
            parse_tasks(f"ruler,{name}")
