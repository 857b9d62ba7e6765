"""Two engines in one fleet, as clients see them: behind one gateway, and a Model that rolls from one to the other.

Adapters are asked for meanwhile. The simulator signs what an adapter answers, so a wrong weight shows in the text.
"""

import json
import os
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from shoal.api import names
from shoal.api.meta import API_VERSION
from shoal_dev.sim.signatures import signatures_in
from tests.e2e.conftest import Fleet, serves
from tests.support.tenantfixture import TenantFixture
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

TENANT = f"engines-e2e-{os.getpid()}"
PER_ENGINE = {"on-sglang": "SGLang", "on-vllm": "vLLM"}
"""Model -> its engine."""
ROLLED = "rolled"
ADAPTERS = {"counsel-rolled": "legal", "bard-rolled": "poet"}
"""Served name -> folder of its files."""
TOKENS = 48


def own(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    namespace = {} if kind == "Tenant" else {"namespace": "demo"}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name} | namespace, "spec": spec}


@dataclass
class Asked:
    """One client of one model, which asks again and again, whole and in streams."""

    client: openai.OpenAI
    model: str
    usage: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Request -> its input and output tokens, by its own answer."""
    heard: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    """The signatures that each answer was made of."""
    problems: list[str] = field(default_factory=list[str])
    stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> "Asked":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self.stopped.set()
        assert self._thread is not None
        self._thread.join(180)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self.stopped.wait(0.1):
            for ask in (self._whole, self._stream):
                try:
                    request, text, tokens = ask()
                except (openai.APIError, ValueError) as error:
                    self.problems.append(f"{self.model}: {error!r}")
                    continue
                self.usage[request] = tokens
                self.heard.add(tuple(sorted(set(signatures_in(text)))))

    def _body(self) -> dict[str, Any]:
        return {"model": self.model, "prompt": "Tell me something long.", "max_tokens": TOKENS}

    def _whole(self) -> tuple[str, str, tuple[int, int]]:
        raw = self.client.completions.with_raw_response.create(**self._body(), extra_body={"ignore_eos": True})
        answer = raw.parse()
        assert answer.usage is not None
        tokens = answer.usage.prompt_tokens, answer.usage.completion_tokens
        return raw.headers["x-request-id"], answer.choices[0].text, tokens

    def _stream(self) -> tuple[str, str, tuple[int, int]]:
        raw = self.client.completions.with_raw_response.create(
            **self._body(), stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
        parts: list[str] = []
        tokens: tuple[int, int] | None = None
        for chunk in raw.parse():
            parts += [choice.text for choice in chunk.choices]
            if chunk.usage is not None:
                tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if tokens is None:
            raise ValueError("the stream ended without its usage")
        return raw.headers["x-request-id"], "".join(parts), tokens


@pytest.fixture(scope="module")
def tenants(fleet: Fleet) -> Generator[TenantFixture]:
    fleet.until_alone()  # else a class that gets free meanwhile draws the replicas to it
    made = TenantFixture(fleet)
    models = [{"namespace": "demo", "name": name} for name in (*PER_ENGINE, ROLLED)]
    fleet.apply(own("Tenant", TENANT, models=models, adapters=[{"namespace": "demo"}]))
    try:
        made.keys[TENANT] = made.make_key("first", tenant=TENANT)
        yield made
    finally:
        fleet.kubectl("delete", "tenants.shoal.dev", TENANT, "--ignore-not-found")


def engines(fleet: Fleet, model: str) -> list[tuple[str, bool]]:
    """Engine and readiness of each of the Model's pods, those that go left out."""
    pods = fleet.get("pods", "-n", "demo", "-l", f"{names.LABEL_MODEL}={model},{names.LABEL_COMPONENT}=engine")
    return sorted(
        (pod["metadata"]["annotations"][names.ANNOTATION_ENGINE], serves(pod))
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    )


def until_recorded(tenants: TenantFixture, usage: dict[str, tuple[int, int]]) -> None:
    """Every answered request is in the ledger, once, with the tokens of its own answer."""

    def rows() -> list[dict[str, Any]]:
        return [row for row in tenants.rows("--tenant", TENANT) if row["ended"] and row["request"] in usage]

    until(lambda: len(rows()) >= len(usage), 120, lambda: f"{len(rows())} of {len(usage)}")
    found = rows()
    assert len(found) == len(usage)
    assert {row["request"]: (row["input_tokens"], row["output_tokens"]) for row in found} == usage


