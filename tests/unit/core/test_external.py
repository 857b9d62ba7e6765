"""External targets: what an installation allows, whose keys go where, and when a target rests."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.api import reasons
from shoal.api.config import ExternalHost
from shoal.api.modelroute import ExternalTarget
from shoal.core.routing.external import (
    FAILURES,
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    SECRET_TYPE,
    Credential,
    ExternalProblem,
    TargetHealth,
    begins_within,
    cause_of,
    cause_of_silence,
    connectable,
    credential_id,
    credential_of,
    hops_of,
    host_problem,
    read_credential,
    retry_after_of,
    served_external,
    status_of_event,
)
from tests.support.routes import a_route, target

NOW = datetime(2026, 11, 26, 10, 0, 0, tzinfo=UTC)
HOSTS = (ExternalHost(host="api.example.com"), ExternalHost(host="vllm.other.internal", port=8443, plain_http=True))


def external(url: str = "https://api.example.com/v1", **more: Any) -> ExternalTarget:
    fields = {"name": "outside", "url": url, "model": "m", "credentials": {"name": "provider"}, **more}
    return ExternalTarget.model_validate(fields)


def secret(token: bytes = b"sk-1\n", host: bytes = b"api.example.com", **more: bytes) -> dict[str, bytes]:
    return {"token": token, "host": host, **more}


@pytest.mark.parametrize(
    "url",
    [
        "https://169.254.169.254/v1",
        "https://[::1]/v1",
        "https://2130706433/v1",
        "https://0x7f.1/v1",
        "https://localhost/v1",
        "https://user:pw@api.example.com/v1",
        "https://api.example.com/v1?x=1",
        "https://api.example.com/v1#x",
        "https://API.example.com/v1",
        "https://api.example.com:0/v1",
        "https://api.example.com/\r\nx: y",
        "file:///etc/passwd",
        "https://api.example.com\\@evil.example",
    ],
)
def test_a_url_that_could_mean_something_else_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        external(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://api.example.com/v1", None),
        ("https://api.example.com:443/v1/", None),
        ("http://vllm.other.internal:8443/v1", None),
        ("https://api.example.com:8443/v1", "does not allow api.example.com at port 8443"),
        ("https://api.example.com:99999/v1", "does not allow"),
        ("http://api.example.com:443/v1", "plain HTTP to api.example.com is not allowed; use https"),
        ("https://xapi.example.com/v1", "gateway.external.allowedHosts"),
    ],
)
def test_the_installation_decides_which_hosts(url: str, says: str | None) -> None:
    found = host_problem(external(url), HOSTS)
    assert (found is None) is (says is None)
    if found is not None and says is not None:
        assert found.reason == reasons.EXTERNAL_NOT_ALLOWED
        assert says in found.message


def test_without_a_list_nothing_is_allowed() -> None:
    assert host_problem(external(), ()) is not None


@pytest.mark.parametrize(
    ("address", "networks", "may"),
    [
        ("93.184.216.34", (), True),
        ("10.20.0.5", (), False),
        ("10.20.0.5", ("10.20.0.0/16",), True),
        ("10.21.0.5", ("10.20.0.0/16",), False),
        ("::ffff:10.20.0.5", ("10.20.0.0/16",), True),
        ("fd00:1::5", ("fd00:1::/32",), True),
        ("127.0.0.1", ("0.0.0.0/0",), False),
        ("::1", ("::/0",), False),
        ("169.254.169.254", ("0.0.0.0/0",), False),
        ("::ffff:169.254.169.254", ("0.0.0.0/0",), False),
        ("fe80::1%eth0", ("::/0",), False),
        ("100.100.100.200", ("0.0.0.0/0",), False),
        ("fd00:ec2::254", ("::/0",), False),
        ("0.0.0.0", ("0.0.0.0/0",), False),
        ("nonsense", ("0.0.0.0/0",), False),
    ],
)
def test_addresses_inside_are_called_only_where_the_installation_names_them(
    address: str, networks: tuple[str, ...], may: bool
) -> None:
    assert connectable(address, networks) is may


def test_a_key_goes_to_the_host_that_its_secret_names() -> None:
    assert credential_of(SECRET_TYPE, secret(), "chat", external()) == Credential("api.example.com", "sk-1")


@pytest.mark.parametrize(
    ("type", "data", "reason", "says"),
    [
        (None, None, reasons.SECRET_NOT_FOUND, "kubectl create secret generic provider --type=" + SECRET_TYPE),
        ("Opaque", secret(), reasons.SECRET_REFUSED, "is not of type"),
        ("kubernetes.io/service-account-token", secret(), reasons.SECRET_REFUSED, "is not of type"),
        (SECRET_TYPE, secret(host=b"other.example.com"), reasons.SECRET_REFUSED, "is not for api.example.com"),
        (SECRET_TYPE, {"token": b"sk-1"}, reasons.SECRET_REFUSED, "is not for api.example.com"),
        (SECRET_TYPE, secret(b""), reasons.SECRET_REFUSED, "has no API key in `token`"),
        (SECRET_TYPE, secret(b"a\r\nx-admin: 1"), reasons.SECRET_REFUSED, "visible ASCII"),
        (SECRET_TYPE, secret(b"\xff\xfe"), reasons.SECRET_REFUSED, "visible ASCII"),
        (SECRET_TYPE, secret(b"x" * 5000), reasons.SECRET_REFUSED, "1 to 4096"),
    ],
)
def test_other_secrets_are_never_sent(type: str | None, data: dict[str, bytes] | None, reason: str, says: str) -> None:
    found = credential_of(type, data, "chat", external())
    assert isinstance(found, ExternalProblem)
    assert found.reason == reason
    assert says in found.message
    assert "sk-1" not in found.message


def test_a_key_survives_its_delivery_and_is_not_shown() -> None:
    key = Credential("api.example.com", "sk-1")
    assert read_credential(key.file().encode()) == key
    assert "sk-1" not in repr(key)
    for broken in (b"", b"[]", b"{}", b'{"host": 1, "token": "x"}', b'{"host": "h.x", "token": "a\\nb"}', b"\xff"):
        assert read_credential(broken) is None


def test_keys_of_two_namespaces_are_two() -> None:
    assert credential_id("a", "s", "k") != credential_id("b", "s", "k")


def test_an_external_target_is_known_by_its_route_and_name() -> None:
    entry = {"name": "outside", "url": "https://api.example.com:8443/v1/", "model": "m"}
    route = a_route({"targets": [target("outside", kind="external")]}, externalTargets=[entry])
    assert list(route.references()) == [("External", "chat/front/outside")]
    found = served_external(route, route.spec.external_targets[0])
    assert (found.key, found.external and found.external.authority) == ("chat/front/outside", "api.example.com:8443")
    assert found.external is not None
    assert (found.external.base, found.external.tls, found.external.credential) == ("/v1", True, None)


# --- rest -------------------------------------------------------------------------------------------------------------


def test_a_target_rests_after_failures_in_a_row_and_is_tried_by_one() -> None:
    health = TargetHealth()
    for _ in range(FAILURES - 1):
        health.failed(0.0)
        assert health.take(0.0) == 0.0
    health.answered()
    for _ in range(FAILURES):
        assert health.take(0.0) == 0.0
        health.failed(0.0)
    assert health.take(1.0) == FIRST_REST_SECONDS - 1.0
    assert health.take(FIRST_REST_SECONDS) == 0.0, "one tries it"
    assert health.take(FIRST_REST_SECONDS) > 0.0, "and the others wait for it"
    health.failed(FIRST_REST_SECONDS)
    assert health.take(FIRST_REST_SECONDS) == 2 * FIRST_REST_SECONDS, "each failure doubles the rest"
    health.answered()
    assert health.take(FIRST_REST_SECONDS) == 0.0


def test_a_rest_is_bounded_whatever_the_target_asks_for() -> None:
    health = TargetHealth()
    health.failed(0.0, 10.0**9)
    assert health.take(0.0) == LONGEST_REST_SECONDS
    again = TargetHealth()
    for _ in range(50):
        again.failed(0.0)
    assert again.take(0.0) == LONGEST_REST_SECONDS


def test_a_stream_leaves_for_its_fallback_before_its_time_is_over() -> None:
    assert begins_within(60.0, 30.0, 30.0, leaves=True) == 22.5
    assert begins_within(60.0, 30.0, 30.0, leaves=False) == 60.0, "a whole answer, or no fallback"
    assert begins_within(60.0, 600.0, 600.0, leaves=True) == 60.0
    assert begins_within(60.0, 7.5, 30.0, leaves=True) == 60.0, "it is a fallback itself"


@pytest.mark.parametrize(
    ("waited", "left", "stream", "client_left", "cause"),
    [
        (30.0, 30.0, True, False, "target"),
        (30.0, 30.0, False, False, "either"),
        (7.5, 7.5, True, False, None),
        (12.0, 30.0, True, True, "either"),
        (12.0, 30.0, False, True, None),
        (1.0, 30.0, True, True, None),
    ],
)
def test_what_a_silence_is_about(
    waited: float, left: float, stream: bool, client_left: bool, cause: str | None
) -> None:
    assert cause_of_silence(waited, left, 30.0, stream=stream, client_left=client_left) == cause


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"30", 30.0),
        (b"Thu, 26 Nov 2026 10:00:20 GMT", 20.0),
        (b"Thu, 26 Nov 2020 10:00:20 GMT", 0.0),
        (b"", None),
        (b"soon", None),
        (b"-5", None),
        (b"9" * 5000, 999999999.0),
        (b"\xff\xfe", None),
    ],
)
def test_retry_after(value: bytes, seconds: float | None) -> None:
    assert retry_after_of(value, NOW) == seconds


@pytest.mark.parametrize(
    ("header", "hops"),
    [(None, 0), (b"0", 0), (b"1", 1), (b"2", 2), (b"3", 2), (b"9" * 500, 2), (b"", 0), (b"-1", 0), (b"two", 0)],
)
def test_hops_are_bounded_whatever_a_client_writes(header: bytes | None, hops: int) -> None:
    assert hops_of(header) == hops


@pytest.mark.parametrize(
    ("cause", "statuses"),
    [
        ("request", (400, 406, 411, 413, 415, 422, 431, 451)),
        ("either", (402, 403, 404, 408, 409, 425)),
        ("target", (401, 405, 407, 429, 500, 502, 503, 504, 529)),
    ],
)
def test_what_an_error_is_about(cause: str, statuses: tuple[int, ...]) -> None:
    assert {cause_of(status) for status in statuses} == {cause}


@pytest.mark.parametrize(
    ("cause", "events"),
    [
        (
            "request",
            [
                {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}},
                {"error": {"message": "filtered", "type": None, "code": "content_filter"}},
                {"error": {"object": "error", "type": "BadRequestError", "code": 400}},
                {"type": "error", "error": {"type": "request_too_large"}},
                {"type": "response.failed", "response": {"error": {"code": "invalid_prompt"}}},
            ],
        ),
        (
            "either",
            [
                {"error": {"message": "flagged", "code": "403"}},
                {"error": {"message": "no"}},
                {"error": "no"},
                {"error": {"type": ["a"], "code": True}},
                {"type": "error", "error": {"type": "permission_error"}},
                {"type": "error", "code": None, "message": "no"},
                {"type": "response.failed", "response": {"error": {"code": "vector_store_timeout"}}},
                {},
            ],
        ),
        (
            "target",
            [
                {"error": {"message": "The server had an error", "type": "server_error", "code": None}},
                {"error": {"type": "server_error", "code": "external_broken"}},
                {"error": {"type": "requests", "code": "rate_limit_exceeded"}},
                {"error": {"code": 503, "status": "UNAVAILABLE"}},
                {"error": {"code": None, "status": "RESOURCE_EXHAUSTED"}},
                {"type": "error", "error": {"type": "overloaded_error"}},
                {"type": "error", "code": "server_error", "message": "no"},
                {"type": "response.failed", "response": {"error": {"code": "server_error"}}},
            ],
        ),
    ],
)
def test_what_an_error_event_is_about(cause: str, events: list[dict[str, object]]) -> None:
    assert {cause_of(status_of_event(event)) for event in events} == {cause}
