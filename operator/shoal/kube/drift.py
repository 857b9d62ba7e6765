"""Whether an object still says what Shoal applied: it may say more (defaults, other managers), never otherwise."""

from collections.abc import Mapping
from typing import Any, Final, cast

_KEYS: Final = ("name", "mountPath", "uid", "containerPort")
"""By which server-side apply tells the items of the lists that Shoal sends apart."""


def covers(live: Any, wanted: Any) -> bool:
    """True when every field of `wanted` stands in `live` with the same value.

    Lists of named things may have further items: those belong to other managers. All other lists must be equal. A
    field that Shoal sends empty may be absent, since the API server drops it.
    """
    if isinstance(wanted, Mapping):
        fields = cast("Mapping[str, Any]", wanted)
        if not isinstance(live, Mapping):
            return not fields
        found = cast("Mapping[str, Any]", live)
        return all(covers(found.get(name), value) for name, value in fields.items())
    if isinstance(wanted, list | tuple):
        items = list(cast("list[Any]", wanted))
        if not isinstance(live, list):
            return not items
        return _covers_list(cast("list[Any]", live), items)
    if live is None:
        return wanted is None or wanted == "" or wanted is False
    return live == wanted


def _covers_list(live: list[Any], wanted: list[Any]) -> bool:
    named = [cast("Mapping[str, Any]", item) for item in wanted if isinstance(item, Mapping)]
    found = [cast("Mapping[str, Any]", item) for item in live if isinstance(item, Mapping)]
    for key in _KEYS:
        if wanted and len(named) == len(wanted) and all(key in item for item in named):
            by_key = {item.get(key): item for item in found}
            return all(covers(by_key.get(item[key]), item) for item in named)
    return len(live) == len(wanted) and all(covers(a, b) for a, b in zip(live, wanted, strict=True))
