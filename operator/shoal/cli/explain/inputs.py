"""Input of `shoal explain` and `shoal render`: Kubernetes YAML or JSON, written by people or printed by kubectl."""

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

import click
import orjson
import pydantic
import yaml

from shoal.api import names
from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import API_VERSION, GROUP, CustomResource, JsonObject, Object
from shoal.api.model import Model
from shoal.core import facts
from shoal.core.claimants import oldest
from shoal.core.devices import Claim, DeviceClass, DeviceTaintRule, RuleTaints, Slice
from shoal.kube import deviceviews, projections

if TYPE_CHECKING:
    from yaml import SafeLoader
else:
    try:
        from yaml import CSafeLoader as SafeLoader
    except ImportError:  # PyYAML without libyaml: slower, otherwise the same
        from yaml import SafeLoader

K = TypeVar("K", bound=CustomResource)

_SHOWN: Final = 5
"""Problems reported per object at most."""


class _Loader(SafeLoader):
    """YAML as the API server reads it: a timestamp stays a string."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True, slots=True)
class ExplainedFleet:
    """The fleet: GPUs on which Models can run."""

    classes: dict[str, GPUClass]
    nodes: tuple[facts.Node, ...] | None
    """None: no Nodes are given, so capacity is unlimited."""
    pods: tuple[facts.Pod, ...] = ()
    """Pods that hold GPUs."""
    owners: Mapping[str, str] = field(default_factory=dict[str, str])
    """Key of an engine pod -> key of its Model."""
    built_in: bool = False
    """Whether this is the built-in catalogue."""
    slices: tuple[Slice, ...] = ()
    claims: tuple[Claim, ...] = ()
    device_classes: tuple[DeviceClass, ...] = ()
    """Of dynamic resource allocation, for classes with a `device`."""


def objects(path: Path) -> Iterator[JsonObject]:
    """Every object of a file, with Lists unfolded; `-` is standard input.

    Raises click.UsageError with file, line and remedy.
    """
    for number, found in enumerate(_documents(_text(path), _shown(path)), 1):
        if found is None:
            continue
        if not isinstance(found, dict) or not isinstance(cast("JsonObject", found).get("kind"), str):
            raise click.UsageError(
                f"{_shown(path)}, document {number}: no Kubernetes object: it needs `apiVersion`, `kind`, `metadata`"
            )
        yield from _unfold(cast("JsonObject", found))


def document(path: Path) -> JsonObject:
    """The single mapping in a file. Raises click.UsageError."""
    return parse_text(_text(path), _shown(path))


def parse_text(text: str, shown: str) -> JsonObject:
    """The single mapping in YAML or JSON text; `shown` is its name in the click.UsageError."""
    found = [d for d in _documents(text, shown) if d is not None]
    if len(found) != 1 or not isinstance(found[0], dict):
        raise click.UsageError(f"{shown}: must hold one mapping of names to values")
    return cast("JsonObject", found[0])


def _shown(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise click.UsageError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{_shown(path)}: cannot be read: {error}") from None


def _documents(text: str, shown: str) -> list[Any]:
    if text.lstrip().startswith("{"):
        # kubectl's JSON of a fleet is large, and JSON is parsed a hundred times faster than YAML. Text that is not JSON
        # may still be YAML.
        with contextlib.suppress(orjson.JSONDecodeError):
            return [orjson.loads(text)]
    try:
        return list(yaml.load_all(text, _Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise click.UsageError(f"{shown}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None


def _unfold(obj: JsonObject) -> Iterator[JsonObject]:
    if str(obj["kind"]).endswith("List") and isinstance(obj.get("items"), list):
        for item in cast("list[JsonObject]", obj["items"]):
            # Items of a typed list may lack `kind`.
            yield from _unfold({"kind": str(obj["kind"]).removesuffix("List"), **item})
    else:
        yield obj


@dataclass(frozen=True, slots=True)
class Declared:
    """Objects in the files with Models."""

    models: tuple[Model, ...]
    """In the order of the files."""
    classes: dict[str, GPUClass]
    """GPUClasses in the same files."""
    pools: tuple[LoRAPool, ...] = ()
    adapters: tuple[LoRAAdapter, ...] = ()

    def pool_of(self, model: Model) -> LoRAPool | None:
        """The pool that applies to the Model: the oldest, or the first if none has an age."""
        return oldest(p for p in self.pools if p.model_key == model.key)

    def adapters_of(self, pool: LoRAPool) -> int:
        """Number of adapters that name the pool."""
        key = f"{pool.metadata.namespace}/{pool.metadata.name}"
        return sum(a.pool_key == key for a in self.adapters)


def read_models(paths: Sequence[Path], namespace: str) -> Declared:
    """Reads Models, and the GPUClasses, LoRAPools and LoRAAdapters in the same files.

    Objects without a namespace get `namespace`. Raises click.UsageError.
    """
    found: dict[tuple[str, str], CustomResource] = {}
    kinds: dict[str, type[CustomResource]] = {k.kind_name: k for k in (Model, GPUClass, LoRAPool, LoRAAdapter)}
    for path in paths:
        for raw in objects(path):
            kind = kinds.get(raw["kind"]) if _is_ours(raw) else None
            if kind is None:
                continue
            if kind is not GPUClass:
                metadata: JsonObject = raw.get("metadata") or {}
                raw = raw | {"metadata": metadata | {"namespace": metadata.get("namespace") or namespace}}
            one = parse(kind, raw, path)
            name = one.metadata.name if kind is GPUClass else f"{one.metadata.namespace}/{one.metadata.name}"
            if (kind.kind_name, name) in found and kind is not GPUClass:
                raise click.UsageError(f"{path}: {kind.kind_name} {name} is given twice")
            found[kind.kind_name, name] = one
    models = tuple(o for o in found.values() if isinstance(o, Model))
    if not models:
        raise click.UsageError(f"{', '.join(map(str, paths))}: there is no Model (apiVersion {API_VERSION}) in there")
    return Declared(
        models,
        {o.metadata.name: o for o in found.values() if isinstance(o, GPUClass)},
        tuple(o for o in found.values() if isinstance(o, LoRAPool)),
        tuple(o for o in found.values() if isinstance(o, LoRAAdapter)),
    )


def read_fleet(path: Path) -> ExplainedFleet:
    """Reads GPUClasses, and if present Nodes, Pods, and the objects of dynamic resource allocation. Raises
    click.UsageError."""
    classes: dict[str, GPUClass] = {}
    nodes: dict[str, facts.Node] = {}
    pods: dict[str, facts.Pod] = {}
    owners: dict[str, str] = {}
    slices: list[Slice] = []
    taint_rules: list[DeviceTaintRule] = []
    claims: list[Claim] = []
    device_classes: list[DeviceClass] = []
    for raw in objects(path):
        try:
            if raw["kind"] == GPUClass.kind_name and _is_ours(raw):
                found = parse(GPUClass, raw, path)
                classes[found.metadata.name] = found
            elif raw["kind"] == "Node":
                node = projections.node(raw)
                nodes[node.name] = node
            elif raw["kind"] == "ResourceSlice":
                slices.append(deviceviews.resource_slice(raw))
            elif raw["kind"] == "DeviceTaintRule":
                taint_rules += [rule] if (rule := deviceviews.device_taint_rule(raw)) is not None else []
            elif raw["kind"] == "DeviceClass":
                device_classes.append(deviceviews.device_class(raw))
            elif raw["kind"] == "ResourceClaim":
                claims += [claim] if (claim := deviceviews.resource_claim(raw)) is not None else []
            elif raw["kind"] == "Pod" and (pod := projections.pod(raw)) is not None:
                pods[pod.key] = pod
                if pod.model_uid:
                    owners[pod.key] = f"{pod.namespace}/{raw['metadata']['labels'].get(names.LABEL_MODEL)}"
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            name = cast("JsonObject", raw.get("metadata") or {}).get("name", "without a name")
            raise click.UsageError(f"{path}: {raw['kind']} {name} is not as kubectl prints it: {error}") from None
    if not classes:
        raise click.UsageError(
            f"{path}: there is no GPUClass in there; `kubectl get gpuclasses,nodes,pods -A -o yaml` prints a fleet"
        )
    return ExplainedFleet(
        classes,
        tuple(nodes.values()) if nodes else None,
        tuple(pods.values()),
        owners,
        slices=tuple(RuleTaints().add(slices, taint_rules)),
        claims=tuple(claims),
        device_classes=tuple(device_classes),
    )


def parse(kind: type[K], raw: JsonObject, path: Path) -> K:
    """Parses one of Shoal's objects. Raises click.UsageError with object, field and allowed values."""
    name = cast("JsonObject", raw.get("metadata") or {}).get("name")
    where = f"{path}: {kind.kind_name} {name or 'without a name'}"
    if raw.get("apiVersion", API_VERSION) != API_VERSION:
        raise click.UsageError(
            f"{where}: apiVersion {raw['apiVersion']!r} is not known; this version has {API_VERSION}"
        )
    unknown = [*_unknown(kind, {k: v for k, v in raw.items() if k == "spec"})]
    if unknown:
        raise click.UsageError(f"{where}: {'; '.join(unknown[:_SHOWN])}")
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise click.UsageError(f"{where}: {'; '.join(problems[:_SHOWN])}") from None


def _is_ours(raw: JsonObject) -> bool:
    return str(raw.get("apiVersion", "")).startswith(f"{GROUP}/")


def _unknown(kind: type[Object], raw: JsonObject, prefix: str = "") -> Iterator[str]:
    """Fields that the kind does not have. The models ignore unknown fields, but in a file these are typing errors."""
    fields = {str(field.alias or name): field.annotation for name, field in kind.model_fields.items()}
    for key, value in raw.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            yield f"{prefix}{key}: unknown field" + (f"; did you mean `{near[0]}`?" if near else "")
            continue
        inner = _object_in(fields[key])
        if inner is None:
            continue
        items: Iterable[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        for number, item in enumerate(items):
            if isinstance(item, dict):
                index = f"[{number}]" if isinstance(value, list) else ""
                yield from _unknown(inner, cast("JsonObject", item), f"{prefix}{key}{index}.")


def _object_in(annotation: Any) -> type[Object] | None:
    """The Object type of a field, alone, optional or in a tuple; None: the field has another type."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, Object) else None
    if get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        return next((found for part in get_args(annotation) if (found := _object_in(part))), None)
    return None
