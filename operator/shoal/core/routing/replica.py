"""A replica, as routing knows it."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine pod, from the API server."""

    uid: str
    namespace: str
    name: str
    model: str
    """`namespace/name` of its Model."""
    model_uid: str
    ip: str | None
    ready: bool
    deleting: bool
    install_key: str | None
    """Fingerprint of the install key from which its keys are derived."""
    gpu_class: str | None
    node: str | None
    mtls: bool = False
    """Engine and agent use mutual TLS."""
    engine: str = "SGLang"
    """Type of its engine, which during a rollout may differ from the Model's."""
    engine_version: str | None = None
    """Version of its engine; None: its pod does not say it."""
    compiles_tools: bool = False
    """Its engine may make a grammar of the schemas of all tools, whatever the Model says now."""
    reads_media: bool = True
    """Its engine reads the images and sounds that the Model's weights can read; False: its pod says that it reads text
    only, whatever the Model says now."""
    created: datetime | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def runs(self) -> tuple[str, str | None]:
        """Type and version of its engine. Replicas of one Model that run the same serve the same endpoints."""
        return self.engine, self.engine_version
