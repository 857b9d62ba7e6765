"""A fleet of real processes on loopback, without a cluster: two engines (the simulator), or one real one, with their
agents, two gateways with their spools, one ledger, and an API server that is a fake in this process.

Each pod has an address of its own in 127.0.0.0/8, so all ports are the real ones.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from shoal.api import keys, names
from shoal.api.keys import AgentKeys, hash_api_key
from shoal.api.ledger import TotalsMessage
from shoal.api.reconciliation import UnattributedPage
from shoal.engine.sglang.client import parse_counters
from tests.storm.ledgerrows import Booked, Tokens
from tests.storm.mutants import ENVIRONMENT as MUTATION
from tests.storm.tenants.children import Child
from tests.storm.tenants.line import Line
from tests.support.addresses import pod_ip
from tests.support.engines import MODEL, ROOT, START_SECONDS, Kind, make_models, sglang_launcher
from tests.support.gateway_process import FakeApiServer, kubeconfig
from tests.support.rolekeys import give

KEY: Final = "sk-storm-2b9d40f1c7"
TENANT: Final = "storm"
NAMESPACE: Final = "storm"
ONE_MODEL: Final = "steady"
_UID: Final = "uid-steady"
_INSTALL_KEY: Final = b"an install key for one storm...."
_CREATED: Final = "2026-01-01T00:00:00Z"
_ENGINE_HOSTS: Final[dict[Kind, range]] = {"sim": range(1, 3), "sglang": range(1, 2)}
_GATEWAY_HOSTS: Final = range(5, 7)
_LEDGER_HOST: Final = 9
_LINE_HOST: Final = 10


@dataclass(slots=True)
class LocalFleet:
    """All of it, up."""

    folder: Path
    engines: list[Child]
    agents: list[Child]
    gateways: list[Child]
    ledger: Child
    line: Line
    session: aiohttp.ClientSession
    database_url: str
    kind: Kind

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Of the gateways."""
        return tuple((pod_ip(host), names.GATEWAY_PORT) for host in _GATEWAY_HOSTS)

    def spool(self, gateway: Child) -> Path:
        return self.folder / gateway.name

    async def counted(self) -> Tokens:
        """The engines' own counters."""
        found: list[Tokens] = []
        for host in _ENGINE_HOSTS[self.kind]:
            async with self.session.get(f"http://{pod_ip(host)}:{names.ENGINE_PORT}/metrics") as answer:
                counters = parse_counters(await answer.read())
                found.append(Tokens(counters.prompt_tokens or 0, counters.generation_tokens or 0))
        return Tokens.sum(found)

    async def booked(self) -> Booked:
        """What the ledger answers a person, and tells gateways."""
        url = f"http://{pod_ip(_LEDGER_HOST)}:{names.LEDGER_PORT}"
        headers = {"authorization": f"Bearer {keys.derive(_INSTALL_KEY, 'billing', keys.LEDGER)}"}
        async with self.session.get(f"{url}{names.UNATTRIBUTED_PATH}", headers=headers) as answer:
            answer.raise_for_status()
            total = UnattributedPage.model_validate_json(await answer.read()).total
        async with self.session.get(f"{url}{names.TOTALS_PATH}", headers=headers) as answer:
            answer.raise_for_status()
            said = TotalsMessage.model_validate_json((await answer.content.readline()).removeprefix(b"data: "))
        return Booked(
            Tokens(total.engine_input or 0, total.engine_output or 0),
            Tokens(total.billed_input, total.billed_output),
            Tokens(total.unattributed_input or 0, total.unattributed_output or 0),
            sum(tenant.requests for tenant in (said.tenants or {}).values() if tenant is not None),
        )

    async def restart(self, child: Child) -> None:
        await child.gone()
        await child.start()

    async def all_serve(self) -> None:
        for child in (self.ledger, *self.gateways):
            await child.serves(self.session)


