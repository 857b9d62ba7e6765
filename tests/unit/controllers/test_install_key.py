"""The install key: made when the operator begins to lead, and what each role has of it."""

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal.api import keys, names
from shoal.api.meta import JsonObject
from shoal.controllers import installkey
from shoal.controllers.installkey import InstallKeySource
from shoal.kube.errors import APIServerUnavailable, NotFound
from shoal.net.installkey import KeyRing
from tests.support.rolekeys import give

OLD = b"o" * 32
NEW = b"n" * 32


class Secrets:
    """The API server as far as Secrets of one namespace go; refuses the first calls."""

    def __init__(self, refusals: int = 0, **secrets: dict[str, bytes]) -> None:
        self.stored: dict[str, dict[str, str]] = {}
        self.refusals = refusals
        self.applied: list[str] = []
        self.made: str | None = None
        for name, data in secrets.items():
            self.put(name.replace("_", "-"), **data)

    def put(self, name: str, **data: bytes) -> None:
        self.stored[name] = {key: base64.b64encode(value).decode() for key, value in data.items()}

    async def get(self, _resource: Any, name: str, *_: Any) -> JsonObject:
        if self.refusals:
            self.refusals -= 1
            raise APIServerUnavailable("not now")
        if name not in self.stored:
            raise NotFound("no such Secret")
        return {"metadata": {"creationTimestamp": self.made} if self.made else {}, "data": self.stored[name]}

    get_metadata = get

    async def create(self, _resource: Any, body: JsonObject) -> JsonObject:
        self.stored[body["metadata"]["name"]] = body["data"]
        return body

    async def apply(self, _resource: Any, body: JsonObject, **_: Any) -> JsonObject:
        self.applied.append(body["metadata"]["name"])
        return await self.create(_resource, body)

    async def delete(self, _resource: Any, name: str, *_: Any) -> None:
        self.stored.pop(name, None)

    def bundle(self, role: keys.Role, file: str = "current") -> keys.KeyBundle:
        raw = base64.b64decode(self.stored[names.key_secret(role)][file])
        return keys.KeyBundle.model_validate_json(raw)


def source_of(server: Secrets, **given: Any) -> InstallKeySource:
    return InstallKeySource(server, "shoal-system", **given)  # type: ignore[arg-type]


async def made_by(server: Secrets) -> InstallKeySource:
    source = source_of(server)
    task = asyncio.create_task(source.run())
    async with asyncio.timeout(20):
        while source.keys is None:
            await asyncio.sleep(0.01)
    task.cancel()
    return source


async def test_made_at_once_with_no_model_there_to_ask_for_it():
    server = Secrets()
    source = await made_by(server)
    assert source.keys is not None
    assert base64.b64decode(server.stored[names.ROOT_KEY_SECRET]["current"]) == source.keys.current.value
    assert names.INSTALL_KEY_SECRET not in server.stored


async def test_tried_again_soon_while_there_is_none(monkeypatch: Any):
    monkeypatch.setattr(installkey, "RETRY_SECONDS", 0.01)
    assert (await made_by(Secrets(refusals=3))).keys is not None


async def test_each_role_has_its_own_secret_and_a_quiet_one_is_not_written_again():
    server = Secrets(shoal_root_key={"current": NEW, "previous": OLD})
    source = source_of(server)
    await source.ensure()
    await source.ensure()
    assert sorted(server.applied) == ["shoal-key-billing", "shoal-key-gateway", "shoal-key-ledger", "shoal-key-logs"]
    assert server.bundle("gateway") == keys.bundle(NEW, "gateway")
    assert server.bundle("ledger", "previous") == keys.bundle(OLD, "ledger")
    assert set(server.stored["shoal-key-billing"]) == {"key"}
    del server.stored["shoal-key-billing"]
    await source.ensure()
    assert "shoal-key-billing" in server.stored


async def test_who_does_not_lead_writes_nothing():
    server = Secrets(shoal_root_key={"current": NEW})
    await source_of(server).ensure(make=False)
    assert server.applied == []


def test_what_a_role_has_opens_nothing_that_is_not_its_own() -> None:
    """Every key of the installation against what is in the Secrets of gateways, ledger and people."""
    uids = ["uid-1", "uid-2"]
    subjects = [*uids, keys.LEDGER, keys.DEMAND]
    everything: dict[tuple[keys.Role, str], str] = {
        (role, subject): keys.derive(NEW, role, subject) for role in keys.ROLES for subject in subjects
    }

    def opened(role: keys.Role) -> set[tuple[keys.Role, str]]:
        known = keys.bundle(NEW, role)
        return {(r, s) for (r, s), key in everything.items() if known.bearer_for(r, s) == key}

    assert opened("gateway") == {("gateway", s) for s in subjects} | {("operator", "demand"), ("logs", "demand")}
    assert opened("ledger") == {("ledger", s) for s in subjects} | {("gateway", "ledger"), ("billing", "ledger")}
    for role in keys.BUNDLES:
        text = keys.bundle(NEW, role).model_dump_json()
        for other in keys.ROLES:
            has = keys.role_key(NEW, other).hex() in text
            assert has is (other == role)
            # The admin key of an engine is known to the operator and to the pod's own Secret.
            assert all(everything["admin", uid] not in text for uid in uids)
        assert NEW.hex() not in text
    # As it was: who had the install key to read bills had the engines' admin keys.
    assert keys.InstallKey(OLD, old=True).bearer_for("admin", "uid-1") == keys.derive_old(OLD, "admin", "uid-1")


