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
    """`sqlite:////path/file` or `postgresql://user@host:5432/database`. A password is better kept out of it: libpq
    reads PGPASSWORD and PGPASSFILE."""
    host: str = "0.0.0.0"  # noqa: S104 - a pod's own address; the NetworkPolicy decides who reaches it
    port: int = Field(default=names.LEDGER_PORT, ge=0, le=65535)
    mtls: bool = False
    """Gateways call over mutual TLS, and it calls agents so; ready only with a certificate."""
    mtls_dir: Path = Path(names.TLS_DIR)
    """The mounted Secret with this process's certificate, which the operator issues. It may appear later."""
    mtls_port: int = Field(default=names.LEDGER_TLS_PORT, ge=0, le=65535)
    ops_host: str = "0.0.0.0"  # noqa: S104
    ops_port: int = Field(default=names.OPS_PORT, ge=0, le=65535)
    installation: str = Field(default="shoal", min_length=1, max_length=128)
    """The `source` of records that are not a gateway's; the same as the gateways have."""
    pod_name: str = Field(default="", validation_alias=AliasChoices("SHOAL_LEDGER_POD_NAME", "POD_NAME", "pod_name"))
    pod_namespace: str = Field(
        default="shoal-system",
        validation_alias=AliasChoices("SHOAL_LEDGER_POD_NAMESPACE", "POD_NAMESPACE", "pod_namespace"),
    )
    keys_dir: Path = Path(names.ROLE_KEYS_DIR)
    install_key_dir: Path = Path(names.INSTALL_KEY_DIR)
    prices_dir: Path = Path(names.PRICES_DIR)
    reconcile: bool = True
    """Whether the engines' own counters are read, which takes a cluster; without it nothing is `unattributed`."""
    scope_namespaces: tuple[str, ...] = ()
    """The only namespaces whose engines are read, Shoal's own among them, as JSON; empty: all."""
    metrics_auth: bool = False
    """Whether /metrics and what /readyz says of causes are for those alone whose Kubernetes token may `get` them."""
    gateway_tokens: bool = False
    """Whether a gateway must prove from which pod it sends records, by a token of that pod, and may send only its own.
    Takes a cluster, whose API server knows the tokens."""
    gateway_account: str = Field(default="shoal-gateway", min_length=1)
    """The ServiceAccount of gateways, in this ledger's own namespace."""
    log_level: str = "info"

    retention_days: int = Field(default=92, ge=1, le=36_500)
    """How long single records are kept, from their arrival: raw ones and requests."""
    hours_retention_days: int = Field(default=1_100, ge=32, le=36_500)
    """How long hourly sums are kept, from which bills are made. Credits are never deleted."""
    close_open_seconds: float = Field(default=3_600.0, gt=0)
    """A gateway that has said nothing for so long is dead: its open requests are closed as `cut` with the counts of
    their last checkpoint. More than the longest request and its longest wait together, or live requests are closed
    (and put right when their final record comes)."""
    readers: int = Field(default=4, ge=1, le=64)
    """Queries at a time."""
    max_body_bytes: int = Field(default=16 * _MIB, gt=0)
    """Of a call, also after it was decompressed."""
    max_waiting_records: int = Field(default=50_000, gt=0)
    """Records that wait for their commit; further batches get a 503 with Retry-After."""
    answer_seconds: float = Field(default=30.0, gt=0)
    """Longest that a call waits for the database."""

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        # Else the host would begin within the password, and stand in logs and errors.
        if not value.startswith("sqlite") and value.partition("?")[0].count("@") > 1:
            raise ValueError("there is more than one @: in the password write it as %40 (: as %3A, / as %2F, % as %25)")
        try:
            url = make_url(value)
        except ArgumentError:
            raise ValueError("not a database URL; such as sqlite:////var/lib/shoal-ledger/ledger.sqlite") from None
        except ValueError:
            raise ValueError("not a database URL: what stands behind the host's colon is no port") from None
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        if url.drivername not in ("sqlite", "postgresql+psycopg"):
            raise ValueError(f"{url.drivername} is not supported: sqlite:////path/file or postgresql://host/database")
        if url.drivername == "sqlite" and not url.database:
            raise ValueError("a SQLite database needs a file: sqlite:////path/file (four slashes: an absolute path)")
        return url.render_as_string(hide_password=False)
