"""The TLS sidecar of an engine: Envoy, which terminates mutual TLS and exposes only the serving paths to gateways.

The engine listens on localhost. Envoy has three routes to it: serving paths over mutual TLS for gateways, the path of
its probe for the kubelet, and plain /metrics where scrapers are configured. The agent is in the same pod and does not
use Envoy.
"""

from typing import Any, Final

import orjson

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
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
) -> JsonObject:
    """Envoy's configuration. `folder` contains the files of `secrets`."""
    # Gateways check with the probe whether a replica that lost a request is still there.
    serving = [*(_to_engine(path, "POST") for path in kind.serving_paths), _to_engine(kind.ready_path, "GET")]
    probes = [_to_engine(kind.ready_path, "GET")]
    if config.pods.scraper_namespaces:
        probes.append(_to_engine("/metrics", "GET"))
    return {
        "node": {"id": "engine", "cluster": "shoal"},
        "static_resources": {
            "listeners": [
                _listener("serving", serving_port, serving, _tls(folder)),
                _listener("probes", probe_port, probes),
            ],
            "clusters": [_engine(engine_port)],
        },
    }


def _listener(name: str, port: int, routes: list[JsonObject], tls: JsonObject | None = None) -> JsonObject:
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
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{_TYPE}extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            }
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


def _engine(port: int) -> JsonObject:
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), _NO_LIMIT)
    protocol: JsonObject = {
        "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http_protocol_options": {}},
        "common_http_protocol_options": {"idle_timeout": f"{ENGINE_IDLE_SECONDS}s"},
    }
    address: JsonObject = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {
        "name": "engine",
        "type": "STATIC",
        "connect_timeout": f"{CONNECT_SECONDS}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        # No limits: gateways decide how many requests an engine gets.
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol},
        "load_assignment": {
            "cluster_name": "engine",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }


def _tls(folder: str) -> JsonObject:
    def source(name: str) -> JsonObject:
        config = {"path": f"{folder}/{name}.json", "watched_directory": {"path": folder}}
        return {"name": name, "sds_config": {"path_config_source": config, "resource_api_version": "V3"}}

    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "require_client_certificate": True,
            "disable_stateless_session_resumption": True,
            "common_tls_context": {
                "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
                "tls_certificate_sds_secret_configs": [source(_CERTIFICATE)],
                "validation_context_sds_secret_config": source(_TRUST),
            },
        },
    }


def _secret(name: str, kind: str, content: Any) -> str:
    resource = {"@type": f"{_TYPE}extensions.transport_sockets.tls.v3.Secret", "name": name, kind: content}
    return orjson.dumps({"resources": [resource]}).decode()
