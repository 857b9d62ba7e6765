"""How many orders of events of the drain's protocol are searched, and that none stops an engine under a request.

python -m tests.bench.bench_protocol

The tests search the small worlds; this one those with two faults, and with two gateways: half a million states.
"""

import sys
import time

from rich.console import Console
from rich.table import Table

from shoal.core import drain
from tests.support import protocol
from tests.support.protocol import Gate, World, search

WORLDS = {
    "one gateway, a request, a fault": World((Gate(),), (None,), picks=1, faults=1, hooks=1),
    "one gateway, a request, two faults": World((Gate(),), (None,), picks=1, faults=2, hooks=1),
    "one gateway, two requests, a fault, two drains": World((Gate(),), (None,), picks=2, faults=1, hooks=2),
    "two gateways, a request": World((Gate(),) * 2, (None,) * 2, picks=1, faults=0, hooks=1),
}


def main() -> int:
    drain.CLAIM_SECONDS, drain.RESTART_SECONDS = float(protocol.SILENCE), float(protocol.RESTART)
    table = Table(title="the drain's protocol, in every order of events")
    for column in ("world", "states", "drains let through", "CPU s", "engines stopped under a request"):
        table.add_column(column, justify="left" if column == "world" else "right")
    lost = False
    for name, world in WORLDS.items():
        begun = time.process_time()
        story, states, let_through = search(world)
        seconds = time.process_time() - begun
        table.add_row(name, f"{states:,}", f"{let_through:,}", f"{seconds:.1f}", "; ".join(story) if story else "0")
        lost = lost or story is not None
    Console(width=160).print(table)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
