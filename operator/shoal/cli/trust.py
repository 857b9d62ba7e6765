"""How a command verifies a service at an https URL.

With mutual TLS, gateways and ledger have certificates by the installation's own CA, for names that are in no DNS
(`api/identity.py`). A server at a URL proves to be the service by such a certificate, or, behind an Ingress, by one
that this machine trusts for the URL's own host. No request is sent before one of the two holds.
"""

import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp

from shoal.api import names
from shoal.api.identity import ProcessRole, server_name
from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.resources import CONFIGMAPS

R = TypeVar("R")

Connect = Callable[[], Awaitable[KubeClient]]
"""Connects to the cluster. Raises ValueError, OSError."""

_Proof = Literal["installation", "host"]
_MOST_BYTES: Final = 1 << 20


class NotVerified(Exception):
    """The server at the URL did not prove to be the service. The message says why, and what to do."""


class _NoAuthority(Exception):
    """The CA of the installation cannot be read; the message says why."""


class AuthoritySource(NamedTuple):
    """Where the CA of the installation is read: in a file, else in the cluster."""

    namespace: str
    """Shoal's namespace."""
    file: str | None = None
    cluster: KubeClient | None = None
    connect: Connect | None = None
    """Used where there is no `cluster`."""

    async def read(self) -> ssl.SSLContext:
        """Trusts the CA alone. Raises NotVerified for a file that cannot be used, _NoAuthority."""
        if self.file is not None:
            return _of_file(self.file)
        found = await self._config_map()
        data: JsonObject = found.get("data") or {}
        where = f"ConfigMap {names.AUTHORITY_CONFIG_MAP} in namespace {self.namespace}"
        try:
            return _trusting(str(data.get(names.TRUST_FILE) or ""))
        except ValueError:
            raise _NoAuthority(f"the {where} has no certificate in {names.TRUST_FILE}") from None

    async def _config_map(self) -> JsonObject:
        try:
            if self.cluster is not None:
                return await self.cluster.get(CONFIGMAPS, names.AUTHORITY_CONFIG_MAP, self.namespace)
            if self.connect is None:
                raise _NoAuthority("there is no cluster to read it from")
            async with await self.connect() as cluster:
                return await cluster.get(CONFIGMAPS, names.AUTHORITY_CONFIG_MAP, self.namespace)
        except NotFound:
            raise _NoAuthority(
                f"there is no ConfigMap {names.AUTHORITY_CONFIG_MAP} in namespace {self.namespace}, which the operator "
                "makes where mutual TLS is on"
            ) from None
        except Forbidden as error:
            raise _NoAuthority(
                f"this needs the right to get the ConfigMap {names.AUTHORITY_CONFIG_MAP} in namespace "
                f"{self.namespace}, which Shoal's roles there grant ({error.message})"
            ) from None
        except KubeError as error:
            raise _NoAuthority(f"the API server did not answer: {error.message}") from None
        except (ValueError, OSError, TimeoutError) as error:
            raise _NoAuthority(f"there is no cluster to read it from: {error}") from None


class ServiceTrust:
    """Verifies the server at one URL."""

    def __init__(self, url: str, role: ProcessRole, source: AuthoritySource) -> None:
        self._url, self._source = url, source
        self._role: ProcessRole = role
        self._context: ssl.SSLContext | None = None
        # `kubectl port-forward` ends when a connection through it is broken off: what is forwarded from this machine
        # is taken for the service first.
        self._proofs: list[_Proof] = ["installation", "host"] if _is_local(url) else ["host", "installation"]

    async def call(self, send: Callable[[Mapping[str, Any]], Awaitable[R]]) -> R:
        """Calls `send` with arguments for a request of aiohttp's. Raises NotVerified, and what `send` raises."""
        refused: dict[_Proof, str] = {}
        for proof in self._proofs:
            try:
                answer = await send({} if proof == "host" else await self._of_the_installation())
            except _NoAuthority as error:
                refused[proof] = str(error)
            except aiohttp.ClientConnectorCertificateError as error:
                refused[proof] = str(getattr(error.certificate_error, "verify_message", "") or error.certificate_error)
            else:
                self._proofs.sort(key=lambda each: each != proof)
                return answer
        if self._context is None:
            raise NotVerified(
                f"the certificate at {self._url} is not trusted: {refused['host']}. The {self._role}'s own is verified "
                f"with the CA of the installation, which cannot be read: {refused['installation']}. With the CA in a "
                "file, use --ca-file"
            )
        raise NotVerified(
            f"the certificate at {self._url} is not that of this installation's {self._role}: "
            f"{refused['installation']}; and it is not trusted for the host of the URL: {refused['host']}"
        )

    async def _of_the_installation(self) -> Mapping[str, Any]:
        if self._context is None:
            self._context = await self._source.read()
        return {"ssl": self._context, "server_hostname": server_name(self._role)}


def _of_file(name: str) -> ssl.SSLContext:
    try:
        with Path(name).open("rb") as file:
            return _trusting(file.read(_MOST_BYTES).decode("ascii"))
    except OSError as error:
        raise NotVerified(f"--ca-file {name}: {error.strerror or error}") from None
    except ValueError:
        raise NotVerified(f"--ca-file {name}: there is no certificate in it, as PEM") from None


def _trusting(certificates: str) -> ssl.SSLContext:
    """Raises ValueError for a text without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=certificates)
    except ssl.SSLError:
        raise ValueError("no certificate") from None
    # An authority from outside may itself be signed by another one: it is trusted all the same.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _is_local(url: str) -> bool:
    """Whether the URL is of this machine."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
