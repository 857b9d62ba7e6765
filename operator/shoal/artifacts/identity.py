"""Reads a bucket with the pod's ServiceAccount identity: exchanges the cloud's token for temporary keys.

A cloud provides a ServiceAccount's identity by environment variables (AWS: IRSA, EKS Pod Identity; Azure Workload
Identity) or by a metadata server (GKE). The keys are used like those of a Secret. The node cache receives them with
each request, so it needs no identity of its own and reads the bucket as the requesting pod.
"""

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from xml.etree import ElementTree

import aiohttp
import structlog

from shoal.api import reasons
from shoal.api.sources import parse_source
from shoal.artifacts.bucketkeys import authenticates, has_any_credential
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError, Interrupted
from shoal.artifacts.ranges import with_retries
from shoal.artifacts.source import Settings

_GOOGLE: Final = "/computeMetadata/v1/instance/service-accounts/default"
_METADATA_SECONDS: Final = 3.0
"""Timeout of the metadata server, which runs on the node: without a response it does not exist or is not ready yet."""

log = structlog.get_logger()


async def with_identity(
    uri: str, credentials: StoreCredentials, settings: Settings, environment: Mapping[str, str]
) -> StoreCredentials:
    """`credentials`, or temporary keys of the pod's identity if the credentials do not authenticate for the bucket.

    Without an identity, `credentials` are returned unchanged: the bucket may be public. Raises ArtifactError: Gated if
    the cloud refuses the identity, SourceUnreachable if the cloud is unavailable, SourceInvalid for an invalid URI.
    """
    try:
        scheme = parse_source(uri).scheme
    except ValueError as error:
        raise ArtifactError(reasons.SOURCE_INVALID, str(error)) from None
    # A Secret with missing keys is an error, and is not replaced by the identity.
    if (
        scheme not in ("s3", "gs", "az")
        or authenticates(scheme, credentials)
        or has_any_credential(scheme, credentials)
    ):
        return credentials
    exchange = _Exchange(settings, environment)
    ask = {"s3": exchange.aws, "gs": exchange.google, "az": exchange.azure}[scheme]
    try:
        found = await with_retries(settings, ask)
    except NoMetadata:
        found = None
    if found is None:
        log.info("source.no_identity", scheme=scheme, consequence="it is read without credentials")
        return credentials
    keys, who = found
    log.info("source.identity", scheme=scheme, who=who)
    # The Secret's location of the bucket (an endpoint, an account) takes precedence over the cloud's.
    return replace(credentials, values={**keys, **credentials.values}, identity=who)


_Found = tuple[dict[str, str], str] | None
"""Keys named as in a Secret, and the identity that they belong to, for messages."""


class NoMetadata(Interrupted):
    """No metadata server responds: there is none, or it does not know the pod yet."""


