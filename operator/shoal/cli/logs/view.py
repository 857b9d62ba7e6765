"""Entries as lines for a person. Of texts only their beginning: `-o json` has them whole."""

from typing import Any, Final, cast

HEADER: Final = (
    f"{'TIME':<20} {'USER':<16} {'KEY':<12} {'MODEL':<28} {'OUTCOME':<9} {'STATUS':>6} {'INPUT':>7} {'OUTPUT':>7} "
    f"{'MS':>9} TEXT"
)
_TEXT: Final = 60


def line(entry: dict[str, Any]) -> str:
    """One entry; what is not known is `-`."""
    moment = str(entry.get("time") or "-")

    def number(name: str, width: int) -> str:
        value = entry.get(name)
        return f"{'-' if value is None else round(value):>{width}}"

    return (
        f"{moment[:19] + 'Z' if len(moment) > 19 else moment:<20} {_word(entry.get('user')):<16} "
        f"{_word(entry.get('keyName')):<12} {_word(entry.get('adapter') or entry.get('model')):<28} "
        f"{_word(entry.get('outcome')):<9} {number('status', 6)} {number('inputTokens', 7)} "
        f"{number('outputTokens', 7)} {number('durationMs', 9)} {_text(entry)}"
    )


def _text(entry: dict[str, Any]) -> str:
    request = cast(dict[str, Any], entry.get("request") or {})
    asked: Any = request.get("prompt") or request.get("input")
    messages: Any = request.get("messages")
    if isinstance(messages, list) and messages:
        last: Any = cast(list[Any], messages)[-1]
        asked = cast(dict[str, Any], last).get("content") if isinstance(last, dict) else last
    if asked is None:
        return str(entry.get("error") or "")
    shown = " ".join(_plain(asked).split())
    return shown if len(shown) <= _TEXT else shown[: _TEXT - 1] + "…"


def _plain(value: Any) -> str:
    """The texts in a content, one behind the other, without what a terminal would obey."""
    match value:
        case str():
            return "".join(c for c in value[: 4 * _TEXT] if c.isprintable() or c.isspace())
        case list():
            return " ".join(_plain(item) for item in cast(list[Any], value)[:8])
        case dict():
            found = cast(dict[str, Any], value)
            return _plain(found.get("text") or found.get("content") or "")
        case _:
            return ""


def _word(value: Any) -> str:
    return "".join(c for c in str(value) if c.isprintable()) if value else "-"
