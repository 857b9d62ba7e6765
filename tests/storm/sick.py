"""GPUs that sicken in a storm: a Model whose replicas hold devices of a DRA driver, and what must hold of all classes.

Whatever sickens, no request is lost, no more than a bounded share of a class is out of use at once, and a replica goes
when another one serves in its place, and not before. A driver that is replaced is no sickness: its replicas stay. In
such a storm the operator takes less time to believe its signals and to test what has healed
(`tests.storm.mutants.hurry`): else no GPU would come back before the storm ends.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from shoal.api.meta import GROUP
from tests.storm.journals import DriverUpgrade, Journals, Kill, OutOfUse, Sickness, lines

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
REPLACED_SECONDS: Final = 120.0
"""Within which a replica on a GPU that is out of use must be replaced: it took up to 30 s on two cores."""


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


def read_upgrades(path: Any) -> list[DriverUpgrade]:
    """From the faults' journal."""
    many = ("pods", "gone", "sick")
    found = [each for line in lines(path) for each in line.get("upgrades", ())]
    return [DriverUpgrade(**each | {name: tuple(each[name]) for name in many}) for each in found]


def violations(journals: Journals) -> list[str]:
    """What a storm says about GPUs that sickened, and about those whose driver was replaced."""
    return [
        *_shares(journals.out_of_use),
        *_replacements(journals.sicknesses, journals.kills, journals.out_of_use),
        *_upgrades(journals.upgrades, journals.kills),
    ]


def line(journals: Journals) -> str:
    """One line at the end."""
    of = journals.sicknesses
    most = max((_gpus(each) for each in journals.out_of_use), default=0)
    waits = sorted(each.replaced - each.since for each in of if each.replaced is not None)
    told = f", after {waits[0]:.0f} to {waits[-1]:.0f} s" if waits else ""
    upgrades = f"; {len(journals.upgrades)} driver upgrades" if journals.upgrades else ""
    return (
        f"GPUs sickened {len(of)} times; {len(waits)} replaced{told}; at most {most} GPUs of a class were out of use"
        f"{upgrades}"
    )


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


def _replacements(sicknesses: Iterable[Sickness], kills: Iterable[Kill], observed: Sequence[OutOfUse]) -> Iterator[str]:
    broken = [kill for kill in kills if kill.what == "engine"]
    for each in sicknesses:
        if each.taken is None:
            yield f"health: {each.unit} was not taken out of use within {each.until - each.since:.0f} s ({each.fault})"
        if each.taken is None:
            continue
        if each.gone is None:
            seconds = _released(each, observed) - each.taken
            if seconds >= REPLACED_SECONDS:
                served = "no other" if each.replaced is None else "another"
                yield (
                    f"health: {each.pod} was still there after {each.unit} was out of use for {seconds:.0f} s "
                    f"({each.fault}), and {served} replica served in its place"
                )
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


def _released(each: Sickness, observed: Iterable[OutOfUse]) -> float:
    """When a GPU that was taken out of use was in use again; at the latest when it healed."""
    gpu_class: str | None = None
    for seen in sorted(observed, key=lambda seen: seen.at):
        out = any(unit_name(*unit) == each.unit for unit in seen.units)
        if each.since <= seen.at < each.until and out:
            gpu_class = seen.gpu_class
        elif seen.gpu_class == gpu_class and not out:
            return min(seen.at, each.until)
    return each.until


def unit_name(node: str, device: str) -> str:
    """As faults and violations name what is out of use; no device: all of the node."""
    return device or f"node {node}"


def _upgrades(upgrades: Iterable[DriverUpgrade], kills: Iterable[Kill]) -> Iterator[str]:
    killed = [kill for kill in kills if kill.what == "engine"]
    for each in upgrades:
        gone = [
            pod
            for pod in each.gone
            if not any(k.pod == pod and k.since <= each.until and k.until >= each.since for k in killed)
        ]
        # With more replicas than the Model has at least, its load may have fallen.
        if len(gone) > max(0, each.before - each.floor):
            yield f"health: {', '.join(gone)} went while the driver of {each.node} was replaced"
        for told in each.sick:
            yield f"health: the driver of {each.node} was replaced, and its GPUs were called sick: {told}"
        if not each.counted:
            yield f"health: the GPUs of {each.node} were not all counted again after its driver was replaced"
