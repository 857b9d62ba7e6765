"""Bounds on the cost of a whole request to an engine: many small numbers multiply."""

from collections.abc import Mapping
from typing import Any, Final

from shoal.core.fields.kinds import Facts, FieldProblem
from shoal.core.fields.pairs import pairs_of
from shoal.core.fields.prompts import prompts_of, texts
from shoal.core.fields.table import GENERATING, PAIRS

MULTIPLIERS: Final = frozenset({"n", "best_of", "echo", "prompt", "input"})
"""Fields that can make a request more than one answer to one prompt."""
SEQUENCES: Final = 128
"""Choices times prompts."""
CONTEXTS: Final = 16
"""Tokens to read and to write, in multiples of the model's context."""
EMBEDDED: Final = 131_072
"""Tokens that an engine reads without answering with text, if that is more than `CONTEXTS` contexts."""
ECHOED: Final = 131_072
"""Log probabilities of prompt tokens in an answer: each is made in the process that serves all requests."""
CHARACTERS_PER_TOKEN: Final = 32
"""More than any text has on average: a text longer than this per token of the context cannot fit, and tokenizing it
alone would take seconds."""
SPARE_CHARACTERS: Final = 65_536
_UNKNOWN_CONTEXT: Final = 32_768
_USUAL: Final = 4
"""Estimated characters of a token."""
_SHORT_BY_DEFAULT: Final = 16
"""Tokens of an answer of /v1/completions without a bound."""

WORDS: Final = (
    f"`n` times the prompts is at most {SEQUENCES}.",
    f"The tokens to read (characters over {_USUAL}) and to write (`n` times the prompts times the bound of an answer, "
    f"which is the context length where a chat names none) are together at most {CONTEXTS} times the context length; "
    f"on endpoints that answer without text at most {EMBEDDED} where that is more.",
    "On /v1/rerank and /v1/score the query counts once for each document or item.",
    f"A prompt has at most {CHARACTERS_PER_TOKEN} characters per token of the context, and {SPARE_CHARACTERS} more.",
    f"With `echo` and `logprobs`: tokens of the prompt times `logprobs` and 1 at most {ECHOED}.",
    f"Where the context length is not known, {_UNKNOWN_CONTEXT} is taken for it.",
)


def too_much(fields: Mapping[str, Any], endpoint: str, facts: Facts, size: int | None) -> FieldProblem | None:
    """Why a request is too large although each field is within its bounds; None: it is not."""
    context = facts.context_length or _UNKNOWN_CONTEXT
    longest = CHARACTERS_PER_TOKEN * context + SPARE_CHARACTERS
    if endpoint in PAIRS:
        return _too_many_pairs(fields, context, longest)
    several = prompts_of(fields)
    prompts = len(several)
    sequences = (fields.get("n") or 1) * prompts
    if sequences > SEQUENCES and endpoint in GENERATING:
        param = "n" if (fields.get("n") or 1) > 1 else "prompt"
        text = f"`n` times the number of prompts must be at most {SEQUENCES}; it is {sequences}."
        return FieldProblem(param, text, "too_many_sequences")
    echoes = bool(fields.get("echo")) and bool(fields.get("logprobs"))
    best_of = fields.get("best_of")
    if best_of is not None and best_of not in (1, fields.get("n") or 1):
        return FieldProblem("best_of", "`best_of` must be 1 or equal to `n`.", "invalid_value")
    if sequences == 1 and not echoes and size is not None and size <= longest:
        # One answer to a prompt that may fit: the engine bounds both by the context.
        return None
    characters, tokens = texts(fields)
    names = ("messages", "prompt", "input")
    param = next(name for name in names if fields.get(name) is not None)
    if characters > longest * prompts or (
        prompts > 1 and isinstance(several[0], str) and max(map(len, several)) > longest
    ):
        text = f"`{param}` is far longer than the model's context length ({context} tokens)."
        return FieldProblem(param, text, "context_length_exceeded")
    read = tokens + characters // _USUAL
    if endpoint not in GENERATING:
        most = max(EMBEDDED, CONTEXTS * context)
        if prompts > 1 and read > most:
            text = f"`{param}` has about {read} tokens; one request may have {most}. Send fewer texts at a time."
            return FieldProblem(param, text, "too_much_work")
        return None
    if echoes and (tokens + characters) * (fields["logprobs"] + 1) > ECHOED:
        text = f"With `echo`, the prompt's tokens times `logprobs` and 1 must be at most {ECHOED}."
        return FieldProblem("echo", text, "too_much_work")
    if sequences > 1 and (work := read + sequences * _answer(fields, endpoint, context, facts)) > CONTEXTS * context:
        text = (
            f"The request asks for about {work} tokens; one may ask for {CONTEXTS * context}. Lower `n`, send fewer "
            "prompts, or set a lower `max_tokens`."
        )
        return FieldProblem("n" if (fields.get("n") or 1) > 1 else param, text, "too_much_work")
    return None


def _too_many_pairs(fields: Mapping[str, Any], context: int, longest: int) -> FieldProblem | None:
    query, several = pairs_of(fields)
    param = "documents" if "documents" in fields else "items"
    each = 0 if query is None else _tokens(query)
    for name, length in (("query", query), (param, max(several, key=len))):
        if isinstance(length, str) and len(length) > longest:
            text = f"`{name}` is far longer than the model's context length ({context} tokens)."
            return FieldProblem(name, text, "context_length_exceeded")
    read = each * len(several) + sum(map(_tokens, several))
    most = max(EMBEDDED, CONTEXTS * context)
    if len(several) > 1 and read > most:
        text = (
            f"`query` with each of `{param}` has about {read} tokens; one request may have {most}. Send fewer at a "
            "time."
        )
        return FieldProblem(param, text, "too_much_work")
    return None


def _tokens(text: Any) -> int:
    """Of a text, about; or of a list of ids."""
    return len(text) // _USUAL if isinstance(text, str) else len(text)


def _answer(fields: Mapping[str, Any], endpoint: str, context: int, facts: Facts) -> int:
    """Tokens of the longest possible answer."""
    named = [bound for name in ("max_tokens", "max_completion_tokens") if (bound := fields.get(name)) is not None]
    bound = max(named) if named else _SHORT_BY_DEFAULT if endpoint == "/v1/completions" else context
    return min(bound, context, facts.max_output_tokens or context)
