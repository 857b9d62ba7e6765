"""Mutual TLS switched off on a serving fleet, and on again by a rollback: no request and no record is lost."""

import json
import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import openai
import pytest

from shoal.api import names
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import STAY, VALUES, Fleet, serves
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "tiny-chat"
TOKENS = 40
"""Of a stream."""
FEW = 8
"""Of an answer that is no stream."""
ENOUGH = 5
"""Answers of each kind, after a switch, that show that all goes on."""
OFF = {**VALUES, "transport": {"mtls": {"enabled": False}}}
ENGINES = ("-n", steps.DEMO_NAMESPACE, "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}")


@dataclass
class Clients:
    """A small steady load, and what came of it."""

    fleet: Fleet
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Request -> tokens of its answer, as its client counted them."""
    ends: Counter[str] = field(default_factory=Counter[str])
    """Whole answers by kind."""
    wrong: list[str] = field(default_factory=list[str])
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, stream: bool) -> None:
        """One client after the other: each has a connection of its own."""
        kind = "stream" if stream else "whole"
        while not self._stop.is_set():
            port = self.fleet.lab.forward_port()
            base = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=base, api_key=steps.DEMO_KEY, max_retries=0, timeout=120) as client:
                try:
                    request, tokens = self.stream(client) if stream else self.whole(client)
                except (openai.APIError, AssertionError) as error:  # connections that broke are among them
                    self.wrong.append(f"{kind} at {time.strftime('%X')}: {error} ({error.__cause__!r})")
                else:
                    self.tokens[request] = tokens
                    self.ends[kind] += 1
            self._stop.wait(0.1)

    def stream(self, client: openai.OpenAI) -> tuple[str, int]:
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt="A story", max_tokens=TOKENS, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        usage = None
        for chunk in raw.parse():
            usage = chunk.usage or usage
        assert usage is not None, "the stream ended without its counts"
        assert usage.completion_tokens == TOKENS
        return raw.headers["x-request-id"], TOKENS

    def whole(self, client: openai.OpenAI) -> tuple[str, int]:
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt="x", max_tokens=FEW, extra_body={"ignore_eos": True}
        )
        usage = raw.parse().usage
        assert usage is not None
        assert usage.completion_tokens == FEW
        return raw.headers["x-request-id"], FEW

    def go_on(self) -> None:
        """Waits for answers to requests that are sent from now on."""
        before = Counter(self.ends)
        until(
            lambda: all(self.ends[kind] - before[kind] >= ENOUGH for kind in ("stream", "whole")) or bool(self.wrong),
            120,
            lambda: (self.ends, self.wrong),
        )

    @contextmanager
    def asking(self) -> Generator[None]:
        with ThreadPoolExecutor(4) as threads:
            loads = [threads.submit(self.run, stream) for stream in (True, True, False, False)]
            try:
                yield
            finally:
                self._stop.set()
        for load in loads:
            load.result()


def speaks(pod: dict[str, Any]) -> bool:
    return pod["metadata"].get("annotations", {}).get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS


def switched(fleet: Fleet, on: bool) -> None:
    """Waits until each process and each engine speaks mutual TLS, or none does, and those from before are gone."""
    ours = ("-n", NAMESPACE, "-l", f"{names.LABEL_PART_OF}=shoal")

    def state() -> dict[str, tuple[bool, bool]]:
        pods = fleet.get("pods", *ours) + fleet.get("pods", *ENGINES)
        kept = [p for p in pods if names.LABEL_COMPONENT in p["metadata"].get("labels", {})]
        speaking = {names.COMPONENT_GATEWAY, names.COMPONENT_OPERATOR, names.COMPONENT_LEDGER, names.COMPONENT_ENGINE}
        return {
            p["metadata"]["name"]: (serves(p), speaks(p))
            for p in kept
            if p["metadata"]["labels"][names.LABEL_COMPONENT] in speaking
        }

    until(lambda: len(found := state()) >= 5 + len(STAY) and set(found.values()) == {(True, on)}, 240, state)


def ledger(fleet: Fleet, *args: str) -> list[dict[str, Any]]:
    """What the ledger has; nothing while it starts."""
    command = ("shoal", "ledger", "records", "--limit", "100000", "-o", "json")
    try:
        output = fleet.exec("shoal-ledger-0", *command, *args)
    except click.ClickException:
        return []
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_it_is_switched_off_and_on_again_under_requests(fleet: Fleet) -> None:
    fleet.until_alone()
    switched(fleet, on=True)
    clients = Clients(fleet)
    try:
        with clients.asking():
            clients.go_on()
            steps.install(fleet, "simulator", steps.LAB_IMAGE, OFF)
            switched(fleet, on=False)
            clients.go_on()
            fleet.helm("rollback", "shoal", "--namespace", NAMESPACE, "--wait", "--timeout", "5m", timeout=310)
            switched(fleet, on=True)
            clients.go_on()
    finally:
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)  # other tests go on with it
    assert clients.wrong == []

    def booked() -> dict[str, list[tuple[bool, str, str, int]]]:
        rows: dict[str, list[tuple[bool, str, str, int]]] = {}
        for row in ledger(fleet):
            if row["request"] in clients.tokens and row["attempt"] == 0:
                said = (bool(row["ended"]), row["outcome"], row["count_source"], row["output_tokens"])
                rows.setdefault(row["request"], []).append(said)
        return rows

    asked = {request: [(True, "answered", "final", tokens)] for request, tokens in clients.tokens.items()}
    until(lambda: booked() == asked, 120, lambda: (len(booked()), len(asked)))
    assert ledger(fleet, "--aside") == []
