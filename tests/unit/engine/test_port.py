"""Every engine kind has and does what the port asks for; an adapter that does not is told by name what it lacks."""

import re
from types import SimpleNamespace
from typing import Any, Final

import pytest

from shoal.engine.kinds import KINDS
from shoal.engine.port import AgentSide, EngineKind, PodSide
from shoal.engine.sglang.arguments import ARGUMENTS as SGLANG_ARGUMENTS
from shoal.engine.unserved import ALL_ROLES, NO_SLEEP
from shoal.engine.vllm.arguments import ARGUMENTS as VLLM_ARGUMENTS
from shoal.engine.wire import EngineCall, Ranking, Wire
from shoal.engine.wires import wire_of
from tests.support.engine_conformance import ROLES, SLEEPS, Conformance, members

ARGUMENTS: Final[dict[str, Any]] = {"SGLang": SGLANG_ARGUMENTS, "vLLM": VLLM_ARGUMENTS}
SUSPECT: Final = re.compile(
    r"sleep|memory-saver|cpu-backup|disaggregation|decoupled|transfer-config|manager-config|role-switch|^encoder-|to-encoder"
    r"|-only$"
)
HARMLESS: Final = {
    # An idle process sleeps for moments; a Model reads texts only.
    "SGLang": {"sleep-on-idle", "language-model-only"},
    # The first one is refused for another reason.
    "vLLM": {"weight-transfer-config", "language-model-only"},
}

REACHES_OUT: Final = re.compile(
    r"(^|-)(ports?|hosts?|ip|urls?|uri|addr|address|endpoint|socket|ipc|bootstrap|peer|remote|servers?|publish|trust|allowed"
    r"|custom-logit-processor)(-|$)"
)
"""Names of arguments that open ports, name other hosts, or let requests bring along what no request should."""
STAYS_INSIDE: Final = {
    "SGLang": {
        # The pod's own: NCCL's port for its own processes, sockets of the file system, shares of the machine's memory.
        "nccl-port", "forward-pass-metrics-ipc-name", "load-snapshot-publish-interval", "hicache-host-memory-fraction",
        "hicache-host-memory-mode", "skip-server-warmup",
        # What its author may decide: where spans go, code in the weights, names of labels.
        "otlp-traces-endpoint", "trust-remote-code", "tokenizer-metrics-allowed-custom-labels",
        # They only forbid.
        "allowed-media-domains", "media-url-max-file-size-mb",
    },
    "vLLM": {
        "otlp-traces-endpoint", "trust-remote-code",
        # They only forbid, or concern browsers, which do not reach an engine.
        "allowed-media-domains", "allowed-headers", "allowed-methods", "allowed-origins",
        # A path that the sidecar does not open; images between the pod's own processes.
        "enable-tokenizer-info-endpoint", "mm-tensor-ipc", "mm-ipc-gpu-memory-gb",
    },
}  # fmt: skip

