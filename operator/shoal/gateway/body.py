"""The request's body: read under limits, checked, and turned into the engine's body."""

import io
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.core.fields.check import FORWARDED, check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import GENERATING
from shoal.core.jsonbounds import JsonBounds, beyond
from shoal.core.nativeapi import NativeApi
from shoal.core.translation import NotTranslatable, renamed
from shoal.gateway.dialects import Dialect
from shoal.net.errors import ApiError, unavailable

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Disconnected(Exception):
    """The client left before its whole body had arrived."""


class Parsed(NamedTuple):
    fields: dict[str, Any]
    model_name: str
    """The body's `model` field."""
    stream: bool
    wants_usage: bool
    """The client usage_options for the closing usage chunk."""
    wants_continuous: bool
    """The client usage_options for usage in every chunk."""


class BodyBudget:
    """Bytes of one kind that the process may hold at one time; without a bound, a burst of large bodies exhausts
    memory. `per_tenant` bounds one tenant, so that none takes all. `what` names the kind in errors."""

    def __init__(self, limit: int, per_tenant: int | None = None, what: str = "request bodies") -> None:
        self.limit = limit
        self.held = 0
        self._per_tenant = limit if per_tenant is None else per_tenant
        self._what = what
        self._tenants: dict[str, int] = {}

    def take(self, tenant: str, size: int) -> None:
        """
        Raises:
            ApiError: 503, the budget is used up.
        """
        own = self._tenants.get(tenant, 0) + size
        if self.held + size > self.limit:
            text = f"The gateway holds too many {self._what}. Try again."
            raise unavailable(text, "overloaded", 2, about_target=False)
        if own > self._per_tenant:
            text = f"The gateway holds too many of your {self._what}. Try again."
            raise unavailable(text, "overloaded", 2, about_target=False)
        self.held += size
        self._tenants[tenant] = own

    def give(self, tenant: str, size: int) -> None:
        if not size:
            return
        self.held -= size
        left = self._tenants[tenant] - size
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]


async def read_body(receive: Receive, declared: bytes | None, limit: int, budget: BodyBudget, tenant: str) -> bytes:
    """Reads the whole body. Its size is taken from the tenant's `budget`; the caller gives it back. The server bounds
    how long a client may take (`BoundedProtocol.sweep`): a timeout here would cost each request more than its parsing.

    Raises:
        ApiError: 413 over `limit` bytes, 503 over the budget.
        Disconnected: the client left.
    """
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    size = 0
    first, rest = b"", None
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part: bytes = message.get("body", b"")
            if size + len(part) > limit:
                raise too_large(limit)
            budget.take(tenant, len(part))
            size += len(part)
            if rest is not None:
                rest.write(part)
            elif first:
                # It grows in place, and `getvalue` copies nothing: parts and what they are joined to would be two.
                rest = io.BytesIO(first)
                rest.seek(0, io.SEEK_END)
                rest.write(part)
                first = b""
            else:
                first = part
            if not message.get("more_body"):
                return first if rest is None else rest.getvalue()
    except BaseException:
        budget.give(tenant, size)
        raise


def admit_body(raw: bytes, limit: int, budget: BodyBudget, tenant: str) -> None:
    """Applies the limits of `read_body` to a body that is here as a whole. Raises ApiError as it does."""
    if len(raw) > limit:
        raise too_large(limit)
    budget.take(tenant, len(raw))


def check_size(raw: bytes, most: JsonBounds) -> None:
    """Checks the raw body before anything is decoded.

    Raises:
        ApiError: 413, the body would become too large in memory.
    """
    if (what := beyond(raw, most)) is not None:
        raise ApiError(413, f"The body has {what}.", "request_too_complex")


def parse(raw: bytes, endpoint: str) -> Parsed:
    """Checks the fields that the gateway itself needs. `checked` validates the rest, once the Model is known.

    Raises:
        ApiError: 400, with the field at fault in `param`.
    """
    try:
        decoded: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(decoded, dict):
        raise ApiError(400, "The body must be a JSON object.", "invalid_json")
    body = cast("dict[str, Any]", decoded)
    word = body.get("model")
    if word is None or word == "":
        raise ApiError(400, "You must provide `model`.", "missing_model", param="model")
    if not isinstance(word, str):
        raise _invalid("model", "a string")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _invalid("stream", "true or false")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _invalid("stream_options", "an object")
    streams = bool(stream) and endpoint in GENERATING
    if not options:
        return Parsed(body, word, streams, False, False)
    usage_options = cast("dict[str, Any]", options)
    wants_usage = usage_options.get("include_usage") is True
    continuous = wants_usage and usage_options.get("continuous_usage_stats") is True
    return Parsed(body, word, streams, wants_usage=wants_usage, wants_continuous=continuous)


def translated(parsed: Parsed, dialect: Dialect) -> Parsed:
    """A body of another API as one that the engine knows.

    Raises:
        ApiError: 400, the engine's API has no words for it.
    """
    try:
        fields = dialect.request(parsed.fields)
    except NotTranslatable as error:
        raise ApiError(400, str(error), "unsupported_field", param=error.param) from None
    # The events of the other API are made from the usage.
    return parsed._replace(fields=fields, stream=bool(fields.get("stream")), wants_usage=True, wants_continuous=True)


