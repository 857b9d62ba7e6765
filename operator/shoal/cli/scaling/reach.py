"""Asks the operator that leads: the holder of the Lease is its pod, and the API server proxies to a pod's port."""

from collections.abc import Coroutine
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote, urlencode

import aiohttp
import click
import orjson
from pydantic import ValidationError

from shoal.api import names
from shoal.api.adapterfigures import Adapters
from shoal.api.decisions import Decisions
from shoal.api.meta import JsonObject
from shoal.api.replica import Message
from shoal.kube.client import Client
from shoal.kube.errors import Forbidden, KubeError, NotFound, Unauthorized, Unavailable, from_status
from shoal.kube.resources import LEASES

R = TypeVar("R")
M = TypeVar("M", bound=Message)

DIRECT_SECONDS: Final = 10.0
TOKEN_SECONDS: Final = 600
"""The shortest that an API server gives."""
_NOT_LEADING: Final = "NotLeading"
_MODEL_UNKNOWN: Final = "ModelUnknown"
_POOL_UNKNOWN: Final = "PoolUnknown"


class Unreachable(Exception):
    """The operator was not reached, or did not answer; the text says why and what to do."""


class Operator:
    """The operator of an installation, whichever of its pods leads."""

    def __init__(self, client: Client, namespace: str, url: str | None = None):
        """`namespace` is Shoal's own. With `url` the operator is called there, without the API server."""
        self._client, self._namespace, self._url = client, namespace, url
        self._token: str | None = None
        """What the operator is shown; empty: it asks for nothing."""

    async def all(self, namespace: str | None) -> Decisions:
        """The Models of a namespace (None: of all), without their decisions. Raises Unreachable."""
        query = "" if namespace is None else "?" + urlencode({"namespace": namespace})
        return await self._ask(names.DECISIONS_PATH + query, Decisions)

    async def one(self, namespace: str, name: str) -> Decisions:
        """One Model with its decisions. Raises Unreachable."""
        return await self._ask(f"{names.DECISIONS_PATH}/{quote(namespace, safe='')}/{quote(name, safe='')}", Decisions)

    async def adapters(self, namespace: str | None, pool: str | None) -> Adapters:
        """The pools of a namespace (None: of all), or the one of this name, with their adapters. Raises Unreachable."""
        query = {name: value for name, value in (("namespace", namespace), ("pool", pool)) if value is not None}
        return await self._ask(names.ADAPTERS_PATH + ("?" + urlencode(query) if query else ""), Adapters)

    async def _ask(self, path: str, kind: type[M]) -> M:
        for last in (False, True):
            pod = self._url or await self._leader()
            try:
                headers = await self._headers()
                raw = await (self._direct(path, headers) if self._url else self._proxied(pod, path, headers))
                return kind.model_validate_json(raw)
            except ValidationError as error:
                raise Unreachable(f"{pod} answers something that this command does not understand: {error}") from None
            except Unauthorized as error:
                # The token's time is over: a picture that goes on for long needs several.
                if last or not self._token:
                    raise Unreachable(self._told(error, pod)) from None
                self._token = None
            except KubeError as error:
                # Between the look at the Lease and the call another one may have begun to lead.
                if not last and self._moved(error):
                    continue
                raise Unreachable(self._told(error, pod)) from None
        raise AssertionError("unreachable")

    async def _leader(self) -> str:
        try:
            lease = await self._client.get(LEASES, names.LEASE_NAME, self._namespace)
        except NotFound:
            raise Unreachable(
                f"no operator has run in namespace {self._namespace} (there is no Lease {names.LEASE_NAME}): if Shoal "
                "is installed elsewhere, name its namespace with --operator-namespace"
            ) from None
        except Forbidden as error:
            raise Unreachable(self._rights(error)) from None
        spec: JsonObject = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if not holder:
            raise Unreachable(f"no operator leads at the moment: {self._look()}")
        return holder

    async def _headers(self) -> dict[str, str]:
        """Raises Unreachable."""
        if self._token is None:
            try:
                self._token = await self._client.token(names.DECISIONS_ACCOUNT, self._namespace, seconds=TOKEN_SECONDS)
            except NotFound:  # an installation that has no such account asks for no token
                self._token = ""
            except Forbidden as error:
                raise Unreachable(self._rights(error)) from None
            except KubeError as error:
                raise Unreachable(f"no token of {names.DECISIONS_ACCOUNT}: {error.message}") from None
        return {names.HEADER_KEY: self._token} if self._token else {}

    async def _proxied(self, pod: str, path: str, headers: dict[str, str]) -> bytes:
        return await self._client.proxy(pod, self._namespace, port=names.OPS_PORT, path=path, headers=headers)

    async def _direct(self, path: str, headers: dict[str, str]) -> bytes:
        timeout = aiohttp.ClientTimeout(total=DIRECT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{(self._url or '').rstrip('/')}{path}", headers=headers) as response,
            ):
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(str(error) or type(error).__name__) from error
        if response.status >= 400:
            raise from_status(response.status, _json(raw))
        return raw

    def _moved(self, error: KubeError) -> bool:
        gone = isinstance(error, NotFound) and error.reason not in (_MODEL_UNKNOWN, _POOL_UNKNOWN)
        return self._url is None and (gone or error.reason == _NOT_LEADING)

    def _told(self, error: KubeError, pod: str) -> str:
        if error.reason == _MODEL_UNKNOWN:
            return f"{error.message}: see the Model's conditions (kubectl describe), or try again in a few seconds"
        if error.reason == _POOL_UNKNOWN:
            return error.message
        if error.reason == _NOT_LEADING:
            return f"{error.message}: try again in a few seconds"
        if isinstance(error, Forbidden):
            return self._rights(error)
        if self._url:
            return f"{self._url} does not answer: {error.message}"
        if isinstance(error, NotFound):
            return f"the operator that led, pod {pod}, is gone or does not tell its decisions: {self._look()}"
        return (
            f"the API server does not reach port {names.OPS_PORT} of the operator, pod {pod}: {error.message}. Where a "
            "NetworkPolicy or a firewall is between them, try: kubectl -n "
            f"{self._namespace} port-forward {pod} {names.OPS_PORT}, and --operator-url "
            f"http://127.0.0.1:{names.OPS_PORT}"
        )

    def _rights(self, error: KubeError) -> str:
        return (
            f"{error.message}\nThis needs the right to get the Lease {names.LEASE_NAME} and pods/proxy in namespace "
            f"{self._namespace}, and to create a token of the ServiceAccount {names.DECISIONS_ACCOUNT}, as the Role "
            "shoal-decisions there has it; without it, the Model's status and events say what was decided."
        )

    def _look(self) -> str:
        return f"look at kubectl -n {self._namespace} get pods -l {names.LABEL_COMPONENT}={names.COMPONENT_OPERATOR}"


def _json(raw: bytes) -> JsonObject:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        return cast("JsonObject", body)
    return {"message": raw[:512].decode(errors="replace").strip()}


async def told(work: Coroutine[Any, Any, R]) -> R:
    """Runs what a command does; every failure that a person can do something about becomes a ClickException."""
    try:
        return await work
    except NotFound as error:
        missing = "this cluster does not know Models: is Shoal's chart `shoal-crds` installed?"
        raise click.ClickException(missing if error.kind_missing else error.message) from None
    except KubeError as error:
        raise click.ClickException(error.message) from None
    except Unreachable as error:
        raise click.ClickException(str(error)) from None
    except (ValueError, OSError, TimeoutError) as error:
        raise click.ClickException(f"no cluster to talk to: {error}") from None
