"""Leader election: one leader, no write after the lease is lost, no wait after a clean end."""

import asyncio
import contextlib
import copy
import itertools
import time
from typing import Any, cast

import pytest

from shoal.kube.client import KubeClient
from shoal.kube.errors import AlreadyExists, APIServerUnavailable, Conflict, NotFound
from shoal.kube.lease import Elector, StuckLeader


class LeaseApi:
    """The API server's compare-and-set on one Lease; `away` makes it unreachable for a client."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False
        self._versions = itertools.count(1)

    def _check(self) -> None:
        if self.away:
            raise APIServerUnavailable("no answer")

    async def get(self, *_: object) -> dict[str, Any]:
        self._check()
        if self.lease is None:
            raise NotFound("no lease", reason="NotFound")
        return copy.deepcopy(self.lease)

    async def create(self, _resource: object, obj: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise AlreadyExists("there is one")
        return self._store(obj)

    async def replace(self, _resource: object, obj: dict[str, Any], *, manager: str) -> dict[str, Any]:
        self._check()
        assert self.lease is not None
        if obj["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict("changed")
        return self._store(obj)

    def _store(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.lease = copy.deepcopy(obj)
        self.lease["metadata"]["resourceVersion"] = str(next(self._versions))
        return copy.deepcopy(self.lease)


class View:
    """One process's connection to the API: it can be cut alone."""

    def __init__(self, api: LeaseApi) -> None:
        self._api, self.cut = api, False

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kw: Any) -> Any:
            if self.cut:
                raise APIServerUnavailable("no answer")
            return await getattr(self._api, name)(*args, **kw)

        return call


class Worker:
    def __init__(self) -> None:
        self.running = False
        self.terms = 0

    async def lead(self) -> None:
        self.running, self.terms = True, self.terms + 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False


def elector(view: View, identity: str) -> Elector:
    return Elector(view, "ns", "lease", identity, duration=1.5, deadline=1.0, period=0.05)  # type: ignore[arg-type]


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
def api() -> LeaseApi:
    return LeaseApi()


async def test_only_one_leads_and_the_other_follows_when_it_ends_cleanly(api: LeaseApi) -> None:
    one, two = Worker(), Worker()
    first = asyncio.create_task(elector(View(api), "one").run(one.lead))
    await until(lambda: one.running)
    second = asyncio.create_task(elector(View(api), "two").run(two.lead))
    await asyncio.sleep(2.0)  # longer than the lease: it is renewed
    assert one.running
    assert not two.running
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not one.running
    assert api.lease is not None
    assert api.lease["spec"]["holderIdentity"] != "one"  # given back; the other one may have it already
    await until(lambda: two.running)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_a_leader_that_is_cut_off_stops_before_another_starts_and_stands_again(api: LeaseApi) -> None:
    one, two, view = Worker(), Worker(), View(api)
    both = False

    async def two_leads() -> None:
        nonlocal both
        both = one.running
        await two.lead()

    tasks = [asyncio.create_task(elector(view, "one").run(one.lead))]
    await until(lambda: one.running)
    tasks.append(asyncio.create_task(elector(View(api), "two").run(two_leads)))
    await asyncio.sleep(0.1)
    view.cut = True
    await until(lambda: two.running)
    assert not one.running
    assert not both
    view.cut = False
    tasks[1].cancel()
    await until(lambda: one.terms == 2)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_with_the_api_server_away_nobody_leads_and_the_process_lives_on(api: LeaseApi) -> None:
    one = Worker()
    task = asyncio.create_task(elector(View(api), "one").run(one.lead))
    await until(lambda: one.running)
    api.away = True
    await until(lambda: not one.running)
    assert not task.done()
    api.away = False
    await until(lambda: one.terms == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_workers_that_do_not_stop_end_the_process(api: LeaseApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kube.lease.STOP_SECONDS", 0.1)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(elector(View(api), "one").run(stubborn))
    await until(lambda: api.lease is not None)
    api.away = True
    with pytest.raises(StuckLeader):
        await task
    release.set()


async def test_what_breaks_in_the_workers_ends_the_process(api: LeaseApi) -> None:
    async def broken() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        await elector(View(api), "one").run(broken)
    assert api.lease is not None
    assert api.lease["spec"]["holderIdentity"] == ""


async def test_a_leader_that_was_stopped_is_not_certain_before_anything_of_it_has_noticed(api: LeaseApi) -> None:
    stopped = 0.0

    def clock() -> float:
        return time.monotonic() + stopped

    worker = Worker()
    one = Elector(
        cast("KubeClient", View(api)), "ns", "lease", "one", duration=1.5, deadline=1.0, period=0.05, clock=clock
    )
    assert not one.certain
    task = asyncio.create_task(one.run(worker.lead))
    await until(lambda: worker.running)
    assert one.certain
    stopped = 60.0  # SIGSTOP and SIGCONT: the clock went on, the event loop has had no turn yet
    assert one.leading
    assert worker.running
    assert not one.certain
    await until(lambda: one.certain)  # nobody took the Lease: it is renewed
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_one_renewal_that_is_never_answered_costs_no_lease(api: LeaseApi) -> None:
    """Its connection leads to an API server that is gone, say. The next one gets another."""
    one, view, calls = Worker(), View(api), 0

    async def replace(*args: Any, **kw: Any) -> dict[str, Any]:
        nonlocal calls
        answer = await api.replace(*args, **kw)
        calls += 1
        if calls == 3:
            await asyncio.Event().wait()  # it was carried out, as it happens
        return answer

    view.replace = replace  # type: ignore[attr-defined]
    task = asyncio.create_task(elector(view, "one").run(one.lead))
    await until(lambda: calls > 8)
    assert (one.running, one.terms) == (True, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_term_begins_when_the_lease_was_asked_for_and_not_when_the_answer_came(api: LeaseApi) -> None:
    """Another process counts from the moment in which the Lease was written."""
    now, certain = 0.0, True
    view = View(api)

    async def create(*args: Any) -> dict[str, Any]:
        nonlocal now
        answer = await api.create(*args)
        now += 0.4
        return answer

    async def lead() -> None:
        nonlocal now, certain
        now = 1.6
        certain = one.certain
        await asyncio.Event().wait()

    view.create = create  # type: ignore[attr-defined]
    one = Elector(view, "ns", "lease", "one", duration=1.5, deadline=1.0, period=0.05, clock=lambda: now)  # type: ignore[arg-type]
    task = asyncio.create_task(one.run(lead))
    await until(lambda: now == 1.6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not certain
