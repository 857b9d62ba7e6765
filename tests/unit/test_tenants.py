"""Whether a Tenant can be used, and when that changes."""

from datetime import UTC, datetime, timedelta

from shoal.api.tenant import Tenant
from shoal.core.tenants import decide

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


def ready(one: Tenant, *rivals: Tenant, models: tuple[str, ...] = ()) -> tuple[str, str]:
    (condition,) = decide(one, rivals=rivals, models=models, now=NOW).status.conditions
    return condition.reason, condition.message


def test_a_key_that_expires_is_looked_at_again_at_that_moment() -> None:
    soon, later = NOW + timedelta(minutes=5), NOW + timedelta(days=1)
    keys = [key("a", expires=later.isoformat()), key("b", sha="b", expires=soon.isoformat())]
    decision = decide(tenant(keys=keys), rivals=(), models=(), now=NOW)
    assert decision.again_at == soon
    assert decision.status.active_keys == 2
    after = decide(tenant(keys=keys), rivals=(), models=(), now=soon)
    assert after.status.active_keys == 1
    assert after.again_at == later


def test_why_no_key_can_be_used() -> None:
    gone = key("a", expires=(NOW - timedelta(seconds=1)).isoformat())
    assert ready(tenant(keys=[gone, key("b", sha="b", disabled=True)])) == (
        "NoUsableKey",
        "none of 2 keys can be used: 1 disabled, 1 expired",
    )
    assert ready(tenant(keys=[])) == ("NoUsableKey", "no key is listed")


def test_a_hash_on_two_tenants_belongs_to_the_older() -> None:
    old = tenant("old", age=2)
    young = tenant("young", keys=[key("mine", sha="b"), key("theirs")])
    assert ready(young, old) == ("KeyClaimed", "key 'theirs' belongs to the older Tenant 'old'")
    assert ready(old, young)[0] == "Active"


def test_a_missing_model_is_named() -> None:
    one = tenant(models=[{"namespace": "ns", "name": "a"}, {"namespace": "ns", "name": "b"}])
    assert ready(one, models=("ns/a",)) == ("ModelNotFound", "there is no Model ns/b; the others can be used")


def test_suspension_comes_first() -> None:
    assert ready(tenant(suspended=True, keys=[]))[0] == "Suspended"
