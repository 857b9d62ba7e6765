"""Sources of adapters are read in batches; one that fails disturbs nobody, and a restart reads nothing twice."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from shoal.api import names, reasons
from shoal.api.adapterfacts import BATCH_ENV
from shoal.api.artifact import ArtifactFacts
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.controllers.lora import reader as room
from shoal.controllers.lora.reader import AdapterReader
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.core.artifacts import CONTAINER
from shoal.core.lora import pool as pools
from shoal.core.lora.format.facts import job_name, message
from shoal.core.lora.lifecycle.revisions import demands, read_key
from shoal.kube.errors import Forbidden
from tests.support.controlplane import ended
from tests.support.lora_fleet import POOLED_FACTS, Sources, adapter, found_at, pool, revision_of, unreachable
from tests.support.operators import CONFIG
from tests.support.streams import until

POOL = LoRAPool.model_validate(pool("chat") | {"metadata": {"name": "pool", "namespace": "chat", "uid": "p"}})
SETTINGS = pools.settings(POOL, ArtifactFacts.model_validate(POOLED_FACTS))


class Api:
    """Takes Jobs; refuses them while `refuses`."""

    def __init__(self) -> None:
        self.jobs: list[JsonObject] = []
        self.patched: list[tuple[str, JsonObject]] = []
        self.refuses = False

    async def apply(self, _resource: object, body: JsonObject, *, manager: str) -> JsonObject:
        if self.refuses:
            raise Forbidden("exceeded quota: jobs", status=403)
        assert manager == names.MANAGER_LORAPOOL
        made = body | {"metadata": body["metadata"] | {"uid": f"job-{len(self.jobs)}", "resourceVersion": "1"}}
        self.jobs.append(made)
        return made

    async def merge_patch(
        self, _resource: object, name: str, namespace: str, patch: JsonObject, *, manager: str
    ) -> JsonObject:
        assert manager == names.MANAGER_LORAPOOL
        self.patched.append((f"{namespace}/{name}", patch))
        return {}


class Fixture:
    def __init__(self) -> None:
        self.api = Api()
        self.world = World(cast("Any", self.api), CONFIG, "shoal-system", cast("Any", None))
        self.changed: list[str] = []
        self.reader = AdapterReader(self.world, self.changed.append)
        subscribe(self.world.pods, self.reader.on_pod)
        subscribe(self.world.jobs, self.reader.on_job)
        self.sources = Sources()

    def ask(self, name: str, uri: str = "") -> room.AdapterReading:
        body = adapter("chat", name, uri)
        one = LoRAAdapter.model_validate(body | {"metadata": body["metadata"] | {"uid": name}})
        return self.reader.read(one, read_key(one, demands(SETTINGS)), POOL, SETTINGS)

    def answer(self, number: int) -> None:
        """The pod of the Job with this number ends."""
        job = self.api.jobs[number]
        template = job["spec"]["template"]
        pod = template | {"metadata": template["metadata"] | {"uid": f"pod-{job['metadata']['uid']}"}}
        self._end(job, *self.sources.said(pod))

    def crash(self, number: int) -> None:
        """It ends without a word, and the Job has failed."""
        job = self.api.jobs[number]
        self._end(job, 137, {})
        failed = {
            "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "x"}]
        }
        self._job(job, failed, "2")

    def go(self, number: int) -> None:
        """The Job's time to live is over."""
        job = self.api.jobs[number]["metadata"]
        self.world.jobs.remove(f"chat/{job['name']}", job["uid"])

    def complete(self, number: int) -> None:
        self._job(self.api.jobs[number], {"conditions": [{"type": "Complete", "status": "True"}]}, "2")

    def _job(self, job: JsonObject, status: JsonObject, version: str) -> None:
        self.world.jobs.upsert(job | {"metadata": job["metadata"] | {"resourceVersion": version}, "status": status})

    def _end(self, job: JsonObject, code: int, said: JsonObject) -> None:
        template = job["spec"]["template"]
        labels = template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        metadata = {"name": f"{job['metadata']['name']}-x", "namespace": "chat", "uid": f"pod-{job['metadata']['uid']}"}
        body = {"metadata": metadata | {"labels": labels, "resourceVersion": "1"}, "spec": template["spec"]}
        self.world.pods.upsert(body | {"status": ended(body, code, said)})

    def read(self, number: int) -> list[str]:
        environment = self.api.jobs[number]["spec"]["template"]["spec"]["containers"][0]["env"]
        said = json.loads(next(e["value"] for e in environment if e["name"] == BATCH_ENV))
        return [one["uri"] for one in said["adapters"]]


