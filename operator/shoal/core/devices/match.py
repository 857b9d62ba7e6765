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


class MatchCache:
    """Evaluations of slices that have not changed. Lives as long as its owner; holds what the last `match` used."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Slice, _Outcome]] = {}
        self._used: dict[tuple[str, str], tuple[Slice, _Outcome]] = {}

    def outcome(self, of: Slice, selectors: _Selectors) -> _Outcome:
        key = (of.name, selectors.key)
        known = self._used.get(key) or self._known.get(key)
        if known is None or known[0] is not of:
            known = (of, _evaluated(of, selectors.compiled))
        self._used[key] = known
        return known[1]

    def close(self) -> None:
        """What was not used since the last call is forgotten."""
        self._known, self._used = self._used, {}


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
    found: dict[str, dict[str, list[Matched]]] = {c.metadata.name: {} for c in ordered}
    elsewhere: dict[str, dict[str, list[DeviceId]]] = {c.metadata.name: {} for c in ordered}
    many: dict[str, int] = dict.fromkeys(found, 0)
    updating: dict[str, set[str]] = {name: set() for name in found}
    usable = [(c.metadata.name, c, selectors[c.metadata.name]) for c in ordered if c.metadata.name in selectors]
    for pool in pools:
        for each in pool.slices:
            nodes = {device.node for device in each.devices}
            chosen: list[tuple[str, GPUClass, frozenset[str]]] = []
            for name, gpu_class, of_class in usable:
                if not any(_on(gpu_class, node, labels) for node in nodes):
                    continue
                outcome = cache.outcome(each, of_class)
                if outcome.failed is not None and name not in problems:
                    problems[name] = DeviceProblem(reasons.SELECTOR_INVALID, outcome.failed)
                if outcome.names:
                    chosen.append((name, gpu_class, outcome.names))
            if not chosen:
                continue
            for device in each.devices:
                id_ = DeviceId(pool.driver, pool.name, device.name)
                owner = ""
                for name, gpu_class, of_names in chosen:
                    if device.name not in of_names or (len(nodes) > 1 and not _on(gpu_class, device.node, labels)):
                        continue
                    if device.node is None:
                        many[name] += 1
                    elif not owner:
                        owner = name
                        found[name].setdefault(device.node, []).append(Matched(id_, device))
                        if pool.updating:
                            updating[name].add(device.node)
                    else:
                        elsewhere[name].setdefault(owner, []).append(id_)
    cache.close()
    drivers = {name: {m.id.driver for of in nodes.values() for m in of} for name, nodes in found.items()}
    return {
        name: ClassDevices(
            by_node={} if name in problems else {node: tuple(of) for node, of in sorted(nodes.items())},
            problem=problems.get(name),
            elsewhere={other: tuple(ids) for other, ids in sorted(elsewhere[name].items())},
            of_many_nodes=many[name],
            updating=tuple(sorted(updating[name])),
            incomplete=tuple("/".join(p) for p in incomplete if p[0] in drivers[name] or not drivers[name]),
        )
        for name, nodes in found.items()
    }


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


def _on(gpu_class: GPUClass, node: str | None, labels: Mapping[str, Mapping[str, str]]) -> bool:
    if node is None:
        return True
    return node in labels and gpu_class.spec.node_selector.items() <= labels.get(node, _NO_LABELS).items()