def ring(folder: Path, *, new: bool = True, old: bool = False) -> KeyRing:
    for name in ("role", "old"):
        (folder / name).mkdir(exist_ok=True)
    if new:
        give(folder / "role", NEW)
    if old:
        (folder / "old" / "current").write_bytes(OLD)
    made = KeyRing(folder / "role", folder / "old")
    made.refresh()
    return made


def test_a_gateway_serves_pods_of_before_and_of_now_after_an_upgrade(tmp_path: Path) -> None:
    both = ring(tmp_path, old=True)
    assert both.key_for(keys.fingerprint(NEW), "u") == keys.derive(NEW, "gateway", "u")
    assert both.key_for(keys.fingerprint(OLD), "u") == keys.derive_old(OLD, "gateway", "u")
    assert both.key_for("another", "u") is None
    # A ledger of before takes the second.
    assert both.bearers_of("gateway", keys.LEDGER) == (
        keys.derive(NEW, "gateway", keys.LEDGER),
        keys.derive_old(OLD, "gateway", keys.LEDGER),
    )
    (tmp_path / "old" / "current").unlink()
    assert both.refresh()
    assert both.key_for(keys.fingerprint(OLD), "u") is None
    assert both.bearers_of("ledger", "u") == ()


def test_keys_that_are_not_understood_leave_those_before_in_force(tmp_path: Path) -> None:
    made = ring(tmp_path)
    (tmp_path / "role" / "current").write_bytes(orjson.dumps({"fingerprint": "x"}))
    assert not made.refresh()
    assert made.key_for(keys.fingerprint(NEW), "u") is not None


@pytest.mark.parametrize("behind", [True, False])
async def test_the_key_of_before_is_in_use_until_every_gateway_knows_the_new_ones(behind: bool) -> None:
    server = Secrets(shoal_install_key={"current": OLD})
    source = source_of(server, behind=lambda: behind, in_use=lambda: {keys.fingerprint(OLD)})
    for _ in range(5):
        await source.ensure()
    found = await source.ensure()
    assert found.current.old is behind
    assert {key.old for key in found.former} == {not behind}
    # A pod made with either is called with its own.
    assert found.of(keys.fingerprint(OLD)).value == OLD
    assert names.INSTALL_KEY_SECRET in server.stored


async def test_the_key_of_before_stays_in_use_until_kubelets_have_brought_the_new_ones() -> None:
    made = datetime(2026, 1, 1, tzinfo=UTC)
    now = [made]
    server = Secrets(shoal_install_key={"current": OLD}, shoal_root_key={"current": NEW})
    server.made = made.isoformat()
    source = source_of(server, in_use=lambda: {keys.fingerprint(OLD)}, now=lambda: now[0])
    assert (await source.ensure()).current.old
    assert "shoal-key-gateway" in server.stored
    now[0] += timedelta(seconds=installkey.MOUNT_SECONDS)
    assert not (await source.ensure()).current.old


async def test_the_key_of_before_dies_with_the_last_of_its_pods() -> None:
    server = Secrets(shoal_install_key={"current": OLD})
    in_use: set[str | None] = {keys.fingerprint(OLD)}
    source = source_of(server, in_use=lambda: in_use)
    for _ in range(5):
        await source.ensure()
    assert names.INSTALL_KEY_SECRET in server.stored
    in_use.clear()
    for _ in range(installkey.UNUSED_CHECKS):
        assert names.INSTALL_KEY_SECRET in server.stored
        await source.ensure()
    assert names.INSTALL_KEY_SECRET not in server.stored
    assert (await source.ensure()).former == ()


async def test_a_gateway_of_before_that_comes_back_turns_it_round() -> None:
    server, behind = Secrets(shoal_install_key={"current": OLD}), [False]
    source = source_of(server, behind=lambda: behind[0], in_use=lambda: {keys.fingerprint(OLD)})
    changed: list[bool] = []
    source.changed.append(lambda: changed.append(source.keys is not None and source.keys.current.old))
    await source.ensure()
    behind[0] = True
    await source.ensure()
    assert changed == [True]
