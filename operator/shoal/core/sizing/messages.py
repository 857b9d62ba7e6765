"""The sentences for a person whose Model does not fit: the sum, and what to do."""

from collections.abc import Sequence

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing.tensor import UNKNOWN_NODE, choices, most, obstacle
from shoal.core.sizing.types import GPU, Sized, Tuning
from shoal.core.sizing.units import gib


def gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def no_node(tensor: int, largest: int, tuning: Tuning) -> str:
    stages = f" and `pipeline` {tuning.pipeline}" if tuning.pipeline > 1 else ""
    return f"`tensor` is {tensor}{stages}, and the largest node has {gpus(largest)}: a replica is on one node"


def instead(numbers: Sequence[int]) -> str:
    return f"; it can be {', '.join(map(str, numbers))}" if numbers else ""


def too_long(asked: int, longest: int, tuning: Tuning) -> str:
    return (
        f"contextLength {asked} is more than the {longest} tokens that the model's config allows, and {tuning.engine} "
        f"does not start with it; set {tuning.longer_context_by}=1 in `pod.env` to try it all the same"
    )


def unknown(facts: ArtifactFacts, tuning: Tuning) -> str:
    if tuning.draft:
        return (
            f"{tuning.draft} keeps the tokens of a draft model too, whose size is not known: say in "
            "`sizing.kvBytesPerToken` what one token takes of each GPU with it"
        )
    name = f"of {facts.architecture} " if facts.architecture else ""
    return (
        f"what one token {name}takes in the KV cache is not known: say in `sizing.kvBytesPerToken` how many bytes it "
        "takes of each GPU (an engine that has run on it says so in its log)"
    )


def uneven(facts: ArtifactFacts, tuning: Tuning) -> str:
    name = f" of {facts.architecture}" if facts.architecture else ""
    return (
        f"how {tuning.pipeline} stages share the layers{name}, which are not all alike, is not known: say in "
        "`sizing.kvBytesPerToken` how many bytes one token takes of each GPU (an engine that has run on it says so in "
        "its log)"
    )


def unknown_slots(facts: ArtifactFacts) -> str:
    name = f" of {facts.architecture}" if facts.architecture else ""
    return f"what the LoRAPool's places take of each GPU is not known: it depends on the layers{name}"


def uncuttable(facts: ArtifactFacts, gpu: GPU, tuning: Tuning) -> str:
    limit = gpu.largest_node or UNKNOWN_NODE
    if limit < tuning.pipeline:
        return f"`pipeline` is {tuning.pipeline}, and {_none_larger(gpu)}"
    why = obstacle(facts, most(gpu, tuning), tuning) or "no number of GPUs suits its shape"
    return f"no replica of up to {gpus(limit)} can be made: {why}"


def too_small(sized: Sized, facts: ArtifactFacts, gpu: GPU, context: int, *, asked: int | None, tuning: Tuning) -> str:
    """`sized` is the largest replica that was tried."""
    limit = _limit(sized, facts, gpu, asked, tuning)
    where = f"on {gpus(sized.gpus)} with {gib(gpu.memory_bytes)}" + (" each" if sized.gpus > 1 else "")
    if sized.peak_bytes_per_gpu + sized.breakdown.overhead > gpu.memory_bytes:
        while_loading = " while they are loaded" if sized.peak_bytes_per_gpu > sized.weight_bytes_per_gpu else ""
        # The weights alone may be a little less than the memory, and the sum has to show why they do not fit.
        less = sized.peak_bytes_per_gpu <= gpu.memory_bytes
        driver = f" beside the driver's {gib(sized.breakdown.overhead)}" if less else ""
        return f"{where}, weights need {gib(sized.peak_bytes_per_gpu)}{while_loading}{driver}; {limit}"
    parts = [f"weights {gib(sized.breakdown.weights)}", *tuning.parts(sized.breakdown)]
    taken = f"{where}, {', '.join(parts[:-1])} and {parts[-1]}"
    tokens, fixed = (sized.kv_tokens or 0) // sized.attention_groups, tuning.limit()
    if sized.breakdown.kv <= 0:
        return f"{taken} leave nothing for the KV cache; {limit}"
    room = f"leave KV cache for {tokens} tokens"
    if (refusal := tuning.refusal(facts, sized, context)) is not None:
        return f"{taken} {room}, {refusal}; {limit}"
    if fixed is not None and sized.kv_bytes_per_token * context <= sized.breakdown.kv:
        return f"{fixed} is less than one request of {context} tokens needs"
    return f"{taken} {room}; one request of {context} needs {gib(context * sized.kv_bytes_per_token)}; {limit}"


def _limit(sized: Sized, facts: ArtifactFacts, gpu: GPU, asked: int | None, tuning: Tuning) -> str:
    """Why there are not more GPUs."""
    if asked is not None:
        return f"`tensor` is {asked}"
    stages, tensor = tuning.pipeline, sized.gpus // tuning.pipeline
    if tensor == most(gpu, tuning):
        return _none_larger(gpu)
    more = choices(facts, GPU(gpu.name, gpu.memory_bytes, largest_node=64), tuning)
    larger = next((n for n in more if n > tensor), None)
    if larger is not None:
        return f"it would take {larger * stages}, and no node has more than {gpus(gpu.largest_node or UNKNOWN_NODE)}"
    return f"more do not help: {obstacle(facts, 2 * tensor, tuning) or 'the model cannot be cut further'}"


def _none_larger(gpu: GPU) -> str:
    if gpu.largest_node:
        return f"no node has more than {gpus(gpu.largest_node)}"
    return f"more than {UNKNOWN_NODE} GPUs are not tried"
