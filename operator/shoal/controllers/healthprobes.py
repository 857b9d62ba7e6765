"""What only a fleet of replicas shows: which one is far slower, which one answers otherwise; and tests on probation.

Loads come from the agents' streams. Canaries go to agents, which ask the engine beside them; a replica gets them while
its GPUs are on probation, and every ten minutes while its Model is busy. What is known of answers is remembered in the
status of the Model.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import aiohttp
import structlog
from pydantic import ValidationError

from shoal.api import names
from shoal.api.model import CanaryAnswers, Model
from shoal.api.replica import CANARY_PROMPTS, CANARY_TOKENS, CanaryAnswer
from shoal.controllers import peers
from shoal.controllers.health import FleetHealth
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.replicastates import held_devices
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.health import HealthSignal, Unit
from shoal.core.health.canary import (
    LONGEST_PROMPT,
    WITNESSES,
    CanaryContext,
    CanaryVerdict,
    CanaryWatch,
    Spoken,
    digest,
)
from shoal.core.health.decide import Tested
from shoal.core.health.slow import LEAST_PEERS, SlowWatch
from shoal.core.layers import faults
from shoal.core.scaling import Load
from shoal.core.status import canaryanswers
from shoal.kube.projections import Custom
from shoal.net.tls import NoCertificate, TLSCredentials, dial

log = structlog.get_logger()

TICK_SECONDS: Final = 5.0
ROUND_SECONDS: Final = 600.0
TEST_SECONDS: Final = 30.0
"""Between two tests of replicas on probation."""
ASK_SECONDS: Final = 25.0
"""For one canary; the agent gives its engine less."""
MOST_ASKED: Final = 8
"""Replicas of one group in a round."""
ANSWER_BYTES: Final = 65_536
_AT_ONCE: Final = 16
_RESULTS: Final[Mapping[CanaryVerdict, Tested]] = {"agrees": "passed", "differs": "failed", "unknown": "answered"}
_Waiting = Mapping[str, tuple[tuple[Unit, datetime], ...]]
"""Replica -> units on probation that it would test, and since when."""
_NOBODY: Final[_Waiting] = {}
Learned = Callable[[str, str, CanaryAnswers], object]
"""Called with the uid of a Model, a class, and what is to be remembered."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Ready replicas that can be compared: of one Model, class and revision."""

    key: str
    model: Custom[Model]
    gpu_class: str
    pods: tuple[facts.Pod, ...]
    context: CanaryContext | None
    """What their answers depend on; None: not all of it is known, so that answers are not remembered."""

    @property
    def name(self) -> str:
        return f"{self.model.metadata.namespace}/{self.model.metadata.name}"


