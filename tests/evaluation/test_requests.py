"""What ``--methods`` says."""

from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.requests import MethodRequest, option_names, parse_methods


def parse(text: str, **common: Any) -> list[MethodRequest]:
    return parse_methods(text, common)


def test_full_and_fp8_are_always_rows() -> None:
    assert [request.label for request in parse("fdc, kq")] == ["fdc", "kq", "full", "fp8"]
    assert [request.label for request in parse("fp8,kq")] == ["fp8", "kq", "full"]


def test_options_follow_their_method_with_commas_too() -> None:
    requests = parse("fdc,kq:allocation=budget,grid=32,kq,palu:hadamard=true,heads=2,tale")
    assert [(request.label, request.options) for request in requests[:5]] == [
        ("fdc", {}),
        ("kq:allocation=budget,grid=32", {"allocation": "budget", "grid": 32}),
        ("kq", {}),
        ("palu:hadamard=true,heads=2", {"hadamard": True, "heads": 2}),
        ("tale", {}),
    ]


def test_common_options_go_to_those_that_have_them_and_say_nothing_else() -> None:
    requests = parse("kivi,kq,kq:grid=8,fdc-4bit,h2o", grid=32, allocation="tail")
    options = {request.label: request.options for request in requests}
    assert options["kivi"] == options["h2o"] == options["full"] == options["fp8"] == {}
    assert options["kq"] == options["fdc-4bit"] == {"grid": 32, "allocation": "tail"}
    assert options["kq:grid=8"] == {"grid": 8, "allocation": "tail"}


def test_options_of_combinations_and_of_the_calibration_are_known() -> None:
    requests = parse(
        "fdc+keyformer:keep=0.5,palu:allocation=fisher,fisher_form=expected,kq:centre=true,skip=0"
    )
    assert requests[0].options == {"keep": 0.5}
    assert requests[2].options == {"centre": True, "skip": (0,)}
    assert requests[1].options == {"allocation": "fisher", "fisher_form": "expected"}
    assert option_names("svd-kv+h2o") == option_names("svd-kv")
    assert option_names("tale+kivi") != option_names("tale")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no method"),
        ("fdc,nonsense", "'nonsense'"),
        ("kq:colour=red", "colour"),
        ("full:grid=16", "it has none"),
        ("grid=32", "write for example kq:grid=32"),
        ("fdc,grid=32", "write for example kq:grid=32"),
        ("fdc,kq,fdc", "--methods names fdc twice"),
        ("kq,kq:grid=8,kq:grid=8", "--methods names kq:grid=8 twice"),
        ("kq:grid=8,kq:grid=many", "--methods kq:grid=many"),
        ("kq:allocation", "KEY=VALUE"),
        ("fdc,kq:", "'kq:' "),
        ("kq: ,grid=32", "'kq:' "),
        (":grid=32", "':grid=32' "),
        ("fdc:paper:", "did you mean fdc:paper?"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_layers_are_left_out_of_every_method_that_compresses() -> None:
    found = {request.label: request.options for request in parse("kq,kq:skip=1,fp8", skip="0,-1")}
    assert found["kq:skip=1"] != found["kq"] == found["fp8"] == {"skip": (0, -1)}
    assert found["full"] == {}
    with pytest.raises(UsageError, match=r"it has .*, skip"):
        parse("hadamard-int4:nope=1")
