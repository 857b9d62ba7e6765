"""Keys of a Secret with the location and the credentials of a bucket, and their names in obstore."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError

# Only these keys are passed to obstore: among its settings are file names and addresses of token services, and tenants
# must not use a node's own credentials.
KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {
        "AWS_ACCESS_KEY_ID": "access_key_id",
        "AWS_SECRET_ACCESS_KEY": "secret_access_key",
        "AWS_SESSION_TOKEN": "session_token",
        "AWS_REGION": "region",
        "AWS_ENDPOINT_URL": "endpoint",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "virtual_hosted_style_request",
    },
    "gs": {
        "GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key",
        "GOOGLE_BEARER_TOKEN": "bearer_token",
        "GOOGLE_BASE_URL": "base_url",
    },
    "az": {
        "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
        "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
        "AZURE_STORAGE_SAS_TOKEN": "sas_token",
        "AZURE_STORAGE_TOKEN": "token",
        "AZURE_CLIENT_ID": "client_id",
        "AZURE_CLIENT_SECRET": "client_secret",
        "AZURE_TENANT_ID": "tenant_id",
        "AZURE_ENDPOINT": "endpoint",
    },
}
_PROOF: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "s3": (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),),
    "gs": (("GOOGLE_SERVICE_ACCOUNT_KEY",),),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
    ),
}
"""Sets of keys; one complete set authenticates the caller."""
_AZURE_KINDS: Final = {
    "account_key": "access_key",
    "sas_token": "sas_token",
    "client_secret": "client_secret",
    "token": "bearer_token",
}
"""obstore's credential type by setting. Without it, the workload identity in a pod's environment takes precedence over
its Secret."""
_TOKENS: Final = {"gs": "GOOGLE_BEARER_TOKEN", "az": "AZURE_STORAGE_TOKEN"}
"""Key that a ServiceAccount's identity is exchanged for. It expires within hours, so it does not belong in a Secret."""


_VALUES: Final[Mapping[str, re.Pattern[str]]] = {
    "AWS_REGION": re.compile(r"^[a-z0-9-]{1,63}$"),
    "AZURE_STORAGE_ACCOUNT_NAME": re.compile(r"^[a-z0-9]{1,24}$"),
    "AZURE_TENANT_ID": re.compile(r"^[A-Za-z0-9.-]{1,253}$"),
    "AZURE_CLIENT_ID": re.compile(r"^[A-Za-z0-9-]{1,128}$"),
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": re.compile(r"^(true|false|1|0)$", re.IGNORECASE),
}
"""What these keys may say: parts of a cloud's address are made of them, and "x/" would make another address of it."""
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_ENDPOINT")


def endpoint(scheme: str, credentials: StoreCredentials) -> str | None:
    """The address that the Secret names in place of the cloud's own. Raises ArtifactError for one that is none."""
    named = [(key, credentials.values[key]) for key in _ENDPOINTS if key in KEYS[scheme] and key in credentials.values]
    if scheme == "gs" and (key := credentials.values.get("GOOGLE_SERVICE_ACCOUNT_KEY")):
        named.append(("gcs_base_url", _google_url(key)))
    named = [(key, url) for key, url in named if url]
    if not named:
        return None
    if len({url for _, url in named}) > 1:
        raise _unusable("gcs_base_url", "it names another address than GOOGLE_BASE_URL")
    key, url = named[0]
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid, parts = False, None
    if parts is None or not valid or parts.username is not None or parts.query or parts.fragment or not url.isascii():
        raise _unusable(key, "it is not an http:// or https:// URL")
    return url


def _google_url(key: str) -> str:
    """Server in a service account key, which may differ from the cloud's (for emulators)."""
    try:
        found = json.loads(key)
    except (ValueError, RecursionError):
        return ""
    url = cast("dict[str, Any]", found).get("gcs_base_url") if isinstance(found, dict) else None
    return url if isinstance(url, str) else ""


def _unusable(key: str, why: str) -> ArtifactError:
    return ArtifactError(reasons.GATED, f"key {key} of the Secret in source.secretRef cannot be used: {why}")


def store_config(source: SourceUri, credentials: StoreCredentials) -> dict[str, str]:
    """obstore's settings for the bucket. Raises ArtifactError(Gated)."""
    scheme = source.scheme
    for key in KEYS[scheme]:
        value, pattern = credentials.values.get(key), _VALUES.get(key)
        if value is not None and pattern is not None and not pattern.fullmatch(value):
            raise _unusable(key, "its value does not have the cloud's format")
    config = {setting: credentials.values[key] for key, setting in KEYS[scheme].items() if key in credentials.values}
    proven = authenticates(scheme, credentials)
    # A Secret may contain only the location of a public bucket.
    if credentials.given and not proven and (has_any_credential(scheme, credentials) or not config):
        raise ArtifactError(
            reasons.GATED,
            f"the Secret of source.secretRef has no {authenticating_keys(scheme)} (it has: "
            f"{', '.join(sorted(credentials.values)) or 'nothing'})",
        )
    if scheme == "az" and "account_name" not in config:
        raise ArtifactError(
            reasons.GATED,
            f"{source.uri} needs the name of the storage account: put it into key AZURE_STORAGE_ACCOUNT_NAME of a "
            "Secret and name the Secret in source.secretRef",
        )
    if scheme == "s3":
        config.setdefault("region", "us-east-1")
    if not proven:
        config["skip_signature"] = "true"
    elif scheme == "az":
        config["credential_type"] = next(kind for key, kind in _AZURE_KINDS.items() if key in config)
    return config


def authenticates(scheme: str, credentials: StoreCredentials) -> bool:
    """Whether the credentials are complete for this kind of bucket."""
    has = credentials.values
    return any(all(key in has for key in keys) for keys in _PROOF[scheme]) or _TOKENS.get(scheme) in has


def has_any_credential(scheme: str, credentials: StoreCredentials) -> bool:
    """Whether the credentials contain any authenticating key, even if other keys are missing."""
    return any(key in credentials.values for keys in _PROOF[scheme] for key in keys)


def store_settings(scheme: str, credentials: StoreCredentials) -> dict[str, str]:
    """obstore's settings from a Secret, for buckets of Shoal's own; without keys, the pods use their own identity."""
    config = {setting: credentials.values[key] for key, setting in KEYS[scheme].items() if key in credentials.values}
    if scheme == "s3" and config:
        config.setdefault("region", "us-east-1")
    return config


def host(config: Mapping[str, str]) -> str:
    """Server of the bucket as given by the Secret: the same bucket name on another server is another bucket."""
    named = [config.get("endpoint"), config.get("base_url"), config.get("account_name")]
    if key := config.get("service_account_key"):
        try:
            named.append(json.loads(key).get("gcs_base_url"))
        except (ValueError, AttributeError):
            named.append(hashlib.sha256(key.encode()).hexdigest())  # whatever it means, the hash is unique to this key
    return " ".join(filter(None, named))


def authenticating_keys(scheme: str) -> str:
    """Authenticating keys for this kind of bucket, for people."""
    return ", or ".join(" and ".join(keys) for keys in _PROOF[scheme])
