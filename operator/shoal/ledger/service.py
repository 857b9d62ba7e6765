"""The ledger's API on the shell (`net/shell.py`): its keys, its size limit, and its error messages. The modules of
the ledger add their routes."""

import io
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from starlette.responses import Response

from shoal.api import keys, names, rights
from shoal.api.keys import ROLES, Role
from shoal.core import cells
from shoal.kube.callers import Callers
from shoal.ledger.database import DatabaseUnavailable
from shoal.net.asgi import unproved
from shoal.net.errors import Problem
from shoal.net.rights import PERSON, RightGuard
from shoal.net.roles import RoleGuard, given_key, role_of
from shoal.net.shell import Handler, Shell, ShellRequest, Unrouted, error_response
from shoal.net.tls import TLSCredentials

_PLACES: Final = (names.HEADER_KEY, "authorization")
"""Headers that may contain a key. Calls through the API server's proxy have it in the first header."""


class LedgerKeys(Protocol):
    """The part of the key ring that is needed here (`net.installkey.KeyRing`)."""

    def bearers_of(self, role: Role, subject: str) -> Iterable[str]:
        """The bearer keys of `role` for `subject`, one for each valid install key."""
        ...

    def old_bearers_of(self, role: Role, subject: str) -> Iterable[str]:
        """The bearer keys of `role` for `subject` that are derived from an install key older than the role keys."""
        ...


class LedgerService:
    """Registers routes. Handlers get the caller and the body (`content`). Add routes before `shell` serves. `callers`
    knows people by their tokens; None: keys only."""

    def __init__(
        self,
        keys: LedgerKeys,
        *,
        max_body_bytes: int,
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
    ) -> None:
        self._keys = keys
        self._callers = callers
        self._max_body_bytes = max_body_bytes
        self._credentials = credentials
        self.shell = Shell(
            "the ledger", wording=_error_response, errors={DatabaseUnavailable: _away, TimeoutError: _away}
        )

    def route(self, method: str, path: str, handler: Handler, roles: Iterable[Role]) -> None:
        """Lets callers with a key of one of `roles`, or a token with the right to this call (`rights.LEDGER`), call
        `handler`. Raises ValueError if the route exists already."""
        allowed = tuple(roles)
        right = rights.LEDGER.get((method, path))
        by_right = RightGuard(self._callers, right) if right is not None and self._callers is not None else None
        token = "" if self._callers is None or by_right is None else f", or a token for {self._callers.audience}"
        needed = (
            f"a key of this installation is needed ({', '.join(allowed)}){token}, as a bearer token or in "
            f"{names.HEADER_KEY}"
        )
        by_role = RoleGuard(allowed, self._keys_of, needed, known=ROLES, places=_PLACES, credentials=self._credentials)

        async def guard(request: ShellRequest) -> None:
            given = given_key(request.headers, _PLACES)
            if by_right is not None and by_right.understands(given):
                if (why := unproved(self._credentials, request.scope, PERSON.role)) is not None:
                    raise Problem(403, why)
                await by_right.check(request, given)
            else:
                await by_role(request)
            request.content = await request.read(self._max_body_bytes, advice=": send it in parts")
            _ = request.parameters  # raises Problem if the query string is invalid

        self.shell.route((method,), path, handler, guard)

    def has_old_key(self, request: ShellRequest) -> bool:
        """Whether the call's key is derived from an install key older than the role keys (`InstallKey.old`)."""
        given = given_key(request.headers, _PLACES)
        return role_of(given, ROLES, lambda role: self._keys.old_bearers_of(role, keys.LEDGER)) is not None

    def _keys_of(self, role: Role) -> Iterable[str]:
        return self._keys.bearers_of(role, keys.LEDGER)


def answer_csv(header: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> Response:
    """A CSV table with a header line (RFC 4180). With `name`, a browser saves it as a file of that name."""
    text = io.StringIO(newline="")
    writer = cells.CSVWriter(text)
    writer.row(header)
    writer.rows(rows)
    headers = {"content-disposition": f'attachment; filename="{name}"'} if name else None
    return Response(text.getvalue().encode(), headers=headers, media_type="text/csv")


def _error_response(problem: Problem) -> Response:
    if isinstance(problem, Unrouted):
        lacks = f"the ledger has no {problem.path[:200]}"
        message = f"{problem.path} takes {problem.allowed}" if problem.allowed else lacks
        problem = Problem(problem.status, message, problem.headers)
    return error_response(problem)


def _away(error: Exception) -> Problem:
    return Problem(503, str(error) or "the database did not answer in time", {"retry-after": "1"})
