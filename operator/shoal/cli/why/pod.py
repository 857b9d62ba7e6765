"""`shoal why pod/NAME`: a replica of a Model, or any other pod."""

from datetime import UTC, datetime

from shoal.cli.why import show
from shoal.cli.why.reader import WhyReader
from shoal.cli.why.subjects import WhyAnswer, WhyQuestion
from shoal.core.layers.causes import causes
from shoal.core.layers.types import WhySnapshot
from shoal.kube import layerviews
from shoal.kube.resources import PODS


async def answer(question: WhyQuestion) -> WhyAnswer:
    """Explains a pod. Raises KubeError where the pod itself cannot be read."""
    pod = layerviews.pod(await question.client.get(PODS, question.name, question.namespace))
    reader = WhyReader(question.client)
    classes = await reader.classes([pod.gpu_class]) if pod.gpu_class is not None else ()
    devices = await reader.devices(classes)
    nodes = await reader.nodes((pod,), classes, devices)
    seen = WhySnapshot(
        kind="pod",
        key=pod.key,
        related=classes,
        pods=await reader.with_devices((pod,), classes),
        nodes=nodes,
        holders=await reader.holders(classes, nodes, devices) if pod.node is None else (),
        devices=devices.counts,
        events=await reader.events(pod.namespace),
        unread=tuple(reader.unread),
    )
    return show.answer(causes(seen, datetime.now(UTC)), seen)
