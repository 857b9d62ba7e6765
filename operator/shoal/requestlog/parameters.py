"""Query parameters of GET /v1/logs."""

import base64
import binascii
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qsl

from shoal.net.errors import ApiError
from shoal.requestlog.query import LogQuery, Place, written

MOST_LIMIT: Final = 1000
FILTERS: Final = ("from", "to", "user", "model", "route", "limit", "cursor")


def parameters(query_string: bytes, known: Collection[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            raise _wrong(name[:64], f"is not known; there are {', '.join(known)}")
        if name in given:
            raise _wrong(name, "is there twice")
        given[name] = value
    return given


def query_of(tenant: str, given: Mapping[str, str]) -> LogQuery:
    """The query of a call's parameters. Raises ApiError."""
    raw = given.get("limit", "100")
    if not raw.isdigit() or not 1 <= int(raw) <= MOST_LIMIT:
        raise _wrong("limit", f"must be a number from 1 to {MOST_LIMIT}")
    since, until = (_moment(name, given[name]) if given.get(name) else None for name in ("from", "to"))
    if since is not None and until is not None and since >= until:
        raise _wrong("from", "must be before `to`")
    return LogQuery(
        tenant,
        int(raw),
        given.get("user") or None,
        given.get("model") or None,
        given.get("route") or None,
        since,
        until,
        _place(given["cursor"]) if given.get("cursor") else None,
    )


def _moment(name: str, text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
        return written(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        raise _wrong(name, "must be a time such as 2026-11-22T06:00:00Z (UTC where no zone is given)") from None


def cursor_of(place: Place) -> str:
    return base64.urlsafe_b64encode("|".join(place).encode()).decode().rstrip("=")


def _place(cursor: str) -> Place:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        text = ""
    moment, bar, id = text.partition("|")
    if not bar:
        raise _wrong("cursor", "must be the `next_cursor` of the page before")
    return _moment("cursor", moment), id


def _wrong(name: str, must: str) -> ApiError:
    return ApiError(400, f"`{name}` {must}.", "invalid_parameter", param=name)
