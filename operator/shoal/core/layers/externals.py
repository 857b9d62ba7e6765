"""What became of the last requests to external targets, as gateways tell it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from shoal.api import reasons
from shoal.core.layers import faults
from shoal.core.layers.candidates import Candidate, Level
from shoal.core.layers.types import Evidence, ExternalTargetView

OUTCOMES: Final[Mapping[str, tuple[str, str]]] = {
    "connect": (faults.EXTERNAL_UNREACHABLE, "it is not reached"),
    "lost": (faults.EXTERNAL_UNREACHABLE, "the connection to it broke"),
    "certificate": (faults.EXTERNAL_CERTIFICATE, "its certificate is not trusted, or has expired"),
    "bad_ca_bundle": (faults.EXTERNAL_CERTIFICATE, "its caBundle is not readable"),
    "unauthorized": (faults.EXTERNAL_KEY, "it refuses the installation's key"),
    "no_credentials": (faults.EXTERNAL_KEY, "its key has not arrived at the gateway"),
    "busy": (faults.EXTERNAL_BUSY, "it takes no more requests now (429 or 503)"),
    "full": (faults.EXTERNAL_BUSY, "it has as many requests as it may get (maxConcurrentRequests)"),
    "too_slow": (faults.EXTERNAL_SLOW, "it did not answer in time"),
    "declined": (
        faults.EXTERNAL_ERRORS,
        "it declined the request (402, 403, 404, 408, 409 or 425, or an error in its stream)",
    ),
    "resting_for_tenant": (faults.EXTERNAL_ERRORS, "it declined this tenant's last requests, or did not answer them"),
    "failed": (faults.EXTERNAL_ERRORS, "it answers with errors"),
    "broken": (faults.EXTERNAL_ERRORS, "its answer broke off"),
    "redirect": (faults.EXTERNAL_ERRORS, "it redirects, and redirects are not followed"),
    "resting": (faults.EXTERNAL_ERRORS, "it failed repeatedly, or asked for a pause"),
    "not_allowed": (reasons.EXTERNAL_NOT_ALLOWED, "its host is not allowed here"),
    "address_not_allowed": (reasons.EXTERNAL_NOT_ALLOWED, "its host's address is not allowed here"),
}
"""Outcome of a request to an external target (`shoal_gateway_external_requests_total`) -> reason, and words for people.
A test compares the keys with the gateway's source."""


def candidates(targets: Iterable[ExternalTargetView]) -> Iterator[Candidate]:
    """Targets whose last request failed."""
    for each in targets:
        reason, words = OUTCOMES.get(each.outcome, (faults.EXTERNAL_ERRORS, "it fails"))
        rests = ", and gets no requests for a while" if each.rests else ""
        proof = Evidence(f"last outcome {each.outcome}", f"gateway {each.gateway}", each.age_seconds)
        yield Candidate(reason, f"external target {each.target}: {words}{rests}", Level.OBJECT, (proof,), aside=True)
