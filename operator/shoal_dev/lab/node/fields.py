"""Parts of API objects that may be absent or null."""

from typing import Any

Json = dict[str, Any]


def mapping(parent: Json, key: str) -> Json:
    """`{}` when absent."""
    value: Json | None = parent.get(key)
    return value or {}


def items(parent: Json, key: str) -> list[Json]:
    """`[]` when absent."""
    value: list[Json] | None = parent.get(key)
    return value or []


def words(parent: Json, key: str) -> list[str]:
    """`[]` when absent."""
    value: list[str] | None = parent.get(key)
    return value or []
