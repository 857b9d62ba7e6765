"""The act on tenants: one meets its limit, one hangs up; then what each used, a bill, and what engines counted."""

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import httpx
import openai
from rich.table import Table

from shoal_dev.demo import steps
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.stages import Stages

FILE: Final = steps.EXAMPLES / steps.TENANTS_FILE
MODEL: Final = f"{steps.DEMO_NAMESPACE}/tiny-chat"
KEYS: Final = {"globex": "sk-demo-globex-71c4e0d92f", "initech": "sk-demo-initech-0b8ad35e64"}
"""The keys whose hashes stand in the example: public, not secrets."""
LIMITED: Final = "initech"
BILLED: Final = "globex"
REQUESTS: Final = 12
"""Of each tenant; the limit of the one allows fewer."""
TOKENS: Final = 24
LONG: Final = 2000
"""Tokens of the answer that nobody hears to its end."""
READ_SECONDS: Final = 15.0
"""For so long at most the ledger is waited for, which reads the engines' counters every few seconds."""


@dataclass
class TenantClients:
    """What the clients of one tenant heard."""

    answered: int = 0
    refused: int = 0
    refusal: str = ""
    """The first refusal, as a person reads it."""
    tokens: int = 0
    """By the usage blocks of the answers."""


def run(cluster: DemoCluster, stages: Stages, timeout: float) -> None:
    """Plays the act and prints what happened.

    Raises ClickException when the limit does not hold, or when the ledger does not come to the sums that the clients
    saw within `timeout` seconds.
    """
    console = stages.console
    console.print(f"\n[bold]Tenants[/]: two customers ask {MODEL}; {LIMITED} may ask 8 times a minute")
    cluster.kubectl("apply", "-f", str(FILE))
    with cluster.gateway() as url:
        with stages.stage(f"{REQUESTS} requests of each tenant", spin=False):
            heard = asyncio.run(_ask(url, timeout))
            for tenant, of in heard.items():
                console.print(f"  {tenant}: {of.answered} answered, {of.refused} refused")
            limited = heard[LIMITED]
            if not limited.refused or heard[BILLED].refused:
                raise click.ClickException(f"the limit of {LIMITED}, and of nobody else, should have been met")
            console.print(f"  {LIMITED}: {limited.refusal}", markup=False, soft_wrap=True)
        with stages.stage(f"A client of {BILLED} hangs up in the middle of its answer", spin=False):
            console.print(f"  after {asyncio.run(_hang_up(url))} events of {LONG}")
        with stages.stage("The ledger has every request of both"):
            rows = _until_counted(url, heard, timeout)
    with stages.stage("The ledger has read what the engines counted"):
        _until_read(cluster)
    console.print(_picture(rows))
    month = time.strftime("%Y-%m", time.gmtime())
    for args in (("bill", "--tenant", BILLED, "--month", month), ("unattributed",)):
        console.print(f"kubectl shoal {' '.join(args)}")
        console.print(_shoal(cluster, *args), markup=False, soft_wrap=True)


async def _ask(url: str, timeout: float) -> dict[str, TenantClients]:
    """Lets both tenants ask side by side, when their keys are known to the gateways."""
    heard = {tenant: TenantClients() for tenant in KEYS}
    async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
        for tenant, key in KEYS.items():
            group.create_task(_ask_as(url, key, heard[tenant]))
    return heard


async def _ask_as(url: str, key: str, heard: TenantClients) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        while True:
            try:
                await client.models.retrieve(MODEL)
                break
            except (openai.AuthenticationError, openai.NotFoundError):
                await asyncio.sleep(0.1)  # the gateway does not know the Tenant yet
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS):
                group.create_task(_once(client, heard))


async def _once(client: openai.AsyncOpenAI, heard: TenantClients) -> None:
    try:
        answer = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=TOKENS)
    except openai.RateLimitError as error:
        heard.refused += 1
        after = error.response.headers.get("retry-after", "-")
        heard.refusal = heard.refusal or f"429, Retry-After {after} s: {_message(error)}"
        return
    except openai.APIError as error:
        raise click.ClickException(f"the gateway answered: {error}") from error
    heard.answered += 1
    heard.tokens += answer.usage.total_tokens if answer.usage else 0


def _message(error: openai.APIStatusError) -> str:
    body: Any = error.body
    return str(body.get("message", body)) if isinstance(body, dict) else str(error)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


async def _hang_up(url: str) -> int:
    """Reads a few events of a long answer and leaves; how many it were."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[BILLED], max_retries=0, timeout=60) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="Tell me everything", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        events = 0
        async with stream:
            async for _ in stream:
                events += 1
                if events == 5:
                    break
    return events


def _until_counted(url: str, heard: dict[str, TenantClients], timeout: float) -> dict[str, dict[str, int]]:
    """What each tenant reads of itself with its own key, once it holds every request."""
    deadline = time.monotonic() + timeout
    asked = {tenant: of.answered + (tenant == BILLED) for tenant, of in heard.items()}
    while True:
        rows = {tenant: _usage(url, key) for tenant, key in KEYS.items()}
        enough = all(rows[tenant]["requests"] >= asked[tenant] for tenant in KEYS)
        if enough and rows[LIMITED]["tokens"] >= heard[LIMITED].tokens:
            return rows
        if time.monotonic() > deadline:
            raise click.ClickException(f"the ledger has {rows}, the clients had {asked} requests")
        time.sleep(2)  # how often a tenant may ask is bounded, too


def _until_read(cluster: DemoCluster) -> None:
    """Waits until no Model was billed more than its engines have counted as far as they were read. Where that does not
    come, as after an engine was killed, the table says so."""
    deadline = time.monotonic() + READ_SECONDS
    while time.monotonic() < deadline:
        rows = json.loads(_shoal(cluster, "unattributed", "-o", "json"))["rows"]
        if all((row.get(name) or 0) >= 0 for row in rows for name in ("unattributedInput", "unattributedOutput")):
            return
        time.sleep(1)


def _usage(url: str, key: str) -> dict[str, int]:
    """Sums of `GET /v1/usage` with a tenant's own key."""
    answer = httpx.get(f"{url}/v1/usage", headers={"authorization": f"Bearer {key}"}, timeout=10)
    sums: Counter[str] = Counter(requests=0, inputTokens=0, cachedTokens=0, outputTokens=0)
    if answer.is_success:
        for row in answer.json()["rows"]:
            sums.update({name: int(row.get(name) or 0) for name in tuple(sums)})
    return {**sums, "tokens": sums["inputTokens"] + sums["outputTokens"]}


def _picture(rows: dict[str, dict[str, int]]) -> Table:
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("  tenant", "requests", "input", "cached", "output"):
        table.add_column(heading, justify="left" if heading == "  tenant" else "right")
    for tenant, row in rows.items():
        stats = (row[name] for name in ("requests", "inputTokens", "cachedTokens", "outputTokens"))
        table.add_row(f"  {tenant}", *map(str, stats))
    return table


def _shoal(cluster: DemoCluster, *args: str) -> str:
    """What `kubectl shoal ARGS` prints."""
    return cluster.tools.run(Path(sys.executable), ("-m", "shoal", *args), None, 60)


def delete(cluster: DemoCluster) -> None:
    """Takes the example away again."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(FILE), timeout=300)
