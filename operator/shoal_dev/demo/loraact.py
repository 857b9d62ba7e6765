"""The act on adapters: three fine-tunes on one base, a new revision that takes over under load, one on first use."""

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import click
import httpx
import openai
from rich.markup import escape
from rich.table import Table

from shoal.api import reasons
from shoal.api.meta import GROUP
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import Objects, condition, message, named, until

FILE: Final = steps.EXAMPLES / steps.LORA_FILE
NAMESPACE: Final = "tunes"
PLURAL: Final = "loraadapters"
BASE: Final = f"{NAMESPACE}/tiny-base"
KEY: Final = "sk-demo-tunes-93fe0a6c51"
"""The key whose hash stands in the example: public, not a secret."""
SWAPPED: Final = "support"
NEXT_SOURCE: Final = "file:///opt/shoal/adapters/support-v2"
UNUSED: Final = "poet"
"""On demand, and nobody has asked for it."""
CLIENTS: Final = 6
AFTER: Final = 3
"""Requests of each client after the new revision took over."""
TOKENS: Final = 48
_SIGNATURE: Final = re.compile(r"\[[0-9a-f]{8}\]")
"""The simulator's answers say which adapter's files made them."""


@dataclass
class AdapterClients:
    """What the clients of one adapter heard while its revision changed."""

    signatures: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Of each answer, in the order in which they ended."""
    problems: list[str] = field(default_factory=list[str])
    enough: asyncio.Event = field(default_factory=asyncio.Event)


def run(cluster: DemoCluster, stages: Stages, timeout: float) -> None:
    """Plays the act and prints what happened.

    Raises ClickException with what the objects say when a step does not come within `timeout` seconds, or when an
    answer was missing or came from other weights than it should.
    """
    console = stages.console
    console.print(
        f"\n[bold]Adapters[/]: three fine-tunes on the replicas of one base, {BASE}; clients use each like a model"
    )
    cluster.kubectl("delete", f"{PLURAL}.{GROUP}", "--all", "-n", NAMESPACE, "--ignore-not-found", timeout=timeout)
    cluster.kubectl("apply", "-f", str(FILE))
    with stages.stage("Three adapters available"):
        adapters = until(cluster, PLURAL, NAMESPACE, _all_available, timeout)
    console.print(picture(adapters))
    with cluster.gateway() as url:
        asyncio.run(_play(cluster, url, stages, timeout))
    console.print(picture(named(cluster, PLURAL, NAMESPACE)))


async def _play(cluster: DemoCluster, url: str, stages: Stages, timeout: float) -> None:
    console = stages.console
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=timeout, max_retries=0) as client:
        with stages.stage("The base answers without an adapter, and each adapter as itself", spin=False):
            listed = [model.id async for model in client.models.list()]
            console.print(f"  /v1/models: {', '.join(listed)}")
            base = await _ask(client, BASE)
            if base:
                raise click.ClickException(f"the base answered with the weights of an adapter: {base}")
            first = await _only(client, SWAPPED)
        with stages.stage(f"{UNUSED}, which was never loaded, answered its first request", spin=False):
            began = time.monotonic()
            poet = await _only(client, UNUSED)
            console.print(f"  {UNUSED} {poet} after {(time.monotonic() - began) * 1000:.0f} ms, loading included")
        with stages.stage(f"{CLIENTS} clients use {SWAPPED} while v2 is loaded beside v1 and takes over", spin=False):
            heard = AdapterClients()
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(_again_and_again(client, SWAPPED, heard))
                try:
                    second = await asyncio.to_thread(_swap, cluster, timeout)
                finally:
                    heard.enough.set()
            console.print(f"  revision {escape(second)}: {_story(heard, first)}", soft_wrap=True)


def _swap(cluster: DemoCluster, timeout: float) -> str:
    """Declares v2 and waits until it answers; its revision."""
    before = named(cluster, PLURAL, NAMESPACE)[SWAPPED]["status"]["revision"]
    patch = f'{{"spec":{{"source":{{"uri":"{NEXT_SOURCE}"}}}}}}'
    cluster.kubectl("patch", f"{PLURAL}.{GROUP}", SWAPPED, "-n", NAMESPACE, "--type=merge", "-p", patch)
    found = until(
        cluster,
        PLURAL,
        NAMESPACE,
        lambda all: all[SWAPPED]["status"].get("revision") not in (None, before) and _available(all[SWAPPED]),
        timeout,
    )
    return found[SWAPPED]["status"]["revision"][:19]


def _story(heard: AdapterClients, first: str) -> str:
    """What was heard, in one sentence. Raises ClickException for an answer that is missing, or of other weights."""
    if heard.problems:
        count = len(heard.problems)
        raise click.ClickException(f"{count} requests were not answered; the first: {heard.problems[0]}")
    if mixed := [found for found in heard.signatures if len(set(found)) != 1]:
        raise click.ClickException(f"an answer came from other weights than one revision's: {mixed[0] or 'the base'}")
    counts = Counter(found[0] for found in heard.signatures)
    second = heard.signatures[-1][0]
    if second == first or set(counts) != {first, second}:
        raise click.ClickException(f"answers came from {', '.join(counts)}, not from {first} and then another")
    return f"{counts[first]} answers of {first}, then {counts[second]} of {second}; none failed, none of other weights"


async def _again_and_again(client: openai.AsyncOpenAI, model: str, heard: AdapterClients) -> None:
    more = AFTER
    while more:
        more -= heard.enough.is_set()
        try:
            heard.signatures.append(await _ask(client, model))
        except (openai.APIError, httpx.HTTPError) as error:
            heard.problems.append(str(error))
            await asyncio.sleep(1)


async def _only(client: openai.AsyncOpenAI, model: str) -> str:
    """The signature of the weights that answered. Raises ClickException when it was not one adapter's."""
    try:
        found = await _ask(client, model)
    except openai.APIError as error:
        raise click.ClickException(f"{model}: the gateway answered: {error}") from error
    if len(set(found)) != 1:
        raise click.ClickException(f"{model} was answered by {found or 'the base'}")
    return found[0]


async def _ask(client: openai.AsyncOpenAI, model: str) -> tuple[str, ...]:
    """The signatures in one streamed answer. Raises openai.APIError, and httpx.HTTPError for a broken stream."""
    parts: list[str] = []
    ended = False
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Who are you?"}], max_tokens=TOKENS, stream=True
    )
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                ended = ended or choice.finish_reason is not None
    if not ended:
        raise httpx.RemoteProtocolError("the stream ended before the answer did")
    return tuple(_SIGNATURE.findall("".join(parts)))


def _all_available(adapters: Objects) -> bool:
    return len(adapters) == 3 and all(map(_available, adapters.values()))


def _available(adapter: dict[str, Any]) -> bool:
    return condition(adapter, reasons.AVAILABLE).get("status") == "True"


def picture(adapters: Objects) -> Table:
    """A line per adapter."""
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("  adapter", "rank", "revision", "residency", "says"):
        table.add_column(heading, justify="right" if heading == "rank" else "left")
    for name, adapter in adapters.items():
        status = adapter.get("status", {})
        table.add_row(
            f"  {name}",
            str(status.get("rank", "-")),
            str(status.get("revision", "-"))[:19],
            adapter["spec"].get("residency", "OnDemand"),
            escape(message(adapter)),
        )
    return table


def delete(cluster: DemoCluster) -> None:
    """Takes the example away again."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(FILE), timeout=300)
