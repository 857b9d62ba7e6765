"""The DCGM exporter's metrics by way of the real Prometheus: sick GPUs, measured ones, and samples that are old."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from aiohttp import web

from shoal.api import config
from shoal.core.health.dcgm import of_nodes
from shoal.signals import dcgm
from shoal.signals.dcgm import DCGMMetrics
from shoal.signals.promql import PromQLClient
from tests.support.prometheus import prometheus
from tests.support.streams import until

HOSTS = {"gpu-node-1": "gpu-node-1"}


class Exporter:
    """A page as the DCGM exporter 4 writes it, of two GPUs."""

    def __init__(self) -> None:
        self.xids = {0: 0, 1: 0}
        self.counted: dict[int, str] = {}
        self.double_bit = 0
        self.throttled = 4

    def page(self) -> str:
        lines: list[str] = []
        for name, values in {
            "DCGM_FI_DEV_XID_ERRORS": self.xids,
            "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": dict.fromkeys(self.xids, self.double_bit),
            "DCGM_FI_DEV_ROW_REMAP_FAILURE": dict.fromkeys(self.xids, 0),
            "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": dict.fromkeys(self.xids, self.throttled),
        }.items():
            lines += [f"# HELP {name} As the exporter has it", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{self._labels(gpu)}}} {value}" for gpu, value in values.items()]
        lines += [
            f'DCGM_EXP_XID_ERRORS_COUNT{{{self._labels(gpu)},window_size_in_ms="300000",xid="{xid}"}} 1'
            for gpu, xid in self.counted.items()
        ]
        return "\n".join([*lines, ""])

    def _labels(self, gpu: int) -> str:
        return (
            f'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:0{gpu}:07.0",device="nvidia{gpu}",'
            'modelName="NVIDIA L40S",Hostname="gpu-node-1",DCGM_FI_DRIVER_VERSION="595.58.03",'
            'container="engine",namespace="chat",pod="llama-1"'
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[int]:
        async def page(_: web.Request) -> web.Response:
            return web.Response(text=self.page(), content_type="text/plain")

        app = web.Application()
        app.router.add_get("/metrics", page)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


def told(metrics: DCGMMetrics) -> list[tuple[str, str]]:
    read = metrics.reading
    return [] if read is None else [(s.unit.node, s.message) for s in of_nodes(read, HOSTS, lambda _: None)]


def measured(metrics: DCGMMetrics) -> list[str]:
    return [] if metrics.reading is None else sorted(metrics.reading.by_host.get("gpu-node-1", ()))


async def test_sick_gpus_are_read_and_those_that_nobody_scrapes_any_more_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm, "READ_SECONDS", 0.2)
    exporter = Exporter()
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(exporter.running())
        # The exporter's own pod and namespace, as a ServiceMonitor adds them: the replica's become exported_....
        labels = {"namespace": "gpu-operator", "pod": "dcgm-exporter-1"}
        server = stack.enter_context(prometheus(tmp_path, {f"127.0.0.1:{port}": labels}))
        settings = config.Prometheus(url=server.url)
        metrics = DCGMMetrics(settings, config.DCGM(match='job="shoal"'), lambda: None)
        task = asyncio.create_task(metrics.run())
        try:
            await until(lambda: measured(metrics) == ["GPU-0", "GPU-1"])
            assert told(metrics) == []
            assert metrics.problem is None
            exporter.xids[1] = 79
            exporter.throttled = 0x40
            lost = "DCGM: GPU 1 GPU-1: Xid 79 (the GPU has fallen off the bus)"
            await until(lambda: told(metrics) == [("gpu-node-1", lost)])
            await until(lambda: metrics.reading is not None and metrics.reading.held_down("GPU-0") != "")
            exporter.xids[1], exporter.counted[1] = 45, "48"
            double_bit = "DCGM: GPU 1 GPU-1: Xid 48 (a double-bit error of memory, which cannot be corrected)"
            await until(lambda: told(metrics) == [("gpu-node-1", double_bit)])
            del exporter.xids[1]
            exporter.counted = {}
            await until(lambda: measured(metrics) == ["GPU-0"] and told(metrics) == [])
            monkeypatch.setattr(dcgm, "FRESH_SECONDS", -5)  # as if all had been scraped long ago
            await until(lambda: metrics.reading is not None and not metrics.reading.by_uuid)
            assert "has no sample of DCGM_FI_DEV_XID_ERRORS" in (metrics.problem or "")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with PromQLClient(settings) as client:
            other = await dcgm.read(client, settings, config.DCGM(match='job="tenants"'))
        assert not other.by_uuid, "series with other labels do not count"
