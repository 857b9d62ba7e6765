"""The demo's view of a Model over time."""

import asyncio
import io
from datetime import UTC, datetime

import click
import pytest
from rich.console import Console

from shoal.api.decisions import Decisions, ModelScaling
from shoal.cli.client import Unreachable
from shoal.cli.services import OperatorClient
from shoal_dev.demo.liveview import Frame, LiveView, history, picture, strip


def model(ready: int, wanted: int | None = None, reason: str = "ReplicasReady") -> ModelScaling:
    return ModelScaling(
        model="elastic/bursty",
        wanted=ready if wanted is None else wanted,
        ready_replicas=ready,
        reason=reason,
        message="so",
    )


class Scripted(OperatorClient):
    """Tells one thing after the other, the last one for ever."""

    def __init__(self, *script: ModelScaling | Unreachable):
        self.script = list(script)

    async def one(self, namespace: str, name: str) -> Decisions:
        told = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(told, Unreachable):
            raise told
        return Decisions(operator="op", leads=True, time=datetime.now(UTC), models=(told,))


def live_view(*script: ModelScaling | Unreachable) -> tuple[LiveView, Console]:
    console = Console(record=True, width=200, file=io.StringIO())
    return LiveView(Scripted(*script), "elastic", "bursty", console), console


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_dev.demo.liveview.INTERVAL_SECONDS", 0.001)


def test_the_history_names_each_change_once() -> None:
    frames = [Frame(float(i), model(ready)) for i, ready in enumerate((0, 1, 1, 0, 3))]
    assert history(frames) == "0, 1 s: 1, 3 s: 0, 4 s: 3"
    assert strip(frames) == " ▄▄ █", "a third rounds up, so that one replica is seen"


async def test_it_waits_for_what_is_to_come_and_tells_changes_without_a_terminal() -> None:
    view, console = live_view(model(0, 1, "Waking"), model(0, 1, "Waking"), model(1))
    async with view:
        frame = await view.until(lambda m: m.ready_replicas == 1, 10, "it wakes")
    assert frame.metrics.ready_replicas == 1
    told = console.export_text()
    assert told.count("0/1 replicas, Waking") == 1
    assert "1/1 replicas, ReplicasReady" in told


async def test_what_does_not_come_is_told_with_what_the_model_says() -> None:
    view, _ = live_view(model(0, 1, "NoCapacity").model_copy(update={"stale": ("shoal-gateway-0",)}))
    async with view:
        with pytest.raises(
            click.ClickException, match=r"it wakes.*0 of 1 replicas; NoCapacity: so; stale signals: shoal"
        ):
            await view.until(lambda m: m.ready_replicas == 1, 0.05, "it wakes")


async def test_an_operator_that_does_not_answer_is_waited_for_and_named() -> None:
    view, _ = live_view(Unreachable("no operator leads"), Unreachable("no operator leads"), model(1))
    async with view:
        assert (await view.until(lambda m: m.ready_replicas == 1, 10, "it wakes")).metrics.ready_replicas == 1
    view, _ = live_view(Unreachable("no operator leads"))
    async with view:
        with pytest.raises(click.ClickException, match="no operator leads"):
            await view.until(lambda m: m.ready_replicas == 1, 0.05, "it wakes")


async def test_a_view_that_breaks_ends_the_wait_with_what_broke_it(monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = live_view(model(0))
    monkeypatch.setattr(view, "_show", lambda: 1 / 0)
    async with view:
        with pytest.raises(ZeroDivisionError):
            await view.until(lambda m: m.ready_replicas == 1, 60, "it wakes")


async def test_a_request_that_fails_meanwhile_ends_the_wait_at_once() -> None:
    view, _ = live_view(model(0, 1))

    async def refused() -> None:
        raise click.ClickException("the gateway answered: 503")

    with pytest.raises(click.ClickException, match="503"):
        await view.until(lambda m: m.ready_replicas == 1, 60, "it wakes", asyncio.create_task(refused()))


def test_the_live_view_shows_unknown_as_such() -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(picture([Frame(0.0, model(1, 2))], "clients ask", "the API server is away"))
    told = console.export_text()
    assert "1/2" in told
    assert "?" in told
    assert "the API server is away" in told
