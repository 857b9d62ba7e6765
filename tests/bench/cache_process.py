"""The node cache as a process of its own, without a cluster: FOLDER HUB NAMESPACE..."""

import asyncio
import signal
import sys
from pathlib import Path

from shoal.artifacts import Settings
from shoal.cache.disk import CacheDisk
from shoal.cache.diskquota import DiskQuota
from shoal.cache.fetcher import Fetcher
from shoal.cache.index import Index
from shoal.cache.server import CacheServer
from shoal.runtime import logs
from tests.support.sources import LOCAL


async def main(root: Path, hub: str, namespaces: list[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    disk, index = CacheDisk(root), Index()
    index.fill(await asyncio.to_thread(disk.open))
    async with Fetcher(
        disk, index, DiskQuota(disk, index, 1 << 50, free_percent=1), Settings(network=LOCAL, hub_endpoint=hub)
    ) as fetcher:
        server = CacheServer(disk, index, fetcher)
        for namespace in namespaces:
            await server.add(namespace)
        await stop.wait()
        await server.close()


if __name__ == "__main__":
    logs.configure("warning")
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