def untranslated(parsed: Parsed, api: NativeApi) -> Parsed:
    """A body of another API as it goes to an external target that serves that API.

    Raises:
        ApiError: 400, a part of it is not forwarded.
    """
    try:
        return parsed._replace(fields=api.request(parsed.fields), wants_usage=True)
    except NotTranslatable as error:
        raise ApiError(400, str(error), "unsupported_field", param=error.param) from None


def checked(
    fields: Mapping[str, Any],
    endpoint: str,
    facts: Facts,
    size: int,
    dialect: Dialect | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Rejects fields that are not in `core/fields/table.py`, or that exceed its bounds. `dialect`: of the client, whose
    names for them the error has; `given`: the body in it.

    Raises:
        ApiError: 400, with the field at fault in `param`.
    """
    problem = check(fields, endpoint, facts, size)
    if problem is not None:
        param, message = problem.param, problem.message
        if dialect is not None:
            param, message = renamed(param, message, dialect.names, dialect.kept_tools(given))
        raise ApiError(400, message, problem.code, param=param)


def prompts(fields: Mapping[str, Any]) -> int:
    """Number of prompts in a body: /v1/completions accepts a list of texts or of token lists."""
    prompt: object = fields.get("prompt")
    if not isinstance(prompt, list):
        return 1
    listed = cast("list[object]", prompt)
    return len(listed) if listed and isinstance(listed[0], str | list) else 1


_SHORT_BY_DEFAULT: Final = 16
"""Default `max_tokens` of /v1/completions, at OpenAI and in the engine."""


def bound_answer(fields: dict[str, Any], endpoint: str, cap: int | None) -> int | None:
    """Longest answer in tokens that a request allows; None: it sets no bound. If the Model has a cap, a larger bound in
    `fields` is lowered to it, and a missing bound is set to it.

    Raises:
        ApiError: 400, the Model has a cap and the bound is no positive whole number: an engine might treat it as no
        bound.
    """
    if cap is not None and endpoint in GENERATING:
        _lower(fields, endpoint, cap)
    newer, older = fields.get("max_completion_tokens"), fields.get("max_tokens")
    # If both are set, engines differ in which one they use: take the larger.
    if type(newer) is not int:
        return older if type(older) is int else None
    return max(newer, older) if type(older) is int else newer


def bound_native(fields: dict[str, Any], name: str, endpoint: str, cap: int | None) -> int | None:
    """The same for a body of another API, whose bound is the field `name`. `endpoint`: what engines have for it.

    Raises:
        ApiError: 400, the bound is no positive whole number, also where there is no cap: limits reserve for it, and
        nothing else has checked it.
    """
    bound = fields.get(name)
    if bound is not None and (type(bound) is not int or bound < 1):
        raise _invalid(name, "a whole number of at least 1")
    if cap is not None and endpoint in GENERATING:
        fields[name] = bound = cap if bound is None else min(bound, cap)
    return bound


def lowered(bound: int | None, endpoint: str, cap: int | None) -> int | None:
    """What a Model's cap leaves of a request's bound, as the two above have it."""
    if cap is None or endpoint not in GENERATING:
        return bound
    if bound is None:
        return min(cap, _SHORT_BY_DEFAULT) if endpoint == "/v1/completions" else cap
    return min(bound, cap)


def _lower(fields: dict[str, Any], endpoint: str, cap: int) -> None:
    chat, named = endpoint == "/v1/chat/completions", False
    for name in ("max_completion_tokens", "max_tokens"):
        bound = fields.get(name)
        if bound is None:
            continue
        if type(bound) is not int or bound < (1 if chat else 0):
            raise _invalid(name, "a whole number of at least 1")
        fields[name], named = min(bound, cap), True
    if not named:
        fields["max_tokens"] = cap if chat else min(cap, _SHORT_BY_DEFAULT)


def engine_body(parsed: Parsed, endpoint: str, engine_name: str, rid: str, cache_salt: str | None = None) -> bytes:
    """The engine's body: the forwarded fields, the engine's name of the model, our request id, and usage always on.
    `cache_salt` separates prompts in the engine's cache; None: shared by all.

    Raises:
        ApiError: 400, it is nested too deeply to be encoded again.
    """
    forwarded = FORWARDED[endpoint]
    # SGLang rejects null as a wrong type where OpenAI treats it as absent.
    # `model` comes first: there a wire finds it without decoding the body (engine/wire.py).
    body: dict[str, Any] = {"model": engine_name}
    body |= {name: value for name, value in parsed.fields.items() if name in forwarded and value is not None}
    body["model"] = engine_name
    if endpoint in GENERATING:
        body["rid"] = rid
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if parsed.stream:
        # Always overwritten: a client that sends include_usage=false must still be metered.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    else:
        body.pop("stream_options", None)
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        # The values came from JSON, so only depth can fail: orjson decodes deeper nesting than it encodes.
        raise ApiError(400, "The body is nested too deeply.", "invalid_json") from None


def too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413, f"The body is larger than {limit} bytes.", "request_too_large", headers=((b"connection", b"close"),)
    )


def _invalid(field: str, must_be: str) -> ApiError:
    return ApiError(400, f"`{field}` must be {must_be}.", "invalid_type", param=field)
