"""One row per refusal of a gateway: on which layer its cause is, and what a person is told to do."""

from dataclasses import dataclass

import pytest

from shoal.core.layers.externals import OUTCOMES
from shoal.core.layers.faults import advice
from shoal.core.layers.refusals import REFUSALS, label, refusal
from shoal.core.quota.limits import Limits, Over
from shoal.gateway import quotamessages
from shoal.net import errors
from shoal.net.errors import ApiError


@dataclass(frozen=True)
class RefusedRequest:
    name: str
    error: ApiError
    layer: str
    do: str


def over(limit: str, why: str) -> ApiError:
    found = Over(limit, why, most=10, used=10, requested=1, retry_after=5)  # type: ignore[arg-type]
    return quotamessages.refusal(found, Limits(requests=10, tokens=10, concurrent=10))


REFUSED = [
    RefusedRequest("a model that is not granted", errors.model_not_found("x"), "L6", "GET /v1/models"),
    RefusedRequest("a wrong key", errors.unauthorized(401, "no", "invalid_api_key"), "L6", "listed in a Tenant"),
    RefusedRequest("an expired key", errors.unauthorized(401, "no", "expired_api_key"), "L6", "shoal keys create"),
    RefusedRequest("a suspended tenant", errors.unauthorized(403, "no", "tenant_suspended"), "L6", "suspended"),
    RefusedRequest("too many requests", over("requests", "used"), "L6", "higher limit"),
    RefusedRequest("a budget that is used up", over("budget", "used"), "L6", "larger budget"),
    RefusedRequest("a context that is too long", ApiError(400, "x", "context_length_exceeded"), "L6", "fewer tokens"),
    RefusedRequest("a route without a rule", errors.no_rule("x"), "L6", "route has a rule"),
    RefusedRequest("a route without a target", errors.no_target("x"), "control", "shoal why route/NAME"),
    RefusedRequest("routes in a circle", errors.route_loop(), "control", "leads back"),
    RefusedRequest("an adapter that cannot be loaded", errors.adapter_unusable("x", "y"), "L2.5", "why adapter/NAME"),
    RefusedRequest("an adapter that does not answer", errors.adapter_waits("x", "y"), "L4", "why adapter/NAME"),
    RefusedRequest("an engine that fails", errors.from_engine(500, b""), "L4", "why model/NAME"),
    RefusedRequest("two replicas that are lost", errors.lost_twice(), "L4", "unchanged"),
    RefusedRequest("a gateway that has just started", errors.starting(), "L5", "in a second"),
    RefusedRequest("a gateway whose spool is full", errors.cannot_record(), "L5", "spool"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_a_refusal_has_its_layer_and_a_next_step(refused: RefusedRequest) -> None:
    assert refused.error.code is not None
    row = refusal(refused.error.code, refused.error.outcome)
    assert row == REFUSALS[refused.error.code]
    assert (row.layer, refused.do in row.do) == (refused.layer, True), row


def test_an_error_of_an_external_target_has_the_layer_of_what_became_of_it_there() -> None:
    assert refusal("external_unavailable").layer == "L5"
    for outcome, (reason, _) in OUTCOMES.items():
        assert refusal("external_unavailable", outcome) == advice(reason)
    assert refusal("external_unavailable", "of another version").layer == "L5"


def test_a_code_that_an_engine_made_up_is_the_engines_and_no_label() -> None:
    assert (refusal("made_up").layer, label("made_up", 422)) == ("L4", "422")
    assert (refusal(None).layer, label(None, 400)) == ("L4", "400")
    assert label("hold_full", 503) == "hold_full"
