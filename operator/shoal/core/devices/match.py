"""Which devices each GPUClass has. A device that several classes select counts for the first of them by name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass
from shoal.core.devices.facts import Device, DeviceClass, DeviceId, Slice
from shoal.core.devices.pools import DevicePool
from shoal.core.devices.selectors import Selector, SelectorFailed, SelectorInvalid, compiled

_NO_LABELS: Final[Mapping[str, str]] = {}
_NO_NODES: Final[Mapping[str, tuple["Matched", ...]]] = {}
_NOWHERE: Final[Mapping[str, tuple[DeviceId, ...]]] = {}


@dataclass(frozen=True, slots=True)
class Matched:
    """A device of a class."""

    id: DeviceId
    device: Device


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """Why a class has no devices that pods could get."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ClassDevices:
    """The devices of one class."""

    by_node: Mapping[str, tuple[Matched, ...]] = field(default_factory=dict[str, tuple[Matched, ...]])
    problem: DeviceProblem | None = None
    elsewhere: Mapping[str, tuple[DeviceId, ...]] = field(default_factory=dict[str, tuple[DeviceId, ...]])
    """Class that is first by name -> devices that this class selects too."""
    of_many_nodes: int = 0
    """Devices that several nodes can use. They are not counted."""
    updating: tuple[str, ...] = ()
    """Nodes whose driver is replacing what it publishes; the last complete generation counts."""
    incomplete: tuple[str, ...] = ()
    """Pools, as driver/pool, of no complete generation."""

    @property
    def devices(self) -> tuple[Matched, ...]:
        return tuple(matched for of in self.by_node.values() for matched in of)

    @property
    def shared(self) -> tuple[DeviceId, ...]:
        """Devices of which several claims may have a part. They do not count."""
        return tuple(matched.id for matched in self.devices if matched.device.shared)


@dataclass(frozen=True, slots=True)
class _Selectors:
    """Those of a class, in the order of the scheduler."""

    key: str
    """Says which expressions they are."""
    compiled: tuple[Selector, ...]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of one slice and one list of selectors."""

    names: frozenset[str]
    failed: str | None
    """The first device on which a selector has no result, and why."""


@dataclass(frozen=True, slots=True)
class _Usable:
    """A class with selectors that compile."""

    name: str
    gpu_class: GPUClass
    selectors: _Selectors
    key: tuple[object, ...]
    """Of two classes with one key, a device is of both or of none."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The devices of one pool."""

    pool: DevicePool
    by_node: Mapping[str, Mapping[str, tuple[Matched, ...]]]
    """Class -> node -> its devices."""
    elsewhere: Mapping[str, Mapping[str, tuple[DeviceId, ...]]]
    of_many_nodes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Moment:
    """What a part was made of."""

    pool: DevicePool
    usable: Sequence[_Usable]
    labels: tuple[Mapping[str, str] | None, ...]

    def same(self, other: "_Moment") -> bool:
        """Slices and labels of the store are the same objects until they change."""
        slices, others = self.pool.slices, other.pool.slices
        return (
            (self.usable is other.usable or [u.key for u in self.usable] == [u.key for u in other.usable])
            and self.pool.updating == other.pool.updating
            and len(slices) == len(others)
            and all(a is b for a, b in zip(slices, others, strict=True))
            and all(a is b for a, b in zip(self.labels, other.labels, strict=True))
        )


