"""Gateway, ledger and node cache under the roles that the chart gives them: by the API server's own log, each verb that
is granted is used, and none is missing. The operator's is in test_operator_rbac.py."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.api import names, permissions
from shoal.cache.process import run as run_cache
from shoal.cache.settings import CacheSettings
from shoal.gateway.process import GatewayProcess as Gateway
from shoal.gateway.settings import GatewaySettings
from shoal.kube.client import KubeClient
from shoal.ledger.process import LedgerProcess as Ledger
from shoal.ledger.settings import LedgerSettings
from tests.e2e.operator.test_operator_rbac import granted_to, service_account_kubeconfig, used_by
from tests.e2e.operator.test_operator_scope import grant
from tests.support.controlplane import Fleet, free_ports
from tests.support.operators import NAMESPACE, eventually

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

Work = tuple[Coroutine[None, None, None], Callable[[], None] | None]
"""A process and what asks it to stop; None: it is cancelled."""
Start = Callable[[KubeClient, Path, int], Work]


def settings(folder: Path, port: int) -> dict[str, Any]:
    (folder / "key").mkdir()
    (folder / "key" / "current").write_bytes(b"k" * 32)
    where = {"host": "127.0.0.1", "port": 0, "ops_host": "127.0.0.1", "ops_port": port}
    return {**where, "install_key_dir": folder / "key", "metrics_auth": True}


def gateway(client: KubeClient, folder: Path, port: int) -> Work:
    fields: dict[str, Any] = settings(folder, port) | {
        "settle_seconds": 0.0,
        "spool_dir": folder / "spool",
        "pod_namespace": NAMESPACE,
    }
    process = Gateway(GatewaySettings(**fields), client)
    return process.run(), process.stop


def ledger(client: KubeClient, folder: Path, port: int) -> Work:
    url = f"sqlite:///{folder}/ledger.sqlite"
    process = Ledger(LedgerSettings(**settings(folder, port), prices_dir=folder / "prices", database_url=url), client)
    return process.run(), process.stop


def cache(client: KubeClient, folder: Path, port: int) -> Work:
    settings = CacheSettings(root=folder, ops_host="127.0.0.1", ops_port=port, metrics_auth=True)
    return run_cache(settings, client), None


@contextlib.asynccontextmanager
async def running(start: Start, fleet: Fleet, account: str, folder: Path) -> AsyncGenerator[str]:
    """The process as a pod would run it; yields the address of its pages."""
    (port,) = free_ports(1)
    kubeconfig = service_account_kubeconfig(fleet, folder / "kubeconfig", account)
    (folder / "own").mkdir()
    async with await KubeClient.from_environment(kubeconfig=kubeconfig) as client:
        work, stop = start(client, folder / "own", port)
        task = asyncio.create_task(work)
        try:
            yield f"http://127.0.0.1:{port}"
            if task.done():
                task.result()
        finally:
            (stop or task.cancel)()
            await asyncio.wait([task], timeout=30)


@pytest.mark.parametrize(
    ("start", "rows"),
    [(gateway, permissions.GATEWAY), (ledger, permissions.LEDGER), (cache, permissions.CACHE)],
    ids=["gateway", "ledger", "cache"],
)
async def test_verbs_granted_are_verbs_used(
    start: Start, rows: tuple[permissions.Permission, ...], fleet: Fleet, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    account = f"shoal-{request.node.callspec.id}"
    await grant(fleet, metrics={"auth": {"readers": [{"name": account, "namespace": NAMESPACE}]}})
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    granted = granted_to(*rows, *permissions.ACCESS)
    async with running(start, fleet, account, tmp_path) as url, aiohttp.ClientSession() as session:
        token = fleet.plane.run_kubectl("create", "token", account, f"--namespace={NAMESPACE}").strip()

        async def page(path: str, **headers: str) -> int:
            try:
                async with session.get(url + path, headers=headers) as answer:
                    return answer.status
            except aiohttp.ClientError:
                return 0

        await eventually(lambda: page("/readyz"), lambda status: status == 200, what="it is ready")
        assert await page("/metrics") == 401
        shown = {names.HEADER_KEY: token}
        await eventually(lambda: page("/metrics", **shown), lambda status: status == 200, what="the page")
        await asyncio.sleep(1)  # each list is followed by its watch

    async def used() -> set[tuple[str, str]]:
        return used_by(fleet, user)

    await eventually(used, lambda found: found == granted, what=f"{sorted(granted)}")
    # The mutation: a verb too many, or one too few, is found.
    assert await used() != granted | {("secrets", "get")}
    assert await used() != granted - {("tokenreviews", "create")}
