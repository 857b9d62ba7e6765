"""Whose prompts a request may find in an engine's cache: what the gateway tells the engine, and where it sends them."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from shoal.api.model import Model
from shoal.core.access import index_keys
from shoal.core.routing.affinity import SHARED, head_of, prefix_space
from shoal.core.routing.resolve import ServedModel, served_model
from shoal.engine.port import EngineLaunch
from shoal.engine.sglang.launch import engine_args
from shoal.engine.sglang.wire import NO_PREFIX_CACHE
from shoal.net.installkey import KeyRing
from tests.support.adapter_agents import AdapterAgent, adapter, tuned
from tests.support.gateway import API_KEY, MODEL, gateway, tenant
from tests.support.rolekeys import give
from tests.support.scripted_engine import ScriptedEngine

LONG = "You are a helpful assistant. " * 20
FIELDS = {"messages": [{"role": "user", "content": LONG}]}
CHAT = {"model": "llama", **FIELDS}
PROMPTS = {"/v1/chat/completions": FIELDS, "/v1/completions": {"prompt": LONG}, "/v1/embeddings": {"input": LONG}}


def space(name: str, model: ServedModel = MODEL, **spec: Any) -> str:
    (identity,) = index_keys([tenant(name, f"sk-{name}", **spec)]).values()
    return prefix_space(model, identity)


def declared(**spec: Any) -> Model:
    source = {"uri": "file:///models/tiny"}
    return Model.model_validate({"metadata": {"name": "m", "namespace": "chat"}, "spec": {"source": source, **spec}})


def test_each_tenant_has_a_space_of_its_own_unless_it_names_a_group_or_the_model_is_shared() -> None:
    assert space("acme") != space("globex")
    assert space("acme", prefixCacheGroup="teams") == space("globex", prefixCacheGroup="teams") != space("acme")
    # By no name does a tenant get into a group, or a group into a tenant's.
    assert space("teams") != space("acme", prefixCacheGroup="teams")
    shared = dataclasses.replace(MODEL, shares_prefixes=True)
    assert space("acme", shared) == space("globex", shared, prefixCacheGroup="teams") == SHARED


def test_a_model_shares_only_where_it_says_so() -> None:
    assert served_model(declared()).shares_prefixes is False
    assert served_model(declared(prefixCache={"isolation": "Tenant"})).shares_prefixes is False
    assert served_model(declared(prefixCache={"isolation": "Shared"})).shares_prefixes is True


def test_equal_prompts_go_together_exactly_where_they_can_be_found() -> None:
    shared = dataclasses.replace(MODEL, shares_prefixes=True)
    assert head_of(space("acme"), FIELDS) == head_of(space("acme"), FIELDS) != head_of(space("globex"), FIELDS)
    assert head_of(space("acme", shared), FIELDS) == head_of(space("globex", shared), FIELDS)


async def salts(tmp_path: Path, *callers: str, path: str = "/v1/chat/completions", **changes: Any) -> list[str | None]:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.model(**changes)
        for name in callers:
            it.tenants[name] = tenant(name, f"sk-{name}")
        it.changed()
        for name in callers:
            body = {"model": "llama", **PROMPTS[path]}
            for field in ("cache_salt", "extra_key"):
                assert (await it.post({**body, field: "stolen"}, path, key=f"sk-{name}")).status == 400
            assert (await it.post(body, path, key=f"sk-{name}")).status == 200
    assert len(engine.requests) == len(callers)
    return [asked.body.get("cache_salt") for asked in engine.requests]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_engine_hears_a_salt_per_tenant_that_tells_no_name(tmp_path: Path, path: str) -> None:
    acme, again, globex = await salts(tmp_path, "acme", "acme", "globex", path=path)
    assert acme == again != globex
    assert None not in (acme, globex)
    assert "stolen" not in (acme, globex)
    assert "acme" not in str(acme)
    assert acme not in {hashlib.sha256(b"acme").hexdigest()[:32], hashlib.sha256(b"tenant/acme").hexdigest()[:32]}


async def test_a_shared_model_and_embeddings_have_no_salt(tmp_path: Path) -> None:
    assert await salts(tmp_path, "acme", "globex", shares_prefixes=True) == [None, None]
    (tmp_path / "e").mkdir()
    assert await salts(tmp_path / "e", "acme", path="/v1/embeddings", capabilities=frozenset({"embed"})) == [None]


async def test_requests_for_an_adapter_are_told_apart_too(tmp_path: Path) -> None:
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.it.tenants["globex"] = tenant("globex", "sk-globex")
        it.declare(adapter(tenants=("acme", "globex")))
        for name, key in (("support", API_KEY), ("llama", API_KEY), ("support", "sk-globex")):
            assert (await it.it.post({**CHAT, "model": name}, key=key)).status == 200
        adapted, base, other = [asked.body.get("cache_salt") for asked in it.engines[0].requests]
        assert None not in (adapted, other)
        assert adapted == base != other  # the engine itself keeps adapters apart


def ring(folder: Path, *installed: bytes) -> KeyRing:
    folder.mkdir(parents=True)
    for name, value in zip(("current", "previous"), installed, strict=False):
        give(folder, value, file=name)
    made = KeyRing(folder)
    made.refresh()
    return made


def test_a_salt_is_the_same_at_every_gateway_and_another_for_another_model_space_or_install_key(tmp_path: Path) -> None:
    one, other = ring(tmp_path / "1", b"key-1"), ring(tmp_path / "2", b"key-1", b"key-0")
    salt = one.cache_salt("uid-1", "tenant/acme")
    assert salt == other.cache_salt("uid-1", "tenant/acme")
    others = {
        one.cache_salt("uid-2", "tenant/acme"),
        one.cache_salt("uid-1", "tenant/globex"),
        ring(tmp_path / "3", b"key-2", b"key-1").cache_salt("uid-1", "tenant/acme"),
        ring(tmp_path / "4").cache_salt("uid-1", "tenant/acme"),
    }
    assert len(others | {salt}) == 5


@pytest.mark.parametrize(
    ("spec", "keeps"),
    [
        ({}, True),
        ({"engine": {"extraArgs": ["--is-embedding"]}}, False),
        ({"engine": {"extraArgs": ["--is-embedding", NO_PREFIX_CACHE]}}, False),
        ({"engine": {"extraArgs": ["--is-embedding"]}, "prefixCache": {"isolation": "Shared"}}, True),
    ],
)
def test_an_engine_for_embeddings_keeps_no_prompts_unless_the_model_is_shared(spec: dict[str, Any], keeps: bool):
    args = engine_args(EngineLaunch(declared(**spec), "0.5.23", model_path="/m", port=1, gpus=1))
    assert args.count(NO_PREFIX_CACHE) == (0 if keeps else 1)
