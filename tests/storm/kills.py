"""Gateways and the ledger killed by SIGKILL in turn, beside all other faults: their cost is in the ledger.

The kubelet would wait longer and longer before it starts a container again that is killed again and again. So its pod
is taken away right after the kill, and the StatefulSet makes another one on the same volume.
"""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Final

import click

from shoal.api import names
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab.errors import LabError
from tests.storm.ground import Ground
from tests.storm.journals import Kill, KillOf

Say = Callable[[str, Iterable[Kill]], None]
_GONE_SECONDS: Final = 3.0
"""After a kill: how long requests may tell of it."""


@contextlib.contextmanager
def killing(ground: Ground, count: int, seconds: float, say: Say) -> Generator[None]:
    """Kills `count` times within `seconds`, while the block runs; none while the Service does not send to all again, so
    that somebody always serves. What could not be done meanwhile is not made up for by kills in quick succession:
    clients that find a new gateway killed three times in a row give up, and prove nothing."""
    stop = threading.Event()
    thread = threading.Thread(target=_kill, args=(ground, count, seconds, say, stop), name="kills")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def _kill(ground: Ground, count: int, seconds: float, say: Say, stop: threading.Event) -> None:
    turns = itertools.cycle((names.COMPONENT_GATEWAY, names.COMPONENT_LEDGER))
    done = turn = 0
    began = time.monotonic()
    component = next(turns)
    each = seconds / (count + 1)
    last = began
    while done < count:
        due = max(began + each * (done + 1), last + each / 2)
        if stop.wait(max(1.0, due - time.monotonic())):
            break
        # The API server may be away, and gateways may be restarting: that is part of the storm.
        with contextlib.suppress(LabError, click.ClickException):
            pods = sorted(ground.serving(component))
            if not pods or len(pods) < ground.wanted(component):
                continue
            pod = pods[turn % len(pods)]
            since = time.time()
            ground.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGKILL)
            what: KillOf = "ledger" if component == names.COMPONENT_LEDGER else "gateway"
            say(f"killed: {pod}", [Kill(what, pod, since, time.time() + _GONE_SECONDS, "killed")])
            done, last = done + 1, time.monotonic()
            turn += component == names.COMPONENT_GATEWAY
            component = next(turns)
            ground.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--force", "--grace-period=0", "--wait=false")
    say(f"{done} SIGKILLs of gateways and ledger, of {count}", [])
