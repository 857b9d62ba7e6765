"""Starts node processes by forking one that has loaded their code already.

Loading it takes most of a second of CPU, which a fleet of eight nodes would pay eight times at each `up`.
`python -m shoal_dev.lab.nodefork FD` reads requests from the socket FD and answers each with the new process's pid. The
processes are not its children: forked twice, they are adopted, and reaped, by the supervisor.
"""

import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import orjson
from pydantic import BaseModel

_NODE: Final = ("shoal_dev.lab.node.__main__", "shoal_dev.lab.node.kubelet", "shoal_dev.lab.node.statusonly")
"""What is loaded before the first fork; not by the supervisor, which imports this module for its messages."""


class ForkRequest(BaseModel):
    """Start a node. `log` is appended to."""

    config: str
    log: str


class ForkAnswer(BaseModel):
    """The node's process."""

    pid: int


def _become_node(request: ForkRequest) -> int:
    os.setsid()
    with open(request.log, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = ["shoal_dev.lab.node", "--config", request.config]
    return importlib.import_module(_NODE[0]).main()


def _fork(request: ForkRequest, channel: socket.socket) -> int:
    """Returns the grandchild's pid; the grandchild never returns. Raises OSError."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(read)
        channel.close()
        pid = os.fork()
        if pid:
            os.write(write, orjson.dumps(pid))
            os._exit(0)
        os.close(write)
        code = 1
        try:
            code = _become_node(request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    pid = int(orjson.loads(os.read(read, 64)))
    os.close(read)
    os.waitpid(middle, 0)
    return pid


def main(argv: Sequence[str]) -> None:
    """Serves requests until the other end is closed."""
    for module in _NODE:
        importlib.import_module(module)
    # What is loaded now is for ever: the collector must not touch, and thereby copy, its pages in every node.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(argv[0])) as channel:
        while data := channel.recv(1 << 16):
            answer = ForkAnswer(pid=_fork(ForkRequest.model_validate_json(data), channel))
            channel.send(answer.model_dump_json().encode())


if __name__ == "__main__":
    main(sys.argv[1:])
