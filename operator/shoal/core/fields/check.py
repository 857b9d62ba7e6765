"""Whether a request may go to an engine."""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from shoal.core.fields.kinds import Facts, FieldProblem
from shoal.core.fields.media import not_read, placeholder_problem
from shoal.core.fields.pairs import mixed, not_scored
from shoal.core.fields.table import CHAT, DETOKENIZE, SCORE, TABLE, TOKENIZE, TRANSCRIBE, not_in_table
from shoal.core.fields.tokens import not_one_text
from shoal.core.fields.tools import tools_problem
from shoal.core.fields.work import MULTIPLIERS, SPARE_CHARACTERS, too_much

_NEEDED: Final = {path: [name for name, f in fields.items() if f.needed] for path, fields in TABLE.items()}
_CHECKS: Final = {path: {name: f.kind.check for name, f in fields.items()} for path, fields in TABLE.items()}
_MEDIA: Final = frozenset(name for fields in TABLE.values() for name, f in fields.items() if f.media)
FORWARDED: Final = {path: frozenset(n for n, f in fields.items() if f.forwarded) for path, fields in TABLE.items()}
"""By endpoint: fields that are sent to the engine."""


def check(fields: Mapping[str, Any], endpoint: str, facts: Facts, size: int | None = None) -> FieldProblem | None:
    """What is wrong with a request's fields; None: nothing. `size`: bytes of the whole body, which spares counting for
    small ones. A field that is null counts as absent."""
    checks = _CHECKS[endpoint]
    for name, value in fields.items():
        known = checks.get(name)
        if known is None:
            if value is not None:
                return not_in_table(name)
        elif value is not None:
            if (found := known(value, name, facts)) is not None:
                return found
            if name in _MEDIA and "image" not in facts.media:
                return not_read(name, "image", facts)
    if (lesser := facts.differences.fields.get(endpoint)) is not None and (found := _not_done(fields, lesser)):
        return found
    for name in _NEEDED[endpoint]:
        if fields.get(name) is None:
            return FieldProblem(name, f"You must provide `{name}`.", "missing_value")
    if fields.get("min_tokens") and _constrained(fields):
        # If the grammar allows only the end and `min_tokens` forbids it, no token is left: the engine samples from NaN,
        # and exits.
        return FieldProblem("min_tokens", "`min_tokens` cannot be used with a grammar or tools.", "conflicting_fields")
    if facts.deterministic and fields.get("min_p"):
        # SGLang asserts that no request of a step uses it, and exits.
        return FieldProblem(
            "min_p", "`min_p` cannot be used: this model's engine is deterministic.", "unsupported_field"
        )
    if endpoint == CHAT and "tools" in fields and (found := tools_problem(fields, facts)) is not None:
        return found
    if endpoint == TOKENIZE and (found := not_one_text(fields)) is not None:
        return found
    if endpoint == SCORE:
        if (found := mixed(fields)) is not None:
            return found
        most = facts.differences.most_scored_bytes
        if most is not None and (found := not_scored(fields, most)) is not None:
            return found
    if "messages" in fields and (found := placeholder_problem(fields, facts)) is not None:
        return found
    if size is not None and size <= SPARE_CHARACTERS and "messages" in fields and fields.keys().isdisjoint(MULTIPLIERS):
        # Almost all requests: one answer to a prompt that is short for any model.
        return None
    if endpoint in (DETOKENIZE, TRANSCRIBE):
        return None
    return too_much(fields, endpoint, facts, size)


def _not_done(fields: Mapping[str, Any], lesser: Mapping[str, Callable[[Any], bool]]) -> FieldProblem | None:
    """A checked field of which the engine does not do what its value asks for: it would be ignored."""
    for name in lesser.keys() & fields.keys():
        value = fields[name]
        if value is not None and not lesser[name](value):
            text = f"`{name}` is not accepted with this value: the engine of this model does not do it."
            return FieldProblem(name, text, "unsupported_field")
    return None


def _constrained(fields: Mapping[str, Any]) -> bool:
    """Whether the engine may compile a grammar for the answer."""
    if fields.get("regex") is not None or fields.get("json_schema") is not None:
        return True
    wanted = cast("dict[str, Any] | None", fields.get("response_format"))
    if wanted is not None and wanted["type"] != "text":
        return True
    return bool(fields.get("tools")) and fields.get("tool_choice") != "none"
