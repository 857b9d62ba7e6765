"""The node cache's process: what it keeps, the sockets, the volumes it follows, and its own health and metrics."""

import asyncio
import contextlib
import shutil
import signal
from typing import Final

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from shoal.artifacts import Settings
from shoal.cache.disk import CacheDisk, stale
from shoal.cache.diskquota import DiskQuota
from shoal.cache.fetcher import Fetcher
from shoal.cache.index import Index
from shoal.cache.scrub import Scrub
from shoal.cache.server import CacheServer
from shoal.cache.settings import CacheSettings
from shoal.cache.volumes import NamespaceVolumes
from shoal.core import network
from shoal.kube.access import Access
from shoal.kube.client import KubeClient
from shoal.net.pages import METRICS, TokenGuard, denial_response
from shoal.net.server import make_server
from shoal.net.serving import KEEP_ALIVE_SECONDS, serving
from shoal.net.shell import GET, Shell, ShellRequest, answer_json

KEEP_PARTIAL_SECONDS: Final = 24 * 3600.0
"""What a fetch left that nobody went on with."""
_TIDY_SECONDS: Final = 3600.0

log = structlog.get_logger()


async def run(settings: CacheSettings, client: KubeClient) -> None:
    """Serves until SIGTERM. Raises OSError when the folder or the port cannot be had."""
    stop = asyncio.Event()
    # A process that is number 1 of its container has no default action for these signals.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    disk, index = CacheDisk(settings.root), Index(settings.grace_seconds)
    index.fill(await asyncio.to_thread(disk.open))
    quota = DiskQuota(disk, index, settings.size_bytes, settings.free_percent)
    sources = Settings(
        hub_endpoint=settings.hub_endpoint.rstrip("/") or None, network=network.of_config(settings.sources)
    )
    log.info("cache.opened", models=index.models, bytes=index.bytes, size=settings.size_bytes)
    async with contextlib.AsyncExitStack() as stack:
        fetcher = await stack.enter_async_context(Fetcher(disk, index, quota, sources))
        server = CacheServer(disk, index, fetcher)
        stack.push_async_callback(server.close)
        volumes = NamespaceVolumes(client, disk, index, server, settings.grace_seconds)
        scrub = Scrub(disk, index, quota, bytes_per_second=settings.scrub_bytes_per_second)
        metrics = _Metrics(disk, index, quota, scrub)
        REGISTRY.register(metrics)
        stack.callback(REGISTRY.unregister, metrics)
        await _serve_ops(stack, settings, volumes, Access(client) if settings.metrics_auth else None)
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work) for work in (volumes.run(), _tidy(disk, quota), scrub.run())]
            await stop.wait()
            for task in working:
                task.cancel()


async def _serve_ops(
    stack: contextlib.AsyncExitStack, settings: CacheSettings, volumes: NamespaceVolumes, access: Access | None
) -> None:
    async def healthz(_: ShellRequest) -> Response:
        return answer_json({"status": "ok"})

    async def readyz(_: ShellRequest) -> Response:
        if volumes.synced:
            return answer_json({"status": "ok"})
        return answer_json({"status": "not ready", "volumes": "not listed yet"}, 503)

    async def metrics(_: ShellRequest) -> Response:
        # In a thread: the disk is asked, and may be slow.
        body = await asyncio.to_thread(generate_latest, REGISTRY)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

    shell = Shell("the node cache", wording=denial_response, guard=TokenGuard(access))
    shell.route(GET, "/healthz", healthz)
    shell.route(GET, "/readyz", readyz)
    shell.route(GET, METRICS, metrics)
    server = make_server(
        shell, host=settings.ops_host, port=settings.ops_port, keep_alive=KEEP_ALIVE_SECONDS, stop_seconds=1
    )
    await stack.enter_async_context(serving(server))


async def _tidy(disk: CacheDisk, quota: DiskQuota) -> None:
    """Drops what fetches left that nobody went on with."""
    while True:
        async with quota.lock:
            found = await asyncio.to_thread(disk.partials)
            for key in stale(found, KEEP_PARTIAL_SECONDS):
                if not quota.is_reserved(key):
                    await asyncio.to_thread(disk.drop_partial, key)
                    log.info("cache.partial_dropped", model=key, bytes=found[key][0])
        await asyncio.sleep(_TIDY_SECONDS)


class _Metrics(Collector):
    def __init__(self, disk: CacheDisk, index: Index, quota: DiskQuota, scrub: Scrub) -> None:
        self._disk = disk
        self._index = index
        self._quota = quota
        self._scrub = scrub

    def collect(self) -> list[Metric]:
        free = shutil.disk_usage(self._disk.root).free
        return [
            GaugeMetricFamily("shoal_cache_models", "Cached models.", value=self._index.models),
            GaugeMetricFamily("shoal_cache_bytes", "Bytes of the cached files.", value=self._index.bytes),
            GaugeMetricFamily("shoal_cache_size_bytes", "Size limit of the cache.", value=self._quota.size),
            GaugeMetricFamily("shoal_cache_disk_free_bytes", "Free bytes of the disk.", value=free),
            GaugeMetricFamily("shoal_cache_holds", "Pods that use a model.", value=self._index.holds),
            CounterMetricFamily("shoal_cache_evictions", "Models evicted.", value=self._quota.evicted),
            CounterMetricFamily(
                "shoal_cache_broken_files", "Files found corrupt on the disk.", value=self._scrub.broken
            ),
        ]