class _Exchange:
    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings, self._env = settings, environment

    async def aws(self) -> _Found:
        """IRSA: AssumeRoleWithWebIdentity of the AWS STS API, which needs no signature. Otherwise EKS Pod Identity."""
        env = self._env
        region = {"AWS_REGION": env["AWS_REGION"]} if env.get("AWS_REGION") else {}
        if (role := env.get("AWS_ROLE_ARN")) and (file := env.get("AWS_WEB_IDENTITY_TOKEN_FILE")):
            form = {
                "Action": "AssumeRoleWithWebIdentity",
                "Version": "2011-06-15",
                "RoleArn": role,
                "RoleSessionName": env.get("AWS_ROLE_SESSION_NAME") or "shoal",
                "WebIdentityToken": await _read(file),
            }
            text = await self._ask("POST", _sts(env), f"role {role}", data=form)
            return region | _aws_keys(_of_xml(text, role)), f"role {role}"
        if uri := env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
            who = "the pod identity association of its ServiceAccount"
            file = env.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
            headers = {"Authorization": await _read(file)} if file else {}
            answer = _object(await self._ask("GET", uri, who, headers=headers, direct=True), who)
            return region | _aws_keys(answer | {"SessionToken": answer.get("Token")}), who
        return None

    async def google(self) -> _Found:
        """GKE's metadata server, which identifies each pod as its ServiceAccount."""
        host = self._env.get("GCE_METADATA_HOST") or "metadata.google.internal"
        who = "the ServiceAccount's Google identity"
        try:
            async with asyncio.timeout(_METADATA_SECONDS):
                text = await self._ask(
                    "GET", f"http://{host}{_GOOGLE}/token", who, headers={"Metadata-Flavor": "Google"}, direct=True
                )
        except (Interrupted, TimeoutError):
            raise NoMetadata(f"{host} does not answer") from None
        token = _object(text, who).get("access_token")
        return ({"GOOGLE_BEARER_TOKEN": token}, who) if isinstance(token, str) and token else None

    async def azure(self) -> _Found:
        """Azure Workload Identity: the ServiceAccount's token as a client assertion of Microsoft Entra ID."""
        env = self._env
        client, tenant = env.get("AZURE_CLIENT_ID"), env.get("AZURE_TENANT_ID")
        file = env.get("AZURE_FEDERATED_TOKEN_FILE")
        if not (client and tenant and file):
            return None
        host = (env.get("AZURE_AUTHORITY_HOST") or "https://login.microsoftonline.com").rstrip("/")
        form = {
            "grant_type": "client_credentials",
            "client_id": client,
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            "client_assertion": await _read(file),
            "scope": "https://storage.azure.com/.default",
        }
        who = f"client {client} of tenant {tenant}"
        token = _object(await self._ask("POST", f"{host}/{tenant}/oauth2/v2.0/token", who, data=form), who)
        found = token.get("access_token")
        return ({"AZURE_STORAGE_TOKEN": found}, who) if isinstance(found, str) and found else None

    async def _ask(
        self,
        method: str,
        url: str,
        who: str,
        *,
        data: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        direct: bool = False,
    ) -> str:
        """Sends a request and returns the text of the response. `direct`: without the chart's proxy, to a server on the
        node. Raises ArtifactError."""
        host = urlsplit(url).netloc
        settings = self._settings
        timeout = aiohttp.ClientTimeout(total=settings.stall_seconds, sock_connect=settings.connect_seconds)
        context = await asyncio.to_thread(ssl.create_default_context)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(ssl=context), timeout=timeout, trust_env=not direct
                ) as session,
                session.request(method, url, data=data, headers=headers, allow_redirects=False) as response,
            ):
                text, status = await response.text(), response.status
        except aiohttp.ClientConnectorCertificateError:
            raise ArtifactError(
                reasons.SOURCE_UNREACHABLE,
                f"the certificate of {host} is not trusted: add its CA to the chart's caBundle",
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Interrupted(f"{host}, which identifies {who}, cannot be reached ({type(error).__name__})") from None
        if status == 200:
            return text
        if status == 429 or status >= 500:
            raise Interrupted(f"{host}, which identifies {who}, answered {status}")
        raise _refused(who, f"{host} answered {status}")


def _sts(env: Mapping[str, str]) -> str:
    """STS of the pod's region, as the AWS SDKs choose it."""
    if (named := env.get("AWS_ENDPOINT_URL_STS")) is not None:
        return named
    region = env.get("AWS_REGION")
    if not region:
        return "https://sts.amazonaws.com"
    return f"https://sts.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def _of_xml(text: str, role: str) -> dict[str, str | None]:
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - of AWS, over TLS; expat refuses entities that blow up
    except ElementTree.ParseError:
        raise _refused(f"role {role}", "STS's answer is not understood") from None
    found = root.find(".//{*}Credentials")
    return {each.tag.rpartition("}")[2]: each.text for each in found} if found is not None else {}


def _aws_keys(answer: Mapping[str, Any]) -> dict[str, str]:
    named = {
        "AWS_ACCESS_KEY_ID": answer.get("AccessKeyId"),
        "AWS_SECRET_ACCESS_KEY": answer.get("SecretAccessKey"),
        "AWS_SESSION_TOKEN": answer.get("SessionToken"),
    }
    if not all(isinstance(value, str) and value for value in named.values()):
        raise _refused("the ServiceAccount's AWS identity", "the answer has no keys")
    return {name: str(value) for name, value in named.items()}


def _object(text: str, who: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _refused(who, "the answer is not understood")
    return found  # pyright: ignore[reportUnknownVariableType]


def _refused(who: str, why: str) -> ArtifactError:
    return ArtifactError(
        reasons.GATED,
        f"the cloud does not give the pod the identity of {who} ({why}): check the annotations of the "
        "ServiceAccount in spec.pod.serviceAccountName and that the identity trusts its namespace and name",
    )


async def _read(path: str) -> str:
    """Reads a projected token. Raises ArtifactError."""
    try:
        return (await asyncio.to_thread(Path(path).read_text)).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            reasons.GATED,
            f"the ServiceAccount's token cannot be read from {path} ({type(error).__name__}): look whether the cloud's "
            "webhook still adds it to new pods",
        ) from None


async def credentials_of(uri: str, secret: Path, settings: Settings, *, identity: bool) -> StoreCredentials:
    """Credentials of a source: the mounted Secret, or the identity of the pod's ServiceAccount if `identity` (the Model
    names one) and the Secret does not authenticate. Raises ArtifactError and OSError."""
    found = await asyncio.to_thread(StoreCredentials.read, secret)
    return await with_identity(uri, found, settings, os.environ) if identity else found
