"""What is removed from objects and texts before they leave a cluster."""

import re
from collections.abc import Callable
from typing import Any, Final, cast

REMOVED: Final = "(removed)"
_DEEPEST: Final = 64
"""Levels of an object that are kept; no object of Kubernetes has as many."""
_DROPPED: Final = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
"""Fields without information of their own. The second repeats the object as text."""
_SECRET_FIELDS: Final = frozenset({"sha256", "password", "token", "apiKey", "caBundle"})
"""Fields whose value is removed. `sha256` is the hash of a tenant's key, which would allow offline guessing."""
_TEXTS: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"(?<=://)[^/@\s\"']{1,512}@"), f"{REMOVED}@"),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{6,}"), f"sk-{REMOVED}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{10,}"), f"hf_{REMOVED}"),
    (re.compile(r"\bAKIA[A-Z0-9]{12,}"), f"AKIA{REMOVED}"),
    (re.compile(r"\beyJ[\w-]{10,}\.[\w-]{4,}\.[\w-]{4,}"), REMOVED),
    (re.compile(r"(?i)\b(bearer\s+)[^\s\"',]+"), rf"\1{REMOVED}"),
    (re.compile(r"(?i)\b(password|passwd|secret|token|api[_-]?key)(\"?\s*[:=]\s*\"?)[^\s\"',}]+"), rf"\1\2{REMOVED}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL), REMOVED),
)


def clean_text(text: str) -> str:
    """A log or message without credentials: user names and passwords in URLs, keys, tokens."""
    for pattern, instead in _TEXTS:
        text = pattern.sub(instead, text)
    return text


def clean(value: Any, depth: int = 0) -> Any:
    """An object without credentials. Values of environment variables are removed, whatever their names: their names
    stay."""
    if depth > _DEEPEST:
        return REMOVED
    match value:
        case dict():
            found = cast("dict[str, Any]", value)
            return {name: _field(name, each, depth) for name, each in found.items() if name not in _DROPPED}
        case list():
            return [clean(each, depth + 1) for each in cast("list[Any]", value)]
        case str():
            return clean_text(value)
        case _:
            return value


def _field(name: str, value: Any, depth: int) -> Any:
    if name in _SECRET_FIELDS:
        return REMOVED
    if name == "env":
        return _environment(value, depth)
    return clean(value, depth + 1)


def _environment(value: Any, depth: int) -> Any:
    """Of a container (a list of name and value), or of a Model (name -> value)."""
    match value:
        case list():
            items = [clean(each, depth + 1) for each in cast("list[Any]", value)]
            return [each | {"value": REMOVED} if isinstance(each, dict) and "value" in each else each for each in items]
        case dict():
            return dict.fromkeys(cast("dict[str, Any]", value), REMOVED)
        case _:
            return REMOVED