class MatchCache:
    """Evaluations of slices that have not changed. Lives as long as its owner; holds what the last `match` used."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], tuple[_Moment, _Part]] = {}
        self._used_parts: dict[tuple[str, str], tuple[_Moment, _Part]] = {}
        self._known: dict[tuple[str, str], tuple[Slice, _Outcome]] = {}
        self._used: dict[tuple[str, str], tuple[Slice, _Outcome]] = {}

    def outcome(self, of: Slice, selectors: _Selectors) -> _Outcome:
        key = (of.name, selectors.key)
        known = self._used.get(key) or self._known.get(key)
        if known is None or known[0] is not of:
            known = (of, _evaluated(of, selectors.compiled))
        self._used[key] = known
        return known[1]

    def part(self, pool: DevicePool, usable: Sequence[_Usable], labels: Mapping[str, Mapping[str, str]]) -> _Part:
        key = (pool.driver, pool.name)
        nodes = [node for each in pool.slices for node in sorted(each.nodes, key=str)]
        of_nodes = tuple(labels.get(node) if node else None for node in nodes)
        now = _Moment(pool, usable, of_nodes)
        known = self._parts.get(key)
        if known is None or not known[0].same(now):
            known = (now, _matched(pool, usable, labels, self))
        self._used_parts[key] = known
        return known[1]

    def close(self) -> None:
        """What was not used since the last call is forgotten."""
        self._known, self._used = self._used, {}
        self._parts, self._used_parts = self._used_parts, {}


def match(
    classes: Iterable[GPUClass],
    device_classes: Mapping[str, DeviceClass],
    pools: Sequence[DevicePool],
    incomplete: Sequence[tuple[str, str]],
    labels: Mapping[str, Mapping[str, str]],
    cache: MatchCache | None = None,
) -> dict[str, ClassDevices]:
    """GPUClass -> its devices, of the classes that have a `device`. `labels`: node -> labels; devices of a node that
    is not there count for nobody. `pools` and `incomplete` as `current` returns them."""
    ordered = sorted((c for c in classes if c.spec.device is not None), key=lambda c: c.metadata.name)
    cache = cache or MatchCache()
    selectors: dict[str, _Selectors] = {}
    problems: dict[str, DeviceProblem] = {}
    for gpu_class in ordered:
        try:
            selectors[gpu_class.metadata.name] = _selectors(gpu_class, device_classes)
        except _Unusable as error:
            problems[gpu_class.metadata.name] = DeviceProblem(error.reason, str(error))
    usable = [_usable(c, selectors[c.metadata.name]) for c in ordered if c.metadata.name in selectors]
    for pool in pools:
        for each in pool.slices:
            for one in usable:
                if _reaches(one.gpu_class, each, labels):
                    failed = cache.outcome(each, one.selectors).failed
                    if failed is not None:
                        problems.setdefault(one.name, DeviceProblem(reasons.SELECTOR_INVALID, failed))
    # A class that has no devices takes none from the others.
    usable = [one for one in usable if one.name not in problems]
    parts = [cache.part(pool, usable, labels) for pool in pools]
    cache.close()
    return {
        c.metadata.name: _together(c.metadata.name, parts, incomplete, problems.get(c.metadata.name)) for c in ordered
    }


def _usable(gpu_class: GPUClass, selectors: _Selectors) -> _Usable:
    name = gpu_class.metadata.name
    key = (name, selectors.key, *sorted(gpu_class.spec.node_selector.items()))
    return _Usable(name, gpu_class, selectors, key)


def _together(
    name: str, parts: Iterable[_Part], incomplete: Sequence[tuple[str, str]], problem: DeviceProblem | None
) -> ClassDevices:
    by_node: dict[str, tuple[Matched, ...]] = {}
    elsewhere: dict[str, tuple[DeviceId, ...]] = {}
    updating: set[str] = set()
    drivers: set[str] = set()
    many = 0
    for part in parts:
        for node, of in part.by_node.get(name, _NO_NODES).items():
            by_node[node] = (*by_node[node], *of) if node in by_node else of
            drivers.add(part.pool.driver)
            if part.pool.updating:
                updating.add(node)
        for owner, ids in part.elsewhere.get(name, _NOWHERE).items():
            elsewhere[owner] = (*elsewhere.get(owner, ()), *ids)
        many += part.of_many_nodes.get(name, 0)
    return ClassDevices(
        by_node=by_node,
        problem=problem,
        elsewhere=dict(sorted(elsewhere.items())),
        of_many_nodes=many,
        updating=tuple(sorted(updating)),
        incomplete=tuple("/".join(p) for p in incomplete if p[0] in drivers or not drivers),
    )


def _matched(
    pool: DevicePool, usable: Sequence[_Usable], labels: Mapping[str, Mapping[str, str]], cache: MatchCache
) -> _Part:
    by_node: dict[str, dict[str, list[Matched]]] = {}
    elsewhere: dict[str, dict[str, list[DeviceId]]] = {}
    many: dict[str, int] = {}
    for each in pool.slices:
        reached = [one for one in usable if _reaches(one.gpu_class, each, labels)]
        chosen = [(one, names) for one in reached if (names := cache.outcome(each, one.selectors).names)]
        for device in each.devices if chosen else ():
            id_ = DeviceId(pool.driver, pool.name, device.name)
            owner = ""
            for one, names in chosen:
                if device.name not in names or not _on(one.gpu_class, device.node, labels):
                    continue
                if device.node is None:
                    many[one.name] = many.get(one.name, 0) + 1
                elif not owner:
                    owner = one.name
                    by_node.setdefault(owner, {}).setdefault(device.node, []).append(Matched(id_, device))
                else:
                    elsewhere.setdefault(one.name, {}).setdefault(owner, []).append(id_)
    return _Part(
        pool,
        {name: {node: tuple(of) for node, of in nodes.items()} for name, nodes in by_node.items()},
        {name: {owner: tuple(ids) for owner, ids in owners.items()} for name, owners in elsewhere.items()},
        many,
    )


class _Unusable(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _selectors(gpu_class: GPUClass, device_classes: Mapping[str, DeviceClass]) -> _Selectors:
    """Of the DeviceClass first, then of the GPUClass: the order of the scheduler. Raises _Unusable."""
    device = gpu_class.spec.device
    assert device is not None  # noqa: S101 - `match` chose such classes
    of = device_classes.get(device.device_class_name)
    if of is None:
        raise _Unusable(
            reasons.DEVICE_CLASS_NOT_FOUND,
            f"there is no DeviceClass {device.device_class_name}: `kubectl get deviceclasses` lists those of the "
            "installed drivers",
        )
    found: list[Selector] = []
    own = [each.condition.expression for each in device.selectors]
    for where, expressions in ((f"DeviceClass {of.name}", of.selectors), ("spec.device.selectors", own)):
        for place, expression in enumerate(expressions):
            try:
                found.append(compiled(expression))
            except SelectorInvalid as error:
                raise _Unusable(reasons.SELECTOR_INVALID, f"{where}[{place}] does not compile: {error}") from None
    return _Selectors("\0".join(each.expression for each in found), tuple(found))


def _evaluated(of: Slice, selectors: Sequence[Selector]) -> _Outcome:
    names: set[str] = set()
    failed: str | None = None
    for device in of.devices:
        try:
            if all(selector.matches(of.driver, device) for selector in selectors):
                names.add(device.name)
        except SelectorFailed as error:
            failed = failed or (
                f"a selector has no result for device {of.driver}/{of.pool}/{device.name}: {error}. The scheduler "
                "places no pod meanwhile: test with has() whether a device has the attribute"
            )
    return _Outcome(frozenset(names), failed)


def _reaches(gpu_class: GPUClass, of: Slice, labels: Mapping[str, Mapping[str, str]]) -> bool:
    return any(_on(gpu_class, node, labels) for node in of.nodes)


def _on(gpu_class: GPUClass, node: str | None, labels: Mapping[str, Mapping[str, str]]) -> bool:
    if node is None:
        return True
    return node in labels and gpu_class.spec.node_selector.items() <= labels.get(node, _NO_LABELS).items()