@pytest.fixture
async def it(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Fixture]:
    monkeypatch.setattr(room, "SETTLE_SECONDS", 0.0)
    fixture = Fixture()
    task = asyncio.create_task(fixture.reader.run())
    try:
        yield fixture
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_twenty_adapters_are_two_jobs_and_each_is_told(it: Fixture) -> None:
    for number in range(20):
        assert it.ask(f"a{number}").waiting
    await until(lambda: len(it.api.jobs) == 2)
    assert sorted(len(it.read(n)) for n in range(2)) == [4, 16]
    for number in range(2):
        it.answer(number)
    assert sorted(it.changed) == sorted(f"chat/a{n}" for n in range(20))
    found = it.ask("a7").found
    assert found is not None
    assert found.revision == revision_of("s3://adapters/a7/v1")


async def test_the_same_source_is_read_once_for_all_who_name_it(it: Fixture) -> None:
    it.ask("one", "s3://adapters/shared")
    it.ask("two", "s3://adapters/shared")
    await until(lambda: len(it.api.jobs) == 1)
    assert it.read(0) == ["s3://adapters/shared"]


async def test_one_that_fails_is_tried_again_when_its_job_is_gone_and_alone(it: Fixture) -> None:
    away = "s3://adapters/away/v1"
    it.sources.known[away] = unreachable(away)
    for name in ("away", "fine"):
        it.ask(name)
    await until(lambda: len(it.api.jobs) == 1)
    it.answer(0)
    it.complete(0)
    assert it.ask("fine").found is not None
    problem = it.ask("away").problem
    assert problem is not None
    assert problem.reason == reasons.SOURCE_UNREACHABLE
    it.sources.known[away] = found_at(away)
    it.go(0)
    await until(lambda: len(it.api.jobs) == 2)
    assert it.read(1) == [away], "those that were read are not read again"
    assert it.api.jobs[1]["spec"]["ttlSecondsAfterFinished"] > it.api.jobs[0]["spec"]["ttlSecondsAfterFinished"]
    it.answer(1)
    assert it.ask("away").found is not None


async def test_what_failed_is_read_at_once_when_a_secret_has_come(it: Fixture) -> None:
    gated = "s3://adapters/gated/v1"
    it.sources.known[gated] = room.ModelProblem(reasons.GATED, "it needs credentials")
    it.ask("gated")
    await until(lambda: len(it.api.jobs) == 1)
    await it.reader.retry("chat/pool")
    assert it.api.patched == [], "it is read just now"
    it.answer(0)
    it.complete(0)
    it.ask("fine")
    await until(lambda: len(it.api.jobs) == 2)
    it.answer(1)
    it.complete(1)
    await it.reader.retry("chat/pool")
    name = it.api.jobs[0]["metadata"]["name"]
    assert it.api.patched == [(f"chat/{name}", {"spec": {"ttlSecondsAfterFinished": 0}})], "and of no other"
    it.sources.known[gated] = found_at(gated)
    it.go(0)
    await until(lambda: len(it.api.jobs) == 3)
    assert it.api.jobs[2]["spec"]["ttlSecondsAfterFinished"] == it.api.jobs[0]["spec"]["ttlSecondsAfterFinished"]
    it.answer(2)
    assert it.ask("gated").found is not None


async def test_what_is_wrong_with_the_files_is_final(it: Fixture) -> None:
    uri = "s3://adapters/bad/v1"
    it.sources.known[uri] = room.ModelProblem(reasons.CORRUPT, "the header is broken")
    it.ask("bad")
    await until(lambda: len(it.api.jobs) == 1)
    it.answer(0)
    answer = it.ask("bad")
    assert answer.final
    it.go(0)
    it.ask("other")
    await until(lambda: len(it.api.jobs) == 2)
    assert it.read(1) == ["s3://adapters/other/v1"]


