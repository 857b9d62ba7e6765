"""Every engine kind has and does what the port asks for; an adapter that does not is told by name what it lacks."""

from types import SimpleNamespace

import pytest

from shoal.engine.kinds import KINDS
from shoal.engine.port import AgentSide, PodSide
from tests.support.engine_conformance import Conformance, members


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_a_kind_is_complete(kind: object) -> None:
    assert await Conformance(kind).failures() == {}


class SkeletonPod:
    """The beginning of an adapter: a command, and nothing that follows it."""

    command = ("trtllm-serve",)
    versions = ("1.2.0",)
    ready_path = "health"
    serving_paths = ("/v1/completions",)

    def keys_file(self, api_key: str, admin_key: str) -> dict[str, str]:
        return {}

    def args(self, *_: object, **__: object) -> tuple[str, ...]:
        raise NotImplementedError


async def test_a_skeleton_is_told_by_name_what_it_lacks() -> None:
    skeleton = SimpleNamespace(type="TensorRT-LLM", pod=SkeletonPod(), agent=SimpleNamespace())
    failures = await Conformance(skeleton).failures()
    missing = {name for name, why in failures.items() if why == "is missing"}
    there = {"command", "versions", "ready_path", "serving_paths", "keys_file", "args"}
    assert missing == {f"pod.{name}" for name in members(PodSide) if name not in there} | {
        f"agent.{name}" for name in members(AgentSide)
    }
    assert failures["kind.type"] == "AssertionError: no value of spec.engine.type"
    assert failures["pod.serving_paths"].startswith("AssertionError: does not chat")
    assert failures["pod.keys_file"] == "AssertionError: the engine gets no key"
    assert failures["pod.args"] == "NotImplementedError: "
    assert failures["wire.type"] == "AssertionError: gateways cannot speak to it (engine/wires.py)"
    assert {"client.ready", "client.loads", "adapters.load", "adapters.unload"} <= failures.keys()
    assert "pod.command" not in failures
