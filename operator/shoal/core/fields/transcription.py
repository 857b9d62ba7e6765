"""Fields of /v1/audio/transcriptions, which come as texts of a form."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from shoal.core.fields.kinds import Choice, Facts, FieldProblem, FieldType, Flag, Number, wrong, wrong_type

_NUMBER: Final = re.compile(r"-?[0-9]{1,6}(\.[0-9]{1,17})?")
_LANGUAGE: Final = re.compile(r"[a-z]{2,3}")
_GRANULARITIES: Final = Choice(("word", "segment"))
WITH_USAGE: Final = ("json", "verbose_json")
"""Formats of an answer that tells the seconds of the audio."""


@dataclass(frozen=True, slots=True)
class Language:
    """A language, which becomes a token of the prompt."""

    describe: str = 'a code of ISO 639 such as "en"'

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return None if isinstance(value, str) and _LANGUAGE.fullmatch(value) else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class Granularities:
    """One or both kinds of time stamps."""

    describe: str = 'one or both of "word" and "segment"'

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        given = cast(list[object], value) if isinstance(value, list) else [value]
        if not 1 <= len(given) <= 2 or any(_GRANULARITIES.check(one, at, facts) is not None for one in given):
            return wrong(at, self.describe)
        return None


def typed(texts: Mapping[str, Sequence[str]], kinds: Mapping[str, FieldType]) -> dict[str, Any] | FieldProblem:
    """The texts of a form as values that the kinds check, or what is wrong. An empty text counts as left out: pages
    send all their inputs."""
    found: dict[str, Any] = {}
    for name, given in texts.items():
        kind = kinds.get(name)
        if isinstance(kind, Granularities):
            found[name] = list(given)
            continue
        if len(given) > 1:
            return FieldProblem(name[:64], f"`{name[:64]}` is there more than once.", "invalid_value")
        text = given[0]
        if not text:
            continue
        if isinstance(kind, Flag):
            if text.lower() not in ("true", "false"):
                return wrong_type(name, kind.describe)
            found[name] = text.lower() == "true"
        elif isinstance(kind, Number):
            if _NUMBER.fullmatch(text) is None:
                return wrong_type(name, kind.describe)
            found[name] = float(text)
        else:
            found[name] = text
    return found


def unmeasured(fields: Mapping[str, Any], milliseconds: int | None) -> FieldProblem | None:
    """Whether nobody would tell how long the audio is: the file does not, and the engine only in some answers."""
    if milliseconds is not None or (not fields.get("stream") and fields.get("response_format", "json") in WITH_USAGE):
        return None
    text = (
        "The length of this file is only known after decoding. Send it as WAV, MP3, FLAC, Ogg or WebM "
        "with Opus, or ask for "
        f"`response_format` {' or '.join(WITH_USAGE)} without `stream`."
    )
    return FieldProblem("file", text, "length_not_known")
