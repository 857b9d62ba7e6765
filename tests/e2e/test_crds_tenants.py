"""Limits, budget and request log of a Tenant at a real API server: what is refused, and what a person then reads."""

from typing import Any

import pytest

from tests.e2e.test_crds import TENANT, changed
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.apiserver


def budget(**said: object) -> dict[str, Any]:
    return changed(TENANT, "spec.budget", said)


def rule(**said: object) -> dict[str, Any]:
    return changed(TENANT, "spec.logging", {"mode": "Full", "redact": [{"name": "r"} | said]})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("budget of nothing", budget(amount="0", currency="USD"), "`amount` must be money above zero"),
    ("budget in bytes", budget(amount="5Gi", currency="USD"), "`amount` must be money above zero"),
    ("budget beyond counting", budget(amount="4600001", currency="KRW"), "`amount` may be at most 4600000"),
    ("budget of no currency", budget(amount="500"), "`amount` and `currency` belong together"),
    ("budget of two kinds", budget(amount="5", currency="USD", tokens=5), "give either `amount` and `currency`, or"),
    ("budget of none", budget(whenUnknown="Serve"), "give either `amount` and `currency`, or `tokens`"),
    ("limit of nothing", changed(TENANT, "spec.limits", {"requestsPerMinute": 0}), "greater than or equal to 1"),
    (
        "log of everything",
        changed(TENANT, "spec.logging", {"mode": "All"}),
        'supported values: "Off", "Metadata", "Full"',
    ),
    ("rule of two kinds", rule(builtin="Email", pattern="x"), "give either `builtin` or `pattern`"),
    ("rule of none", rule(), "give either `builtin` or `pattern`"),
    (
        "adapters of one namespace twice",
        changed(TENANT, "spec.adapters", [{"namespace": "a"}, {"namespace": "a", "names": ["x"]}]),
        "spec.adapters[1]: Duplicate value",
    ),
    (
        "adapters of no name",
        changed(TENANT, "spec.adapters", [{"namespace": "a", "names": []}]),
        "spec.adapters[0].names",
    ),
    (
        "adapters of every namespace",
        changed(TENANT, "spec.models", [{"namespace": "a", "name": "m", "adapters": "All"}]),
        'supported values: "Same", "None"',
    ),
    (
        "the same rule twice",
        changed(TENANT, "spec.logging.redact", [{"name": "r", "builtin": "Email"}] * 2),
        "spec.logging.redact[1]: Duplicate value",
    ),
]


@pytest.mark.parametrize(("bad", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_tenant_is_refused_with_words_that_help(apiserver: ApiServer, bad: dict[str, Any], message: str) -> None:
    done = apiserver.apply(bad, dry_run=True)

    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("amount", ["500", "99.50", "500m", 7])
def test_money_may_be_written_as_a_quantity(apiserver: ApiServer, amount: str | int) -> None:
    done = apiserver.apply(budget(amount=amount, currency="EUR"), dry_run=True)

    assert done.returncode == 0, done.stderr


def test_what_a_later_version_may_decide_is_not_written_into_the_object(apiserver: ApiServer) -> None:
    said = changed(changed(TENANT, "metadata.name", "plain"), "spec.logging", {"mode": "Full"})
    apiserver.apply(changed(said, "spec.budget", {"tokens": 1000}))

    spec = apiserver.json("get", "tenant", "plain")["spec"]

    assert spec["logging"] == {"mode": "Full"}
    assert spec["budget"] == {"tokens": 1000}
    assert spec.get("limits", {}) == {}
