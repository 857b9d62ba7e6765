"""CEL expressions about devices, as the scheduler evaluates them.

The library is the C++ implementation of CEL with its type checker, so an expression compiles here where it compiles at
the API server, but for functions that are not declared below. The work of one evaluation is bounded by the length of
the expression and by the number of its macros, since CEL has no other loops; the library itself ends an evaluation
after 10,000 iterations, and refuses more than 32 levels of brackets.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any, Final

from shoal.core import quantity
from shoal.core.devices.facts import Device, Version

LONGEST: Final = 10 * 1024
"""Characters of an expression; the API server takes no more in a DeviceClass."""
MOST_LOOPS: Final = 2
"""Macros over a list or a map in one expression."""
MOST_BINDS: Final = 4
"""Uses of cel.bind in one expression."""
_LOOPS: Final = re.compile(r"\.\s*(?:all|exists|exists_one|existsOne|map|filter|transformList|transformMap)\s*\(")
_BINDS: Final = re.compile(r"\bcel\s*\.\s*bind\s*\(")
_DOMAINS: Final = re.compile(r"""\[\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\]""")
_MAPS: Final = re.compile(r"\b(?:attributes|capacity)\b")
_FIELDS: Final = re.compile(
    r"""\bdevice\s*\.\s*(?:attributes|capacity)\s*\[\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\]\s*\.\s*\??\s*([A-Za-z_]\w*)(?!\s*\()"""
)
_MOST_KNOWN: Final = 1024
_ERRORS: Final = (RuntimeError, ValueError, TypeError, OverflowError)
"""The library's own are RuntimeErrors; the others are of values that it cannot take, such as half of a character."""
_SEMVER: Final = re.compile(
    r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?$"
)
_SHOWN: Final = 300


class SelectorInvalid(ValueError):
    """The expression does not compile, or not within the limits."""


class SelectorFailed(ValueError):
    """The expression has no result for a device, such as for an attribute that the device does not have."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A compiled expression."""

    expression: str
    _run: Callable[[dict[str, Any]], Any]
    _domains: frozenset[str]
    _reads: tuple[str, ...] | None
    """Names of all attributes and capacities that it reads; None: it may read any."""
    _known: dict[tuple[object, ...], bool | str] = field(default_factory=dict[tuple[object, ...], bool | str])
    """What a device has of `_reads` -> the result, or why there is none: a fleet has few kinds of devices."""

    def matches(self, driver: str, device: Device) -> bool:
        """Raises SelectorFailed. The scheduler then schedules no pod with the expression."""
        if self._reads is None:
            found = self._evaluated(driver, device)
        else:
            attributes, capacity = device.attributes, device.capacity
            values = ((type(attributes.get(name)), attributes.get(name), capacity.get(name)) for name in self._reads)
            key = (driver, device.shared, *values)
            kept = self._known.get(key)
            found = self._evaluated(driver, device) if kept is None else kept
            if kept is None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        if isinstance(found, str):
            raise SelectorFailed(found)
        return found

    def _evaluated(self, driver: str, device: Device) -> bool | str:
        try:
            found = self._run(_variables(driver, device, self._domains))
        except _ERRORS as error:
            return str(error)[:_SHOWN]
        return found if isinstance(found, bool) else str(found)[:_SHOWN]


@lru_cache(maxsize=512)
def compiled(expression: str) -> Selector:
    """Raises SelectorInvalid."""
    if len(expression) > LONGEST:
        raise SelectorInvalid(f"the expression has {len(expression)} characters; {LONGEST} are allowed")
    if (loops := len(_LOOPS.findall(expression))) > MOST_LOOPS:
        raise SelectorInvalid(f"the expression has {loops} macros such as `exists`; {MOST_LOOPS} are allowed")
    if (binds := len(_BINDS.findall(expression))) > MOST_BINDS:
        raise SelectorInvalid(f"the expression has {binds} x `cel.bind`; {MOST_BINDS} are allowed")
    try:
        program = _environment().compile(expression)
    except _ERRORS as error:
        raise SelectorInvalid(_compiler_message(str(error))) from None
    returns = program.return_type().name()
    if returns not in ("BOOL", "DYN"):
        raise SelectorInvalid(f"the expression is of type {returns.lower()}; it must be true or false")

    def run(variables: dict[str, Any]) -> Any:
        return program.eval(data=variables).value()

    return Selector(expression, run, frozenset(a or b for a, b in _DOMAINS.findall(expression)), _reads(expression))


def _reads(expression: str) -> tuple[str, ...] | None:
    """Where each use of attributes and capacities names one of them, as almost always: their names."""
    found = _FIELDS.findall(expression)
    if len(found) != len(_MAPS.findall(expression)):
        return None
    return tuple(sorted({f"{a or b}/{id_}" for a, b, id_ in found}))


def _compiler_message(text: str) -> str:
    """What the compiler says, on one line and without its picture of the expression."""
    lines = (line for line in text.splitlines() if not line.startswith(" |"))
    told = " ".join(lines).removeprefix("INVALID_ARGUMENT: ").replace(" (in container '')", "")
    return re.sub(r"ERROR: <input>:(\d+):(\d+): ", r"column \2: ", told).strip()[:_SHOWN]


def _variables(driver: str, device: Device, domains: frozenset[str]) -> dict[str, Any]:
    """A domain of which the device has nothing is an empty map, as at the scheduler."""
    attributes: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    capacity: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    quantities = _quantities()
    for name, value in device.attributes.items():
        domain, _, id_ = name.rpartition("/")
        found = {"version": value.text} if isinstance(value, Version) else value
        attributes.setdefault(domain, {})[id_] = found
    for name, amount in device.capacity.items():
        domain, _, id_ = name.rpartition("/")
        capacity.setdefault(domain, {})[id_] = quantities.quantity(amount)
    return {
        "device.driver": driver,
        "device.allowMultipleAllocations": device.shared,
        "device.attributes": attributes,
        "device.capacity": capacity,
    }


@dataclass(frozen=True, slots=True)
class _QuantityType:
    """CEL itself has no quantities: a message type of one text field stands for them. Versions, which it lacks too, are
    maps, since the library tells functions of one name apart by the kind of their arguments, and not by their type."""

    pool: Any
    message: Any

    def quantity(self, amount: Decimal) -> Any:
        return self.message(text=f"{amount.normalize():f}" if amount else "0")


@cache
def _quantities() -> _QuantityType:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="shoal-devices.proto", package="kubernetes", syntax="proto3")
    file.message_type.add(name="Quantity").field.add(name="text", number=1, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    found = pool.FindMessageTypeByName("kubernetes.Quantity")
    return _QuantityType(pool, message_factory.GetMessageClass(found))


def _version(text: str) -> dict[str, str]:
    if _SEMVER.match(text) is None:
        raise ValueError(f"{text[:64]!r} is not a semantic version")
    return {"version": text}


@cache
def _environment() -> Any:
    """Loads the library: only a fleet with such a class needs it."""
    from cel_expr_python import cel  # pyright: ignore[reportMissingModuleSource]
    from cel_expr_python.ext import ext_bindings, ext_optional  # pyright: ignore[reportMissingModuleSource]

    quantities, kind = _quantities(), cel.Type
    amount, version = kind("kubernetes.Quantity"), kind.Map(kind.STRING, kind.STRING)
    declared: list[Any] = []

    def function(name: str, returns: Any, takes: list[Any], run: Callable[..., Any], *, member: bool = True) -> None:
        found = next((each for each in declared if each[0] == name), None)
        if found is None:
            declared.append(found := (name, []))
        found[1].append(cel.Overload(f"{name}_{len(found[1])}", returns, takes, member, run))

    def parsed(text: str) -> Any:
        return quantities.quantity(quantity.parse(text))

    function("quantity", amount, [kind.STRING], parsed, member=False)
    function("isQuantity", kind.BOOL, [kind.STRING], _is_quantity, member=False)
    function("semver", version, [kind.STRING], _version, member=False)
    function("isSemver", kind.BOOL, [kind.STRING], _is_semver, member=False)
    keys: list[tuple[Any, Callable[[Any], Any]]] = [(amount, _amount), (version, _order)]
    for type_, key in keys:
        compare = _compare(key)
        function("compareTo", kind.INT, [type_, type_], compare)
        function("isGreaterThan", kind.BOOL, [type_, type_], _when(compare, 1))
        function("isLessThan", kind.BOOL, [type_, type_], _when(compare, -1))
    for place, part in enumerate(("major", "minor", "patch")):
        function(part, kind.INT, [version], _part(place))
    function("asInteger", kind.INT, [amount], _integer)
    function("lowerAscii", kind.STRING, [kind.STRING], str.lower)
    function("upperAscii", kind.STRING, [kind.STRING], str.upper)
    return cel.NewEnv(
        descriptor_pool=quantities.pool,
        variables={
            "device.driver": kind.STRING,
            "device.allowMultipleAllocations": kind.BOOL,
            "device.attributes": kind.Map(kind.STRING, kind.Map(kind.STRING, kind.DYN)),
            "device.capacity": kind.Map(kind.STRING, kind.Map(kind.STRING, amount)),
        },
        functions=[cel.FunctionDecl(name, overloads) for name, overloads in declared],
        extensions=[ext_bindings.ExtBindings(), ext_optional.ExtOptional()],
    )


def _amount(message: Any) -> Decimal:
    return Decimal(message.text)


def _is_quantity(text: str) -> bool:
    try:
        quantity.parse(text)
    except ValueError:
        return False
    return True


def _order(version: Any) -> tuple[tuple[int, ...], bool, tuple[tuple[bool, int, str], ...]]:
    """As semantic versions are ordered: a pre-release is before its release."""
    text = str(version["version"])
    found = _SEMVER.match(text)
    if found is None:
        raise ValueError(f"{text[:64]!r} is not a semantic version")
    parts = [(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in (found[4] or "").split(".") if p]
    return tuple(int(found[i]) for i in (1, 2, 3)), not parts, tuple(parts)


def _is_semver(text: str) -> bool:
    return _SEMVER.match(text) is not None


def _integer(message: Any) -> int:
    return int(_amount(message))


def _part(place: int) -> Callable[[Any], int]:
    def part(version: Any) -> int:
        return _order(version)[0][place]

    return part


def _compare(key: Callable[[Any], Any]) -> Callable[[Any, Any], int]:
    def compare(a: Any, b: Any) -> int:
        return (key(a) > key(b)) - (key(a) < key(b))

    return compare


def _when(compare: Callable[[Any, Any], int], result: int) -> Callable[[Any, Any], bool]:
    def is_so(a: Any, b: Any) -> bool:
        return compare(a, b) == result

    return is_so
