"""What the policies of LoRAPools and their Models say, evaluated as the API server does, without one."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel  # pyright: ignore[reportMissingModuleSource]

from tests.e2e.test_policies import REFUSED, REFUSED_FIELDS, TAKEN, TAKEN_FIELDS, model_of, pool

LORAPOOLS = Path(__file__).resolve().parents[2] / "policies" / "admission" / "lorapools.yaml"
CASES: list[tuple[dict[str, Any], str]] = [
    *(({"extraArgs": list(given)}, words) for given, words in REFUSED),
    *REFUSED_FIELDS,
]
FITS: list[dict[str, Any]] = [*({"extraArgs": list(given)} for given in TAKEN), *TAKEN_FIELDS]


@cache
def environment() -> Any:
    kind: Any = cel.Type
    text = [kind.STRING]
    functions = [
        cel.FunctionDecl("upperAscii", [cel.Overload("upper", kind.STRING, text, True, str.upper)]),
        cel.FunctionDecl("replace", [cel.Overload("replace", kind.STRING, text * 3, True, str.replace)]),
    ]
    names = ("object", "oldObject", "params", "variables")
    return cel.NewEnv(variables=dict.fromkeys(names, kind.DYN), functions=functions)


def evaluated(expression: str, given: dict[str, Any]) -> Any:
    return environment().compile(expression).eval(data=given).plain_value()


def told(name: str, changed: dict[str, Any], before: dict[str, Any] | None, other: dict[str, Any]) -> list[str]:
    """Messages of a policy that refuses."""
    policies = {
        one["metadata"]["name"]: one
        for one in yaml.safe_load_all(LORAPOOLS.read_text())
        if "Binding" not in one["kind"]
    }
    spec = policies[name]["spec"]
    variables: dict[str, Any] = {}
    given = {"object": changed, "oldObject": before, "params": other, "variables": variables}
    for variable in spec["variables"]:
        variables[variable["name"]] = evaluated(variable["expression"], given)
    return [
        evaluated(one["messageExpression"], given)
        for one in spec["validations"]
        if not evaluated(one["expression"], given)
    ]


@pytest.mark.parametrize(("engine", "words"), CASES)
def test_a_pool_and_its_model_are_refused_with_the_words_of_the_status(engine: dict[str, Any], words: str) -> None:
    (message,) = told("shoal-lora-pools", pool("p", "m"), None, model_of("m", engine))
    assert message.startswith(f"Model m: {words}")
    (message,) = told("shoal-lora-models", model_of("m", engine), model_of("m", {}), pool("p", "m"))
    assert message.startswith(f"LoRAPool p gives this Model adapters: {words}")


@pytest.mark.parametrize("engine", FITS)
def test_what_goes_together_is_taken(engine: dict[str, Any]) -> None:
    assert told("shoal-lora-pools", pool("p", "m"), None, model_of("m", engine)) == []
    assert told("shoal-lora-models", model_of("m", engine), None, pool("p", "m")) == []


@pytest.mark.parametrize(("engine", "words"), CASES)
def test_a_model_that_was_wrong_before_may_change_otherwise(engine: dict[str, Any], words: str) -> None:
    scaled = model_of("m", engine) | {"spec": {**model_of("m", engine)["spec"], "scaling": {"minReplicas": 2}}}
    assert told("shoal-lora-models", scaled, model_of("m", engine), pool("p", "m")) == []
    assert told("shoal-lora-models", model_of("m", engine), None, pool("p", "another")) == []


def test_another_engine_for_a_model_whose_attention_is_divided_is_judged_anew() -> None:
    engine, words = REFUSED_FIELDS[-1]
    before = model_of("m", engine | {"type": "SGLang"})
    (message,) = told("shoal-lora-models", model_of("m", engine), before, pool("p", "m"))
    assert message.endswith(words)
