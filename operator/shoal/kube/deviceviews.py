"""Objects of dynamic resource allocation as decisions read them (`core/devices/facts.py`)."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, cast

from shoal.api.meta import JsonObject
from shoal.core import quantity
from shoal.core.devices.facts import Claim, Device, DeviceClass, DeviceId, DeviceTaintRule, Slice, Version
from shoal.core.facts import Taint

_MOST_DEVICES: Final = 1024
"""Of one slice; the API server takes 128."""
_LONGEST: Final = 253


def resource_slice(raw: JsonObject) -> Slice:
    spec, pool = raw["spec"], raw["spec"]["pool"]
    driver = str(spec["driver"])
    node = _node(spec)
    devices = tuple(_device(each, driver, node) for each in _seq(spec, "devices")[:_MOST_DEVICES])
    return Slice(
        name=raw["metadata"]["name"],
        driver=driver,
        pool=str(pool["name"]),
        generation=int(pool.get("generation") or 0),
        slices_of_pool=int(pool.get("resourceSliceCount") or 0),
        devices=devices,
        counters=_counters(_seq(spec, "sharedCounters"), "name"),
        nodes=frozenset(device.node for device in devices),
    )


def device_taint_rule(raw: JsonObject) -> DeviceTaintRule | None:
    """None: without a selector it selects nothing."""
    spec = _map(raw, "spec")
    selector: Any = spec.get("deviceSelector")
    if not isinstance(selector, dict):
        return None
    driver, pool, device = (_text(cast("JsonObject", selector), field) for field in ("driver", "pool", "device"))
    return DeviceTaintRule(raw["metadata"]["name"], _taint(_map(spec, "taint")), driver, pool, device)


def resource_claim(raw: JsonObject) -> Claim | None:
    """None: it has no devices, or those of others: with adminAccess it has a device that another claim may have too."""
    status = _map(raw, "status")
    results = _seq(_map(_map(status, "allocation"), "devices"), "results")
    devices = tuple(
        DeviceId(str(each.get("driver")), str(each.get("pool")), str(each.get("device")))
        for each in results
        if not each.get("adminAccess")
    )
    if not devices:
        return None
    metadata = raw["metadata"]
    users = (each for each in _seq(status, "reservedFor") if each.get("resource") == "pods")
    return Claim(
        namespace=metadata["namespace"],
        name=metadata["name"],
        devices=devices,
        pods=tuple((str(each.get("name")), str(each.get("uid"))) for each in users),
    )


def device_class(raw: JsonObject) -> DeviceClass:
    expressions = (_map(each, "cel").get("expression") for each in _seq(_map(raw, "spec"), "selectors"))
    return DeviceClass(raw["metadata"]["name"], tuple(str(text) for text in expressions if text))


def _device(raw: JsonObject, driver: str, node: str | None) -> Device:
    return Device(
        name=str(raw["name"]),
        attributes={_qualified(name, driver): _attribute(of) for name, of in _map(raw, "attributes").items()},
        capacity={
            _qualified(name, driver): quantity.parse(_map({"of": of}, "of").get("value", 0))
            for name, of in _map(raw, "capacity").items()
        },
        taints=tuple(map(_taint, _seq(raw, "taints"))),
        node=node or _node(raw),
        counters=_counters(_seq(raw, "consumesCounters"), "counterSet"),
        shared=bool(raw.get("allowMultipleAllocations")),
    )


def _taint(raw: JsonObject) -> Taint:
    return Taint(str(raw.get("key", "")), str(raw.get("value", "")), str(raw.get("effect", "")))


def _attribute(of: JsonObject) -> bool | int | str | Version:
    """Exactly one of the fields is set. A list, which only newer clusters have, reads as an empty text."""
    for kind in ("bool", "int", "string"):
        if kind in of:
            return of[kind] if isinstance(of[kind], (bool, int)) else str(of[kind])[:_LONGEST]
    return Version(str(of["version"])[:_LONGEST]) if "version" in of else ""


def _qualified(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _counters(sets: list[JsonObject], named: str) -> dict[tuple[str, str], Decimal]:
    return {
        (str(each.get(named)), counter): quantity.parse(of.get("value", 0))
        for each in sets
        for counter, of in cast("dict[str, JsonObject]", _map(each, "counters")).items()
    }


def _node(of: JsonObject) -> str | None:
    """The one node that has the slice or the device: named, or selected by its name."""
    if name := of.get("nodeName"):
        return str(name)
    terms = _seq(_map(of, "nodeSelector"), "nodeSelectorTerms")
    if len(terms) != 1:
        return None
    for field in _seq(terms[0], "matchFields"):
        values = cast("list[str]", field.get("values") or [])
        if field.get("key") == "metadata.name" and field.get("operator") == "In" and len(values) == 1:
            return values[0]
    return None


def _map(obj: Mapping[str, Any], field: str) -> JsonObject:
    value: Any = obj.get(field)
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _text(obj: JsonObject, field: str) -> str | None:
    value: Any = obj.get(field)
    return None if value is None else str(value)


def _seq(obj: Mapping[str, Any], field: str) -> list[JsonObject]:
    value: Any = obj.get(field)
    return cast("list[JsonObject]", value) if isinstance(value, list) else []
