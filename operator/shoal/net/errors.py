"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Also the engine's own flat ones, and
what a cold endpoint refuses with."""

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from shoal.core.translation import StreamFailure

RETRY_AFTER_MAX_SECONDS: Final = 60
"""Clients ignore a longer Retry-After."""
DO_NOT_RETRY: Final = ((b"x-should-retry", b"false"),)
"""OpenAI's SDKs retry a 429 and a 5xx by themselves; this header stops them."""

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ADAPTERS: Final = re.compile(r"lora|adapter|dict_keys\(|@[0-9a-f]{12}\b", re.IGNORECASE)
_INSIDE: Final = re.compile(
    r"traceback|<path>|\bfile \"|\.py\b|\b0x[0-9a-f]{6,}|\b\d{1,3}(?:\.\d{1,3}){3}\b|(?<![\w/:])/\w[\w.-]*/[\w.-]",
    re.IGNORECASE,
)
"""Tracebacks, files, addresses: of no use to a client, and of some to an attacker."""
_DIMENSIONS: Final = re.compile(
    r"does not support matryoshka|only supports (\[\d{1,6}(?:, \d{1,6}){0,63}\]) matryoshka"
)
_MOST_TEXT: Final = 2000
_IDENTIFIER: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_PARAM: Final = re.compile(r"[A-Za-z_][\w.\[\]-]{0,99}")


