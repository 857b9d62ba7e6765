"""One network namespace per pod, on the lab's bridge."""

import asyncio

from shoal_dev.lab.node.config import NodeConfig
from shoal_dev.lab.node.runtime import Runtime

COMMAND_SECONDS = 20.0


class NetworkError(Exception):
    """The pod's network could not be made. The message is for an event."""


class Network:
    """Addresses of one node: 10.244.<index>.2 to .254."""

    def __init__(self, config: NodeConfig, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._index = config.nodes[0].index
        self._used: set[int] = set()
        self._last = 1

    def allocate(self, wanted: str | None = None) -> str:
        """The wanted address if it is free, else the next free one, so that one just given back is not reused at once.

        Raises NetworkError.
        """
        prefix, _, last = (wanted or "").rpartition(".")
        if prefix == f"{self._config.pod_prefix}.{self._index}" and int(last) not in self._used:
            self._used.add(int(last))
            return f"{prefix}.{last}"
        for step in range(1, 254):
            number = 2 + (self._last - 2 + step) % 253
            if number not in self._used:
                self._used.add(number)
                self._last = number
                return f"{self._config.pod_prefix}.{self._index}.{number}"
        raise NetworkError("no free pod address on this node")

    def release(self, address: str) -> None:
        self._used.discard(int(address.rpartition(".")[2]))

    async def attach(self, sandbox: str, hostname: str, address: str) -> None:
        """Makes the pod's namespaces and connects them. They need no removal: the kernel drops them with the pod."""
        path = await self._runtime.sandbox(sandbox, hostname)
        host = f"p{self._index}-{address.rpartition('.')[2]}"
        await _ip(
            # a pod that just ended here may still hold the name: its namespace is dropped asynchronously
            f"link add {host} type veth peer name eth0 netns {path}\nlink set {host} master {self._config.bridge} up\n"
            # a pod may reach itself through its Service
            f"link set {host} type bridge_slave hairpin on\n",
        )
        await _ip(
            f"link set lo up\naddr add {address}/16 dev eth0\nlink set eth0 up\n"
            f"route add default via {self._config.gateway}\n",
            namespace=path,
        )

    async def detach(self, sandbox: str, address: str) -> None:
        host = f"p{self._index}-{address.rpartition('.')[2]}"
        await self._runtime.drop(sandbox)
        # at once, not when the kernel gets round to it: the address may be used again
        await _ip(f"link del {host}\n", quiet=True)
        self.release(address)


async def _ip(batch: str, namespace: str | None = None, quiet: bool = False) -> None:
    enter = ("nsenter", f"--net={namespace}") if namespace else ()
    process = await asyncio.create_subprocess_exec(
        *enter,
        "ip",
        "-batch",
        "-",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(COMMAND_SECONDS):
        _, errors = await process.communicate(batch.encode())
    if process.returncode and not quiet:
        raise NetworkError(f"ip: {errors.decode(errors='replace').strip()}")
