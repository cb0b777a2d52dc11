import copy
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvprof.records.schema import kinds, result_schema, validate_result
from tests.records.sample import benchmark_result, spectrum_result, stability_result


def test_the_schema_is_itself_valid_and_covers_every_kind() -> None:
    schema = result_schema()
    Draft202012Validator.check_schema(schema)
    assert set(kinds()) >= {"spectrum", "stability", "doctor", "benchmark"}
    assert schema["properties"]["kind"]["enum"] == list(kinds())


@pytest.mark.parametrize("result", [spectrum_result(), stability_result(), benchmark_result()])
def test_valid_results_pass_here_and_in_plain_jsonschema(result: dict[str, Any]) -> None:
    validate_result(result)
    Draft202012Validator(result_schema()).validate(result)


def test_more_than_the_schema_names_is_allowed_in_data() -> None:
    result = spectrum_result()
    result["data"]["more"] = {"figure": 0.1}
    result["data"]["removal"][0]["more"] = "words"
    validate_result(result)


def damaged(path: list[Any], value: Any = None, *, drop: bool = False) -> dict[str, Any]:
    result = copy.deepcopy(spectrum_result())
    target: Any = result
    for step in path[:-1]:
        target = target[step]
    if drop:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return result


VALUES = ["data", "pairs", "qk", "singular_values", 0, 1, 2]
DAMAGES = [
    (damaged(VALUES, "0.5"), "data.pairs.qk.singular_values[0][1][2]"),
    (damaged(VALUES, True), "data.pairs.qk.singular_values[0][1][2]"),
    (damaged(VALUES, None), "data.pairs.qk.singular_values[0][1][2]"),
    (damaged(VALUES[:-1], 3.0), "data.pairs.qk.singular_values[0][1]"),
    (damaged(["data", "removal", 0, "ranks_qk", 0, 0], 1.5), "data.removal[0].ranks_qk[0][0]"),
    (damaged(["data", "removal", 0, "removal_rate"], 1.5), "data.removal[0].removal_rate"),
    (damaged(["data", "removal", 0, "dim_rate"], "a"), "data.removal[0].dim_rate"),
    (damaged(["data", "pairs", "vo", "mean"], drop=True), "data.pairs.vo.mean"),
    (damaged(["data", "removal"], drop=True), "data.removal"),
    (damaged(["data", "first_position"], drop=True), "data.first_position"),
    (
        damaged(["data", "first_position", "energy_share_v"], drop=True),
        "data.first_position.energy_share_v",
    ),
    (damaged(["inputs", "tokens"], "8k"), "inputs.tokens"),
    (damaged(["data"], []), "data"),
    (damaged(["complete"], 1), "complete"),
    (damaged(["complete"], False), "incomplete_reason"),
    (damaged(["created"], "yesterday"), "created"),
    (damaged(["environment", "cpu", "threads"], "2"), "environment.cpu.threads"),
    (damaged(["kind"], "spectra"), "kind"),
    (damaged(["warnings"], [3]), "warnings[0]"),
]


@pytest.mark.parametrize(("result", "place"), DAMAGES)
def test_what_is_wrong_is_named_with_its_place(result: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(place)}: ") as caught:
        validate_result(result)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("result", [result for result, _ in DAMAGES])
def test_the_printed_schema_refuses_it_too(result: dict[str, Any]) -> None:
    assert not Draft202012Validator(result_schema()).is_valid(result)


@pytest.mark.parametrize("key", ["heads_and_seeds", "spread"])
def test_an_average_says_over_how_many_and_how_far_apart(key: str) -> None:
    result = stability_result()
    single, average = result["data"]["curves"]
    assert single["layer"] is not None
    del average[key]
    with pytest.raises(ValueError, match=rf"^data\.curves\[1\]: .*{key}"):
        validate_result(result)


def test_a_benchmark_names_its_program() -> None:
    with pytest.raises(ValueError, match=r"^inputs\.benchmark: "):
        validate_result(benchmark_result(benchmark=None))
    unnamed = benchmark_result()
    del unnamed["inputs"]["benchmark"]
    with pytest.raises(ValueError, match=r"^inputs: 'benchmark' is a required property"):
        validate_result(unnamed)
