"""The node cache's process: what it keeps, the sockets, the volumes it follows, and its own health and metrics."""

import asyncio
import contextlib
import shutil
import signal
from typing import Final

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
from shoal.net.guard import guarded

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
    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        if volumes.synced:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "not ready", "volumes": "not listed yet"}, status=503)

    async def metrics(_: web.Request) -> web.Response:
        body = await asyncio.to_thread(generate_latest, REGISTRY)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[guarded(access)])
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, settings.ops_host, settings.ops_port).start()


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
            GaugeMetricFamily("shoal_cache_models", "Models that are here.", value=self._index.models),
            GaugeMetricFamily("shoal_cache_bytes", "Bytes of their files.", value=self._index.bytes),
            GaugeMetricFamily("shoal_cache_size_bytes", "The cache's bound.", value=self._quota.size),
            GaugeMetricFamily("shoal_cache_disk_free_bytes", "Free bytes of the disk.", value=free),
            GaugeMetricFamily("shoal_cache_holds", "Pods that use a model.", value=self._index.holds),
            CounterMetricFamily("shoal_cache_evictions", "Models evicted.", value=self._quota.evicted),
            CounterMetricFamily("shoal_cache_broken_files", "Files that rotted on the disk.", value=self._scrub.broken),
        ]