class HealthProbes:
    """`run` while this operator leads."""

    def __init__(
        self,
        world: World,
        install: InstallKeySource,
        health: FleetHealth,
        load: Callable[[str], Load | None],
        changed: Callable[[str], None],
        learned: Learned = lambda _uid, _class, _answers: None,
        credentials: TLSCredentials | None = None,
    ) -> None:
        """`load`: what the agent of a pod says, by the pod's uid. `changed`: called with a class about which something
        else is known now; `learned`: called with what is to be remembered of a Model's answers."""
        self._world, self._install, self._load, self._changed = world, install, load, changed
        self._learned = learned
        self._credentials = credentials
        self._slow, self._canary = SlowWatch(), CanaryWatch()
        self._found, self._held_down = health.found, health.held_down
        self._next_round: dict[str, float] = {}
        self._next_test: dict[str, float] = {}
        self._made: dict[str, int] = {}
        """Group -> tokens that its replicas had generated at the last round."""
        self._asked: dict[str, float] = {}
        """Replica -> when it was asked last."""
        self._contexts: dict[tuple[str, str], tuple[Custom[Model], facts.EngineBuild, CanaryContext | None]] = {}
        """(Model's uid, class) -> what it was computed from, and what answers depend on."""
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def begin_term(self) -> None:
        """Nothing of an earlier term counts."""
        self._slow, self._canary = SlowWatch(), CanaryWatch()
        self._found.clear()
        self._next_round, self._next_test, self._made, self._asked = {}, {}, {}, {}

    async def run(self) -> None:
        """Until cancelled."""
        self.begin_term()
        # Agents are in the cluster: never through the proxy of the environment (trust_env is off by default).
        connector = aiohttp.TCPConnector(limit=_AT_ONCE, force_close=True)
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._observe_always())
            tasks.create_task(self._ask_always(session))

    async def _observe_always(self) -> None:
        """Apart from the canaries: an agent that does not answer one must not hold up the windows of all paces."""
        while True:
            self.observe(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)

    async def _ask_always(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self.ask(session, time.monotonic())
            await asyncio.sleep(TICK_SECONDS)

    def observe(self, now: float) -> None:
        """One look at the loads of all replicas."""
        groups = self._groups()
        for group in groups:
            loads = {pod.uid: self._load(pod.uid) for pod in group.pods}
            self._slow.report(loads, now, self._with_held_clocks(group) if len(loads) < LEAST_PEERS else ())
        uids = {pod.uid for group in groups for pod in group.pods}
        keys = {group.key for group in groups}
        self._slow.keep(uids)
        self._canary.keep(uids, keys)
        places = {(group.model.metadata.uid, group.gpu_class) for group in groups}
        self._contexts = {place: known for place, known in self._contexts.items() if place in places}
        by_group, by_pod = (self._next_round, self._next_test, self._made), (self._asked,)
        for tables, there in ((by_group, keys), (by_pod, uids)):
            for table in tables:
                for gone in [key for key in table if key not in there]:
                    del table[gone]
        self._publish(groups)

    def _with_held_clocks(self, group: _Group) -> frozenset[str]:
        """Replicas on a GPU whose clocks are held down, as DCGM measures it."""
        units = ((pod.uid, self._unit(pod)) for pod in group.pods)
        return frozenset(uid for uid, unit in units if unit is not None and self._held_down(group.gpu_class, unit))

    def _groups(self) -> list[_Group]:
        found: dict[tuple[str, str], list[facts.Pod]] = {}
        for pod in self._world.pods.values():
            if pod.model_uid is not None and pod.gpu_class and pod.ready and not pod.deleting and not pod.finished:
                found.setdefault((pod.model_uid, pod.gpu_class), []).append(pod)
        groups: list[_Group] = []
        for (uid, gpu_class), pods in sorted(found.items()):
            custom = self._world.model_by_uid(uid)
            child = self._world.deployment_of(uid, gpu_class)
            # During a rollout, replicas of two revisions differ because they should.
            rolling = child is not None and child.deployment is not None and not child.deployment.rolled_out
            if custom is not None and not rolling:
                context = self._context(custom, gpu_class, pods)
                key = f"{uid}/{gpu_class}/{context.key if context is not None else custom.metadata.generation}"
                groups.append(_Group(key, custom, gpu_class, tuple(pods), context))
        return groups

    def _context(self, custom: Custom[Model], gpu_class: str, pods: Sequence[facts.Pod]) -> CanaryContext | None:
        """What the answers of these replicas depend on; None: they differ in that, or it is not known. Thousands of
        Models are looked at often, and computed when they change."""
        builds = {pod.engine for pod in pods}
        build = builds.pop() if len(builds) == 1 else None
        if build is None:
            return None
        place = custom.metadata.uid, gpu_class
        known = self._contexts.get(place)
        if known is None or known[0] is not custom or known[1] != build:
            known = self._contexts[place] = custom, build, _context(custom, gpu_class, build)
        return known[2]

    # --- canaries -----------------------------------------------------------------------------------------------------

    async def ask(self, session: aiohttp.ClientSession, now: float) -> None:
        """Canaries that are due now. Tests of replicas on probation come first."""
        tests: list[tuple[_Group, _Waiting]] = []
        others: list[tuple[_Group, _Waiting]] = []
        for group in self._groups():
            waiting = self._waiting(group) if now >= self._next_test.get(group.key, 0.0) else _NOBODY
            if waiting:
                self._next_test[group.key] = now + TEST_SECONDS  # there may be nothing yet to compare it with
                tests.append((group, waiting))
            elif self._due(group, now):
                others.append((group, _NOBODY))
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(group: _Group, waiting: _Waiting) -> None:
            async with limit:
                await self._round(session, group, waiting, now)

        await asyncio.gather(*(one(*each) for each in (*tests, *others)))
        if tests or others:
            self._publish(self._groups())

    async def _round(self, session: aiohttp.ClientSession, group: _Group, waiting: _Waiting, now: float) -> None:
        def order(pod: facts.Pod) -> tuple[bool, bool, float, str]:
            """One that differed is asked again, and the others in turn."""
            doubted = self._canary.doubted(pod.uid)
            return pod.uid not in waiting, not doubted, self._asked.get(pod.uid, float("-inf")), pod.name

        first = sorted(group.pods, key=order)[:MOST_ASKED]
        self._asked.update((pod.uid, now) for pod in first)
        answers = await asyncio.gather(*(self._answers(session, pod) for pod in first))
        out = self._out_of_use(group.gpu_class)
        said = {
            pod.uid: Spoken(*self._gpu(pod), texts, counts=not self._is_out(pod, out))
            for pod, texts in zip(first, answers, strict=True)
            if texts
        }
        if not said:
            return
        if group.context is not None and not self._canary.knows(group.key):
            model = group.model.object
            known = canaryanswers.stored(model).get(group.gpu_class) if model is not None else None
            self._canary.remember(group.key, canaryanswers.memory(known, group.context))
        before = self._canary.memory(group.key)
        verdicts = self._canary.round(group.key, said, self._world.now())
        after = self._canary.memory(group.key)
        if group.context is not None and after != before:
            self._learned(group.model.metadata.uid, group.gpu_class, canaryanswers.shown(group.context, after))
        for pod_uid, verdict in verdicts.items():
            for unit, since in waiting.get(pod_uid, ()):
                self._found.tested(group.gpu_class, unit, since, _RESULTS[verdict])
                self._changed(group.gpu_class)

    async def _answers(self, session: aiohttp.ClientSession, pod: facts.Pod) -> Mapping[str, str]:
        """Prompt -> digest of the answer. Empty: it gives none."""
        found: dict[str, str] = {}
        for number in range(len(CANARY_PROMPTS)):
            async with self._turns:  # the time of an answer begins with its turn
                answer = await self._ask(session, pod, number)
            if answer is None or answer.prompt in found or len(answer.prompt) > LONGEST_PROMPT:
                break  # an agent of before has one prompt
            found[answer.prompt] = digest(answer.text)
        return found

    def _due(self, group: _Group, now: float) -> bool:
        """A round every ten minutes, where there is or will be something to compare with and the Model is used: a
        canary must not keep a Model from going to zero. So it is asked while other requests run, and not after them."""
        if group.context is None and len(group.pods) <= WITNESSES:
            return False
        if group.key not in self._next_round:
            self._next_round[group.key] = now + ROUND_SECONDS
        if now < self._next_round[group.key]:
            return False
        loads = [self._load(pod.uid) for pod in group.pods]
        if not any(load is not None and load.running for load in loads):
            return False
        self._next_round[group.key] = now + ROUND_SECONDS
        made = sum(load.generation_tokens_total or 0 for load in loads if load is not None)
        before = self._made.get(group.key)
        self._made[group.key] = made
        own = min(len(group.pods), MOST_ASKED) * len(CANARY_PROMPTS) * CANARY_TOKENS
        return before is not None and abs(made - before) > 2 * own

    def _out_of_use(self, gpu_class: str) -> frozenset[Unit]:
        """Also on probation: what such a GPU answers is no evidence of what is right."""
        custom = self._world.classes.get(gpu_class)
        status = custom.object.status if custom is not None and custom.object is not None else None
        return frozenset(Unit(each.node, each.device or "") for each in (status.quarantined if status else ()))

    def _is_out(self, pod: facts.Pod, out: frozenset[Unit]) -> bool:
        if not out or pod.node is None:
            return False
        return Unit(pod.node) in out or any(Unit(pod.node, each) in out for each in held_devices(self._world, pod))

    def _gpu(self, pod: facts.Pod) -> tuple[str, bool]:
        """(the GPU of a replica, True); of one with several, or whose GPU nobody names: (its node, False)."""
        unit = self._unit(pod)
        text = f"{pod.node}\0{unit.device}" if unit is not None else f"{pod.node}"
        return hashlib.sha256(text.encode()).hexdigest()[:16], unit is not None

    def _waiting(self, group: _Group) -> _Waiting:
        custom = self._world.classes.get(group.gpu_class)
        status = custom.object.status if custom is not None and custom.object is not None else None
        found: dict[str, tuple[tuple[Unit, datetime], ...]] = {}
        for each in status.quarantined if status is not None else ():
            unit = Unit(each.node, each.device or "")
            if each.state != "Probation" or self._found.is_tested(group.gpu_class, unit):
                continue
            for pod in group.pods:
                if pod.node == unit.node and (not unit.device or unit.device in held_devices(self._world, pod)):
                    found[pod.uid] = (*found.get(pod.uid, ()), (unit, each.since))
        return found

    async def _ask(self, session: aiohttp.ClientSession, pod: facts.Pod, number: int) -> CanaryAnswer | None:
        install = self._install.keys
        if install is None or pod.ip is None or pod.model_uid is None:
            return None
        peer = peers.agent(pod, install, pod.model_uid, self._credentials)
        headers = {"authorization": f"Bearer {peer.key}"}
        try:
            secured = dial(peer.credentials, peer.server_name)
            url = f"{peer.base_url}{names.CANARY_PATH}?prompt={number}"
            async with session.post(url, headers=headers, allow_redirects=False, **secured) as response:
                if response.status != 200:
                    return None  # an agent of before, or a model that generates no text
                return CanaryAnswer.model_validate_json(await _bounded(response))
        except (aiohttp.ClientError, TimeoutError, OSError, NoCertificate, ValidationError, ValueError) as error:
            log.info("no canary", pod=pod.key, error=f"{type(error).__name__}: {error}"[:300])
            return None

    # --- signals ------------------------------------------------------------------------------------------------------

    def _publish(self, groups: Iterable[_Group]) -> None:
        found: dict[str, list[HealthSignal]] = {}
        for group in groups:
            for pod in group.pods:
                unit = self._unit(pod)
                if unit is None:
                    continue
                if (times := self._slow.slow(pod.uid)) is not None:
                    text = f"pod {pod.key} takes {times:.1f} times as long for a token as the others of its Model"
                    why = self._held_down(group.gpu_class, unit)
                    text += f"; DCGM: the clocks of its GPU are held down: {why}" if why else ""
                    found.setdefault(group.gpu_class, []).append(
                        HealthSignal(unit, faults.REPLICA_SLOW, text, group.name)
                    )
                if self._canary.differs(pod.uid):
                    text = f"pod {pod.key} answers the canary otherwise than other GPUs of the class do for its Model"
                    found.setdefault(group.gpu_class, []).append(
                        HealthSignal(unit, faults.REPLICA_GARBLED, text, group.name)
                    )
        before = self._found.signals
        self._found.put({name: tuple(of) for name, of in found.items()})
        for name in before.keys() | found.keys():
            if {(s.unit, s.reason) for s in before.get(name, ())} != {(s.unit, s.reason) for s in found.get(name, ())}:
                self._changed(name)

    def _unit(self, pod: facts.Pod) -> Unit | None:
        """The GPU of a replica that has one; None: nobody says which it is, or it has several. On the word of replicas
        alone no whole node is taken out of use."""
        devices = held_devices(self._world, pod)
        if pod.node is None or len(devices) != 1 or sum(pod.requests.values()) != 1:
            return None
        return Unit(pod.node, next(iter(devices)))


def _context(custom: Custom[Model], gpu_class: str, build: facts.EngineBuild) -> CanaryContext | None:
    """None: its weights may change in place."""
    model = custom.object
    if model is None or not build.pinned:
        return None
    artifact = model.status.artifact if model.status is not None else None
    variant = next((v for v in model.spec.variants if v.gpu_class == gpu_class), None)
    own = (variant.quantization if variant is not None else None) or model.spec.engine.quantization.weights
    quantization = own or (artifact.quantization if artifact is not None else None)
    key = hashlib.sha256(f"{gpu_class}\0{build.digest}".encode()).hexdigest()[:16]
    return CanaryContext(key, build.image, build.weights, quantization)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise ValueError(f"more than {ANSWER_BYTES} bytes")
    return bytes(body)
