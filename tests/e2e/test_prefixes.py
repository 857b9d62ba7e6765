"""Conversations on a live fleet of two gateways and two replicas: what one gateway sent where, the other one knows
(`GET /v1/prefixes`), also when it has just been restarted."""

import os
import signal
import time
from collections import Counter
from collections.abc import Generator
from typing import Any, Final

import pytest

from shoal.api import names
from shoal.api.meta import API_VERSION
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet
from tests.support.conversations import Said, say
from tests.support.tenantfixture import TenantFixture, admitted
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]

TENANT: Final = f"prefixes-e2e-{os.getpid()}"
SPACE: Final = "demo"
MODEL: Final = "prefixes-e2e"
MANY: Final = 16
"""Conversations. All begin in the same way, so the prompt's head says the same replica of all of them."""
OPENING: Final = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello! How can I help?"},
]


@pytest.fixture(scope="module")
def tenants(fleet: Fleet) -> Generator[TenantFixture]:
    made = TenantFixture(fleet)
    spec = {"models": [{"namespace": SPACE, "name": MODEL}]}
    fleet.apply({"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": TENANT}, "spec": spec})
    fleet.make_model(MODEL, scaling={"minReplicas": 2, "maxReplicas": 2})
    try:
        made.keys[TENANT] = made.make_key("first", tenant=TENANT)
        fleet.expect(MODEL, "Ready", "ReplicasReady", within=240)
        selector = f"{names.LABEL_MODEL}={MODEL},{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
        two = ("wait", "--for=condition=Ready", "pods", "-n", SPACE, "-l", selector, "--timeout=120s")
        fleet.kubectl(*two, timeout=130)
        admitted(made, made.keys[TENANT])
        yield made
    finally:
        fleet.delete_model(MODEL)
        fleet.kubectl("delete", "tenants.shoal.dev", TENANT, "--ignore-not-found")


def body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True}


def replicas(tenants: TenantFixture, asked: list[Said]) -> list[str]:
    """The replica of each, by its record."""
    ids = [one.request for one in asked]
    found: dict[str, str] = {}

    def there() -> bool:
        rows = tenants.rows("--tenant", TENANT)
        found.update({row["request"]: row["replica"] for row in rows if row["ended"] and row["attempt"] == 0})
        return set(ids) <= found.keys()

    until(there, 60, lambda: len(found))
    return [found[id] for id in ids]


def test_a_conversation_goes_on_at_its_replica_through_whichever_gateway(fleet: Fleet, tenants: TenantFixture) -> None:
    prefix, key = fleet.lab.enter_command(), tenants.keys[TENANT]
    first, second = tenants.gateways()
    pods = [f"{NAMESPACE}/shoal-gateway-{number}" for number in range(2)]
    talks = [
        [*OPENING, {"role": "user", "content": f"Story {n}: " + f"what {n} happened then? " * 60}] for n in range(MANY)
    ]

    # All at once: no replica alone takes them, so that many are not where their head belongs.
    begun = say(prefix, first, key, [body(talk) for talk in talks], at_once=MANY)
    assert {one.status for one in begun} == {200}, begun[0].text
    homes = replicas(tenants, begun)
    assert min(Counter(homes).values()) >= 3, Counter(homes)
    assert len(set(homes)) == 2
    time.sleep(2)  # gateways tell each other once a second

    def go_on(gateway: str) -> list[Said]:
        """The next turn of each, one after the other."""
        answers = say(prefix, gateway, key, [
            body([*talk, {"role": "assistant", "content": one.text}, {"role": "user", "content": "And then?"}])
            for talk, one in zip(talks, begun, strict=True)
        ])  # fmt: skip
        assert {one.status for one in answers} == {200}, answers[0].text
        return answers

    other = go_on(second)
    assert replicas(tenants, other) == homes
    # The engine says the same: what came before is in its cache.
    assert all(one.cached >= 0.8 * before.prompt for one, before in zip(other, begun, strict=True))

    victim = next(pod for pod in pods if address_of(fleet, pod) == second)
    fleet.lab.signal_container(victim, signal.SIGKILL)
    until(lambda: not serving(fleet, victim), 60)
    until(lambda: serving(fleet, victim), 120)
    ready = time.monotonic()

    def right() -> int:
        return sum(now == before for now, before in zip(replicas(tenants, go_on(second)), homes, strict=True))

    found = [right()]
    while found[-1] < MANY and time.monotonic() < ready + 60:
        found.append(right())
    assert found[-1] == MANY, found
    print(
        f"after its restart: {found} of {MANY} at their replica, all within {time.monotonic() - ready:.1f} s of ready"
    )


def address_of(fleet: Fleet, pod: str) -> str:
    namespace, _, name = pod.partition("/")
    (found,) = (p for p in fleet.get("pods", "-n", namespace) if p["metadata"]["name"] == name)
    return f"{found['status']['podIP']}:{names.GATEWAY_PORT}"


def serving(fleet: Fleet, pod: str) -> bool:
    namespace, _, name = pod.partition("/")
    (found,) = (p for p in fleet.get("pods", "-n", namespace) if p["metadata"]["name"] == name)
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found["status"].get("conditions", ()))