@contextlib.asynccontextmanager
async def up(
    folder: Path,
    database_url: str | None = None,
    mutation: str | None = None,
    *,
    kind: Kind = "sim",
    speed: float = 1.0,
) -> AsyncGenerator[LocalFleet]:
    """A fleet whose every process serves; all are gone afterwards, `folder` stays.

    `database_url`: of the ledger; None: SQLite in the folder. `mutation`: see `tests.storm.mutants`.
    """
    await asyncio.to_thread(make_models)
    (folder / "engines").mkdir(parents=True)
    key_dir = folder / "install-key"
    key_dir.mkdir()
    for role in keys.BUNDLES:
        (key_dir / role).mkdir()
        give(key_dir / role, _INSTALL_KEY, role)
    api = FakeApiServer()
    api.objects["gpuclasses"] = []
    api.crds = True
    await api.up()
    line = Line(pod_ip(_LINE_HOST), pod_ip(_LEDGER_HOST))
    await line.up()
    async with aiohttp.ClientSession() as session:
        url = database_url or f"sqlite:///{folder / 'ledger.sqlite'}"
        fleet = _fleet(folder, key_dir, kubeconfig(folder, api), line, session, url, mutation, kind, speed)
        try:
            await _tell(api, kind)
            for child in (*fleet.engines, *fleet.agents, fleet.ledger, *fleet.gateways):
                await child.start()
            for child in fleet.engines:
                await child.serves(session, START_SECONDS[kind])
            for child in (*fleet.agents, fleet.ledger, *fleet.gateways):
                await child.serves(session)
            yield fleet
        finally:
            for child in (*fleet.gateways, fleet.ledger, *fleet.agents, *fleet.engines):
                child.strike()
                await child.gone()
            await line.down()
            await api.down()


