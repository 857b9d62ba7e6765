"""`python -m shoal_dev.lab.node --config FILE`: one node, or all status-only nodes."""

# Only what PID 1 needs is imported here: it forks every container, so it stays small.
import argparse
import os
import socket
import sys
from pathlib import Path

from shoal_dev.lab.node import spawner


def _kubelet(path: Path, to_spawner: socket.socket | None) -> None:
    import asyncio

    from shoal_dev.lab.node.config import NodeConfig

    config = NodeConfig.read(path)
    _logging(config.log_level)
    if config.status_only is not None:
        from shoal_dev.lab.node import statusonly

        asyncio.run(statusonly.run(config, config.status_only))
    elif to_spawner is not None:
        from shoal_dev.lab.node import kubelet

        asyncio.run(kubelet.run(config, to_spawner))


def _logging(level: str) -> None:
    # shoal.runtime may not be imported from here: the lab is below it
    import logging

    import structlog

    number: int = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal_dev.lab.node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the node's configuration, written by `shoal lab`")
    path: Path = parser.parse_args().config
    import json

    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        print(f"cannot read {path}: {error}", file=sys.stderr)
        return 2
    if content.get("statusOnly") is not None:
        _kubelet(path, None)
        return 0
    if os.geteuid() != 0:
        print("a process node needs root: it makes namespaces and mounts", file=sys.stderr)
        return 1
    return spawner.start_node(lambda to_spawner: _kubelet(path, to_spawner))


if __name__ == "__main__":
    sys.exit(main())
