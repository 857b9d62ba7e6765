"""The TLS sidecar of an engine: Envoy, which terminates mutual TLS and exposes only the serving paths to gateways.

The engine listens on localhost. Envoy has three routes to it: serving paths over mutual TLS for gateways, the path of
its probe for the kubelet, and plain /metrics where scrapers are configured. The agent is in the same pod and does not
use Envoy.
"""

from collections.abc import Sequence
from typing import Any, Final

import orjson

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.core.admission import HEADER
from shoal.engine.port import PodSide
from shoal.net.pki import CertificatePair

IDLE_SECONDS: Final = 75
"""Longer than the idle timeout of gateways' connections, so that gateways never write to a connection that is being
closed."""
ENGINE_IDLE_SECONDS: Final = 4
"""Shorter than the idle timeout of engines (SGLang and vLLM: 5 s), for the same reason."""
CONNECT_SECONDS: Final = 2
BUFFER_BYTES: Final = 64 * 1024
"""Buffer per connection. Larger bodies pass through it by backpressure on the sender."""
_NO_LIMIT: Final = 1_000_000
_TYPE: Final = "type.googleapis.com/envoy."
_CERTIFICATE, _TRUST = "certificate", "trust"


def secrets(pair: CertificatePair, trust: str, caller: str) -> dict[str, str]:
    """The certificate's files in Envoy's format; Envoy reloads them when they change. `caller` is the URI that the
    client's certificate must have."""
    certificate = {"certificate_chain": {"inline_string": pair.certificate}, "private_key": {"inline_string": pair.key}}
    validation = {
        "trusted_ca": {"inline_string": trust},
        "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"exact": caller}}],
    }
    return {
        f"{_CERTIFICATE}.json": _secret(_CERTIFICATE, "tls_certificate", certificate),
        f"{_TRUST}.json": _secret(_TRUST, "validation_context", validation),
    }


def command(
    config: OperatorConfig, kind: PodSide, *, folder: str = names.TLS_DIR, engine_port: int = names.ENGINE_PORT
) -> list[str]:
    """Command of the container. `kind`: of the engine behind it."""
    return [
        "envoy",
        "--config-yaml",
        orjson.dumps(bootstrap(config, kind, folder=folder, engine_port=engine_port)).decode(),
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "--log-level",
        "warning",
    ]


