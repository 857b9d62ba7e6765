"""Settings of the gateway: environment variables SHOAL_GATEWAY_*, written by the chart."""

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal.api import names
from shoal.api.config import ExternalHost

_MIB = 1024 * 1024


class GatewaySettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SHOAL_GATEWAY_", frozen=True, extra="ignore")

    host: str = "0.0.0.0"  # noqa: S104 - a pod's own address; the NetworkPolicy decides who reaches it
    port: int = Field(default=names.GATEWAY_PORT, ge=0, le=65535)
    ops_host: str = "0.0.0.0"  # noqa: S104
    ops_port: int = Field(default=names.OPS_PORT, ge=0, le=65535)
    tls_cert: Path | None = None
    """PEM file of the certificate chain; read again when it changes."""
    tls_key: Path | None = None
    mtls: bool = False
    """Ready only with a certificate: replicas, the ledger and the other gateways speak mutual TLS."""
    mtls_dir: Path = Path(names.TLS_DIR)
    """The mounted Secret with this process's certificate, which the operator issues. It may appear later."""
    mtls_port: int = Field(default=names.OPS_TLS_PORT, ge=0, le=65535)
    """Where operators and the other gateways call."""
    ext_proc: bool = False
    """Answers Envoys that ask what to do with a request (docs/other-doors.md)."""
    ext_proc_port: int = Field(default=names.EXT_PROC_PORT, ge=0, le=65535)
    ext_proc_tls_dir: Path | None = None
    """The mounted Secret with tls.crt and tls.key of that port, read again when it changes. None: plain HTTP/2."""
    ext_proc_client_certificates: bool = False
    """Whether callers of that port need a certificate that the folder's ca.crt signed."""
    installation: str = Field(default="shoal", min_length=1, max_length=128)
    """Names this installation; the `source` of usage records. The same for all gateways, never a pod's name."""
    pod_name: str = Field(default="", validation_alias=AliasChoices("SHOAL_GATEWAY_POD_NAME", "POD_NAME", "pod_name"))
    """This gateway's own pod. If it is not set, the gateway treats itself as one of its peers."""
    pod_namespace: str = Field(
        default="shoal-system",
        validation_alias=AliasChoices("SHOAL_GATEWAY_POD_NAMESPACE", "POD_NAMESPACE", "pod_namespace"),
    )
    """Where the other gateways are."""
    keys_dir: Path = Path(names.ROLE_KEYS_DIR)
    install_key_dir: Path = Path(names.INSTALL_KEY_DIR)
    spool_dir: Path = Path(names.SPOOL_DIR)
    spool_max_bytes: int | None = Field(default=None, ge=16 * _MIB)
    """Most bytes that the spool may use. None: 80 % of its volume, and at most 1.5 GiB."""
    when_spool_full: Literal["Refuse", "Serve"] = "Refuse"
    """What happens when usage can no longer be kept on disk. Refuse: requests get 503 `cannot_record_usage`. Serve:
    requests are served, and lost records are counted."""
    spool_keep_seconds: float = Field(default=900.0, ge=0)
    """How long final rows stay in the spool after the ledger has them, for `shoal gateway records`."""
    ledger_url: str = ""
    """Such as http://shoal-ledger:8500. Empty: there is no ledger, and rows stay in the spool."""
    ledger_token_file: Path = Path(names.LEDGER_TOKEN_FILE)
    """The mounted token that proves to the ledger from which pod rows come; read again when it changes. It may be
    missing, but a ledger that requires it then takes no rows. If it exists, `pod_name` must be set: the ledger's totals
    are by boot ids that name the pod."""
    ship_seconds: float = Field(default=20.0, ge=0)
    """After the last request: how long shipping the spool may take before the process ends. The rest is shipped at the
    next start."""
    scope_namespaces: tuple[str, ...] = ()
    """The only namespaces whose Models are served, Shoal's own among them, as JSON; empty: all."""
    metrics_auth: bool = False
    """Whether /metrics and the reasons in /readyz require a Kubernetes token that may `get` them."""
    role_tokens: bool = False
    """Whether people may read and delete request logs with a Kubernetes token whose owner has the right
    (docs/roles.md)."""
    log_level: str = "info"

    request_seconds: float = Field(default=900.0, gt=0)
    """Longest time that one request may take at replicas, up to its last byte. Waiting for a replica comes on top."""
    hold_seconds: float = Field(default=600.0, ge=0)
    """Longest time that a request waits for a replica, whatever its Model allows: it is part of the pod's grace
    period."""
    body_seconds: float = Field(default=60.0, gt=0)
    """Longest time that a client may take to send its head or its body, and longest time that it may read nothing of
    its answer while more waits to be sent."""
    connect_seconds: float = Field(default=2.0, gt=0)
    """Longest time that connecting to an engine may take."""
    traffic_requests: int = Field(default=65_536, ge=0, le=1 << 20)
    """Answered requests that are kept in memory for `shoal advise`, without their prompts (docs/advise.md): about 200
    bytes each. 0: none."""
    routing: Literal["Seconds", "PrefixHeads"] = "Seconds"
    """How a replica is chosen. Seconds: by the predicted seconds until the first token (docs/routing.md). PrefixHeads:
    by the head of the prompt, within the replica's share of the load."""
    attempts: int = Field(default=3, ge=1, le=10)
    """Replicas that one request is sent to at most, all before the first byte of an answer."""
    max_body_bytes: int = Field(default=16 * _MIB, gt=0)
    max_form_bytes: int = Field(default=26 * _MIB, gt=0)
    """Largest form: a file of 25 MiB, as OpenAI takes, and the fields beside it. `max_body_bytes` where that is
    larger."""
    max_body_values: int = Field(default=1024 * 1024, gt=0)
    """Most JSON values of one body, at any depth: a prompt of a million token ids has as many."""
    max_body_containers: int = Field(default=64 * 1024, gt=0)
    """Arrays and objects of one body."""
    max_body_strings: int = Field(default=128 * 1024, gt=0)
    """Strings of one body, names of members included."""
    max_body_depth: int = Field(default=128, ge=16, le=250)
    """Levels of arrays and objects inside each other."""
    max_held_body_bytes: int | None = Field(default=None, gt=0)
    """Bytes of all request bodies in memory at one time; one tenant may use half of it. None: a quarter of the
    container's memory."""
    max_answer_bytes: int | None = Field(default=None, gt=0)
    """Largest non-streaming answer in bytes. None: 256 MiB, and at most half of `max_held_answer_bytes`."""
    max_held_answer_bytes: int | None = Field(default=None, gt=0)
    """Bytes of all non-streaming answers in memory at one time. None: a quarter of the container's memory."""
    max_head_bytes: int = Field(default=32 * 1024, gt=0)
    max_connections: int | None = Field(default=None, gt=0)
    """Most client connections. None: one for each 64 KiB of the container's memory, and at most 16384."""
    max_requests: int = Field(default=4096, gt=0)
    """Requests in flight at one time; further ones get a 503 with Retry-After."""
    keep_alive_seconds: int = Field(default=75, gt=0)
    """Longest idle time of a client's connection; it must be longer than a load balancer's."""
    settle_seconds: float = Field(default=5.0, ge=0)
    """After SIGTERM: how long new requests are still served, so that Endpoints and load balancers can follow."""
    max_tracked_models: int = Field(default=1000, gt=0)
    """Models with metric series of their own; further ones share the label "other"."""
    log_dir: Path = Path(names.LOGS_DIR)
    """Request logs of tenants that asked for one; made when the first entry is written."""
    log_max_bytes: int = Field(default=0, ge=0)
    """Most bytes of `log_dir`; further entries are dropped and counted. 0: no limit."""
    log_url: str = ""
    """Where finished files go, such as s3://bucket/prefix (gs://, az://). Empty: they stay in `log_dir`."""
    log_secret_dir: Path | None = None
    """The mounted Secret with the bucket's credentials. Without it the pod's own identity is used."""
    log_key_dir: Path | None = None
    """The mounted Secret with the keys of request logs: `current` encrypts, the others only decrypt. Without it logs
    are not encrypted."""
    log_queue_bytes: int = Field(default=64 * _MIB, gt=0)
    """Most bytes of the request log in memory: captures of running requests, and entries that wait for the disk."""
    log_entry_bytes: int = Field(default=_MIB, ge=4096)
    """Most bytes of one request, and of one answer, in an entry."""
    log_rotate_bytes: int = Field(default=8 * _MIB, ge=4096)
    """A file is closed when it reaches this size."""
    log_rotate_seconds: float = Field(default=900.0, gt=0, le=3600.0)
    """A file is closed when it reaches this age."""
    media_egress: bool = False
    """Whether media that clients name by https URL are fetched, from the hosts that a Model allows. Off: such requests
    are refused."""
    external_hosts: tuple[ExternalHost, ...] = ()
    """Hosts that external targets of routes may have, as JSON. None: every external target is refused."""
    external_keys_dir: Path | None = None
    """The mounted Secret with the keys of external targets, which the operator writes. It may appear later."""
    replica_header: bool = False
    """Adds x-shoal-replica (namespace/pod) to answers. It reveals the fleet to clients."""
