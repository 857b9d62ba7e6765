"""Credentials for the API server: of a kubeconfig (also from exec plugins), else the pod's service account."""

import asyncio
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.kube import execplugin
from shoal.kube import kubeconfig as kubeconfigs
from shoal.kube.execplugin import PluginCredentials
from shoal.kube.kubeconfig import KubeconfigCluster, KubeconfigUser, Selection, bounded

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS: Final = 60.0
"""Age at which a token's file is read again; the kubelet replaces a service account's at 80 % of its hour."""
LEAST_SECONDS: Final = 1.0
"""A plugin whose credentials have run out already is not run for each request."""
PEM_LIMIT: Final = 1 << 20
TOKEN_LIMIT: Final = 1 << 16
"""Bytes of a file."""


@dataclass(frozen=True, slots=True, repr=False)
class ClusterCredentials:
    """How to reach and convince the API server. Never logged: hence no repr."""

    server: str
    tls: ssl.SSLContext
    token: str | None
    proxy: str | None
    tls_server_name: str | None
    namespace: str
    insecure: bool
    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    renew_seconds: float | None
    """Age at which they are loaded again: a token's file is replaced, a plugin's credentials run out. None: only when
    the API server refuses them."""


async def load(kubeconfig: str | None = None, context: str | None = None) -> ClusterCredentials:
    """Loads credentials: the given kubeconfig, else KUBECONFIG or ~/.kube/config, else the pod's service account.

    Raises:
        ValueError: there are none, or they cannot be used; it says which file and which field.
        OSError: a file cannot be read.
        TimeoutError: an exec plugin did not end.
    """
    selected = await asyncio.to_thread(kubeconfigs.select, kubeconfig, context)
    if selected is None:
        return await asyncio.to_thread(_service_account, None, lambda: kubeconfigs.looked(kubeconfig))
    if selected.cluster is None:
        return await asyncio.to_thread(_service_account, selected.namespace, lambda: "the context names no cluster")
    cluster, user = selected.cluster, selected.user
    ca = await asyncio.to_thread(
        _pem, cluster.certificate_authority_data, cluster.certificate_authority, selected.cluster_field
    )
    given = None
    if user.plugin is not None:
        field = f"{selected.user_field}.exec"
        given = await execplugin.run(user.plugin, field, selected.user_folder, cluster, ca)
    return await asyncio.to_thread(_of_context, selected, cluster, ca, given)


def _of_context(
    selected: Selection, cluster: KubeconfigCluster, ca: bytes | None, given: PluginCredentials | None
) -> ClusterCredentials:
    """`given`: by the user's exec plugin."""
    user, field = selected.user, selected.user_field
    _refuse(user, field)
    certificate = _pem(user.client_certificate_data, user.client_certificate, f"{field}.client-certificate")
    key = _pem(user.client_key_data, user.client_key, f"{field}.client-key")
    renew = TOKEN_SECONDS if user.token_file else None
    token = _token(user, field)
    if given is not None:
        token = given.token or token
        if given.certificate and given.key:
            certificate, key = given.certificate.encode(), given.key.encode()
        left = given.seconds()
        renew = renew if left is None else max(left, LEAST_SECONDS)
    if (certificate is None) != (key is None):
        missing = "client-key" if key is None else "client-certificate"
        raise ValueError(f"{field}: a client certificate needs its key; {missing} (or {missing}-data) is missing")
    return ClusterCredentials(
        server=cluster.server.rstrip("/"),
        tls=_tls(cluster, ca, selected.cluster_field, certificate, key, field),
        token=token,
        proxy=cluster.proxy_url,
        tls_server_name=cluster.tls_server_name,
        namespace=selected.namespace or "default",
        insecure=cluster.insecure_skip_tls_verify,
        ca=ca,
        certificate=certificate,
        key=key,
        renew_seconds=renew,
    )


