"""The lab's network: one network namespace that holds everything, so that the host's own is never touched.

`pods0` is a bridge to which each pod's own namespace is attached; `lo` holds the address that the API server and all
kubelets share, and the cluster DNS's. Addresses are the same in every lab.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shoal_dev.lab.errors import LabError

HOST: Final = "10.200.0.1"
"""The API server's and the nodes' address."""
API_PORT: Final = 6443
BRIDGE: Final = "pods0"
GATEWAY: Final = "10.244.0.1"
POD_PREFIX: Final = "10.244"
SERVICE_RANGE: Final = "10.96.0.0/16"
API_SERVICE: Final = "10.96.0.1"
DNS: Final = "10.96.0.10"
DOMAIN: Final = "cluster.local"

PROGRAMS: Final = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mount": "mount",
    "nft": "nftables",
}
"""Program -> Debian package."""


def require_programs(announce: Callable[[str], None], programs: Mapping[str, str] = PROGRAMS) -> None:
    """Installs what is missing with apt-get where there is one; else raises LabError with the packages' names."""
    if not (missing := _missing(programs)):
        return
    if shutil.which("apt-get") is None:
        raise LabError(
            f"the lab needs {', '.join(missing)}: install the package{'s'[: len(missing) > 1]} and try again"
        )
    announce(f"installing {', '.join(missing)} with apt-get")
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    # A fresh machine has no package lists, or old ones; with good ones the update is not needed.
    for command in (install, ["apt-get", "update"], install):
        result = subprocess.run(
            ["env", "DEBIAN_FRONTEND=noninteractive", *command],
            capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if not _missing(programs):
            return
    raise LabError(f"`{' '.join(install)}` failed: {(result.stderr or result.stdout).strip()[-500:]}")


def _missing(programs: Mapping[str, str]) -> list[str]:
    return [package for program, package in programs.items() if shutil.which(program) is None]


def set_up() -> None:
    """Makes the addresses and routes in the calling process's network namespace, which must be new. Raises LabError."""
    commands = f"""
        link set lo up
        addr add {HOST}/32 dev lo
        addr add {DNS}/32 dev lo
        link add {BRIDGE} type bridge forward_delay 0
        addr add {GATEWAY}/16 dev {BRIDGE}
        link set {BRIDGE} up
        route add {SERVICE_RANGE} dev {BRIDGE} src {GATEWAY}
    """
    # The last route: without it a connection from the lab to a ClusterIP leaves with source 127.0.0.1 and hangs.
    result = subprocess.run(
        ["ip", "-batch", "-"], input=commands, capture_output=True, text=True, timeout=30, check=False
    )
    if result.returncode != 0:
        raise LabError(f"the lab's network cannot be made: {result.stderr.strip()}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    if bridged_packets_are_filtered():
        Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")


def bridged_packets_are_filtered() -> bool:
    """Whether the kernel has br_netfilter, by which answers between two pods on one bridge find back through NAT.

    Without it, connections to Services are masqueraded: everything works, and pods see the gateway's address as the
    client's.
    """
    return Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists()
