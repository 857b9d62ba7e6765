"""What a newcomer may rely on: the layout's promises hold (invariant 13)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "operator" / "shoal"

# core/ decides: what it needs comes in as arguments.
FORBIDDEN_MODULES = {
    "aiohttp", "asyncio", "httptools", "kopf", "logging", "os", "pathlib", "random", "requests", "secrets",
    "socket", "sqlite3", "structlog", "subprocess", "tempfile", "threading", "time", "urllib.request", "uuid",
}  # fmt: skip
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval"}
FORBIDDEN_ATTRIBUTES = {"now", "utcnow", "today"}


def forbidden(module: str) -> bool:
    return not FORBIDDEN_MODULES.isdisjoint({module, module.split(".", maxsplit=1)[0]})


def violations(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if forbidden(alias.name)]
            case ast.ImportFrom(module=str(module)):
                found += [module] if forbidden(module) else []
            case ast.AsyncFunctionDef(name=name):
                found.append(f"async def {name}")
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{name}()")
            case ast.Call(func=ast.Attribute(attr=name)) if name in FORBIDDEN_ATTRIBUTES:
                found.append(f".{name}()")
            case _:
                pass
    return found


@pytest.mark.parametrize(
    "path", sorted([*PACKAGE.glob("core/**/*.py"), *PACKAGE.glob("api/**/*.py")]), ids=lambda p: p.name
)
def test_core_and_api_do_no_io_and_read_no_clock(path: Path) -> None:
    assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from datetime import datetime\nx = datetime.now()",
        "import os.path",
        "open('x')",
        "async def f(): ...",
        "from random import choice",
    ],
)
def test_the_check_above_can_fail(source: str) -> None:
    assert violations(source)


def test_operator_directory_is_only_a_source_root() -> None:
    # With an __init__.py it would shadow the standard library's `operator` for anything started in the repository.
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_top_level_is_fixed() -> None:
    allowed = {
        "pyproject.toml", "uv.lock", "operator", "crds", "charts", "policies", "images", "tests", "Makefile",
        "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "docs", "examples", ".ci",
        ".github", ".gitignore", ".git",
    }  # fmt: skip
    tracked = {
        p.name for p in ROOT.iterdir() if not p.name.startswith((".venv", ".pytest", ".ruff", ".hypo", ".import"))
    }
    assert tracked - {"dist", ".lab", ".dockerignore", ".containerignore"} <= allowed
