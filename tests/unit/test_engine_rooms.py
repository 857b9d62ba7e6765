"""Engines are behind one port: what differs between them is said in `engine/`, and asked of the kind by all others."""

import ast
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


def distinctions(trees: Mapping[str, ast.Module]) -> set[str]:
    """Texts outside of `engine/` that are an engine's name: what one compares a type with."""
    return {
        module
        for module, tree in trees.items()
        if _within(module, "shoal") and not _within(module, "shoal.engine")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip().lower() in NAMES
    }


def test_only_the_registry_knows_the_adapters() -> None:
    assert trespasses(modules()) == set()


def test_nobody_outside_asks_which_engine_it_is() -> None:
    assert distinctions(modules()) == MAY_NAME


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
