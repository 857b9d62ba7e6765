"""All that an operator does about LoRA pools and adapters, put together."""

import asyncio

from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.lora.adapters import AdapterController
from shoal.controllers.lora.choices import Choices
from shoal.controllers.lora.desired import DesiredAdapterWriter
from shoal.controllers.lora.placer import Placer
from shoal.controllers.lora.pools import PoolController
from shoal.controllers.lora.signals import AdapterSignals
from shoal.controllers.lora.view import AdapterView
from shoal.controllers.world import World
from shoal.kube.queue import TokenBucket, WorkQueue
from shoal.net.stream import ListenerIdentity
from shoal.net.tls import TLSCredentials


def _queue() -> WorkQueue:
    """Most reconciles of adapters write nothing: what bounds the writes are the workers."""
    return WorkQueue("loraadapter", workers=16, bucket=TokenBucket(rate=2000, burst=4000))


class LoRAControllers:
    """`run` while this operator leads."""

    def __init__(
        self,
        world: World,
        install: InstallKeySource,
        signals: AdapterSignals,
        identity: ListenerIdentity,
        credentials: TLSCredentials | None = None,
    ) -> None:
        choices = Choices(world)
        self.desired = DesiredAdapterWriter(
            world, install, signals, WorkQueue("adapters", workers=16), identity, credentials
        )
        queue = _queue()
        self.placer = Placer(world, choices, self.desired, signals, queue.add)
        self.adapters = AdapterController(world, choices, self.placer, queue)
        self.pools = PoolController(world, choices, self.adapters.reader.retry, WorkQueue("lorapool", workers=2))
        self.view = AdapterView(world, self.placer, signals)

    @property
    def queues(self) -> tuple[WorkQueue, ...]:
        """All work queues."""
        return self.pools.queue, self.adapters.queue, self.desired.queue

    def reported(self, model_uid: str | None, urgent: bool) -> None:
        """The signals of a Model changed, or with None perhaps those of every Model."""
        self.placer.reported(model_uid, urgent)

    def enqueue_all(self) -> None:
        """After a list of everything. Adapters have no children that could have been changed, and the list itself
        contains the changes that were missed."""
        self.pools.enqueue_all()

    async def run(self) -> None:
        """Works until cancelled."""
        self.adapters.enqueue_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pools.queue.run(self.pools.reconcile))
            group.create_task(self.adapters.namespaces.run())
            group.create_task(self.adapters.reader.run())
            group.create_task(self.adapters.queue.run(self.adapters.reconcile))
            group.create_task(self.placer.run())
            group.create_task(self.desired.run())
