"""`shoal why node/NAME`: a node, its GPUs, and the class that counts it."""

from datetime import UTC, datetime

from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import NODES


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a node. Raises KubeError where the node itself cannot be read."""
    node = layerviews.node(await question.client.get(NODES, question.name))
    reader = WhyReader(question.client)
    classes = await reader.classes(None)
    seen = WhySnapshot(
        kind="node",
        key=node.name,
        related=classes,
        nodes=(node,),
        devices=(await reader.devices(classes)).counts,
        events=await reader.events(None),
        unread=tuple(reader.unread),
    )
    return show.answer(causes(seen, datetime.now(UTC)), seen)
