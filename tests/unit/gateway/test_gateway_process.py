"""The whole gateway against an API server that is away, knows no Shoal yet, comes back, goes again."""

import asyncio
import contextlib
from pathlib import Path

import aiohttp

from shoal.api import keys, names
from tests.support.gateway import API_KEY, INSTALL_KEY, tenant
from tests.support.gateway_process import (
    MODEL,
    POD,
    POD_IP,
    FakeApiServer,
    agent,
    ask,
    readyz,
    running,
    serving,
    until_ready,
)
from tests.support.rolekeys import give
from tests.support.routes import a_route, target
from tests.support.scripted_engine import ScriptedEngine
from tests.support.streams import until


async def test_from_nothing_to_an_answer_and_on_without_the_api_server(tmp_path: Path):
    server = FakeApiServer()
    engine = ScriptedEngine()
    async with (
        running(tmp_path, server) as process,
        aiohttp.ClientSession() as session,
        contextlib.AsyncExitStack() as stack,
    ):
        # 1. no API server, no operator, no key
        status, why = await readyz(session, process)
        assert status == 503
        assert "not reachable" in why["models"]
        assert why["installKey"].endswith("the operator makes them")
        async with session.get(f"http://127.0.0.1:{process.ops.port}/healthz") as alive:
            assert alive.status == 200
        async with session.get(f"http://127.0.0.1:{process.server.port}/healthz") as balanced:
            assert balanced.status == 503
        # A key that is not known yet may be right: an SDK tries again after a 503, and gives up after a 401.
        async with ask(session, process) as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert (await refused.json())["error"]["code"] == "starting"

        # 2. an API server without the CustomResourceDefinitions
        await server.up()
        async with asyncio.timeout(40):
            while "CustomResourceDefinitions are missing" not in (await readyz(session, process))[1].get("models", ""):
                await asyncio.sleep(0.05)

        # 3. they come, and objects with them; one of each does not validate
        server.crds = True
        acme = tenant().model_dump(mode="json", by_alias=True, exclude_none=True)
        for plural, obj in (
            ("models", MODEL),
            ("models", {"metadata": {"name": "broken", "namespace": "chat"}, "spec": {"source": 3}}),
            ("tenants", {"metadata": {"name": "broken"}, "spec": {"keys": "none"}}),
            ("tenants", acme),
            ("pods", POD),
        ):
            await server.change(plural, obj)
        runner = await agent()
        stack.push_async_callback(runner.cleanup)
        listener = await asyncio.start_server(engine.handle, POD_IP, names.ENGINE_PORT)
        stack.callback(listener.close)
        give(tmp_path / "key", INSTALL_KEY)
        await until_ready(session, process)
        async with session.get(f"http://127.0.0.1:{process.server.port}/healthz") as balanced:
            assert balanced.status == 200
        assert process.metrics.registry.get_sample_value("shoal_gateway_invalid_objects_total", {"kind": "Model"}) == 1
        assert process.metrics.registry.get_sample_value("shoal_gateway_invalid_objects_total", {"kind": "Tenant"}) == 1
        async with asyncio.timeout(30):
            while not process.fleet.live:
                await asyncio.sleep(0.05)
        async with ask(session, process) as answer:
            assert (await answer.json())["model"] == "llama"
        async with ask(session, process, key="sk-of-nobody") as refused:
            assert refused.status == 401

        # 4. a suspended tenant is refused at once
        await server.change("tenants", {**acme, "spec": {**acme["spec"], "suspended": True}})
        async with asyncio.timeout(20):
            while (await ask(session, process)).status != 403:
                await asyncio.sleep(0.02)
        await server.change("tenants", acme)

        # 5. the API server goes: serving goes on
        async with asyncio.timeout(20):
            while (await ask(session, process)).status != 200:
                await asyncio.sleep(0.02)
        await server.down()
        await asyncio.sleep(0.3)
        assert (await readyz(session, process))[0] == 200
        async with ask(session, process) as answer:
            assert answer.status == 200
        async with session.get(f"http://127.0.0.1:{process.ops.port}/metrics") as metrics:
            text = await metrics.text()
        assert (
            'shoal_gateway_requests_total{gen_ai_operation_name="chat",gen_ai_request_model="chat/llama"'
            in text.replace(
                'gen_ai_request_model="chat/llama",gen_ai_operation_name="chat"',
                'gen_ai_operation_name="chat",gen_ai_request_model="chat/llama"',
            )
        )
        assert "gen_ai_server_request_duration_seconds_bucket" in text
        for secret in (API_KEY, "cus_1", keys.derive(INSTALL_KEY, "gateway", "uid-llama")):
            assert secret not in text


async def test_custom_resource_definitions_from_before_there_were_adapters_and_routes_are_enough(tmp_path: Path):
    server = FakeApiServer()
    server.crds = True
    del server.objects["lorapools"], server.objects["loraadapters"], server.objects["modelroutes"]
    async with running(tmp_path, server) as process, aiohttp.ClientSession() as session:
        await server.up()
        give(tmp_path / "key", INSTALL_KEY)
        await until_ready(session, process)
        assert process._reflectors["adapters"].missing
        assert process._reflectors["routes"].missing
        assert not process._reflectors["models"].missing


async def test_nothing_is_answered_before_every_list_was_read(tmp_path: Path):
    """A word may be an adapter's, and a key of one more Tenant, that have not come yet."""
    server = FakeApiServer()
    server.crds = True
    async with running(tmp_path, server) as process, aiohttp.ClientSession() as session:
        give(tmp_path / "key", INSTALL_KEY)
        process.directory.listed = lambda: False
        await server.up()
        await server.change("models", MODEL)
        await server.change("tenants", tenant().model_dump(mode="json", by_alias=True, exclude_none=True))
        await until_ready(session, process)
        async with ask(session, process) as refused:
            assert refused.status == 503
        process.directory.listed = lambda: True
        async with ask(session, process, key="sk-of-nobody") as refused:
            assert refused.status == 401


async def test_limits_of_a_route_come_change_and_go_with_the_object(tmp_path: Path):
    server = FakeApiServer()
    async with serving(tmp_path, ScriptedEngine(), server) as process, aiohttp.ClientSession() as session:
        accounts = process.demand.tenants.accounts
        for most in (1, 2):
            route = a_route({"targets": [target("llama")]}, limits={"requestsPerMinute": most})
            await server.change("modelroutes", route.model_dump(mode="json", by_alias=True, exclude_none=True))
            await until(
                lambda most=most: any(
                    (limits := each.tenant_limits) is not None and limits.requests_per_minute == most
                    for each in process.directory.snapshot.model_index.routes.values()
                )
            )
            for status in (200, 429):
                async with ask(session, process, model="front") as answer:
                    assert answer.status == status, await answer.text()
        assert list(accounts) == ["acme@uid-chat-front"]
        await server.remove("modelroutes", "front")
        await until(lambda: not accounts)
        async with ask(session, process, model="front") as answer:
            assert answer.status == 404
