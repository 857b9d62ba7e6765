"""The act on routes: a canary that halts itself, and what routing was worth for the act's own conversations."""

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any, Final

import click
import openai

from shoal.api import reasons
from shoal.cli.client import run_command
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import condition, until

FILE: Final = steps.EXAMPLES / steps.CANARY_FILE
NAMESPACE: Final = "routes"
ROUTE: Final = "assistant"
BEFORE: Final = "before"
NEXT: Final = "next"
KEY: Final = "sk-demo-routes-7c3e9b1f52"
"""The key whose hash stands in the example: public, not a secret."""
MOST_ASKED: Final = 200
"""Requests until which the canary must be halted. It gets every fifth, and three that fail are enough."""
CONVERSATIONS: Final = 40
AT_ONCE: Final = 8
TURNS: Final = 6
TOKENS: Final = 8
SYSTEM: Final = "You are the assistant of a demo. Answer in few words, and keep to what was said before. " * 20
_KNOWN_SECONDS: Final = 30.0


def run(cluster: DemoCluster, stages: Stages, timeout: float) -> None:
    """Plays the act and prints what happened.

    Raises ClickException when the Model does not serve, a client gets an error, or the canary is not halted.
    """
    console = stages.console
    console.print(
        f"\n[bold]Routes[/]: {NAMESPACE}/{ROUTE} gives every fifth request to a canary that cannot serve; "
        "it is halted without anybody"
    )
    with stages.stage("The Model of before is Ready, the canary's is not"):
        cluster.kubectl("apply", "-f", str(FILE))
        until(
            cluster,
            "models",
            NAMESPACE,
            lambda found: (
                BEFORE in found
                and condition(found[BEFORE], reasons.READY).get("status") == "True"
                and NEXT in found
                and condition(found[NEXT], reasons.STALLED).get("status") == "True"
            ),
            timeout,
        )
    with cluster.gateway() as url:
        with stages.stage("The canary is halted, and no client got an error", spin=False):
            asked = run_command(_until_halted(cluster, url, timeout))
        console.print(f"  {asked} requests were answered; the route says:")
        console.print(f"  {_ready(cluster).get('message', '')}", markup=False, soft_wrap=True)
        _show(cluster, stages, "why", f"route/{ROUTE}", "-n", NAMESPACE)
        turns = f"{CONVERSATIONS} conversations of {TURNS} turns"
        with stages.stage(f"{turns}, all by the route", spin=False):
            run_command(_converse(url))
    _show(cluster, stages, "advise", f"model/{BEFORE}", "-n", NAMESPACE)


async def _until_halted(cluster: DemoCluster, url: str, timeout: float) -> int:
    """Asks until the status says that the canary is halted. Returns the number of answers."""
    asked = 0
    deadline = time.monotonic() + timeout
    async with _client(url) as client:
        await _until_known(client)
        while _halted(cluster) is None:
            if asked < MOST_ASKED:
                await _ask(client, [{"role": "user", "content": f"Question {asked}"}])
                asked += 1
            elif time.monotonic() > deadline:
                raise click.ClickException(f"the canary is not halted after {asked} requests: {_ready(cluster)}")
            else:
                await asyncio.sleep(0.5)
    return asked


async def _converse(url: str) -> None:
    """Conversations, a few at a time, each turn with all that was said before."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def talk(client: openai.AsyncOpenAI, number: int) -> None:
        async with slots:
            said = [{"role": "system", "content": SYSTEM}]
            for turn in range(TURNS):
                said.append({"role": "user", "content": f"I am client {number}, and this is my question {turn}."})
                said.append({"role": "assistant", "content": await _ask(client, said)})

    async with _client(url) as client, asyncio.TaskGroup() as group:
        for number in range(CONVERSATIONS):
            group.create_task(talk(client, number))


async def _ask(client: openai.AsyncOpenAI, said: list[dict[str, str]]) -> str:
    try:
        answer = await client.chat.completions.create(
            model=ROUTE,
            messages=said,  # pyright: ignore[reportArgumentType]
            max_tokens=TOKENS,
        )
    except openai.APIError as error:
        raise click.ClickException(f"the gateway answered: {error}") from error
    return answer.choices[0].message.content or ""


async def _until_known(client: openai.AsyncOpenAI) -> None:
    """Waits until the gateway knows the new Tenant and the route."""
    deadline = time.monotonic() + _KNOWN_SECONDS
    while True:
        try:
            await client.models.retrieve(ROUTE)
            return
        except (openai.AuthenticationError, openai.NotFoundError) as error:
            if time.monotonic() > deadline:
                raise click.ClickException(f"the gateway does not know the Tenant: {error}") from error
            await asyncio.sleep(0.1)


def _client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)


def _ready(cluster: DemoCluster) -> dict[str, Any]:
    route: dict[str, Any] = json.loads(cluster.kubectl("get", "modelroutes", ROUTE, "-n", NAMESPACE, "-o", "json"))
    return condition(route, reasons.READY)


def _halted(cluster: DemoCluster) -> str | None:
    """Why the canary is halted; None: it is not."""
    ready = _ready(cluster)
    return ready.get("message") if ready.get("reason") == reasons.CANARY_HALTED else None


def _show(cluster: DemoCluster, stages: Stages, *args: str) -> None:
    """Prints a command of `kubectl shoal`, and what it prints. `why` ends with 1 where something is wrong."""
    stages.console.print(f"\n[bold]kubectl shoal {' '.join(args)}[/]")
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *args],
        env={**os.environ, **cluster.tools.env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise click.ClickException(f"shoal {' '.join(args)} failed:\n{done.stderr.strip()}")
    stages.console.print(done.stdout, markup=False, soft_wrap=True)


def delete(cluster: DemoCluster) -> None:
    """Takes the example away again."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(FILE), timeout=300)
