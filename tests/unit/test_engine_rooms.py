"""Engines are behind one port: what differs between them is said in `engine/`, and asked of the kind by all others."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from shoal.engine.kinds import KINDS
from tests.unit.test_house import modules

ROOMS: Final = tuple(sorted(f"shoal.engine.{name.lower()}" for name in KINDS))
"""The package of each adapter."""
NAMES: Final = frozenset(name.lower() for name in KINDS) | {"vllm", "tgi", "trtllm", "tensorrt-llm"}
MAY_NAME: Final = {
    "shoal.api.model",  # the field's values
    "shoal.api.lint",  # the field's values may be products' names
    "shoal.core.routing.replica",  # what runs in a pod that does not say it
    "shoal.core.sizing.sglang",  # the name in messages about this arithmetic
    "shoal.core.sizing.vllm",
}
"""Modules outside of `engine/` with a text that is an engine's name and nothing else."""
MAY_MENTION: Final = {
    *MAY_NAME,
    "shoal.api.chartvalues",  # images
    "shoal.api.config",  # the place of an engine's versions in the chart
    "shoal.core.fields.table",  # reasons of bounds, for the reference page
    "shoal.core.lora.format.peft",  # what neither engine serves
}
"""Modules outside of `engine/` whose texts contain an engine's name: messages, rules in CEL, arguments."""
MAY_USE: Final = {
    "shoal.api.chartvalues",  # the place of an engine's versions in the chart
    "shoal.api.config",
    "shoal.core.sizing",  # one arithmetic per engine
}
"""Modules and packages outside of `engine/` with an engine's name in an attribute, a variable, a class or an import."""
ARGUMENTS: Final = ("is-embedding", "disable-radix-cache", "enable-prefix-caching")
"""Arguments that only one engine has: who looks for them asks which engine it is."""
REGISTRIES: Final = ("shoal.engine.kinds", "shoal.engine.wires")
"""Modules that map the type to an adapter: of the operator and the agent, and of the gateway."""
MAY_IMPORT: Final = ("shoal_dev.sim", "shoal_dev.release", "shoal_dev.generate")


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def trespasses(trees: Mapping[str, ast.Module]) -> set[str]:
    """Imports of an adapter's package by anything but itself and the registry."""
    found: set[str] = set()
    for module, tree in trees.items():
        if module in REGISTRIES or any(_within(module, free) for free in MAY_IMPORT):
            continue
        for imported in _imported(tree):
            room = next((room for room in ROOMS if _within(imported, room)), None)
            if room is not None and not _within(module, room):
                found.add(f"{module} imports {room}")
    return found


_WORDS: Final = re.compile(
    rf"(?<![a-z0-9])({'|'.join(re.escape(name) for name in NAMES)})(?![a-z0-9])|{'|'.join(ARGUMENTS)}", re.IGNORECASE
)
_IDENTIFIER: Final = re.compile(r"_*(vllm|sglang|tgi(?![a-z])|trtllm)", re.IGNORECASE)


def _outside(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, ast.AST]]:
    """Modules outside of `engine/` with each of their nodes, docstrings left out."""
    for module, tree in trees.items():
        if not _within(module, "shoal") or _within(module, "shoal.engine"):
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        yield from ((module, node) for node in ast.walk(tree) if id(node) not in prose)


def distinctions(trees: Mapping[str, ast.Module]) -> set[str]:
    """Texts outside of `engine/` that are an engine's name: what one compares a type with."""
    return {
        module
        for module, node in _outside(trees)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip().lower() in NAMES
    }


def mentions(trees: Mapping[str, ast.Module]) -> set[str]:
    """Texts outside of `engine/` that contain an engine's name, or an argument that one engine has."""
    return {
        module
        for module, node in _outside(trees)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORDS.search(node.value)
    }


def uses(trees: Mapping[str, ast.Module]) -> set[str]:
    """Names in code outside of `engine/` that begin with an engine's: what one distinguishes by a class or a member."""
    return {module for module, node in _outside(trees) if any(_IDENTIFIER.match(name) for name in _identifiers(node))}


def _identifiers(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.alias(name=name):
            return name.split(".")
        case _:
            return []


def test_only_the_registry_knows_the_adapters() -> None:
    assert trespasses(modules()) == set()


def test_nobody_outside_asks_which_engine_it_is() -> None:
    assert distinctions(modules()) == MAY_NAME
    assert mentions(modules()) == MAY_MENTION
    used = uses(modules())
    assert {next((free for free in MAY_USE if _within(module, free)), module) for module in used} == MAY_USE


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shoal.gateway.request", "from shoal.engine.sglang import launch"),
        ("shoal.gateway.request", "def f():\n    import shoal.engine.sglang.client"),
        ("shoal.engine.port", "from shoal.engine.sglang.client import SGLangClient"),
    ],
)
def test_the_first_check_can_fail(module: str, source: str) -> None:
    assert trespasses({module: ast.parse(source)})


@pytest.mark.parametrize(
    "source",
    [
        "x = model.spec.engine.type == 'vLLM'",
        "match kind:\n    case 'vLLM': ...",
        "ARGS = {'SGLang': ()}",
        "x = image.startswith('vllm')",
    ],
)
def test_the_second_check_can_fail(source: str) -> None:
    assert distinctions({"shoal.manifests.pod": ast.parse(source)})


@pytest.mark.parametrize(
    "source",
    [
        "RULE = \"self.type != 'SGLang' || !has(self.speculation)\"",
        "x = 'vLLM' in message",
        "x = f'{name} of SGLang'",
        "x = '--disable-radix-cache' in args",
    ],
)
def test_the_third_check_can_fail(source: str) -> None:
    assert mentions({"shoal.manifests.pod": ast.parse(source)})


@pytest.mark.parametrize(
    "source",
    [
        "x = isinstance(tuning, VLLMTuning)",
        "x = engines.sglang",
        "from shoal.core.sizing import SGLangTuning",
        "f(vllm=1)",
    ],
)
def test_the_fourth_check_can_fail(source: str) -> None:
    assert uses({"shoal.manifests.pod": ast.parse(source)})


def test_a_docstring_may_say_what_an_engine_does() -> None:
    tree = ast.parse('"""As SGLang does."""\nx = 1\n"""What vLLM gives."""')
    assert mentions({"shoal.manifests.pod": tree}) == set()