def bootstrap(
    config: OperatorConfig,
    kind: PodSide,
    *,
    folder: str = names.TLS_DIR,
    engine_port: int = names.ENGINE_PORT,
    serving_port: int = names.ENGINE_TLS_PORT,
    probe_port: int = names.ENGINE_PROBE_PORT,
    proxy_port: int = names.ENGINE_PROXY_PORT,
    admission_port: int = names.ADMISSION_PORT,
) -> JsonObject:
    """Envoy's configuration. `folder` contains the files of `secrets`."""
    # Gateways check with the probe whether a replica that lost a request is still there.
    serving = [*(_to_engine(path, "POST") for path in kind.serving_paths), _to_engine(kind.ready_path, "GET")]
    probes = [_to_engine(kind.ready_path, "GET")]
    if config.pods.scraper_namespaces:
        probes.append(_to_engine("/metrics", "GET"))
    listeners = [
        _listener("serving", serving_port, serving, _tls(folder)),
        _listener("probes", probe_port, probes),
    ]
    clusters = [_local("engine", engine_port)]
    if config.ext_proc.enabled:
        admitted = [_to_engine(path, "POST") for path in kind.serving_paths]
        listeners.append(_listener("proxies", proxy_port, admitted, _tls(folder, client=False), [_admission()]))
        clusters.append(_local("admission", admission_port))
    return {
        "node": {"id": "engine", "cluster": "shoal"},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def _admission() -> JsonObject:
    """Asks the agent about each request. Without its answer none goes on."""
    exact = [{"exact": HEADER}]
    return {
        "name": "envoy.filters.http.ext_authz",
        "typed_config": {
            "@type": f"{_TYPE}extensions.filters.http.ext_authz.v3.ExtAuthz",
            "transport_api_version": "V3",
            "failure_mode_allow": False,
            "status_on_error": {"code": "ServiceUnavailable"},
            "allowed_headers": {"patterns": exact},
            "http_service": {
                "server_uri": {"uri": "http://127.0.0.1", "cluster": "admission", "timeout": f"{CONNECT_SECONDS}s"},
                "path_prefix": names.ADMISSION_PREFIX,
                "authorization_response": {"allowed_upstream_headers": {"patterns": [{"exact": "authorization"}]}},
            },
        },
    }


def _listener(
    name: str,
    port: int,
    routes: list[JsonObject],
    tls: JsonObject | None = None,
    filters: Sequence[JsonObject] = (),
) -> JsonObject:
    manager: JsonObject = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "codec_type": "HTTP1",
        "server_header_transformation": "PASS_THROUGH",
        "generate_request_id": False,
        "skip_xff_append": True,
        "normalize_path": True,
        # No stream timeout: gateways enforce the time limit of a request.
        "stream_idle_timeout": "0s",
        "request_timeout": "0s",
        "common_http_protocol_options": {"idle_timeout": f"{IDLE_SECONDS}s"},
        "local_reply_config": {
            "mappers": [
                {
                    "filter": {
                        "status_code_filter": {
                            "comparison": {"op": "GE", "value": {"default_value": 400, "runtime_key": "none"}}
                        }
                    },
                    "headers_to_add": [
                        {
                            "header": {"key": names.HEADER_SIDECAR, "value": "%RESPONSE_FLAGS%"},
                            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{_TYPE}extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "engine",
                    "domains": ["*"],
                    "routes": [*routes, {"match": {"prefix": "/"}, "direct_response": {"status": 404}}],
                }
            ]
        },
    }
    chain: JsonObject = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if tls is not None:
        chain["transport_socket"] = tls
    return {
        "name": name,
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": port}},  # noqa: S104 - the pod's own
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _to_engine(path: str, method: str) -> JsonObject:
    method_is: JsonObject = {"name": ":method", "string_match": {"exact": method}}
    return {
        "match": {"path": path, "headers": [method_is]},
        "route": {"cluster": "engine", "timeout": "0s", "idle_timeout": "0s"},
    }


def _local(name: str, port: int) -> JsonObject:
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), _NO_LIMIT)
    protocol: JsonObject = {
        "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http_protocol_options": {}},
        "common_http_protocol_options": {"idle_timeout": f"{ENGINE_IDLE_SECONDS}s"},
    }
    address: JsonObject = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": f"{CONNECT_SECONDS}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        # No limits: gateways decide how many requests an engine gets.
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }


def _tls(folder: str, *, client: bool = True) -> JsonObject:
    """`client`: callers need a certificate."""

    def source(name: str) -> JsonObject:
        config = {"path": f"{folder}/{name}.json", "watched_directory": {"path": folder}}
        return {"name": name, "sds_config": {"path_config_source": config, "resource_api_version": "V3"}}

    common: JsonObject = {
        # An Envoy speaks no more than 1.2 to what is behind it, unless it is configured to.
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_3" if client else "TLSv1_2",
            "tls_maximum_protocol_version": "TLSv1_3",
        },
        "tls_certificate_sds_secret_configs": [source(_CERTIFICATE)],
    }
    if client:
        common["validation_context_sds_secret_config"] = source(_TRUST)
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "require_client_certificate": client,
            "disable_stateless_session_resumption": True,
            "common_tls_context": common,
        },
    }


def _secret(name: str, kind: str, content: Any) -> str:
    resource = {"@type": f"{_TYPE}extensions.transport_sockets.tls.v3.Secret", "name": name, kind: content}
    return orjson.dumps({"resources": [resource]}).decode()
