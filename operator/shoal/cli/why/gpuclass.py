"""`shoal why gpuclass/NAME`: the class and its nodes."""

from datetime import UTC, datetime

from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import GPUCLASSES


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a GPUClass. Raises KubeError where the class itself cannot be read."""
    view = layerviews.shoal_object("class", await question.client.get(GPUCLASSES, question.name))
    reader = WhyReader(question.client)
    devices = await reader.devices((view,))
    nodes = await reader.nodes((), (view,), devices)
    seen = WhySnapshot(
        kind="class",
        key=view.key,
        subject=view,
        nodes=nodes,
        holders=await reader.holders((view,), nodes, devices),
        devices=devices.counts,
        events=await reader.events(None),
        lease=await reader.lease(question.installation.namespace),
        unread=tuple(reader.unread),
    )
    return show.answer(causes(seen, datetime.now(UTC)), seen)
