"""The engine's port for proxies, with the real Envoy: what no gateway admitted reaches no engine."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.agent.admission import AdmissionApp
from shoal.api import names
from shoal.api.config import AgentImage, Engines, ExtProc, OperatorConfig
from shoal.api.keys import derive
from shoal.core import admission
from shoal.engine.kinds import DEFAULT
from shoal.manifests import sidecar
from shoal.net.server import make_server
from shoal.net.serving import serving
from tests.support.controlplane import free_ports
from tests.support.extproc import Processors, envoy, in_front_of
from tests.support.gateway import INSTALL_KEY, MODEL, gateway, replica
from tests.support.mutual import InstallationPKI, model, process
from tests.support.scripted_engine import ScriptedEngine

UID = "11111111-2222-3333-4444-555555555555"
KEY, HOST, PATH = "the-engines-key", "127.0.0.1", "/v1/chat/completions"
CHAT = {"model": "chat/llama", "messages": [{"role": "user", "content": "hello"}]}
CONFIG = OperatorConfig(
    engines=Engines(default_version="1", versions={}, cpuPerGPU="1", memoryPerGPU="1Gi"),
    agent=AgentImage(image="shoal"),
    ext_proc=ExtProc(enabled=True, proxy_namespaces=("ingress",)),
)


class Pod:
    def __init__(self, engine: ScriptedEngine, port: int, session: aiohttp.ClientSession, trust: str) -> None:
        self.engine, self.port, self.session, self.trust = engine, port, session, trust

    async def ask(self, proof: str | None, path: str = PATH, **headers: str) -> int:
        told = {**({} if proof is None else {admission.HEADER: proof}), **headers}
        url = f"https://{HOST}:{self.port}{path}"
        async with self.session.post(url, json=CHAT, headers=told, ssl=False) as answer:
            return answer.status


def proof(nonce: str, **changes: Any) -> str:
    said: dict[str, Any] = {"engine_key": KEY, "host": HOST, "path": PATH, "now": time.time(), **changes}
    return admission.proof(said["engine_key"], said["host"], said["path"], nonce, said["now"])


@asynccontextmanager
async def pod(folder: Path, key: str = KEY, *, agent: bool = True) -> AsyncGenerator[Pod]:
    pki = InstallationPKI()
    for name, text in sidecar.secrets(pki.pair(model(UID)), pki.trust, process("gateway").uri).items():
        (folder / name).write_text(text)
    serving_port, probes, proxies, asked = free_ports(4)
    servers = [make_server(AdmissionApp(HOST, lambda: key), host=HOST, port=asked, keep_alive=30, stop_seconds=1)]
    async with (
        ScriptedEngine().running() as engine,
        aiohttp.ClientSession() as session,
        serving(*servers[: int(agent)]),
    ):
        bootstrap = sidecar.bootstrap(
            CONFIG,
            DEFAULT.pod,
            folder=str(folder),
            engine_port=engine.port,
            serving_port=serving_port,
            probe_port=probes,
            proxy_port=proxies,
            admission_port=asked,
        )
        _, _, *flags = sidecar.command(CONFIG, DEFAULT.pod)[1:]
        program = Path(sys.executable).with_name("envoy")
        child = await asyncio.create_subprocess_exec(program, "--config-yaml", json.dumps(bootstrap), *flags)
        it = Pod(engine, proxies, session, pki.trust)
        try:
            async with asyncio.timeout(30):
                while True:
                    with suppress(aiohttp.ClientError):
                        await it.ask(None)
                        break
                    await asyncio.sleep(0.05)
            yield it
        finally:
            child.terminate()
            await child.wait()


async def test_only_an_admitted_request_reaches_the_engine_and_with_the_engines_key(tmp_path: Path) -> None:
    async with pod(tmp_path) as it:
        assert await it.ask(None) == 403
        assert await it.ask(None, authorization=f"Bearer {KEY}") == 403
        assert await it.ask(proof("a", engine_key="another")) == 403
        assert await it.ask(proof("b", path="/v1/completions")) == 403
        assert await it.ask(proof("c", now=time.time() - 100)) == 403
        assert it.engine.requests == []
        mine = proof("d")
        assert await it.ask(mine, authorization="Bearer of-a-client") == 200
        assert it.engine.requests[0].headers["authorization"] == f"Bearer {KEY}"
        assert await it.ask(mine) == 403
        assert len(it.engine.requests) == 1


@pytest.mark.parametrize("path", ["/server_info", "/load_lora_adapter", "/v1/chat/completions/../../server_info"])
async def test_an_admitted_request_opens_no_other_path(tmp_path: Path, path: str) -> None:
    async with pod(tmp_path) as it:
        assert await it.ask(proof("a", path=path), path) in (403, 404)
        assert it.engine.requests == []


async def test_a_request_through_both_envoys_is_metered_once_and_the_proxy_sees_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Envoy with external processing, the TLS sidecar, the engine."""
    key = derive(INSTALL_KEY, "gateway", MODEL.uid)
    (tmp_path / "pod").mkdir()
    async with pod(tmp_path / "pod", key) as it, gateway(tmp_path) as gate:
        monkeypatch.setattr(names, "ENGINE_PROXY_PORT", it.port)
        gate.ports["pod-1"] = 1  # the gateways' own port: nobody is there
        gate.pods["chat/llama-1"] = replica(1, mtls=True)
        gate.changed()
        gate.hear(1)
        async with in_front_of(gate, trust=it.trust) as envoy:
            for body in (CHAT, {**CHAT, "stream": True}):
                async with await envoy.post(body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
        assert [request.headers["authorization"] for request in it.engine.requests] == [f"Bearer {key}"] * 2
        records = await gate.records(count=2)
        assert [record.data.outcome for record in records] == ["answered", "answered"]


@pytest.mark.parametrize("agent", [True, False], ids=["other-key", "no-agent"])
async def test_a_sidecar_that_refuses_is_no_error_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: bool
) -> None:
    """Such as a proof that a proxy sends again by itself: SDKs retry a 503, and a 403 would be a riddle."""
    (tmp_path / "pod").mkdir()
    async with pod(tmp_path / "pod", "another-key", agent=agent) as it, gateway(tmp_path) as gate:
        monkeypatch.setattr(names, "ENGINE_PROXY_PORT", it.port)
        gate.ports["pod-1"] = 1
        gate.pods["chat/llama-1"] = replica(1, mtls=True)
        gate.changed()
        gate.hear(1)
        async with in_front_of(gate, trust=it.trust) as envoy, await envoy.post(CHAT) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "replica_unavailable")
        (record,) = await gate.records()
        assert (record.data.outcome, record.data.count_source) == ("failed", "none")
        assert it.engine.requests == []


async def test_a_filter_that_fails_open_gets_nothing_from_an_engine_that_its_client_chose(tmp_path: Path) -> None:
    nobody = Processors([("127.0.0.1", free_ports(1)[0])])
    async with pod(tmp_path) as it, envoy(nobody, serves=503, trust=it.trust, failure_mode_allow=True) as proxy:
        aimed = {"x-gateway-destination-endpoint": f"{HOST}:{it.port}"}
        async with proxy.session.post(proxy.url + PATH, json=CHAT, headers=aimed) as answer:
            assert answer.status == 500  # Envoy does not pass on a body that nobody has seen
        async with proxy.session.get(proxy.url + "/v1/models", headers=aimed) as answer:
            assert (answer.status, answer.headers.get("server")) == (403, "envoy")
        assert it.engine.requests == []


async def test_without_the_agent_nothing_is_admitted(tmp_path: Path) -> None:
    async with pod(tmp_path, agent=False) as it:
        assert await it.ask(proof("a")) == 503
        assert it.engine.requests == []
