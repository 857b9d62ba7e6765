"""Changes of `spec.keys` as RFC 6902 operations, which are printed, written to a file, or applied.

Each change of an entry is guarded by a `test` of its name, so that an outdated patch does not change another entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

from shoal.api.meta import JsonObject

MOST_KEYS: Final = 64
"""Keys of one Tenant at most."""


class KeysError(Exception):
    """The change is impossible; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One entry of `spec.keys`, parsed even if the object is otherwise invalid."""

    index: int
    name: str
    sha256: str
    expires: datetime | None
    disabled: bool


def entries(tenant: JsonObject) -> list[KeyEntry]:
    """The entries of `spec.keys`. Raises KeysError for a malformed list or expiry."""
    keys: Any = spec_of(tenant).get("keys") or []
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in cast("list[Any]", keys)):
        raise KeysError(f"spec.keys of {name_of(tenant)} is no list of keys")
    return [_entry(tenant, i, key) for i, key in enumerate(cast("list[JsonObject]", keys))]


def _entry(tenant: JsonObject, index: int, key: JsonObject) -> KeyEntry:
    name, expires = str(key.get("name", "")), key.get("expires")
    if expires is not None and not isinstance(expires, datetime):
        try:
            expires = datetime.fromisoformat(str(expires))
        except ValueError:
            raise KeysError(f"key '{name}' of {name_of(tenant)}: {expires} is no time") from None
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return KeyEntry(index, name, str(key.get("sha256", "")), expires, bool(key.get("disabled")))


def spec_of(tenant: JsonObject) -> JsonObject:
    return cast("JsonObject", tenant.get("spec") or {})


def name_of(tenant: JsonObject) -> str:
    return f"Tenant {tenant.get('metadata', {}).get('name', '')}"


def find(tenant: JsonObject, name: str) -> KeyEntry:
    """The entry of this name. Raises KeysError with the existing names."""
    there = entries(tenant)
    for entry in there:
        if entry.name == name:
            return entry
    listed = ", ".join(e.name for e in there) or "none"
    raise KeysError(f"{name_of(tenant)} has no key '{name}'; it has: {listed}")


def add(tenant: JsonObject, name: str, sha256: str, expires: datetime | None) -> list[JsonObject]:
    """Operations that add a key. Raises KeysError when the name or the hash exists, or the list is full."""
    there = entries(tenant)
    if any(e.name == name for e in there):
        raise KeysError(f"{name_of(tenant)} has a key '{name}' already: choose another --name, or rotate it")
    if twin := next((e for e in there if e.sha256 == sha256), None):
        raise KeysError(f"{name_of(tenant)} already lists this key as '{twin.name}'")
    if len(there) >= MOST_KEYS:
        raise KeysError(f"{name_of(tenant)} has {MOST_KEYS} keys, which is the limit: remove an unused one")
    entry: JsonObject = {"name": name, "sha256": sha256}
    if expires is not None:
        entry["expires"] = stamp(expires)
    if not there:
        # Also when `keys` exists and is empty: `add` to an existing member replaces it.
        return [{"op": "add", "path": "/spec/keys", "value": [entry]}]
    return [{"op": "add", "path": "/spec/keys/-", "value": entry}]


def change(entry: KeyEntry, field: str, value: object) -> list[JsonObject]:
    return [_guard(entry), {"op": "add", "path": f"/spec/keys/{entry.index}/{field}", "value": value}]


def remove(entry: KeyEntry) -> list[JsonObject]:
    return [_guard(entry), {"op": "remove", "path": f"/spec/keys/{entry.index}"}]


def _guard(entry: KeyEntry) -> JsonObject:
    return {"op": "test", "path": f"/spec/keys/{entry.index}/name", "value": entry.name}


def perform(tenant: JsonObject, operations: Sequence[JsonObject]) -> None:
    """Applies the operations to the object in place; the object may be one that preserves YAML comments."""
    if tenant.get("spec") is None:
        tenant["spec"] = {}
    for operation in operations:
        if operation["op"] == "test":
            continue  # always true: the operations were made from this object
        *way, last = str(operation["path"]).strip("/").split("/")
        node = cast("Any", tenant)
        for step in way:
            node = node[_index(step)]
        if operation["op"] == "remove":
            del node[_index(last)]
        elif last == "-":
            node.append(operation["value"])
        elif last not in node and hasattr(node, "insert"):
            # Not as the last field: a comment after the entry belongs to its last field, and would move.
            node.insert(1, last, operation["value"])
        else:
            node[last] = operation["value"]


def _index(step: str) -> int | str:
    return int(step) if step.isdecimal() else step


def stamp(at: datetime) -> str:
    """A time in RFC 3339, in whole seconds, as Kubernetes writes it."""
    return at.astimezone(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
