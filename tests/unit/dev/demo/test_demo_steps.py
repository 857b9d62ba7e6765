"""The demo's steps, on a cluster that answers as it is told."""

import json
from contextlib import AbstractContextManager
from typing import Any, cast

import click
import pytest

from shoal_dev.demo import steps
from shoal_dev.demo.clusters import DemoCluster


class Gateways(DemoCluster):
    """Two gateways, of which the second one gets a record after so many questions."""

    def __init__(self, after: int) -> None:
        self._after = after
        self.asked: list[str] = []

    def get(self, *args: str) -> list[dict[str, Any]]:
        return [{"metadata": {"name": f"shoal-gateway-{n}"}} for n in range(2)]

    def exec(self, pod: str, *argv: str) -> str:
        self.asked.append(pod)
        assert argv[:3] == ("shoal", "gateway", "records")
        rows = [{"subject": "acme", "data": {"kind": kind}} for kind in ("open", "final")]
        done = pod.endswith("1") and len(self.asked) > self._after
        return "\n".join(json.dumps(row) for row in rows[: 1 + done]) + "\n"

    def gateway(self) -> AbstractContextManager[str]:
        raise NotImplementedError

    def try_it(self) -> list[str]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.time, "sleep", lambda _seconds: None)


def test_a_record_that_is_written_a_moment_after_the_answer_is_waited_for() -> None:
    gateways = Gateways(after=4)
    found = steps.usage_record(gateways, "r1")
    assert cast("dict[str, Any]", found["data"])["kind"] == "final"
    assert gateways.asked == ["shoal-gateway-0", "shoal-gateway-1"] * 3


def test_a_record_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_RECORD_SECONDS", -1.0)
    with pytest.raises(click.ClickException, match="no gateway has a usage record of request r1"):
        steps.usage_record(Gateways(after=99), "r1")
