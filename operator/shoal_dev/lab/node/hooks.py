"""preStop and postStart hooks, with the manners of a kubelet that were measured on a real one."""

import asyncio
from typing import Any

import aiohttp

from shoal_dev.lab.node import fields, probes

Json = dict[str, Any]
USER_AGENT = "kube-lifecycle/1.36"


class HookFailed(Exception):
    """The connection broke, or the command failed. An HTTP status is never a failure."""


async def run(target: probes.ProbeTarget, hook: Json) -> None:
    """Runs until the hook ends: no time-out of its own. Raises HookFailed."""
    if "sleep" in hook:
        await asyncio.sleep(hook["sleep"]["seconds"])
    elif "httpGet" in hook:
        action: Json = hook["httpGet"]
        try:
            address = probes.url(target.spec, action, target.address)
            asked = target.http.get(
                address, headers=probes.headers(action, USER_AGENT), allow_redirects=False, ssl=False
            )
            async with asked as answer:
                await answer.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise HookFailed(str(error) or type(error).__name__) from error
    elif "exec" in hook:
        message = await probes.run_command(target, fields.words(hook["exec"], "command"))
        if message is not None:
            raise HookFailed(message)
