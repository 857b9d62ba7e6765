"""Addresses of pods that are not there, for tests that need the real ports."""

import ipaddress
import os


def pod_ip(host: int) -> str:
    """The loopback address that stands for pod number `host` (1 to 14) in this test process.

    All of 127.0.0.0/8 is this machine, so a pod can have its own address with the real ports. Of the 24 bits that are
    free the process has 20, so that test processes side by side (xdist's, another checkout's) do not take each other's.
    """
    if not 1 <= host <= 14:
        raise ValueError(f"there are pods 1 to 14 in a process, not {host}")
    return str(ipaddress.IPv4Address("127.0.0.0") + ((os.getpid() & 0xFFFFF) << 4 | host))
