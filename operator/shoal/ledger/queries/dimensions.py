"""Dimensions by which usage is summed and filtered."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy import Column, ColumnElement, FromClause, func

from shoal.ledger.schema import hours
from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest

COLUMNS: Final[dict[str, Column[str]]] = {
    "tenant": hours.c.tenant,
    "key": hours.c.key_name,
    "externalID": hours.c.external_id,
    "model": hours.c.model,
    "adapter": hours.c.adapter,
    "class": hours.c.gpu_class,
    "plan": hours.c.plan,
}
"""In these columns '' means none."""
TIMES: Final = ("hour", "day", "month")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
FLEET: Final = ("class",)
"""Dimensions of the fleet, which tenants may not query."""


def by(request: ShellRequest, known: Sequence[str]) -> tuple[str, ...]:
    """Parameter `by`: names separated by commas. Raises Problem."""
    given = [name.strip() for value in request.parameters.get("by", ()) for name in value.split(",") if name.strip()]
    for name in given:
        if name not in known:
            raise Problem(400, f"by={name[:40]}: it is one of {', '.join(known)}, or several with commas between them")
    times = [name for name in TIMES if name in given]
    if len(times) > 1:
        raise Problem(400, f"by={','.join(times)}: choose one unit of time")
    return tuple(dict.fromkeys(given))


def only_these(request: ShellRequest, known: Iterable[str]) -> None:
    """Raises Problem for an unknown parameter: a misspelt filter must not be ignored."""
    names = sorted(known)
    for name in request.parameters:
        if name not in names:
            raise Problem(400, f"unknown parameter {name[:40]}: there are {', '.join(names)}")
        if any("\0" in value for value in request.parameters[name]):
            raise Problem(400, f"{name} has a NUL in it, which no name has")


def namespace(request: ShellRequest) -> str | None:
    """Parameter `namespace`: only usage of the Models of that namespace. None: of all. Raises Problem."""
    given = request.one("namespace")
    if given is not None and not _NAMESPACE.fullmatch(given):
        raise Problem(400, f"namespace={given[:40]}: the name of a namespace")
    return given


def of_namespace(name: str | None, source: FromClause = hours) -> tuple[ColumnElement[bool], ...]:
    """Condition for usage of the Models of a namespace; none for None."""
    if name is None:
        return ()
    begins = f"{name}/"
    # No LIKE: SQLite's ignores case.
    return (func.substr(source.c.model, 1, len(begins)) == begins,)


def limit(request: ShellRequest, default: int, most: int) -> int:
    """Parameter `limit`. Raises Problem."""
    value = request.one("limit", str(default)) or ""
    if not (value.isascii() and value.isdigit()) or not 1 <= int(value[:9]) <= most or len(value) > 9:
        raise Problem(400, f"limit={value[:20]}: a number from 1 to {most}")
    return int(value)
