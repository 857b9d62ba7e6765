"""GPUs that sicken in a storm: a Model whose replicas hold devices of a DRA driver, and what must hold of all classes.

Whatever sickens, no request is lost, no more than a bounded share of a class is out of use at once, and a replica goes
only when another one serves in its place. In such a storm the operator takes less time to believe its signals and to
test what has healed (`tests.storm.mutants.hurry`): else no GPU would come back before the storm ends.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import orjson

from shoal.api.meta import GROUP
from tests.storm.journals import Journals, Kill, OutOfUse, Sickness, lines

MODEL: Final = "storm-devices"
CLASS: Final = "storm-l4"
REPLICAS: Final = 4
"""Always: of fewer, nobody can say which one is far slower."""
GPUS_PER_NODE: Final = 2
NODES: Final[Mapping[str, Any]] = {
    "name": "dra-{n}",
    "count": 4,
    "gpus": GPUS_PER_NODE,
    "gpuProduct": "NVIDIA L4",
    "gpuMemoryMiB": 23034,
    "dra": True,
}
SHARE_PERCENT: Final = 25
"""Of a class's GPUs, as docs/gpuclasses.md promises: not read from what a mutation changes."""
UNDER_WAY_SECONDS: Final = 60.0
"""After an engine was killed, its Model may have fewer replicas than it should."""


def gpu_class() -> dict[str, Any]:
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    spec = {"device": {"deviceClassName": "gpu.nvidia.com"}, "tolerations": tolerations}
    return {"apiVersion": f"{GROUP}/v1alpha1", "kind": "GPUClass", "metadata": {"name": CLASS}, "spec": spec}


def observed(line: str, at: float) -> dict[str, Any] | None:
    """What the journal keeps of `NAME CAPACITY [quarantined as JSON]`; None: the class has no status yet."""
    name, _, rest = line.strip().partition(" ")
    capacity, _, quarantined = rest.strip().partition(" ")
    if not capacity.isdigit():
        return None
    entries: list[Any] = orjson.loads(quarantined) if quarantined.strip() else []
    out = [
        (each["node"], each.get("device") or "")
        for each in entries
        if each["state"] == "Quarantined" and each["by"] == "Shoal"
    ]
    return {"at": at, "gpu_class": name, "capacity": int(capacity), "units": sorted(out)}


def read_out_of_use(path: Any) -> list[OutOfUse]:
    return [
        OutOfUse(each["at"], each["gpu_class"], each["capacity"], tuple((n, d) for n, d in each["units"]))
        for each in lines(path)
    ]


def read_sicknesses(path: Any) -> list[Sickness]:
    """From the faults' journal."""
    return [Sickness(**each) for line in lines(path) for each in line.get("sicknesses", ())]


def violations(journals: Journals) -> list[str]:
    """What a storm says about GPUs that sickened."""
    return [*_shares(journals.out_of_use), *_replacements(journals.sicknesses, journals.kills)]


def line(journals: Journals) -> str:
    """One line at the end."""
    of = journals.sicknesses
    most = max((_gpus(each) for each in journals.out_of_use), default=0)
    waits = sorted(each.replaced - each.since for each in of if each.replaced is not None)
    told = f", after {waits[0]:.0f} to {waits[-1]:.0f} s" if waits else ""
    return f"GPUs sickened {len(of)} times; {len(waits)} replaced{told}; at most {most} GPUs of a class were out of use"


def _gpus(seen: OutOfUse) -> int:
    whole = {node for node, device in seen.units if not device}
    return GPUS_PER_NODE * len(whole) + sum(bool(device) and node not in whole for node, device in seen.units)


def _shares(observed: Iterable[OutOfUse]) -> Iterator[str]:
    most: dict[str, int] = {}
    said: set[tuple[str, int]] = set()
    for seen in sorted(observed, key=lambda each: each.at):
        # A node that is away for a moment does not make the class smaller.
        most[seen.gpu_class] = max(most.get(seen.gpu_class, 0), seen.capacity)
        out, total = _gpus(seen), most[seen.gpu_class]
        if out > max(GPUS_PER_NODE, total * SHARE_PERCENT // 100) and (seen.gpu_class, out) not in said:
            said.add((seen.gpu_class, out))
            yield f"health: {out} of {total} GPUs of {seen.gpu_class} were out of use at once"


def _replacements(sicknesses: Iterable[Sickness], kills: Iterable[Kill]) -> Iterator[str]:
    broken = [kill for kill in kills if kill.what == "engine"]
    for each in sicknesses:
        if each.taken is None:
            yield f"health: {each.unit} was not taken out of use within {each.until - each.since:.0f} s ({each.fault})"
        if each.taken is None or each.gone is None:
            continue
        gone = each.gone
        own = any(
            kill.pod.startswith(f"{each.model}-")
            and kill.since <= gone
            and kill.until >= each.since - UNDER_WAY_SECONDS
            for kill in broken
        )
        if each.others < min(each.floor, each.before) and not own:
            yield (
                f"health: {each.pod} went for {each.fault} while {each.others} other replicas of {each.model} were "
                f"ready, of {each.floor}"
            )