def _fleet(
    folder: Path,
    key_dir: Path,
    config: str,
    line: Line,
    session: aiohttp.ClientSession,
    database_url: str,
    mutation: str | None,
    kind: Kind,
    speed: float,
) -> LocalFleet:
    entry = [sys.executable, "-m", "shoal" if mutation is None else "tests.storm.mutants"]
    env = {"PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    if mutation is not None:
        env[MUTATION] = mutation

    def child(name: str, ready: str | None, *command: str, **more: str) -> Child:
        return Child(name, [*entry, *command], env | more, folder / f"{name}.log", ready)

    agent_keys = AgentKeys(
        callers={role: keys.derive(_INSTALL_KEY, role, _UID) for role in ("gateway", "operator", "ledger")},
        engine=keys.derive(_INSTALL_KEY, "gateway", _UID),
        admin=keys.derive(_INSTALL_KEY, "admin", _UID),
    )
    (folder / "agent.json").write_text(agent_keys.model_dump_json())
    (folder / "engine.yaml").write_text(f"api-key: {agent_keys.engine}\nadmin-api-key: {agent_keys.admin}\n")
    engines: list[Child] = []
    agents: list[Child] = []
    for number, host in enumerate(_ENGINE_HOSTS[kind]):
        ip, run = pod_ip(host), folder / f"run-{number}"
        run.mkdir()
        (run / Path(names.BOOT_FILE).name).write_text(secrets.token_hex(8))
        # A folder of its own each: all have the name of this host.
        (folder / "engines" / engine_pod(number)).mkdir()
        engine = child(f"engine-{number}", f"http://{ip}:{names.ENGINE_PORT}/ready", *("sim", "engine"))
        program = engine.command if kind == "sim" else [str(sglang_launcher())]
        engine.command = [*program, *_engine_arguments(folder, ip)]
        if kind == "sim":
            journal = ("--sim-journal", str(folder / "engines" / engine_pod(number)))
            pace = ("--sim-gpu", "l4", "--sim-kv", "llama-3.1-8b", "--sim-load-seconds", "0", "--sim-speed", str(speed))
            engine.command = [*engine.command, *pace, *journal]
        engines.append(engine)
        files = ("--keys", str(folder / "agent.json"), "--run-dir", str(run))
        url = ("--engine-url", f"http://{ip}:{names.ENGINE_PORT}")
        command = ("agent", "serve", "--host", ip, *files, *url)
        agents.append(child(f"agent-{number}", f"http://{ip}:{names.AGENT_PORT}/healthz", *command))
    gateways = [
        child(
            f"shoal-gateway-{number}",
            f"http://{pod_ip(host)}:{names.OPS_PORT}/readyz",
            *("gateway", "run", "--kubeconfig", config),
            POD_NAME=f"shoal-gateway-{number}",
            SHOAL_GATEWAY_HOST=pod_ip(host),
            SHOAL_GATEWAY_OPS_HOST=pod_ip(host),
            SHOAL_GATEWAY_SPOOL_DIR=str(folder / f"shoal-gateway-{number}"),
            SHOAL_GATEWAY_KEYS_DIR=str(key_dir / "gateway"),
            SHOAL_GATEWAY_LEDGER_URL=line.url,
            SHOAL_GATEWAY_SETTLE_SECONDS="0",
            SHOAL_GATEWAY_SPOOL_KEEP_SECONDS="86400",
        )
        for number, host in enumerate(_GATEWAY_HOSTS)
    ]
    ledger = child(
        "shoal-ledger-0",
        f"http://{pod_ip(_LEDGER_HOST)}:{names.OPS_PORT}/readyz",
        *("ledger", "run"),
        KUBECONFIG=config,
        POD_NAME="shoal-ledger-0",
        SHOAL_LEDGER_HOST=pod_ip(_LEDGER_HOST),
        SHOAL_LEDGER_OPS_HOST=pod_ip(_LEDGER_HOST),
        SHOAL_LEDGER_DATABASE_URL=database_url,
        SHOAL_LEDGER_KEYS_DIR=str(key_dir / "ledger"),
        SHOAL_LEDGER_PRICES_DIR=str(folder / "prices"),
    )
    return LocalFleet(folder, engines, agents, gateways, ledger, line, session, database_url, kind)


def _engine_arguments(folder: Path, ip: str) -> list[str]:
    """Those that both kinds understand."""
    return [
        *("--host", ip, "--port", str(names.ENGINE_PORT)),
        *("--model-path", str(MODEL), "--served-model-name", f"{NAMESPACE}/{ONE_MODEL}"),
        *("--enable-metrics", "--enable-cache-report", "--config", str(folder / "engine.yaml")),
        *("--max-total-tokens", "20000", "--max-running-requests", "16"),
    ]


def engine_pod(number: int) -> str:
    return f"{ONE_MODEL}-{number}"


async def _tell(api: FakeApiServer, kind: Kind) -> None:
    """The objects of a cluster: a Model, its pods, a Tenant, the gateways' pods."""
    source = {"source": {"uri": "file:///models/tiny-chat"}}
    metadata = {"name": ONE_MODEL, "namespace": NAMESPACE, "uid": _UID, "creationTimestamp": _CREATED}
    await api.change("models", {"metadata": metadata, "spec": source} | {"apiVersion": "shoal.dev/v1alpha1"})
    key = {"name": "storm", "sha256": hash_api_key(KEY)}
    grant = {"namespace": NAMESPACE, "name": ONE_MODEL}
    spec = {"keys": [key], "models": [grant]}
    await api.change("tenants", {"metadata": {"name": TENANT, "uid": "uid-storm"}, "spec": spec})
    for number, host in enumerate(_ENGINE_HOSTS[kind]):
        labels = {
            names.LABEL_MODEL: ONE_MODEL,
            names.LABEL_MODEL_UID: _UID,
            names.LABEL_GPU_CLASS: "l4-24gb",
            names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        }
        await api.change("pods", _pod(engine_pod(number), NAMESPACE, pod_ip(host), labels))
    for number, host in enumerate(_GATEWAY_HOSTS):
        labels = {names.LABEL_COMPONENT: names.COMPONENT_GATEWAY}
        await api.change("pods", _pod(f"shoal-gateway-{number}", "shoal-system", pod_ip(host), labels))


def _pod(name: str, namespace: str, ip: str, labels: dict[str, str]) -> dict[str, Any]:
    owned = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_PART_OF: names.MANAGED_BY}
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": _CREATED}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "creationTimestamp": _CREATED,
            "labels": labels | owned,
            "annotations": {names.ANNOTATION_INSTALL_KEY: keys.fingerprint(_INSTALL_KEY)},
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "resources": {}}]},
        "status": {"phase": "Running", "podIP": ip, "startTime": _CREATED, "conditions": [condition]},
    }
