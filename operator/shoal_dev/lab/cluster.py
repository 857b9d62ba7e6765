"""One process inside the lab: what a cluster has in kube-proxy, CoreDNS and a storage provisioner, and the forwarders.

Started by the supervisor as `python -m shoal_dev.lab.cluster`, with sockets of the host's network handed down.
"""

import argparse
import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from shoal_dev.lab import dns, forward, network, services
from shoal_dev.lab.kubeapi import Api, LabReflector, Object
from shoal_dev.lab.state import LabForward
from shoal_dev.lab.volumes import Provisioner

_log = structlog.get_logger()
_SETTLE_S: Final = 0.02
"""Changes come in bursts: wait so long and load the table once."""
_NFT_TIMEOUT_S: Final = 20.0


class ServiceNetwork:
    """Keeps the nftables table and the DNS zone equal to Services and EndpointSlices."""

    def __init__(self, api: Api, server: dns.DNSServer) -> None:
        self._server = server
        self._changed = asyncio.Event()
        self._loaded = ""

        def changed(_kind: str, _item: Object) -> None:
            self._changed.set()

        self.services = LabReflector(api, "/api/v1/services", changed)
        self._slices = LabReflector(api, "/apis/discovery.k8s.io/v1/endpointslices", changed)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.services.run())
            tasks.create_task(self._slices.run())
            # A table from half of the truth would refuse connections that should work.
            await self.services.synced.wait()
            await self._slices.synced.wait()
            while True:
                self._changed.clear()
                await self._load()
                await self._changed.wait()
                await asyncio.sleep(_SETTLE_S)

    async def _load(self) -> None:
        known, slices = list(self.services.objects.values()), list(self._slices.objects.values())
        self._server.zone = dns.Zone.build(known, slices)
        table = services.ruleset(
            services.service_ports(known, slices), masquerade_all=not network.bridged_packets_are_filtered()
        )
        if table == self._loaded:
            return
        process = await asyncio.create_subprocess_exec(
            "nft", "-f", "-", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(_NFT_TIMEOUT_S):
            _, error = await process.communicate(table.encode())
        if process.returncode != 0:
            _log.error("services_not_loaded", error=error.decode()[-1000:])
        else:
            self._loaded = table


def _resolver(wanted: LabForward, known: LabReflector) -> Callable[[], forward.ForwardTarget]:
    return lambda: forward.service_target(wanted, known.objects)


async def _run(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = dns.DNSServer()
    upstream = None if arguments.dns_fd is None else socket.socket(fileno=arguments.dns_fd)
    async with Api(arguments.kubeconfig) as api, asyncio.TaskGroup() as tasks:
        served = ServiceNetwork(api, server)
        jobs = [
            served.run(),
            server.serve(network.DNS, 53, upstream),
            Provisioner(api, arguments.nodes).run(),
            forward.serve(
                socket.socket(fileno=arguments.api_fd), lambda: forward.ForwardTarget(network.HOST, network.API_PORT)
            ),
        ]
        for text in arguments.forward:
            number, _, target = text.partition(",")
            wanted = LabForward.parse(target)
            jobs.append(forward.serve(socket.socket(fileno=int(number)), _resolver(wanted, served.services)))
        running = [tasks.create_task(job) for job in jobs]
        await stop.wait()
        for task in running:
            task.cancel()


def main(argv: Sequence[str] | None = None) -> None:
    """The process's entry."""
    parser = argparse.ArgumentParser(prog="shoal_dev.lab.cluster")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--api-fd", type=int, required=True)
    parser.add_argument("--dns-fd", type=int)
    parser.add_argument("--forward", action="append", default=[], metavar="FD,NAMESPACE/SERVICE:PORT")
    asyncio.run(_run(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
