"""Settings of the node cache: environment variables SHOAL_CACHE_*, written by the chart."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal.api import names
from shoal.api.config import Sources
from shoal.cache.diskquota import FREE_PERCENT
from shoal.cache.index import GRACE_SECONDS
from shoal.core import quantity


def _size(value: str) -> str:
    if quantity.count(value) <= 0:
        raise ValueError("must be more than zero, such as 500Gi")
    return value


class CacheSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SHOAL_CACHE_", frozen=True, extra="ignore")

    root: Path = Path("/cache")
    """Folder of the cache: the mounted hostPath of the node."""
    size: Annotated[str, AfterValidator(_size)] = "500Gi"
    """Size limit of the cache (a Quantity)."""
    free_percent: int = Field(default=FREE_PERCENT, ge=0, le=90)
    """Percentage of the disk that is kept free."""
    scrub_rate: Annotated[str, AfterValidator(_size)] = "16Mi"
    """Rate in bytes per second (a Quantity) at which stored files are verified, each file once a week."""
    sources: Sources = Sources()
    """Allowed sources, as JSON."""
    hub_endpoint: str = ""
    """URL of a mirror of the hub; empty: the hub itself."""
    ca_bundle: str = ""
    """File with additional CA certificates; a missing file is ignored."""
    grace_seconds: float = Field(default=GRACE_SECONDS, ge=0)
    """Seconds in which a model is not evicted, after its last use and after a start."""
    ops_host: str = "0.0.0.0"  # noqa: S104 - a pod's own address; the NetworkPolicy decides who reaches it
    ops_port: int = Field(default=names.OPS_PORT, ge=0, le=65535)
    metrics_auth: bool = False
    """Whether /metrics and the causes in /readyz are restricted to callers whose Kubernetes token may `get` them."""
    log_level: str = "info"

    @property
    def scrub_bytes_per_second(self) -> int:
        return quantity.count(self.scrub_rate)

    @property
    def size_bytes(self) -> int:
        return quantity.count(self.size)
