"""Settings of the ledger: environment variables SHOAL_LEDGER_*, written by the chart."""

from pathlib import Path

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from shoal.api import names

_MIB = 1024 * 1024


class LedgerSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SHOAL_LEDGER_", frozen=True, extra="ignore")

    database_url: str = Field(default=f"sqlite:///{names.LEDGER_DIR}/ledger.sqlite", repr=False)
    """`sqlite:////path/file` or `postgresql://user@host:5432/database`. Prefer to leave the password out: libpq reads
    PGPASSWORD and PGPASSFILE."""
    host: str = "0.0.0.0"  # noqa: S104 - a pod's own address; the NetworkPolicy decides who reaches it
    port: int = Field(default=names.LEDGER_PORT, ge=0, le=65535)
    mtls: bool = False
    """Whether the ledger serves gateways and calls agents with mutual TLS; it is then ready only with a certificate."""
    mtls_dir: Path = Path(names.TLS_DIR)
    """Mounted Secret with this process's certificate, issued by the operator. It may appear later."""
    mtls_port: int = Field(default=names.LEDGER_TLS_PORT, ge=0, le=65535)
    ops_host: str = "0.0.0.0"  # noqa: S104
    ops_port: int = Field(default=names.OPS_PORT, ge=0, le=65535)
    installation: str = Field(default="shoal", min_length=1, max_length=128)
    """`source` of records that do not come from a gateway; the same as in the gateways' settings."""
    pod_name: str = Field(default="", validation_alias=AliasChoices("SHOAL_LEDGER_POD_NAME", "POD_NAME", "pod_name"))
    pod_namespace: str = Field(
        default="shoal-system",
        validation_alias=AliasChoices("SHOAL_LEDGER_POD_NAMESPACE", "POD_NAMESPACE", "pod_namespace"),
    )
    keys_dir: Path = Path(names.ROLE_KEYS_DIR)
    install_key_dir: Path = Path(names.INSTALL_KEY_DIR)
    prices_dir: Path = Path(names.PRICES_DIR)
    reconcile: bool = True
    """Whether the counters of engines are read, which requires a cluster; without it nothing is `unattributed`."""
    scope_namespaces: tuple[str, ...] = ()
    """Namespaces whose engines are read, including Shoal's own, as JSON; empty: all."""
    metrics_auth: bool = False
    """Whether /metrics and the causes in /readyz are restricted to callers whose Kubernetes token may `get` them."""
    gateway_tokens: bool = False
    """Whether a gateway must identify its pod with the pod's token, and may send only its own records. Requires a
    cluster, whose API server verifies the tokens."""
    role_tokens: bool = False
    """Whether people may query with a Kubernetes token whose owner has the right (docs/roles.md). Requires a cluster,
    whose API server verifies the tokens."""
    gateway_account: str = Field(default="shoal-gateway", min_length=1)
    """ServiceAccount of gateways, in the ledger's namespace."""
    log_level: str = "info"

    retention_days: int = Field(default=92, ge=1, le=36_500)
    """Days for which single records are kept after their arrival: raw records and requests."""
    hours_retention_days: int = Field(default=1_100, ge=32, le=36_500)
    """Days for which hourly sums are kept. Bills are made from them. Credits are never deleted."""
    close_open_seconds: float = Field(default=3_600.0, gt=0)
    """Silence after which a gateway is dead: its open requests are closed as `cut` with the counts of their last
    checkpoint. It must exceed the longest request plus its longest hold time; otherwise live requests are closed, and
    corrected when their final record arrives."""
    readers: int = Field(default=4, ge=1, le=64)
    """Concurrent queries."""
    max_body_bytes: int = Field(default=16 * _MIB, gt=0)
    """Size limit of a request body, also after decompression."""
    max_waiting_records: int = Field(default=50_000, gt=0)
    """Records waiting for their commit at most; further batches get 503 with Retry-After."""
    answer_seconds: float = Field(default=30.0, gt=0)
    """Timeout of waiting for the database."""

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        # Otherwise part of the password would be parsed as the host, and appear in logs and errors.
        if not value.startswith("sqlite") and value.partition("?")[0].count("@") > 1:
            raise ValueError("there is more than one @: in the password write it as %40 (: as %3A, / as %2F, % as %25)")
        try:
            url = make_url(value)
        except ArgumentError:
            raise ValueError("not a database URL; such as sqlite:////var/lib/shoal-ledger/ledger.sqlite") from None
        except ValueError:
            raise ValueError("not a database URL: the text after the host's colon is not a port") from None
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        if url.drivername not in ("sqlite", "postgresql+psycopg"):
            raise ValueError(f"{url.drivername} is not supported: sqlite:////path/file or postgresql://host/database")
        if url.drivername == "sqlite" and not url.database:
            raise ValueError("a SQLite database needs a file: sqlite:////path/file (four slashes: an absolute path)")
        return url.render_as_string(hide_password=False)
