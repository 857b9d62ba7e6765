"""All that an operator does about LoRA pools and adapters, put together."""

import asyncio

from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.lora.adapters import AdapterController
from shoal.controllers.lora.book import Book
from shoal.controllers.lora.chosen import Choices
from shoal.controllers.lora.floors import Floors
from shoal.controllers.lora.hearing import Ears
from shoal.controllers.lora.placer import Placer
from shoal.controllers.lora.pools import PoolController
from shoal.controllers.world import World
from shoal.kube.queue import Bucket, WorkQueue
from shoal.net.tls import Credentials
from shoal.signals.stream import Me


def _queue() -> WorkQueue:
    """Most reconciles of adapters write nothing: what bounds the writes are the workers."""
    return WorkQueue("loraadapter", workers=16, bucket=Bucket(rate=2000, burst=4000))


class LoRA:
    """`run` while this operator leads."""

    def __init__(
        self,
        world: World,
        install: InstallKeySource,
        ears: Ears,
        me: Me,
        credentials: Credentials | None = None,
    ) -> None:
        choices = Choices(world)
        self.floors = Floors(world, install, ears, WorkQueue("adapter-floors", workers=16), me, credentials)
        self.placer = Placer(world, choices, self.floors, ears)
        self.pools = PoolController(world, choices, WorkQueue("lorapool", workers=2))
        self.book = Book(world, self.placer, ears)
        self.adapters = AdapterController(world, choices, self.placer, _queue())
        self.pools.mended = self.adapters.reader.again

    @property
    def queues(self) -> tuple[WorkQueue, ...]:
        """All work queues."""
        return self.pools.queue, self.adapters.queue, self.floors.queue

    def heard(self, model_uid: str | None, urgent: bool) -> None:
        """Something else is said of a Model, or with None perhaps of every Model."""
        self.placer.heard(model_uid, urgent)

    def enqueue_all(self) -> None:
        """After a list of everything. Adapters have no children that somebody could have changed, and what was missed
        of them the list itself tells."""
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
            group.create_task(self.floors.run())
