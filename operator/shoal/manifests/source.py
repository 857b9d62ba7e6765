"""Access of a container to a Model's source: environment, mounts and volumes.

The Job that reads the metadata and the stage container that fetches the weights have the same access, so that one can
read what the other can read.
"""

from typing import Final

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import SOURCES_ENV, OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.sources import parse_source
from shoal.core.artifacts import identity
from shoal.manifests.parts import env_value, mount

CA_DIR: Final = "/shoal/ca"
_PINNED: Final = ("hf", "https", "s3", "gs", "az")
"""Schemes whose content is pinned to the state at which its metadata was read. The folder of a volume or an image may
be changed by the user; `spec.source.digest` pins it."""


def environment(model: Model, config: OperatorConfig, pinned: ArtifactFacts | None = None) -> list[JsonObject]:
    """Environment of a container that reads the source. `pinned`: the facts of the pinned revision."""
    source = model.spec.source
    return [
        env_value(names.STAGE_URI_ENV, source.uri),
        *([env_value(names.STAGE_DIGEST_ENV, source.digest)] if source.digest else []),
        *_pin(source.uri, pinned),
        *([env_value("SHOAL_STAGE_IDENTITY", "true")] if identity(model) else []),
        *network(config),
    ]


def identity_labels(model: Model) -> dict[str, str]:
    """Labels of a pod that reads the source with its ServiceAccount's identity: Azure's webhook only handles pods with
    this label."""
    azure = identity(model) and model.spec.source.uri.startswith("az://")
    return {"azure.workload.identity/use": "true"} if azure else {}


def network(config: OperatorConfig) -> list[JsonObject]:
    """Environment of containers that fetch: HOME, the hub's mirror, proxies, additional CA certificates."""
    sources = _sources(config)
    proxy = {
        "HTTP_PROXY": config.proxy.http,
        "HTTPS_PROXY": config.proxy.https,
        "NO_PROXY": config.proxy.no_proxy,
    }
    return [
        env_value("HOME", names.HOME_DIR),
        *([env_value("HF_ENDPOINT", config.hub_endpoint)] if config.hub_endpoint else []),
        # Left out when it has only defaults, so that engine pods of an older chart do not roll.
        *([env_value(SOURCES_ENV, sources)] if sources != "{}" else []),
        *(env_value(name, content) for name, content in proxy.items() if content),
        *([env_value("SSL_CERT_FILE", f"{CA_DIR}/{config.ca_bundle.key}")] if config.ca_bundle.config_map else []),
    ]


def _sources(config: OperatorConfig) -> str:
    return config.sources.model_dump_json(by_alias=True, exclude_defaults=True, exclude={"ports"})


def mounts(model: Model, config: OperatorConfig) -> list[JsonObject]:
    """Mounts of a container that reads the source."""
    return [
        *source_mount(model),
        *([mount("source-secret", names.SOURCE_SECRET_DIR, read_only=True)] if model.spec.source.secret_ref else []),
        *certificates(config),
    ]


def certificates(config: OperatorConfig) -> list[JsonObject]:
    """The mount of the additional CA certificates."""
    return [mount("ca", CA_DIR, read_only=True)] if config.ca_bundle.config_map else []


def source_mount(model: Model) -> list[JsonObject]:
    """The mount of a source that is read in place; the engine has it too."""
    return [mount("source", names.SOURCE_DIR, read_only=True)] if in_place(model) else []


def volumes(model: Model, config: OperatorConfig) -> list[JsonObject]:
    """The volumes of these mounts."""
    found: list[JsonObject] = [*in_place(model)]
    if (secret := model.spec.source.secret_ref) is not None:
        found.append({"name": "source-secret", "secret": {"secretName": secret.name}})
    return [*found, *certificate_volumes(config)]


def certificate_volumes(config: OperatorConfig) -> list[JsonObject]:
    """The volume of the additional CA certificates."""
    bundle = config.ca_bundle.config_map
    return [{"name": "ca", "configMap": {"name": bundle}}] if bundle else []


def in_place(model: Model) -> list[JsonObject]:
    """The volume of a source that is mounted rather than fetched; empty for other sources."""
    source = parse_source(model.spec.source.uri)
    match source.scheme:
        case "pvc":
            return [{"name": "source", "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}]
        case "oci":
            return [{"name": "source", "image": {"reference": source.image, "pullPolicy": "IfNotPresent"}}]
        case _:
            return []


def _pin(uri: str, facts: ArtifactFacts | None) -> list[JsonObject]:
    if facts is None or uri.partition("://")[0] not in _PINNED:
        return []
    revision = [env_value(names.STAGE_REVISION_ENV, facts.revision)] if facts.revision else []
    return revision + ([env_value(names.STAGE_MANIFEST_ENV, facts.digest)] if facts.digest else [])
