"""Which Secrets the operator copies to gateways for external targets, and what a route then says."""

import asyncio
import base64
import contextlib
import json
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.api.config import ExternalConfig, ExternalHost
from shoal.api.meta import JsonObject
from shoal.controllers.route import RouteController
from shoal.controllers.route.externalkeys import MOST_READ
from shoal.controllers.world import World
from shoal.core.routing.external import MOST_CREDENTIALS, SECRET_TYPE, credential_id
from shoal.kube.errors import KubeError, NotFound, from_status
from shoal.kube.queue import WorkQueue
from tests.support import operators
from tests.unit.controllers.test_route_controller import OBJECTS, Events, Writes, a_route

TOKEN = "sk-provider-1"
ENTRY = {
    "name": "outside",
    "url": "https://api.example.com/v1",
    "model": "m",
    "credentials": {"name": "provider"},
}
ID = credential_id("chat", "provider", "token")


def secret(type: str = SECRET_TYPE, **data: str) -> JsonObject:
    data = {"host": "api.example.com", "token": TOKEN} | data
    return {"type": type, "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}}


class Cluster(Writes):
    """An API server with Secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: dict[tuple[str, str], JsonObject] = {}
        self.read: list[str] = []
        self.written: list[JsonObject] = []
        self.down = False
        self.unreadable: dict[str, KubeError] = {}
        """By `namespace/name`."""

    async def get(self, _resource: Any, name: str, namespace: str) -> JsonObject:
        self.read.append(f"{namespace}/{name}")
        if self.down:
            raise KubeError("the API server does not answer")
        if (error := self.unreadable.get(f"{namespace}/{name}")) is not None:
            raise error
        if (namespace, name) not in self.secrets:
            raise NotFound(name)
        return self.secrets[namespace, name]

    async def get_metadata(self, resource: Any, name: str, namespace: str) -> JsonObject:
        if (namespace, name) not in self.secrets:
            raise NotFound(name)
        return {}

    async def apply(self, _resource: Any, obj: JsonObject, *, manager: str) -> JsonObject:
        assert manager == names.MANAGER_MODELROUTE
        self.written.append(obj)
        self.secrets[obj["metadata"]["namespace"], obj["metadata"]["name"]] = obj
        return obj


class Rig:
    def __init__(self, *hosts: str) -> None:
        self.cluster = Cluster()
        external = ExternalConfig(allowed_hosts=tuple(ExternalHost(host=host) for host in hosts))
        config = operators.CONFIG.model_copy(update={"external": external})
        self.world = World(cast("Any", self.cluster), config, "shoal-system", cast("Any", Events()))
        self.controller = RouteController(self.world, WorkQueue("modelroute", workers=1))
        self.woken: list[str] = []
        self.controller.queue.add = self.woken.append  # pyright: ignore[reportAttributeAccessIssue]

    def put(self, name: str = "front", *entries: dict[str, Any], **more: Any) -> None:
        targets = [{"external": {"name": "outside"}}]
        body = a_route(name, *targets, externalTargets=list(entries or [ENTRY]), **more)
        self.cluster.version += 1
        body = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.cluster.version)}}
        OBJECTS.insert(0, body)
        self.world.routes.upsert(body)

    def refresh(self) -> None:
        asyncio.run(self.controller.keys.refresh())

    async def lead(self) -> None:
        """Until the first reading of a term has ended."""
        task = asyncio.create_task(self.controller.run())
        before = len(self.cluster.written)
        async with asyncio.timeout(5):
            while len(self.cluster.written) == before:
                await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def delivered(self) -> dict[str, Any]:
        data = self.cluster.written[-1]["data"]
        return {id: json.loads(base64.b64decode(value)) for id, value in data.items()}

    def told(self, key: str = "chat/front") -> dict[str, tuple[str, str, str]]:
        asyncio.run(self.controller.reconcile(key))
        custom = self.world.routes.get(key)
        assert custom is not None
        return {c["type"]: (c["status"], c["reason"], c["message"]) for c in custom.status["conditions"]}

    def unused(self, key: str = "chat/front") -> list[tuple[str, str]]:
        """External targets that the status lists."""
        custom = self.world.routes.get(key)
        assert custom is not None
        return [(one["name"], one["reason"]) for one in custom.status.get("externalTargets", [])]


@pytest.fixture
def rig() -> Rig:
    return Rig("api.example.com")


def test_a_key_is_delivered_and_the_route_is_ready(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    assert rig.told()["Ready"][:2] == ("False", "TargetsNotReady"), "the Secret was not read yet"
    assert rig.unused() == [("outside", "Pending")]
    rig.refresh()
    assert rig.woken[-1] == "chat/front"
    assert rig.delivered() == {ID: {"host": "api.example.com", "token": TOKEN}}
    (written,) = rig.cluster.written
    assert (written["metadata"]["name"], written["metadata"]["namespace"]) == ("shoal-external-keys", "shoal-system")
    found = rig.told()
    assert (found["Accepted"][0], found["Ready"][:2]) == ("True", ("True", "TargetsReady"))
    assert rig.unused() == []


def test_nothing_is_written_while_nothing_changes_and_a_rotation_is_followed(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    rig.refresh()
    assert len(rig.cluster.written) == 1
    rig.cluster.secrets["chat", "provider"] = secret(token="sk-2")
    rig.refresh()
    assert rig.delivered()[ID]["token"] == "sk-2"
    del rig.cluster.secrets["chat", "provider"]
    rig.refresh()
    assert rig.delivered() == {}
    assert rig.told()["Accepted"][:2] == ("False", "SecretNotFound")


def test_a_namespace_with_many_keys_takes_none_from_the_others(rig: Rig) -> None:
    many = {f"key-{n}": f"sk-{n}" for n in range(2 * MOST_CREDENTIALS)}
    rig.cluster.secrets["aaa", "provider"] = secret(**many)
    for n in range(16):
        entries = [
            {**ENTRY, "name": f"e{i}", "credentials": {"name": "provider", "key": f"key-{16 * n + i}"}}
            for i in range(16)
        ]
        rig.put(f"greedy-{n}", *entries, namespace="aaa")
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    delivered = rig.delivered()
    assert len(delivered) == MOST_CREDENTIALS
    assert ID in delivered
    assert rig.cluster.read.count("aaa/provider") == 1


def test_secrets_are_not_read_without_end(rig: Rig) -> None:
    for n in range(MOST_READ // 16 + 2):
        entries = [{**ENTRY, "name": f"e{i}", "credentials": {"name": f"gone-{n}-{i}"}} for i in range(16)]
        rig.put(f"greedy-{n}", *entries, namespace="aaa")
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    assert len(rig.cluster.read) == MOST_READ
    assert set(rig.delivered()) == {ID}


def test_an_installation_without_external_targets_writes_nothing() -> None:
    rig = Rig()
    rig.refresh()
    assert not rig.cluster.written


def test_a_secret_of_something_else_goes_nowhere(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret(type="Opaque")
    rig.put()
    rig.refresh()
    assert not rig.cluster.written
    found = rig.told()
    assert found["Accepted"][:2] == ("False", "SecretRefused")
    assert TOKEN not in str(found)


def test_for_a_host_that_is_not_allowed_no_secret_is_even_read() -> None:
    rig = Rig("other.example.com")
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    assert not rig.cluster.read
    assert not rig.cluster.written
    status, reason, message = rig.told()["Accepted"]
    assert (status, reason) == ("False", "ExternalNotAllowed")
    assert "gateway.external.allowedHosts" in message


def test_only_secrets_of_the_routes_own_namespace_are_read(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put(namespace="evil")
    rig.refresh()
    assert rig.cluster.read == ["evil/provider"]
    assert not rig.cluster.written


def test_a_key_stays_while_the_api_server_does_not_answer(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    rig.cluster.down = True
    rig.refresh()
    assert rig.delivered()[ID]["token"] == TOKEN
    assert len(rig.cluster.written) == 1


def test_a_target_that_is_not_declared_is_named(rig: Rig) -> None:
    rig.put("front", ENTRY | {"name": "elsewhere"})
    rig.refresh()
    status, reason, message = rig.told()["Accepted"]
    assert (status, reason) == ("False", "TargetNotFound")
    assert "External chat/front/outside" in message


UNREADABLE = [
    from_status(403, {"message": "a policy refuses it", "reason": "Forbidden"}),
    from_status(500, {"message": "unable to transform key: no decryption key", "reason": "InternalError"}),
]


@pytest.mark.parametrize("error", UNREADABLE, ids=["forbidden", "not decrypted"])
def test_a_secret_that_cannot_be_read_keeps_no_other_routes_from_their_keys(rig: Rig, error: KubeError) -> None:
    rig.cluster.unreadable["broken/provider"] = error
    rig.put("other", namespace="broken")
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    assert set(rig.delivered()) == {ID}
    assert rig.told()["Accepted"][0] == "True"
    status, reason, message = rig.told("broken/other")["Accepted"]
    assert (status, reason) == ("False", "SecretRefused")
    assert "Secret broken/provider cannot be read" in message
    assert error.message in message


@pytest.mark.parametrize("error", UNREADABLE, ids=["forbidden", "not decrypted"])
def test_a_key_that_gateways_have_stays_where_a_new_leader_cannot_read_it(rig: Rig, error: KubeError) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    other = Rig("api.example.com")
    other.cluster.secrets = rig.cluster.secrets
    other.cluster.unreadable["chat/provider"] = error
    other.cluster.secrets["east", "provider"] = secret(token="sk-2")
    other.put()
    other.put(namespace="east")
    other.refresh()
    delivered = {id: found["token"] for id, found in other.delivered().items()}
    assert delivered == {ID: TOKEN, credential_id("east", "provider", "token"): "sk-2"}


def test_an_api_server_that_does_not_answer_takes_no_key_away(rig: Rig) -> None:
    """A leader that has read nothing yet delivers nothing."""
    rig.cluster.unreadable["chat/provider"] = from_status(503, {"message": "apiserver not ready"})
    rig.put()
    with pytest.raises(KubeError):
        rig.refresh()
    assert not rig.cluster.written


def test_a_new_leader_takes_no_route_for_unready_while_gateways_have_its_key(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.refresh()
    other = Rig("api.example.com", "next.example.com")
    other.cluster.secrets = rig.cluster.secrets
    other.put()
    other.put("later", ENTRY | {"credentials": {"name": "next"}})
    other.put("elsewhere", ENTRY | {"url": "https://next.example.com/v1"})
    assert other.told()["Ready"][:2] == ("True", "TargetsReady")
    assert other.unused() == []
    assert other.told("chat/later")["Ready"][:2] == ("False", "TargetsNotReady"), "gateways were given no such key"
    assert other.told("chat/elsewhere")["Ready"][:2] == ("False", "TargetsNotReady"), "the key is for another host"
    assert other.unused("chat/elsewhere") == [("outside", "Pending")]
    # As long as no reading succeeds: here the API server does not answer for one of the Secrets.
    other.cluster.unreadable["chat/next"] = from_status(503, {"message": "apiserver not ready"})
    with pytest.raises(KubeError):
        other.refresh()
    assert other.told()["Ready"][:2] == ("True", "TargetsReady")


def test_what_gateways_have_is_not_guessed(rig: Rig) -> None:
    """The status stays as the former leader wrote it while the API server does not answer. A Secret that it refuses to
    show keeps no route from its status."""
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put()
    rig.cluster.down = True
    with pytest.raises(KubeError):
        rig.told()
    rig.cluster.down = False
    rig.cluster.unreadable["shoal-system/shoal-external-keys"] = from_status(403, {"message": "a policy refuses it"})
    assert rig.told()["Ready"][:2] == ("False", "TargetsNotReady")
    assert rig.unused() == [("outside", "Pending")]


def test_an_operator_that_leads_again_forgets_what_it_read_in_its_former_term(rig: Rig) -> None:
    rig.put()
    rig.refresh()
    assert rig.told()["Accepted"][:2] == ("False", "SecretNotFound")
    # Another leader finds the Secret, and follows its rotation.
    other = Rig("api.example.com")
    other.cluster.secrets = rig.cluster.secrets
    rig.cluster.secrets["chat", "provider"] = secret()
    other.put()
    other.refresh()
    rig.controller.keys.begin_term()
    assert rig.told()["Ready"][:2] == ("True", "TargetsReady")
    rig.refresh()
    rig.cluster.secrets["chat", "provider"] = secret(token="sk-2")
    other.refresh()
    rig.cluster.unreadable["chat/provider"] = from_status(403, {"message": "a policy refuses it"})
    asyncio.run(rig.lead())
    assert rig.delivered()[ID]["token"] == "sk-2", "the former term's key would replace a newer one"


def test_a_new_leader_repeats_no_warning_of_a_fault_that_the_status_has(rig: Rig) -> None:
    """A target keeps the verdict of the former leader until its Secret is read anew."""
    rig.put()
    rig.refresh()
    before = rig.told()
    assert before["Stalled"][:2] == ("True", "SecretNotFound")
    events = cast("Events", rig.world.recorder)
    assert [event.reason for event in events] == ["SecretNotFound"]
    rig.controller.keys.begin_term()
    assert rig.told() == before
    assert rig.unused() == [("outside", "SecretNotFound")]
    rig.refresh()
    assert rig.told() == before
    assert len(events) == 1
    # The next leader finds the Secret.
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.controller.keys.begin_term()
    assert rig.told() == before, "it was not read yet"
    rig.refresh()
    assert rig.told()["Ready"][:2] == ("True", "TargetsReady")


def test_a_new_leader_has_no_verdict_on_what_was_edited_since(rig: Rig) -> None:
    rig.put()
    rig.refresh()
    assert rig.told()["Stalled"][:2] == ("True", "SecretNotFound")
    custom = rig.world.routes.get("chat/front")
    assert custom is not None
    edited = a_route(
        "front", {"external": {"name": "outside"}}, externalTargets=[ENTRY | {"credentials": {"name": "b"}}]
    )
    edited["metadata"] |= {"generation": 2, "resourceVersion": str(rig.cluster.version + 1)}
    OBJECTS.insert(0, edited)
    rig.world.routes.upsert(edited | {"status": custom.status})
    rig.cluster.version += 1
    rig.controller.keys.begin_term()
    assert rig.told()["Ready"][:2] == ("False", "TargetsNotReady")
    assert rig.unused() == [("outside", "Pending")]


def test_a_target_that_is_edited_has_no_verdict_until_its_secret_is_read(rig: Rig) -> None:
    rig.cluster.secrets["chat", "provider"] = secret()
    rig.put("front", ENTRY | {"credentials": {"name": "provdier"}})
    rig.refresh()
    assert rig.told()["Stalled"][:2] == ("True", "SecretNotFound")
    rig.put("front", ENTRY)
    found = rig.told()
    assert "Stalled" not in found, "nothing is known of the new Secret"
    assert found["Ready"][:2] == ("False", "TargetsNotReady")
    rig.woken.clear()
    rig.refresh()
    assert "chat/front" in rig.woken
    assert rig.told()["Ready"][:2] == ("True", "TargetsReady")


def test_a_key_that_is_not_read_yet_makes_no_route_ready(rig: Rig) -> None:
    """The Secret of an edited target is there too: its status waits for the reading, and then changes."""
    rig.cluster.secrets["chat", "provider"] = rig.cluster.secrets["chat", "next"] = secret()
    rig.put()
    rig.refresh()
    for changed, reason in (
        ({"credentials": {"name": "next"}}, "TargetsNotReady"),
        ({"credentials": {"name": "next"}, "timeouts": {"firstByteSeconds": 20}}, "TargetsReady"),
    ):
        rig.put("front", ENTRY | changed)
        assert rig.told()["Ready"][1] == reason
        rig.woken.clear()
        rig.refresh()
        assert ("chat/front" in rig.woken) == (reason == "TargetsNotReady")
        assert rig.told()["Ready"][1] == "TargetsReady"
    rig.put("front", ENTRY | {"credentials": {"name": "missing"}})
    assert rig.told()["Ready"][0] == "False"
    rig.refresh()
    assert rig.told()["Stalled"][:2] == ("True", "SecretNotFound")