WRITES: Final = re.compile(r"(^|-)(logs?|logging|dump|recorder|export|traces?|profiler)(-|$)")
"""Names of arguments that write logs, dumps or files."""
WRITES_NO_TEXTS: Final = {
    "SGLang": {
        # How much is logged, times, counts and paths.
        "log-level", "log-level-http", "decode-log-interval", "enable-request-time-stats-logging",
        "uvicorn-access-log-exclude-prefixes",
        # Spans have times and counts; those of decoupled speculation are not written, since it is refused.
        "enable-trace", "trace-modules", "otlp-traces-endpoint", "spec-trace-dir",
        # Written when a call asks for it, which Shoal does not make; weights.
        "expert-distribution-recorder-mode", "expert-distribution-recorder-buffer-size", "modelopt-export-path",
    },
    "vLLM": {
        # How much is logged, times, counts and paths.
        "log-level", "uvicorn-log-level", "logging-config", "log-config-file", "log-error-stack",
        "aggregate-engine-logging", "enable-logging-iteration-details", "disable-uvicorn-access-log",
        "disable-access-log-for-endpoints",
        # How requests are logged, if they were.
        "enable-log-deltas", "max-log-len",
        # Spans have times and counts. A replay writes nothing.
        "collect-detailed-traces", "otlp-traces-endpoint", "enable-trace-replay",
    },
}  # fmt: skip


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
    assert "client.greedy" in failures


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_an_adapter_that_lets_engines_sleep_or_do_a_part_of_the_work_is_told_so(
    kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SLEEPS[kind.type]
    assert ROLES[kind.type]
    monkeypatch.setattr(type(kind.pod), "extra_args_problems", lambda *_: [])
    failures = await Conformance(kind).failures()
    assert failures["pod.sleep"] == f"AssertionError: --{SLEEPS[kind.type][0]}: passes"
    assert failures["pod.roles"] == f"AssertionError: --{ROLES[kind.type][0]}: passes"


@pytest.mark.parametrize(("kind", "argument"), [("SGLang", "enable-memory-saver"), ("vLLM", "enable-sleep-mode")])
async def test_an_argument_that_an_adapter_forgets_is_told(
    kind: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ARGUMENTS[kind].owned, argument)
    assert (await Conformance(KINDS[kind]).failures()).keys() == {"pod.sleep"}


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_sound_like_sleep_or_a_part_of_the_work_are_refused(kind: str) -> None:
    """The tables are those of the engines' own parsers: a new version's arguments are found here."""
    arguments = ARGUMENTS[kind]
    names = {argument.name for argument in arguments.tables()[arguments.versions[-1]].values()}
    passed = {name for name in names if SUSPECT.search(name) and arguments.owner(name) not in (NO_SLEEP, ALL_ROLES)}
    assert passed == HARMLESS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_open_ports_name_hosts_or_trust_senders_are_refused(kind: str) -> None:
    """A new version's arguments are found here: refuse them, or say why they pass."""
    arguments = ARGUMENTS[kind]
    names = {argument.name for argument in arguments.tables()[arguments.versions[-1]].values()}
    assert {name for name in names if REACHES_OUT.search(name) and not arguments.owner(name)} == STAYS_INSIDE[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_write_prompts_or_answers_of_all_tenants_are_refused(kind: str) -> None:
    """A new version's arguments are found here: refuse them, or say why they pass."""
    arguments = ARGUMENTS[kind]
    names = {argument.name for argument in arguments.tables()[arguments.versions[-1]].values()}
    assert {name for name in names if WRITES.search(name) and not arguments.owner(name)} == WRITES_NO_TEXTS[kind]


class IdleWire:
    """A wire with all members, which do nothing."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __getattr__(self, name: str) -> object:
        return getattr(self._wire, name)

    def encode(self, body: bytes, call: EngineCall) -> bytes:
        return body

    def rewriter(self, call: EngineCall, model_name: str) -> SimpleNamespace:
        return SimpleNamespace(same=True, rewrite=bytes, rewrite_any=bytes)

    def accepted_drafts(self, call: EngineCall) -> None:
        return None

    def elsewhere(self, status: int, error: bytes, adapter: bool) -> None:
        return None

    def reshape(self, call: EngineCall, answer: object, ranking: Ranking) -> tuple[object, None]:
        return answer, None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_a_wire_that_does_nothing_is_told_by_name_what_it_lacks(
    kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = wire_of(kind.type)
    assert wire is not None
    monkeypatch.setattr("tests.support.engine_conformance.wire_of", lambda _: IdleWire(wire))
    failures = await Conformance(kind).failures()
    # Only SGLang has ids of its own for further attempts.
    own_ids = {"wire.sent_id"} if kind.type == "SGLang" else set[str]()
    assert failures.keys() == {"wire.encode", "wire.rewriter", "wire.elsewhere", "wire.reshape"} | own_ids


class ForgetfulWire(IdleWire):
    """A wire that loses the tenants' salts, and knows requests by ids that it does not send."""

    def encode(self, body: bytes, call: EngineCall) -> bytes:
        whole = self._wire.encode(body, call)
        return whole.replace(b'"cache_salt"', b'"salt_that_no_engine_reads"').replace(b'"salt-1"', b"null")

    def rewriter(self, call: EngineCall, model_name: str) -> Any:
        return self._wire.rewriter(call, model_name)

    def accepted_drafts(self, call: EngineCall) -> Any:
        return self._wire.accepted_drafts(call)

    def elsewhere(self, status: int, error: bytes, adapter: bool) -> Any:
        return self._wire.elsewhere(status, error, adapter)

    def reshape(self, call: EngineCall, answer: Any, ranking: Ranking) -> Any:
        return self._wire.reshape(call, answer, ranking)

    def sent_id(self, call: EngineCall) -> bytes:
        return b"an-id-of-nobody"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_a_wire_that_loses_what_separates_tenants_is_told(
    kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = wire_of(kind.type)
    assert wire is not None
    monkeypatch.setattr("tests.support.engine_conformance.wire_of", lambda _: ForgetfulWire(wire))
    failures = await Conformance(kind).failures()
    assert failures.keys() == {"wire.salted", "wire.sent_id"}
    assert "the tenant's salt is lost" in failures["wire.salted"]


async def test_a_kind_with_the_keys_of_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = list(KINDS.values())[:2]
    monkeypatch.setattr(type(one.pod), "keys_suffix", other.pod.keys_suffix)
    monkeypatch.setattr(type(one.agent), "files_before_unload", None)
    failures = await Conformance(one).failures()
    assert failures.keys() == {"pod.keys_suffix", "agent.files_before_unload"}
