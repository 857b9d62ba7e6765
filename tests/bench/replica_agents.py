"""The agents of all engines of `bench_replicas`, in a process of their own. Shoal's gateways hear the engines' load
from them, and they load adapters.

Their configuration: `folder` (theirs), `engines` (URLs), and with adapters `adapters` (their folder) and `slots`. They
say their `ports`.
"""

import contextlib
import json
from pathlib import Path
from typing import Final

import uvloop

from shoal.core import drain
from shoal.runtime import logs
from tests.bench import replica_processes
from tests.bench.replica_adapters import Adapters
from tests.support.agentpod import Pod
from tests.support.engines import ADMIN_KEY, API_KEY

GATEWAY_KEY: Final = "gateway-key"


async def main() -> None:
    asked = replica_processes.configuration()
    # Agents unload nothing in their first seconds, since they do not know who sends. Here nobody sent before.
    drain.RESTART_SECONDS = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    pool = Adapters(Path(asked["adapters"]), asked["slots"]).settings() if asked["adapters"] else None
    async with contextlib.AsyncExitStack() as stack:
        pods: list[Pod] = []
        for at, url in enumerate(asked["engines"], 1):
            own = Path(asked["folder"]) / f"agent-{at}"
            own.mkdir()
            pod = Pod(own, engine_url=url, pool=pool)
            pod.keys.write_text(
                json.dumps({"callers": {"gateway": GATEWAY_KEY}, "engine": API_KEY, "admin": ADMIN_KEY})
            )
            pod.boot(f"boot-{at}")
            pods.append(await stack.enter_async_context(pod.running()))
        await replica_processes.ready(ports=[pod.port for pod in pods])


if __name__ == "__main__":
    logs.configure("error")
    uvloop.run(main())