async def test_a_batch_that_ends_without_a_word_is_repeated_in_smaller_ones(it: Fixture) -> None:
    for number in range(8):
        it.ask(f"a{number}")
    await until(lambda: len(it.api.jobs) == 1)
    it.crash(0)
    problem = it.ask("a0").problem
    assert problem is not None
    assert problem.reason == reasons.STAGE_FAILED
    it.go(0)
    await until(lambda: len(it.api.jobs) == 3)
    assert [len(it.read(n)) for n in (1, 2)] == [4, 4]


async def test_another_operator_waits_for_the_job_that_reads_already(it: Fixture) -> None:
    it.ask("poet")
    await until(lambda: len(it.api.jobs) == 1)
    again = AdapterReader(it.world, it.changed.append)
    subscribe(it.world.pods, again.on_pod)
    subscribe(it.world.jobs, again.on_job)
    task = asyncio.create_task(again.run())
    before, it.reader = it.reader, again
    try:
        assert it.ask("poet").waiting
        await asyncio.sleep(0.05)
        assert len(it.api.jobs) == 1
        it.answer(0)
        assert it.ask("poet").found is not None
    finally:
        it.reader = before
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("namespace", "pool_name", "name"),
    [("other", "pool", None), ("chat", "mine", None), ("chat", "pool", "mine-29384756")],
    ids=["another namespace", "another pool", "another name"],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
async def test_a_job_that_somebody_else_made_says_nothing_of_an_adapter(
    it: Fixture, namespace: str, pool_name: str, name: str | None, first: bool
) -> None:
    """The annotation is all that such a Job has: a read key can be computed."""
    if not first:
        assert it.ask("poet").waiting
        await until(lambda: len(it.api.jobs) == 1)
    uri = "s3://adapters/poet/v1"
    body = adapter("chat", "poet", uri)
    key = read_key(LoRAAdapter.model_validate(body | {"metadata": body["metadata"] | {"uid": "u"}}), demands(SETTINGS))
    job = name or job_name(f"chat/{pool_name}", [key])
    where: JsonObject = {"namespace": namespace, "resourceVersion": "1"}
    said_of_job = {"annotations": {names.ANNOTATION_READS: key}, "labels": {names.LABEL_POOL: pool_name}}
    it.world.jobs.upsert({"metadata": where | said_of_job | {"name": job, "uid": "forged"}, "spec": {}, "status": {}})
    labels = {"batch.kubernetes.io/job-name": job, names.LABEL_COMPONENT: names.COMPONENT_ADAPTER_FACTS}
    pod = where | {"name": "forged-x", "uid": "forged-x", "labels": labels}
    pod_body: JsonObject = {"metadata": pod, "spec": {"containers": [{"name": CONTAINER, "image": "x"}]}}
    said = json.loads(message([(key, found_at("s3://adapters/forged"))]))
    it.world.pods.upsert(pod_body | {"status": ended(pod_body, 0, said)})

    assert it.ask("poet").waiting, "nothing that the Job says is taken"
    await until(lambda: len(it.api.jobs) == 1)
    it.answer(0)
    found = it.ask("poet").found
    assert found is not None
    assert found.revision == revision_of(uri)


async def test_a_job_that_the_api_server_refuses_is_told(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "REFUSED_SECONDS", 0.01)
    it.api.refuses = True
    it.ask("poet")
    await until(lambda: "chat/poet" in it.changed)
    problem = it.ask("poet").problem
    assert problem is not None
    assert (problem.reason, "exceeded quota" in problem.message) == (reasons.REFUSED, True)
    it.api.refuses = False
    await until(lambda: len(it.api.jobs) == 1)


async def test_who_waits_no_more_is_not_read(it: Fixture) -> None:
    it.ask("gone")
    it.reader.forget("chat/gone")
    it.ask("here")
    await until(lambda: len(it.api.jobs) == 1)
    assert it.read(0) == ["s3://adapters/here/v1"]