def _refuse(user: KubeconfigUser, field: str) -> None:
    """Raises ValueError for a setting that would be ignored, so that no call is made as another user than
    configured."""
    if user.username is not None or user.password is not None:
        raise ValueError(
            f"{field}.username: Kubernetes 1.19 dropped user names with passwords; use a token, a client certificate "
            "or an exec plugin"
        )
    if user.impersonated is not None:
        raise ValueError(f"{field}.as: impersonation is not supported; use credentials of the user itself")
    if user.auth_provider is not None and user.auth_provider.name != "oidc":
        raise ValueError(
            f"{field}.auth-provider.name: {user.auth_provider.name!r} is not supported, only oidc; use the provider's "
            "exec plugin"
        )


def _token(user: KubeconfigUser, field: str) -> str | None:
    """The file's, else the user's own, else that of the OIDC provider."""
    if user.token_file:
        try:
            return _text(Path(user.token_file), f"{field}.tokenFile")
        except (ValueError, OSError):
            if not user.token:
                raise
    if user.token or user.auth_provider is None:
        return (user.token or "").strip() or None
    token = user.auth_provider.config.get("id-token", "").strip()
    if not token:
        raise ValueError(f"{field}.auth-provider.config.id-token is missing; log in at the provider again")
    return token


def _service_account(namespace: str | None, missing: Callable[[], str]) -> ClusterCredentials:
    """Of the pod that this process runs in. `namespace`: instead of the pod's; `missing`: why no kubeconfig is used."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (SERVICE_ACCOUNT / "token").exists():
        raise ValueError(
            f"no credentials for an API server: {missing()}, and this is no pod with a service account's token "
            f"({SERVICE_ACCOUNT}); set KUBECONFIG"
        )
    ca = _file(SERVICE_ACCOUNT / "ca.crt", PEM_LIMIT, "the service account's CA")
    token = _text(SERVICE_ACCOUNT / "token", "the service account's token")
    own = SERVICE_ACCOUNT / "namespace"
    if namespace is None and own.exists():
        namespace = _text(own, "the service account's namespace")
    cluster = KubeconfigCluster(server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
    return ClusterCredentials(
        server=cluster.server,
        tls=_tls(cluster, ca, "the service account's CA", None, None, ""),
        token=token,
        proxy=None,
        tls_server_name=None,
        namespace=namespace or "default",
        insecure=False,
        ca=ca,
        certificate=None,
        key=None,
        renew_seconds=TOKEN_SECONDS,
    )


def _tls(
    cluster: KubeconfigCluster,
    ca: bytes | None,
    cluster_field: str,
    certificate: bytes | None,
    key: bytes | None,
    user_field: str,
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(cadata=ca.decode("ascii", errors="ignore"))
        except ssl.SSLError:
            raise ValueError(f"{cluster_field}: the certificate authority is not a certificate in PEM") from None
    if certificate is not None and key is not None:
        # OpenSSL reads a certificate from files only. This one is the owner's alone, and gone at once.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            try:
                context.load_cert_chain(file.name, password="")  # and never asks at the terminal
            except (ssl.SSLError, ValueError) as error:
                reason = getattr(error, "reason", None) or "OpenSSL does not take them"
                raise ValueError(f"{user_field}: client certificate and key cannot be used: {reason}") from None
    return context


def _pem(data: bytes | None, path: str | None, field: str) -> bytes | None:
    """What stands in the kubeconfig itself comes before what is in a file."""
    if data is not None or not path:
        return data or None
    return _file(Path(path), PEM_LIMIT, field)


def _text(path: Path, field: str) -> str:
    text = _file(path, TOKEN_LIMIT, field).decode(errors="replace").strip()
    if not text:
        raise ValueError(f"{field}: {path} is empty")
    return text


def _file(path: Path, limit: int, field: str) -> bytes:
    try:
        return bounded(path, limit)
    except OSError as error:
        raise type(error)(f"{field}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
