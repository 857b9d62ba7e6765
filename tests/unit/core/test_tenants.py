"""Whether a Tenant can be used, and when that changes."""

from datetime import UTC, datetime, timedelta

import pytest

from shoal.api import reasons
from shoal.api.meta import Condition
from shoal.api.tenant import Tenant
from shoal.core.status.conditions import find
from shoal.core.status.tenantstatus import decide

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def tenant(name: str = "acme", *, age: int = 0, keys: list | None = None, **spec) -> Tenant:
    return Tenant.model_validate(
        {
            "metadata": {
                "name": name,
                "uid": name,
                "generation": 1,
                "creationTimestamp": (NOW - timedelta(days=age)).isoformat(),
            },
            "spec": {"keys": [key("k")] if keys is None else keys, **spec},
        }
    )


def key(name: str, *, sha: str = "a", **more) -> dict:
    return {"name": name, "sha256": sha * 64, **more}


def ready(one: Tenant, *contenders: Tenant, models: tuple[str, ...] = ()) -> tuple[str, str]:
    (condition,) = decide(one, contenders=contenders, models=models, now=NOW).status.conditions
    return condition.reason, condition.message


def logging(**said) -> tuple[str, str, str]:
    decision = decide(tenant(logging=said), contenders=(), models=(), now=NOW)
    ready, condition = decision.status.conditions
    assert (ready.type, ready.status) == ("Ready", "True"), "requests are served, whatever is logged of them"
    assert condition.type == "LoggingReady"
    return condition.status, condition.reason, condition.message


def test_a_tenant_without_a_log_has_no_condition_of_one() -> None:
    (condition,) = decide(tenant(), contenders=(), models=(), now=NOW).status.conditions
    assert condition.type == "Ready"


def test_what_is_logged_is_told() -> None:
    assert logging(mode="Metadata", retentionDays=7) == ("True", "Active", "metadata only, kept for 7 days")
    status, _, message = logging(mode="Full", redact=[{"name": "mail", "builtin": "Email"}])
    assert status == "True"
    assert message.startswith("prompts and answers, kept for 30 days; 1 rule of your own and the one for secrets")


def test_a_rule_that_cannot_be_used_is_named_and_never_repeated() -> None:
    """Its pattern may be the very thing that should not be told."""
    rules = [{"name": "patient", "pattern": "MRN-(1234"}, {"name": "mail", "builtin": "Email"}]
    status, reason, message = logging(mode="Full", redact=rules)

    assert (status, reason) == ("False", "RuleRefused")
    assert "patient" in message
    assert "mail" not in message
    assert "MRN" not in message
    assert "Until that is mended no prompt and no answer is logged, only metadata" in message


def budget(one: Tenant, currency: str | None) -> tuple[str, str, str]:
    _, condition = decide(one, contenders=(), models=(), now=NOW, currency=currency).status.conditions
    assert condition.type == "BudgetReady"
    return condition.status, condition.reason, condition.message


def test_a_budget_in_the_currency_of_the_price_list_is_active() -> None:
    euros = tenant(budget={"amount": "500", "currency": "EUR"})
    assert budget(euros, "EUR") == ("True", "Active", "500 EUR per calendar month, at the price list in force")


@pytest.mark.parametrize(
    ("when", "then"),
    [
        ("Serve", "whenUnknown is Serve: requests are served, and nothing is cut off"),
        ("Refuse", "whenUnknown is Refuse: every request is refused"),
    ],
)
def test_a_budget_in_another_currency_than_the_price_list_says_so_and_what_becomes_of_requests(
    when: str, then: str
) -> None:
    euros = tenant(budget={"amount": "500", "currency": "EUR", "whenUnknown": when})
    assert budget(euros, "USD") == (
        "False",
        "OtherCurrency",
        f"the budget is in EUR and the price list in USD, so what is left is not known; {then}. "
        "Write the budget in USD",
    )


def test_a_budget_without_a_price_list_is_unknown_and_what_was_known_of_it_stays() -> None:
    said = {"amount": "500", "currency": "EUR"}
    status, reason, message = budget(tenant(budget=said), None)
    assert (status, reason) == ("Unknown", "PricesUnknown")
    assert "Give the ledger a price list, or the budget in tokens" in message
    known = tenant(budget=said)
    found = decide(known, contenders=(), models=(), now=NOW, currency="USD").status
    known = known.model_copy(update={"status": found})
    assert (
        decide(known, contenders=(), models=(), now=NOW, currency=None).status == found
    )  # an operator that just began


