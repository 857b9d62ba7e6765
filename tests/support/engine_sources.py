"""What the sources of an installed engine say of its model classes. Nothing of the engine is imported: most of its
models ask for kernels that no CPU has."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.engines import sglang_launcher, vllm_launcher


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A class, and the module that has it."""

    module: str
    node: ast.ClassDef

    @property
    def functions(self) -> set[str]:
        return {part.name for part in self.node.body if isinstance(part, ast.FunctionDef)}


@dataclass(frozen=True, slots=True)
class Module:
    """One file, read."""

    tree: ast.Module
    classes: dict[str, ast.ClassDef] = field(default_factory=dict[str, ast.ClassDef])
    imports: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Name -> the module that it is from, and its name there."""

    def assigned(self, name: str) -> ast.expr | None:
        """The value of a name of the module."""
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return node.value if isinstance(node, ast.Assign) else None
        return None


@dataclass(frozen=True, slots=True)
class EngineSources:
    """The package of one engine below a folder."""

    folder: Path
    package: str
    read: dict[str, Module] = field(default_factory=dict[str, Module])

    def module(self, name: str) -> Module:
        if name not in self.read:
            self.read[name] = self._read(name)
        return self.read[name]

    def _read(self, name: str) -> Module:
        path = self.folder.joinpath(*name.split("."))
        inside = path.is_dir()
        file = path / "__init__.py" if inside else path.with_suffix(".py")
        module = Module(ast.parse(file.read_text()))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                module.classes.setdefault(node.name, node)
            elif isinstance(node, ast.ImportFrom):
                above = name.split(".")[: -node.level + inside or None] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                for each in node.names:
                    # Some models have a class for each maker of GPUs; Shoal's are NVIDIA's.
                    named = each.asname or each.name
                    if named not in module.imports or "nvidia" in source:
                        module.imports[named] = (source, each.name)
        return module

    def find(self, module: str, name: str) -> ModelClass | None:
        """The class of this name, seen from a module; None: it is none of the engine's."""
        found = self.module(module)
        if name in found.classes:
            return ModelClass(module, found.classes[name])
        source, original = found.imports.get(name, ("", ""))
        return self.find(source, original) if source.startswith(self.package) else None

    def lineage(self, module: str, name: str) -> Iterator[ModelClass]:
        """The class and all that it inherits from, over all files."""
        found = self.find(module, name)
        if found is None:
            return
        yield found
        for base in found.node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name):
                yield from self.lineage(found.module, named.id)


@cache
def vllm_sources() -> EngineSources:
    return EngineSources(_packages(vllm_launcher()), "vllm")


@cache
def vllm_registry() -> Mapping[str, tuple[str, str]]:
    """Architecture -> module and name of its class."""

    def table(name: str) -> dict[str, tuple[str, str]]:
        found, value = dict[str, tuple[str, str]](), registry.assigned(name)
        assert isinstance(value, ast.Dict)
        for key, entry in zip(value.keys, value.values, strict=True):
            if isinstance(entry, ast.Name):  # **_ANOTHER_TABLE
                found |= table(entry.id)
            elif key is not None:
                module, of_class = ast.literal_eval(entry)
                found[ast.literal_eval(key)] = (module if "." in module else f"{models}.{module}", of_class)
        return found

    models = "vllm.model_executor.models"
    registry = vllm_sources().module(f"{models}.registry")
    return table("_VLLM_MODELS")


@cache
def sglang_sources() -> EngineSources:
    return EngineSources(_packages(sglang_launcher()), "sglang")


@cache
def sglang_registry() -> Mapping[str, tuple[str, str]]:
    """Architecture -> module and name of its class, which are the same."""
    sources, found = sglang_sources(), dict[str, tuple[str, str]]()
    for path in sorted((sources.folder / "sglang" / "srt" / "models").glob("*.py")):
        module = f"sglang.srt.models.{path.stem}"
        entry = sources.module(module).assigned("EntryClass")
        names = entry.elts if isinstance(entry, (ast.List, ast.Tuple)) else [entry]
        found |= {each.id: (module, each.id) for each in names if isinstance(each, ast.Name)}
    return found


def _packages(launcher: Path) -> Path:
    (found,) = (launcher.parents[1] / "lib").glob("python3*/site-packages")
    return found
