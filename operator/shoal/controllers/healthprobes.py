"""What only a fleet of replicas shows: which one is far slower, which one answers otherwise; and tests on probation.

Loads come from the agents' streams. Canaries go to agents, which ask the engine beside them; a replica gets one while
its GPUs are on probation, and every ten minutes while its Model is busy and has replicas enough to compare.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import aiohttp
import structlog
from pydantic import ValidationError

from shoal.api import names
from shoal.api.replica import CanaryAnswer
from shoal.controllers import peers
from shoal.controllers.health import FleetHealth
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.replicastates import held_devices
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.health import HealthSignal, Unit
from shoal.core.health.canary import WITNESSES, CanaryVerdict, CanaryWatch
from shoal.core.health.decide import Tested
from shoal.core.health.slow import SlowWatch
from shoal.core.layers import faults
from shoal.core.scaling import Load
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
_NOBODY: Final[Mapping[str, tuple[tuple[Unit, datetime], ...]]] = {}


@dataclass(frozen=True, slots=True)
class _Group:
    """Ready replicas that can be compared: of one Model, class and generation of its spec."""

    key: str
    model: str
    gpu_class: str
    pods: tuple[facts.Pod, ...]


class HealthProbes:
    """`run` while this operator leads."""

    def __init__(
        self,
        world: World,
        install: InstallKeySource,
        health: FleetHealth,
        load: Callable[[str], Load | None],
        changed: Callable[[str], None],
        credentials: TLSCredentials | None = None,
    ) -> None:
        """`load`: what the agent of a pod says, by the pod's uid. `changed`: called with a class about which something
        else is known now."""
        self._world, self._install, self._load, self._changed = world, install, load, changed
        self._credentials = credentials
        self._slow, self._canary = SlowWatch(), CanaryWatch()
        self._found, self._held_down = health.found, health.held_down
        self._next_round: dict[str, float] = {}
        self._next_test: dict[str, float] = {}
        self._made: dict[str, int] = {}
        """Group -> tokens that its replicas had generated at the last round."""

    def begin_term(self) -> None:
        """Nothing of an earlier term counts."""
        self._slow, self._canary = SlowWatch(), CanaryWatch()
        self._found.clear()
        self._next_round, self._next_test, self._made = {}, {}, {}

    async def run(self) -> None:
        """Until cancelled."""
        self.begin_term()
        # Agents are in the cluster: never through the proxy of the environment (trust_env is off by default).
        connector = aiohttp.TCPConnector(limit=_AT_ONCE, force_close=True)
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            while True:
                await self.step(session, time.monotonic())
                await asyncio.sleep(TICK_SECONDS)

    async def step(self, session: aiohttp.ClientSession, now: float) -> None:
        """One look at all replicas."""
        groups = self._groups()
        for group in groups:
            self._slow.report({pod.uid: self._load(pod.uid) for pod in group.pods}, now)
        uids = {pod.uid for group in groups for pod in group.pods}
        keys = {group.key for group in groups}
        self._slow.keep(uids)
        self._canary.keep(uids, keys)
        for table in (self._next_round, self._next_test, self._made):
            for gone in [key for key in table if key not in keys]:
                del table[gone]
        await self._rounds(session, groups, now)
        self._publish(groups)

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
                metadata = custom.metadata
                key = f"{uid}/{metadata.generation}/{gpu_class}"
                groups.append(_Group(key, f"{metadata.namespace}/{metadata.name}", gpu_class, tuple(pods)))
        return groups

    # --- canaries -----------------------------------------------------------------------------------------------------

    async def _rounds(self, session: aiohttp.ClientSession, groups: Iterable[_Group], now: float) -> None:
        for group in groups:
            waiting = self._waiting(group) if now >= self._next_test.get(group.key, 0.0) else _NOBODY
            if not waiting and not self._due(group, now):
                continue
            if waiting:
                self._next_test[group.key] = now + TEST_SECONDS  # there may be no other replica to compare it with yet
            first = sorted(group.pods, key=lambda pod: (pod.uid not in waiting, pod.name))[:MOST_ASKED]
            asked = await asyncio.gather(*(self._ask(session, pod) for pod in first))
            said = [(pod, answer) for pod, answer in zip(first, asked, strict=True) if answer is not None]
            by_prompt: dict[str, dict[str, str]] = {}
            for pod, answer in said:
                by_prompt.setdefault(answer.prompt, {})[pod.uid] = answer.text
            for prompt, answers in by_prompt.items():
                verdicts = self._canary.round(f"{group.key}/{prompt}" if len(by_prompt) > 1 else group.key, answers)
                for pod_uid, verdict in verdicts.items():
                    for unit, since in waiting.get(pod_uid, ()):
                        self._found.tested(group.gpu_class, unit, since, _RESULTS[verdict])
                        self._changed(group.gpu_class)

    def _due(self, group: _Group, now: float) -> bool:
        """A round every ten minutes, where there are replicas enough and the Model is used: a canary must not keep a
        Model from going to zero."""
        if len(group.pods) <= WITNESSES:
            return False
        if group.key not in self._next_round:
            self._next_round[group.key] = now + ROUND_SECONDS
        if now < self._next_round[group.key]:
            return False
        self._next_round[group.key] = now + ROUND_SECONDS
        loads = [self._load(pod.uid) for pod in group.pods]
        made = sum(load.generation_tokens_total or 0 for load in loads if load is not None)
        before = self._made.get(group.key)
        self._made[group.key] = made
        return before is not None and abs(made - before) > 2 * MOST_ASKED * 16

    def _waiting(self, group: _Group) -> Mapping[str, tuple[tuple[Unit, datetime], ...]]:
        """Replica -> units on probation that it would test."""
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

    async def _ask(self, session: aiohttp.ClientSession, pod: facts.Pod) -> CanaryAnswer | None:
        install = self._install.keys
        if install is None or pod.ip is None or pod.model_uid is None:
            return None
        peer = peers.agent(pod, install, pod.model_uid, self._credentials)
        headers = {"authorization": f"Bearer {peer.key}"}
        try:
            secured = dial(peer.credentials, peer.server_name)
            url = f"{peer.base_url}{names.CANARY_PATH}"
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
                        HealthSignal(unit, faults.REPLICA_SLOW, text, group.model)
                    )
                if self._canary.differs(pod.uid):
                    text = f"pod {pod.key} answers the canary otherwise than the others of its Model"
                    found.setdefault(group.gpu_class, []).append(
                        HealthSignal(unit, faults.REPLICA_GARBLED, text, group.model)
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


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise ValueError(f"more than {ANSWER_BYTES} bytes")
    return bytes(body)