class Problem(Exception):
    """Why a cold endpoint (`net/shell.py`) does not do what it was asked. The message goes to the caller: it says what
    is wrong and what to do. The endpoint's shell puts it into that process's shape."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers: Mapping[str, str] = headers or {}


class ApiError(Exception):
    """The error for the client. `reason` is the label of the metric, `headers` go out with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        *,
        param: str | None = None,
        type: str | None = None,
        retry_after: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        limit: str | None = None,
        outcome: str | None = None,
        subject: str | None = None,
        about_target: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.about_target = about_target
        """False: a limit of the gateway refused it, which says nothing of the request's target."""
        self.limit = limit
        """Whose limit it is, for the installation's own people: not a part of the answer."""
        self.outcome = outcome
        """What became of the request at an external target, for the installation's own people too."""
        self.subject = subject
        """`adapter/NAMESPACE/NAME` or `route/NAMESPACE/NAME`: whose state explains the error, for them too. None: that
        of the request's Model, or none."""
        self.param = param
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after = None if retry_after is None else max(1, min(retry_after, RETRY_AFTER_MAX_SECONDS))
        self.headers = headers
        if self.retry_after is not None:
            self.headers = (*headers, (b"retry-after", str(self.retry_after).encode()))

    def body(self) -> bytes:
        return orjson.dumps({"error": self._error()})

    def event(self) -> bytes:
        """The same as a server-sent event, for when the status is already out."""
        error = self._error()
        if self.retry_after is not None:
            error["retry_after"] = self.retry_after
        return b"data: " + orjson.dumps({"error": error}) + b"\n\n"

    def failure(self, request_id: str) -> StreamFailure:
        """The same for a stream of another API."""
        return StreamFailure(self.status, self.message, self.type, self.code, self.param, self.retry_after, request_id)

    def _error(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def from_engine(status: int, raw: bytes, model: str = "", name: str = "") -> ApiError:
    """The engine's error (flat, nested, or no JSON) in OpenAI's shape. Its message is passed to the client only
    where it is about the request and shows nothing of the engine's insides. `model`: what the engine, or the provider,
    calls the model; the message then has `name`, as the client calls it."""
    if status >= 500:
        return ApiError(status, "The engine failed on this request.", "engine_error")
    try:
        decoded: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        decoded = None
    fields: Mapping[str, object] = cast(Mapping[str, object], decoded) if isinstance(decoded, dict) else {}
    inner = fields.get("error")
    if isinstance(inner, dict):
        fields = cast(Mapping[str, object], inner)
    elif isinstance(inner, str):
        fields = {"message": inner}
    message = fields.get("message")
    if isinstance(message, str) and (found := _DIMENSIONS.search(message)) is not None:
        # The text names the path of the weights.
        only = f"it has {found[1]} only" if found[1] else "leave it out"
        text = f"The model does not shorten its embeddings to these `dimensions`: {only}."
        return ApiError(status, text, "unsupported_dimensions", param="dimensions")
    if isinstance(message, str) and (
        mentions_adapters(message) or _INSIDE.search(message) or len(message) > _MOST_TEXT
    ):
        # Such texts list what is loaded: other tenants' adapters, and paths.
        return ApiError(status, "The engine refused the request.", "refused_by_engine")
    if isinstance(message, str) and model:
        message = re.sub(rf"(?<![\w/-]){re.escape(model)}(?![\w/-]|\.\w)", lambda _: name, message)
    kind = fields.get("type")
    param = fields.get("param")
    code = fields.get("code")
    return ApiError(
        status,
        message if isinstance(message, str) and message else f"the engine answered with status {status}",
        # SGLang repeats the status as the code; OpenAI's codes are words.
        code if isinstance(code, str) and _IDENTIFIER.fullmatch(code) else None,
        param=param if isinstance(param, str) and _PARAM.fullmatch(param) else None,
        # SGLang's types are Python or HTTP words (BadRequestError, "503"); OpenAI's SDKs go by status.
        type=kind if isinstance(kind, str) and kind.endswith("_error") and _IDENTIFIER.fullmatch(kind) else None,
    )


def mentions_adapters(text: str) -> bool:
    """Whether a text of the engine is about adapters: SGLang's texts name all loaded adapters, of any tenant."""
    return _ADAPTERS.search(text) is not None


def engine_status(event: Mapping[str, Any], default: int = 500) -> int:
    """The HTTP status that an error event of the engine stands for: its `code`."""
    error = event.get("error")
    code = cast(Mapping[str, object], error).get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else default


def model_not_found(name: str) -> ApiError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return ApiError(
        404,
        f"The model `{shown}` does not exist or you do not have access to it.",
        "model_not_found",
        param="model",
    )


def no_rule(name: str) -> ApiError:
    """For a route of which no rule is for the request."""
    return ApiError(404, f"No rule of the route `{name}` is for this request.", "no_route_rule", param="model")


def no_target(name: str, route: str | None = None) -> ApiError:
    """For a route that has no target for the request. It does not tell which targets there are. `route`: its key."""
    return unavailable(
        f"The route `{name}` has no target that can serve this request for you. Try again later.",
        "no_route_target",
        RETRY_AFTER_MAX_SECONDS,
        subject=None if route is None else f"route/{route}",
    )


def adapter_waits(name: str, reason: str, adapter: str | None = None) -> ApiError:
    """For an adapter that the tenant may use and that does not answer now. `adapter`: its key."""
    return unavailable(
        f"The adapter `{name}` does not answer now ({reason}); its status says more. Try again later.",
        "adapter_unavailable",
        RETRY_AFTER_MAX_SECONDS,
        subject=None if adapter is None else f"adapter/{adapter}",
    )


def adapter_unusable(name: str, reason: str, adapter: str | None = None) -> ApiError:
    """For an adapter that no replica can load as it is. `adapter`: its key."""
    return ApiError(
        422,
        f"The adapter `{name}` cannot be loaded as it is ({reason}); its owner has to mend it.",
        "adapter_unusable",
        param="model",
        subject=None if adapter is None else f"adapter/{adapter}",
    )


def unavailable(
    message: str,
    code: str,
    retry_after: int,
    *,
    outcome: str | None = None,
    subject: str | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    about_target: bool = True,
) -> ApiError:
    return ApiError(
        503,
        message,
        code,
        type="server_error",
        retry_after=retry_after,
        outcome=outcome,
        subject=subject,
        headers=headers,
        about_target=about_target,
    )


def timeout(message: str, limit: str) -> ApiError:
    """For a request that took longer than a limit; `limit`: whose, for `shoal why request/ID`."""
    return ApiError(504, message, "timeout", limit=limit)


def starting() -> ApiError:
    return unavailable("This gateway has just started and does not know all keys and models yet.", "starting", 1)


def unauthorized(status: int, message: str, code: str) -> ApiError:
    headers = ((b"www-authenticate", b"Bearer"),) if status == 401 else ()
    return ApiError(status, message, code, headers=headers)


def wrong_method(method: str, allowed: str) -> ApiError:
    return ApiError(
        405,
        f"{method} is not allowed here; use {allowed}.",
        "method_not_allowed",
        headers=((b"allow", allowed.encode()),),
    )


def external_broken() -> ApiError:
    """For an answer of an external target that broke off."""
    return ApiError(502, "The external target broke off its answer; it is incomplete.", "external_broken")


def route_loop() -> ApiError:
    """For a request that came through other clusters' gateways, and that its route would send to another one. It has no
    status of 5xx: SDKs, and the gateways before this one, would send the request again, and believe that this gateway
    fails."""
    return ApiError(
        400,
        "This request came here through other gateways of Shoal, and its route would send it on once more. Their routes"
        " probably form a circle.",
        "route_loop",
        param="model",
    )


def lost_twice() -> ApiError:
    """For a request under which two replicas died. SDKs send a 5xx again by themselves, unless this header tells them
    not to."""
    return ApiError(
        502,
        "Two replicas were lost while they had this request, so no third one gets it. It may be the reason: do not send"
        " it again unchanged.",
        "replica_lost_twice",
        headers=DO_NOT_RETRY,
    )


def carried_once() -> ApiError:
    """For a request whose replica was lost or did not take it, and that a proxy carries: it cannot be given another
    one."""
    return unavailable("The replica of this request was lost or did not take it. Try again.", "replica_unavailable", 1)


def cannot_record() -> ApiError:
    return unavailable("The gateway cannot record usage right now, so it serves nothing.", "cannot_record_usage", 10)