def test_a_model_on_each_engine_behind_one_gateway(fleet: Fleet, tenants: TenantFixture) -> None:
    try:
        for name, engine in PER_ENGINE.items():
            fleet.make_model(name, engine={"type": engine}, scaling={"minReplicas": 1, "maxReplicas": 1})
        for name, engine in PER_ENGINE.items():
            until(lambda name=name, engine=engine: engines(fleet, name) == [(engine, True)], 240,
                  lambda name=name: (engines(fleet, name), fleet.condition(name, "Ready")))  # fmt: skip
        with tenants.client(TENANT) as client:
            assert set(PER_ENGINE) <= {model.id for model in client.models.list()}
            clients = [Asked(client, f"demo/{name}").start() for name in PER_ENGINE]
            until(lambda: all(len(one.usage) >= 10 for one in clients), 120, lambda: [one.problems for one in clients])
            for one in clients:
                one.stop()
        assert [one.problems for one in clients] == [[], []]
        # The same simulated base: the same prompt has the same tokens, whichever engine counts them.
        assert len({tokens for one in clients for tokens in one.usage.values()}) == 1
        assert {heard for one in clients for heard in one.heard} == {()}
        until_recorded(tenants, {key: value for one in clients for key, value in one.usage.items()})
    finally:
        for name in PER_ENGINE:
            fleet.delete_model(name)


@pytest.fixture
def rolled(fleet: Fleet, tenants: TenantFixture) -> Generator[str]:
    """A Model on SGLang with two replicas, and a pool with two adapters."""
    fleet.until_alone()
    fleet.apply(own("LoRAPool", ROLLED, modelRef={"name": ROLLED}, maxRank=8, slotsPerReplica=4, cachedPerReplica=8))
    scaling = {"minReplicas": 2, "maxReplicas": 2}
    fleet.make_model(ROLLED, engine={"type": "SGLang"}, scaling=scaling, drainSeconds=60)
    fleet.apply(
        *(
            own(
                "LoRAAdapter", name, poolRef={"name": ROLLED}, source={"uri": f"file:///opt/shoal/adapters/{folder}"},
                residency="Warm", minCopies=2, tenants=[TENANT],
            )
            for name, folder in ADAPTERS.items()
        )
    )  # fmt: skip
    try:
        until_on(fleet, "SGLang")
        yield f"demo/{ROLLED}"
    finally:
        fleet.kubectl("delete", "loraadapters.shoal.dev", *ADAPTERS, "-n", "demo", "--ignore-not-found")
        fleet.kubectl("delete", "lorapools.shoal.dev", ROLLED, "-n", "demo", "--ignore-not-found")
        fleet.delete_model(ROLLED)


def until_on(fleet: Fleet, engine: str) -> None:
    """Both replicas run this engine, and have the adapters."""
    until(lambda: engines(fleet, ROLLED) == [(engine, True)] * 2, 400,
          lambda: (engines(fleet, ROLLED), fleet.condition(ROLLED, "Ready")))  # fmt: skip

    def resident(name: str) -> str:
        found = json.loads(fleet.kubectl("get", "loraadapters.shoal.dev", name, "-n", "demo", "-o", "json"))
        conditions = found.get("status", {}).get("conditions", [])
        return next((c["reason"] for c in conditions if c["type"] == "Ready"), "")

    until(lambda: all(resident(name) == "Resident" for name in ADAPTERS), 240, lambda: [resident(n) for n in ADAPTERS])


@pytest.mark.long
def test_a_model_rolls_from_one_engine_to_the_other_and_back_under_load(
    fleet: Fleet, tenants: TenantFixture, rolled: str
) -> None:
    with tenants.client(TENANT) as client:
        clients = [Asked(client, model).start() for model in (rolled, *ADAPTERS)]
        enough = 5

        def more() -> None:
            counts = [len(one.usage) for one in clients]
            until(
                lambda: all(len(one.usage) >= count + enough for one, count in zip(clients, counts, strict=True)),
                180,
                lambda: ([len(one.usage) for one in clients], [one.problems for one in clients]),
            )

        more()
        for engine in ("vLLM", "SGLang"):
            fleet.kubectl(
                "patch", "models.shoal.dev", ROLLED, "-n", "demo", "--type=merge", "-p",
                json.dumps({"spec": {"engine": {"type": engine}}}),
            )  # fmt: skip
            until_on(fleet, engine)
            more()
        for one in clients:
            one.stop()

    assert [problem for one in clients for problem in one.problems] == []
    base, *adapters = clients
    assert base.heard == {()}
    for one in adapters:
        # Before, meanwhile and after: this adapter's weights alone, in every answer.
        (signature,) = one.heard
        assert len(signature) == 1
    assert adapters[0].heard != adapters[1].heard
    until_recorded(tenants, {key: value for one in clients for key, value in one.usage.items()})
