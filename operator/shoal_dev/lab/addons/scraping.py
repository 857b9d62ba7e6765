"""Keeps a lab's Prometheus up to date with the cluster: its jobs, targets and rules.

Started by the supervisor as `python -m shoal_dev.lab.addons.scraping`. What a Prometheus Operator and Prometheus' own
Kubernetes discovery do in a cluster.
"""

import argparse
import asyncio
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp
import orjson
import structlog

from shoal_dev.lab.addons import monitors
from shoal_dev.lab.kubeapi import Api, KubeAPIError, LabReflector, Object

_log = structlog.get_logger()
_SETTLE_S: Final = 0.2
"""Changes come in bursts."""
_RELOAD_TIMEOUT: Final = aiohttp.ClientTimeout(total=30)
_AGAIN_S: Final = 2.0
_TOKEN_S: Final = 1800.0
"""A token is valid for an hour."""
_PATHS: Final = {
    "services": "/api/v1/services",
    "slices": "/apis/discovery.k8s.io/v1/endpointslices",
    "pods": "/api/v1/pods",
    "servicemonitors": f"/apis/{monitors.GROUP}/v1/servicemonitors",
    "podmonitors": f"/apis/{monitors.GROUP}/v1/podmonitors",
    "prometheusrules": f"/apis/{monitors.GROUP}/v1/prometheusrules",
}


class Scraping:
    """Files below `folder`, and a reload of `prometheus` (a URL) where targets alone do not do."""

    def __init__(self, api: Api, folder: Path, prometheus: str) -> None:
        self._folder = folder
        self._url = prometheus
        self._changed = asyncio.Event()
        self._unread: set[str] = set()

        def changed(_kind: str, _item: Object) -> None:
            self._changed.set()

        self._seen = {name: LabReflector(api, path, changed) for name, path in _PATHS.items()}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession(timeout=_RELOAD_TIMEOUT) as session:
            for reflector in self._seen.values():
                tasks.create_task(reflector.run())
            for reflector in self._seen.values():
                await reflector.synced.wait()
            # The first time in any case: this process may be new, and Prometheus' configuration old.
            stale = True
            while True:
                self._changed.clear()
                stale = self._write() or stale
                if stale:
                    stale = not await self._reload(session)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S if stale else None):
                        await self._changed.wait()
                await asyncio.sleep(_SETTLE_S)

    def _all(self, name: str) -> list[Object]:
        return list(self._seen[name].objects.values())

    def _write(self) -> bool:
        """Whether Prometheus has to be told."""
        cluster = monitors.MonitoredCluster(self._all("services"), self._all("slices"), self._all("pods"))
        # Items of a list carry no kind.
        service_monitors = [{**item, "kind": "ServiceMonitor"} for item in self._all("servicemonitors")]
        pod_monitors = [{**item, "kind": "PodMonitor"} for item in self._all("podmonitors")]
        jobs = monitors.jobs(service_monitors, pod_monitors, cluster)
        for job in jobs:
            if job.unread and job.name not in self._unread:
                self._unread.add(job.name)
                _log.warning("fields_not_read", monitor=job.name, fields=job.unread)
            _publish(self._folder / "targets" / job.file, orjson.dumps(job.targets))
        _keep_only(self._folder / "targets", {job.file for job in jobs})
        rules = monitors.rules(self._all("prometheusrules"))
        written = [_publish(self._folder / "rules" / name, orjson.dumps(text)) for name, text in rules.items()]
        removed = _keep_only(self._folder / "rules", set(rules))
        config = orjson.dumps(monitors.configuration(jobs, self._folder))
        return any([_publish(self._folder / "prometheus.yml", config), *written, removed])

    async def _reload(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.post(f"{self._url}/-/reload") as answer:
                if answer.status == 200:
                    return True
                _log.error("prometheus_refuses", status=answer.status, reason=(await answer.text())[:500])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.info("prometheus_away", error=str(error) or type(error).__name__)
        return False


class Token:
    """Keeps the token of Prometheus' ServiceAccount in the file that it reads, as a kubelet does in a pod."""

    def __init__(self, api: Api, path: Path, namespace: str, account: str) -> None:
        self._api, self._path = api, path
        self._where = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"

    async def run(self) -> None:
        """Until cancelled."""
        asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        while True:
            pause = _AGAIN_S
            with suppress(KubeAPIError, aiohttp.ClientError, TimeoutError, OSError):
                made = await self._api.request("POST", self._where, asked)
                _publish(self._path, made["status"]["token"].encode())
                pause = _TOKEN_S
            await asyncio.sleep(pause)


def _publish(path: Path, content: bytes) -> bool:
    """Writes the file at once and whole; False where it is so already."""
    with suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return False
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.rename(path)
    return True


def _keep_only(folder: Path, names: set[str]) -> bool:
    gone = [path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in names]
    for path in gone:
        path.unlink()
    return bool(gone)


async def _run(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Api(arguments.kubeconfig) as api, asyncio.TaskGroup() as tasks:
        namespace, _, account = arguments.account.partition("/")
        token = Token(api, arguments.folder / monitors.TOKEN, namespace, account)
        scraping = Scraping(api, arguments.folder, arguments.prometheus)
        running = [tasks.create_task(work) for work in (token.run(), scraping.run())]
        await stop.wait()
        for task in running:
            task.cancel()


def main(argv: Sequence[str] | None = None) -> None:
    """The process's entry."""
    parser = argparse.ArgumentParser(prog="shoal_dev.lab.addons.scraping")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--prometheus", required=True)
    parser.add_argument("--account", required=True, help="NAMESPACE/NAME of its ServiceAccount.")
    asyncio.run(_run(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
