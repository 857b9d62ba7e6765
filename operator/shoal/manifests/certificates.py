"""Secrets with certificates: one per process of Shoal, and one per Model for its pods."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import orjson

from shoal.api import names
from shoal.api.identity import ProcessRole
from shoal.api.meta import JsonObject
from shoal.core import children
from shoal.core.certificates import Leaf
from shoal.manifests import sidecar
from shoal.manifests.secrets import encoded, own_secret
from shoal.manifests.shape import Named, metadata
from shoal.net.pki import CertificatePair

_FIELDS: Final = ("uri", "dns", "authority")


def authority(namespace: str, data: Mapping[str, str], resource_version: str | None) -> JsonObject:
    """The Secret with the authorities, which only the operator reads. `resource_version` is the version that it
    updates."""
    secret = own_secret(namespace, names.AUTHORITY_SECRET, {})
    secret["data"] = dict(data)
    if resource_version is not None:
        secret["metadata"]["resourceVersion"] = resource_version
    return secret


def trusted(namespace: str, trust: str) -> JsonObject:
    """The ConfigMap with the certificates of the trusted authorities, for clients that are no process of Shoal."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.AUTHORITY_CONFIG_MAP,
            "namespace": namespace,
            "labels": {names.LABEL_PART_OF: "shoal", names.LABEL_MANAGED_BY: names.MANAGED_BY},
        },
        "data": {names.TRUST_FILE: trust},
    }


def process_name(role: ProcessRole) -> str:
    """Name of the Secret that the chart mounts."""
    return f"shoal-{role}-tls"


def process(namespace: str, role: ProcessRole, pair: CertificatePair, trust: str, leaf: Leaf) -> JsonObject:
    """The Secret with the certificate of one of Shoal's processes."""
    secret = own_secret(namespace, process_name(role), _files(pair, trust, strict=leaf.strict))
    secret["metadata"]["annotations"] = {names.ANNOTATION_CERTIFICATE: annotation(leaf)}
    return secret


def of_model(model: Named, pair: CertificatePair, trust: str, leaf: Leaf, *, caller: str) -> JsonObject:
    """The Secret with the certificate of a Model's pods: as files for the agent, and in Envoy's format for the sidecar.
    `caller` is the URI of the only client that the sidecar accepts."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, children.certificate_secret(model.metadata.name))
        | {"annotations": {names.ANNOTATION_CERTIFICATE: annotation(leaf)}},
        "type": "Opaque",
        "data": encoded(_files(pair, trust, strict=True) | sidecar.secrets(pair, trust, caller)),
    }


def scaler(namespace: str, pair: CertificatePair, authority: str, leaf: Leaf) -> JsonObject:
    """The Secret with the certificate of the external scaler. `authority` is the CA certificate that KEDA is given.
    `leaf` is for people and `shoal doctor`: renewal reads the certificate itself."""
    secret = own_secret(namespace, names.SCALER_TLS_SECRET, _files(pair, authority, strict=False))
    secret["metadata"]["annotations"] = {names.ANNOTATION_CERTIFICATE: annotation(leaf)}
    secret["type"] = "kubernetes.io/tls"
    return secret


def annotation(leaf: Leaf) -> str:
    """Metadata of a certificate as text."""
    said: dict[str, Any] = {name: getattr(leaf, name) for name in _FIELDS}
    said |= {"trust": list(leaf.trust), "strict": leaf.strict}
    said |= {"notBefore": leaf.not_before.isoformat(), "notAfter": leaf.not_after.isoformat()}
    return orjson.dumps(said).decode()


def read_annotation(found: JsonObject) -> Leaf | None:
    """Metadata of the certificate in such a Secret; None: it has none that this version understands."""
    annotations: Mapping[str, str] = found["metadata"].get("annotations") or {}
    try:
        said: Any = orjson.loads(annotations.get(names.ANNOTATION_CERTIFICATE, ""))
        uri, dns, authority = (str(said[name]) for name in _FIELDS)
        return Leaf(
            datetime.fromisoformat(said["notBefore"]),
            datetime.fromisoformat(said["notAfter"]),
            uri,
            dns,
            authority,
            tuple(str(each) for each in said["trust"]),
            bool(said["strict"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _files(pair: CertificatePair, trust: str, *, strict: bool) -> dict[str, str]:
    return {
        names.CERTIFICATE_FILE: pair.certificate,
        names.CERTIFICATE_KEY_FILE: pair.key,
        names.TRUST_FILE: trust,
        **({names.STRICT_FILE: "nobody is answered without mutual TLS\n"} if strict else {}),
    }