def test_a_budget_says_why_price_lists_are_refused() -> None:
    why = "mine.yaml:2: begins when demo.yaml does, 2026-11-01T00:00Z"
    euros = tenant(budget={"amount": "500", "currency": "EUR"})

    def told(one: Tenant, currency: str | None) -> Condition:
        found = decide(one, contenders=(), models=(), now=NOW, currency=currency, prices_refused=why).status
        return next(each for each in found.conditions if each.type == "BudgetReady")

    none = told(euros, None)
    assert (none.status, none.reason) == ("Unknown", "PricesUnknown")
    assert why in none.message
    assert "requests are served, and nothing is cut off. Correct the named lines" in none.message
    before = told(euros, "EUR")
    assert (before.status, before.reason) == ("True", "Active")
    assert before.message.endswith(f"in force. The ledger refuses other price lists: {why}")
    known = decide(euros, contenders=(), models=(), now=NOW, currency="EUR").status
    assert why in told(euros.model_copy(update={"status": known}), None).message, "more than what was known before"


def test_who_hears_no_gateway_says_nothing_of_budgets() -> None:
    said = tenant(budget={"amount": "500", "currency": "EUR"})
    decision = decide(said, contenders=(), models=(), now=NOW, gateways_live=False)
    assert [condition.type for condition in decision.status.conditions] == ["Ready"]


def test_a_budget_in_tokens_has_no_currency_to_tell_of() -> None:
    (condition,) = decide(tenant(budget={"tokens": 5}), contenders=(), models=(), now=NOW).status.conditions
    assert condition.type == "Ready"


def test_a_key_that_expires_is_looked_at_again_at_that_moment() -> None:
    soon, later = NOW + timedelta(minutes=5), NOW + timedelta(days=1)
    keys = [key("a", expires=later.isoformat()), key("b", sha="b", expires=soon.isoformat())]
    decision = decide(tenant(keys=keys), contenders=(), models=(), now=NOW)
    assert decision.again_at == soon
    assert decision.status.active_keys == 2
    after = decide(tenant(keys=keys), contenders=(), models=(), now=soon)
    assert after.status.active_keys == 1
    assert after.again_at == later


def test_why_no_key_can_be_used() -> None:
    gone = key("a", expires=(NOW - timedelta(seconds=1)).isoformat())
    assert ready(tenant(keys=[gone, key("b", sha="b", disabled=True)])) == (
        "NoUsableKey",
        "none of 2 keys can be used: 1 disabled, 1 expired",
    )
    assert ready(tenant(keys=[])) == ("NoUsableKey", "no key is listed")


def test_a_tenant_that_may_use_nothing_says_so() -> None:
    reason, message = ready(tenant(models=[]))
    assert (reason, message) == (
        "Active",
        "1 key, 0 models: it may use nothing, so every request gets 404; grant Models in spec.models",
    )
    granted = decide(tenant(models=[], adapters=[{"namespace": "chat"}]), contenders=(), models=(), now=NOW)
    assert "nothing" not in granted.status.conditions[0].message


def test_a_hash_on_two_tenants_belongs_to_the_older() -> None:
    old = tenant("old", age=2)
    young = tenant("young", keys=[key("mine", sha="b"), key("theirs")])
    assert ready(young, old) == ("KeyClaimed", "key 'theirs' belongs to the older Tenant 'old'")
    assert ready(old, young)[0] == "Active"
    twin = tenant("twin", age=2)
    (first, second) = sorted((old, twin), key=lambda one: one.metadata.uid)
    assert ready(first, second)[0] == "Active"
    told = f"Tenant '{first.metadata.name}', which was created in the same second and is first by its uid"
    assert ready(second, first)[1].endswith(f"belongs to {told}")
    # All of them: a further key of the same value would not help.
    assert ready(tenant("young", keys=[key("theirs")]), old)[0] == "KeyClaimed"


def test_a_missing_model_is_named() -> None:
    one = tenant(models=[{"namespace": "ns", "name": "a"}, {"namespace": "ns", "name": "b"}])
    assert ready(one, models=("ns/a",)) == ("ModelNotFound", "there is no Model ns/b; the others can be used")


def test_a_missing_model_is_named_beside_a_key_that_is_missing() -> None:
    grants = [{"namespace": "chat", "name": "smal"}]
    assert ready(tenant(keys=[], models=grants)) == (
        "NoUsableKey",
        "no key is listed; ModelNotFound: there is no Model chat/smal",
    )


def test_suspension_comes_first() -> None:
    assert ready(tenant(suspended=True, keys=[]))[0] == "Suspended"


def granting(*grants: dict, listing: set[str]) -> tuple[str, str] | None:
    found = decide(tenant(keys=[key("k")], adapters=list(grants)), contenders=[], models=(), adapters=listing, now=NOW)
    condition = find(found.status.conditions, reasons.ADAPTERS_READY)
    return None if condition is None else (condition.reason, condition.message)


def test_grants_of_adapters_that_match_none_are_named() -> None:
    everything, two = {"namespace": "acme"}, {"namespace": "tunes", "names": ["support", "legal"]}
    assert granting(listing={"acme/x"}) is None
    assert granting(everything, two, listing={"acme/x", "tunes/support", "tunes/legal"}) == (
        "Active",
        "each grant of adapters matches one that lists this tenant",
    )
    assert granting(everything, two, listing={"tunes/support"}) == (
        "AdapterNotFound",
        "no adapter that lists this tenant: acme/*, tunes/legal; the others can be used",
    )
