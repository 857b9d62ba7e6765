"""What the API server may answer, as types. Controllers decide by them; nobody parses messages."""

from collections.abc import Mapping
from typing import Any, Final

_NO_SUCH_FIELD: Final = "field not declared in schema"
"""What server-side apply says, with status 500, of a field that a CustomResourceDefinition does not have."""


class KubeError(Exception):
    """Any failure of a call to the API server. `message` is the server's own sentence."""

    def __init__(self, message: str, *, status: int | None = None, reason: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.retry_after = retry_after
        """Seconds, if the server said so."""

    @property
    def unanswered(self) -> bool:
        """The API server cannot answer now, whatever it is asked. Another error is about this one object, such as a
        403, or a 500 where it cannot be decrypted."""
        return self.status in (None, 429, 502, 503, 504)


class NotFound(KubeError):
    """404: no such object, or no such kind (its CRD is not installed; see `kind_missing`)."""

    plural: str = ""
    """The kind of the object that was read by its name."""
    namespace: str = ""
    """Where it was looked for, which the server's sentence leaves out. Empty: the object is of none."""

    @property
    def kind_missing(self) -> bool:
        """The server does not know the kind at all. It then answers in plain text, without naming an object."""
        return self.reason != "NotFound"


class Conflict(KubeError):
    """409: the object changed since it was read, or another manager owns a field. Read again, decide again."""


class AlreadyExists(Conflict):
    """409 to a create."""


class ObjectInvalid(KubeError):
    """400 or 422: the object is refused as it stands; sending it again is pointless."""


class UnknownField(ObjectInvalid):
    """The kind that is installed does not have a field: it is of another version than expected."""


class Unauthorized(KubeError):
    """401: the credentials are not accepted, also not after they were loaded again."""


class Forbidden(KubeError):
    """403: RBAC, a quota or an admission policy refuses."""


class Gone(KubeError):
    """410: the resourceVersion is too old; list again."""


class APIServerUnavailable(KubeError):
    """No answer, a timeout, 429 or 5xx: the API server may be able to answer later."""


def from_status(status: int, body: Mapping[str, Any], *, retry_after: float | None = None) -> KubeError:
    """The error for an HTTP status and the `Status` object that came with it."""
    message = str(body.get("message") or f"HTTP {status}")
    reason = str(body.get("reason") or "")
    cls: type[KubeError]
    match status:
        case 401:
            cls = Unauthorized
        case 403:
            cls = Forbidden
        case 404:
            cls = NotFound
        case 409:
            cls = AlreadyExists if reason == "AlreadyExists" else Conflict
        case 410:
            cls = Gone
        case 400 | 405 | 413 | 415 | 422:
            cls = ObjectInvalid
        case 500 if _NO_SUCH_FIELD in message:
            cls = UnknownField
        case _:
            cls = APIServerUnavailable if status == 429 or status >= 500 else KubeError
    return cls(message, status=status, reason=reason, retry_after=retry_after)
