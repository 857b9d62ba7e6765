"""Credentials for the API server: kubeconfig (also with exec plugins) or the pod's service account, through kr8s."""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# kr8s offers its credential loading through a whole client only, which is built on another HTTP library and sets no
# timeouts; the version is pinned exactly for this import.
from kr8s._auth import KubeAuth  # pyright: ignore[reportPrivateUsage]

LOAD_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, repr=False)
class ClusterCredentials:
    """How to reach and convince the API server. Never logged: hence no repr."""

    server: str
    tls: ssl.SSLContext | bool
    token: str | None
    proxy: str | None
    tls_server_name: str | None
    namespace: str
    insecure: bool
    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    rotates: bool
    """A service account's token: the kubelet replaces the file, so it must be read again from time to time."""


def _pem(path: object) -> bytes | None:
    return Path(str(path)).read_bytes() if path else None


def _remove(path: object) -> None:
    if path:
        Path(str(path)).unlink(missing_ok=True)


async def load(kubeconfig: str | None = None, context: str | None = None) -> ClusterCredentials:
    """Loads credentials: the given kubeconfig, else KUBECONFIG or ~/.kube/config, else the pod's service account.

    Raises ValueError when there are none, TimeoutError when an exec plugin does not end.
    """
    auth = KubeAuth(kubeconfig=kubeconfig, context=context)
    async with asyncio.timeout(LOAD_TIMEOUT):
        await auth.reauthenticate()
        tls = cast("ssl.SSLContext | bool", await auth.ssl_context())
    user = cast("dict[str, Any]", auth._user)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    cluster = cast("dict[str, Any]", auth._cluster)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    credentials = ClusterCredentials(
        server=auth.server.rstrip("/"),
        tls=tls,
        token=auth.token.strip() if auth.token else None,
        proxy=auth.proxy,
        tls_server_name=auth.tls_server_name,
        namespace=auth.namespace,
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        ca=_pem(auth.server_ca_file),
        certificate=_pem(auth.client_cert_file),
        key=_pem(auth.client_key_file),
        rotates=not cluster,
    )
    # kr8s writes inline PEM data to temporary files and leaves them there; a private key must not lie about.
    _remove(auth.client_key_file if "client-key-data" in user else None)
    _remove(auth.client_cert_file if "client-certificate-data" in user else None)
    _remove(auth.server_ca_file if "certificate-authority-data" in cluster else None)
    return credentials
