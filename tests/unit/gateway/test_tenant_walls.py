"""Invariant 4 at a gateway: nobody reaches a Model or an adapter that was not granted, nor anything with a key that was
taken back. Each wall with its mutation: without it, somebody gets through, and this finds out who. (The walls of usage
rows and of request logs are in test_gateway_usage.py and test_requestlog.py.)"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from shoal.api.tenant import Tenant
from shoal.core import access
from shoal.core.access import Denied, KeyIdentity
from shoal.core.routing.consent import AdapterConsent
from shoal.core.routing.modelindex import ModelIndex
from shoal.gateway import directory, requester
from tests.support.adapter_agents import AdapterAgent, TunedGateway, adapter, pool, tuned
from tests.support.gateway import API_KEY, tenant

WORDS = ("llama", "support", "open", "bait")
"""A Model, an adapter for acme, one for all who may use the Model, and one of somebody else that lists acme."""
TAKEN_BACK: Mapping[str, dict[str, Any]] = {
    "disabled": {"disabled": True},
    "expired": {"expires": datetime(2020, 1, 1, tzinfo=UTC)},
    "suspended": {"suspended": True},
}
OURS = {("acme", word) for word in WORDS if word != "bait"}


async def reached(it: TunedGateway) -> set[tuple[str, str]]:
    """Who gets an answer, or as much as to hear that something is there, and from what."""
    gateway = it.it
    keys = {"acme": API_KEY, "globex": "sk-globex", "nobody": "sk-nobody"} | {who: f"sk-{who}" for who in TAKEN_BACK}
    gateway.tenants["globex"] = tenant("globex", keys["globex"], models=())
    for who, spec in TAKEN_BACK.items():
        gateway.tenants[who] = tenant(who, keys[who], **spec)
    it.pools["chat/pool"] = pool(allowedNamespaces={"from": "All"})
    bait = adapter(
        "bait",
        "evil",
        tenants=("acme", "*"),
        pool_namespace="chat",
        served=("bait", "support"),
        created="2025-01-01T00:00:00Z",
    )
    it.declare(adapter("open", tenants=("*",)), bait)
    found: set[tuple[str, str]] = set()
    for who, key in keys.items():
        for word in WORDS:
            answer = await gateway.post({"model": word, "messages": [{"role": "user", "content": "hi"}]}, key=key)
            headers = {"authorization": f"Bearer {key}"}
            one = await gateway.session.get(f"{gateway.url}/v1/models/{word}", headers=headers)
            assert (answer.status == 200) == (one.status == 200)
            if answer.status == 200:
                found.add((who, word))
    return found


async def test_who_was_granted_something_reaches_that_and_nobody_reaches_more(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        assert await reached(it) == OURS


class Everything(frozenset[str]):
    def __contains__(self, _: object) -> bool:
        return True


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is not looked for only where its tenant was granted something."""
    monkeypatch.setattr(ModelIndex, "_shared", lambda _self, claims, _identity: list(claims))


def no_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch)

    def index(tenants: Iterable[Tenant]) -> dict[str, KeyIdentity]:
        return {key: replace(one, grants=Everything(one.grants)) for key, one in access.index_keys(tenants).items()}

    monkeypatch.setattr(directory, "index_keys", index)


def no_tenants_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch)
    monkeypatch.setattr(ModelIndex, "_may_use", lambda *_: True)


def no_consent_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch)
    monkeypatch.setattr(AdapterConsent, "covers", lambda *_, **__: True)


def no_look_whether(reason: str) -> Callable[[pytest.MonkeyPatch], None]:
    def off(monkeypatch: pytest.MonkeyPatch) -> None:
        def authenticate(index: Mapping[str, KeyIdentity], sha256: str, now: datetime) -> KeyIdentity | Denied:
            found = access.authenticate(index, sha256, now)
            if isinstance(found, Denied) and found.reason == reason:
                return index.get(sha256) or next(one for one in index.values() if one.tenant == "acme")
            return found

        monkeypatch.setattr(requester, "authenticate", authenticate)

    return off


@pytest.mark.parametrize(
    ("off", "leaks"),
    [
        (no_grants, {("globex", "llama")}),
        (no_tenants_of_adapters, {("globex", "support"), ("globex", "open"), ("globex", "bait"), ("acme", "bait")}),
        (no_consent_of_tenants, {("acme", "bait")}),
        (no_look_whether("unknown"), {("nobody", word) for _, word in OURS}),
        *((no_look_whether(who), {(who, "llama"), (who, "open")}) for who in TAKEN_BACK),
    ],
    ids=["grants of Models", "tenants of adapters", "consent of tenants", "unknown", *TAKEN_BACK],
)
async def test_without_one_of_the_walls_somebody_gets_through(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    off: Callable[[pytest.MonkeyPatch], None],
    leaks: set[tuple[str, str]],
):
    off(monkeypatch)
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        assert await reached(it) - OURS == leaks
