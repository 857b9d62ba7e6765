"""Every code with which a gateway refuses a request: its layer, and what to do."""

from collections.abc import Mapping
from typing import Final

from shoal.core.layers.advice import LayerAdvice
from shoal.core.layers.externals import OUTCOMES
from shoal.core.layers.faults import advice
from shoal.core.layers.layer import Layer


def _client(do: str) -> LayerAdvice:
    return LayerAdvice(Layer.CLIENT, "fault", do)


def _fault(layer: Layer, do: str) -> LayerAdvice:
    return LayerAdvice(layer, "fault", do)


_FIELD: Final = _client("Correct the field that `param` names.")
_SHORTER: Final = _client("Send less: the message has the limit.")
_UNSUPPORTED: Final = _client("Leave out what the message names: this model or endpoint does not have it.")
REFUSALS: Final[Mapping[str, LayerAdvice]] = {
    # --- the key and what it may use
    "missing_api_key": _client("Send the API key in the header Authorization or x-api-key."),
    "invalid_api_key": _client("Use a key that is listed in a Tenant, not disabled, and not expired."),
    "disabled_api_key": _client("Use another key, or enable this one: `disabled: false` in spec.keys of the Tenant."),
    "expired_api_key": _client("Create a new key: `shoal keys create --tenant TENANT`."),
    "invalid_token": _client("Use a token that is still valid."),
    "forbidden": _client("Ask for the role that the message names."),
    "tenant_suspended": _client("Ask the platform why the Tenant is suspended."),
    "model_not_found": _client("Use a model name that `GET /v1/models` lists for this key."),
    "no_route_rule": _client("Use a model name whose route has a rule for such requests."),
    "no_route_target": _fault(Layer.CONTROL, "Run `shoal why route/NAME`; the Tenant also needs a grant of a target."),
    "insufficient_quota": _client("Wait for the next period, or ask for a larger budget of the Tenant or key."),
    "rate_limit_exceeded": _client("Send fewer requests or tokens per minute, or ask for a higher limit."),
    # --- the request
    "context_length_exceeded": _client("Send fewer tokens, ask for fewer, or use a model with a longer context."),
    "request_too_large": _SHORTER,
    "request_too_complex": _SHORTER,
    "too_large": _SHORTER,
    "too_many_sequences": _SHORTER,
    "too_much_work": _SHORTER,
    "schema_too_large": _SHORTER,
    "schema_reference": _FIELD,
    "conflicting_fields": _FIELD,
    "unknown_field": _FIELD,
    "invalid_value": _FIELD,
    "invalid_type": _FIELD,
    "invalid_parameter": _FIELD,
    "invalid_key": _FIELD,
    "missing_value": _FIELD,
    "missing_model": _FIELD,
    "not_allowed": _FIELD,
    "string_too_long": _FIELD,
    "pattern_too_large": _FIELD,
    "pattern_not_linear": _FIELD,
    "schema_circular": _FIELD,
    "token_out_of_vocabulary": _FIELD,
    "too_many_prompts": _SHORTER,
    "too_many_documents": _SHORTER,
    "media_not_supported": _UNSUPPORTED,
    "vocabulary_unknown": _client("Send text in place of ids of tokens: this model's vocabulary is not known."),
    "token_not_allowed": _FIELD,
    "url_not_allowed": _client("Send the media in the request, or use a host that the platform allows."),
    "media_not_fetched": _client("Send the media in the request, or make the URL answer."),
    "invalid_json": _client("Send valid JSON."),
    "invalid_form": _client("Send a valid multipart form."),
    "unsupported_field": _UNSUPPORTED,
    "unsupported_media_type": _UNSUPPORTED,
    "unsupported_dimensions": _UNSUPPORTED,
    "audio_not_supported": _UNSUPPORTED,
    "length_not_known": _client("Send the recording in a format whose length can be measured."),
    "wrong_endpoint": _client(
        "Use an endpoint that the message offers. If it offers none, use a model or an engine that has this one."
    ),
    "unknown_path": _client("Correct the URL."),
    "method_not_allowed": _client("Use the method that the message names."),
    "adapter_unusable": _fault(Layer.ARTIFACT, "Correct the adapter: `shoal why adapter/NAME`."),
    # --- the engine
    "engine_error": _fault(Layer.ENGINE, "Look at the engine's log, and run `shoal why model/NAME`."),
    "refused_by_engine": _fault(Layer.ENGINE, "Compare the request with what the engine supports."),
    "replica_lost": _fault(Layer.ENGINE, "Send it again; `shoal why model/NAME` shows why the replica ended."),
    "replica_lost_twice": _fault(Layer.ENGINE, "Do not send it again unchanged: it may be what ends replicas."),
    "replica_unavailable": _fault(Layer.ENGINE, "Send it again; `shoal why model/NAME` shows why the replica ended."),
    "bad_answer": _fault(Layer.ENGINE, "Look at the engine's log: its answer is none of the API's."),
    "no_stream": _fault(Layer.ENGINE, "Look at the engine's log: it did not stream."),
    "answer_too_large": _fault(Layer.GATEWAY, "Ask for a shorter answer, or stream it."),
    "external_broken": _fault(Layer.GATEWAY, "Send it again; ask the provider of the external target why."),
    "route_loop": _fault(
        Layer.CONTROL,
        "Change one of the routes of these clusters: an external target leads back to where it comes from.",
    ),
    # --- waiting for a replica
    "no_replica": _fault(Layer.CONTROL, "Run `shoal why model/NAME`: no replica can take the request."),
    "model_unavailable": _fault(Layer.CONTROL, "Run `shoal why model/NAME`: the Model does not serve."),
    "external_unavailable": _fault(
        Layer.GATEWAY, "Give the route a fallback; shoal_gateway_external_requests_total{outcome} tells what failed."
    ),
    "adapter_unavailable": _fault(Layer.ENGINE, "Run `shoal why adapter/NAME`: it does not answer now."),
    "hold_full": _fault(Layer.GATEWAY, "Send it later; more replicas shorten the queue of held requests."),
    "hold_expired": _fault(Layer.GATEWAY, "Send it later; `shoal why model/NAME` shows why no replica was free."),
    "timeout": _fault(
        Layer.GATEWAY, "Ask for less, or raise requestSeconds: of the ModelRoute, the Model, or the gateways."
    ),
    # --- the client left, at its own timeout or on purpose
    "client_left_early": _client("Look at the client's timeout and connection: it left before its request was taken."),
    "client_left_waiting": _client(
        "Raise the client's timeout, or keep a replica: `shoal why model/NAME` shows what the request waited for."
    ),
    "client_left_working": _client("Raise the client's timeout, or stream: the replica had not begun to answer."),
    "client_left_answering": _client(
        "Raise the timeout of the client, or of a proxy before the gateway, if it did not leave on purpose."
    ),
    "request_timeout": _client("Send the whole body at once."),
    # --- the gateway itself
    "proxy_misconfigured": _fault(Layer.GATEWAY, "Set the proxy's filter up as docs/other-doors.md says."),
    "overloaded": _fault(Layer.GATEWAY, "Send it again later; add gateways if it stays."),
    "starting": _fault(Layer.GATEWAY, "Send it again in a second: the gateway has just started."),
    "cannot_record_usage": _fault(Layer.GATEWAY, "Free the disk of the gateway's spool; nothing is served unbilled."),
    "internal_error": _fault(Layer.GATEWAY, "Report it with the request's id and `shoal support bundle`."),
    "ledger_unavailable": _fault(Layer.CONTROL, "Look at the ledger's pod: `shoal doctor`."),
    "no_ledger": _fault(Layer.CONTROL, "Install the ledger to answer questions about usage."),
    "log_unavailable": _fault(Layer.CONTROL, "Look at the store of the request log."),
    "mutual_tls_needed": _fault(Layer.CONTROL, "Call the port that speaks mutual TLS."),
}
"""Code of an error -> its layer and what to do. A test compares the rows with the codes in the gateway's source."""
_POINTER: Final = "`shoal why {kind}/NAME`"
"""In what to do: where the cause is found."""


def points_at(kind: str, row: LayerAdvice) -> bool:
    """Whether what to do is to ask `shoal why` about an object of the kind."""
    return _POINTER.format(kind=kind) in row.do


OF_MODELS: Final = frozenset(
    {"hold_full", "replica_lost_twice"} | {code for code, row in REFUSALS.items() if points_at("model", row)}
)
"""Codes whose cause is, or may be, something that is wrong with the Model."""
_OF_ENGINE: Final = _fault(Layer.ENGINE, "Compare the request with what the engine supports.")
"""Of codes that the gateway has from an engine."""


def refusal(code: str | None, outcome: str | None = None) -> LayerAdvice:
    """The row of an error. `outcome`: what became of the request at an external target."""
    if outcome is not None and outcome in OUTCOMES:
        return advice(OUTCOMES[outcome][0])
    return REFUSALS.get(code or "", _OF_ENGINE)


def label(code: str | None, status: int) -> str:
    """The error as a metric's label: its code, or its HTTP status where an engine made the code up."""
    return code if code in REFUSALS else str(status)
