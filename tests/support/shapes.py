"""Shapes of JSON: exact keys and types, so that an answer with a field more or less is noticed."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Const:
    """Exactly this value."""

    value: Any


@dataclass(frozen=True)
class Maybe:
    """null, or this."""

    shape: Any


def mismatch(value: Any, shape: Any, where: str = "$") -> str | None:
    """None if `value` has this shape, else where and why not.

    A shape is a type, None, a Const, a Maybe, a dict (these keys, no others), or a list of one (any number of these).
    """
    if isinstance(shape, Const):
        return None if value == shape.value else f"{where}: {value!r} is not {shape.value!r}"
    if isinstance(shape, Maybe):
        return None if value is None else mismatch(value, shape.shape, where)
    if shape is None:
        return None if value is None else f"{where}: {value!r} is not null"
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where}: {value!r} is not an object"
        if set(value) != set(shape):
            return f"{where}: keys {sorted(value)} are not {sorted(shape)}"
        problems = (mismatch(value[key], shape[key], f"{where}.{key}") for key in shape)
        return next((problem for problem in problems if problem), None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where}: {value!r} is not a list"
        problems = (mismatch(item, shape[0], f"{where}[{i}]") for i, item in enumerate(value))
        return next((problem for problem in problems if problem), None)
    if shape is float and isinstance(value, int) and not isinstance(value, bool):
        return None
    # bool is an int in Python, but not in JSON.
    same = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    return None if same else f"{where}: {value!r} is not {shape.__name__}"
