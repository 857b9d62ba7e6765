"""GPUs that drivers publish as devices (dynamic resource allocation, DRA): what of it is true, and what is free.

facts.py      ResourceSlices, DeviceTaintRules, ResourceClaims and DeviceClasses, as small as decisions need them
taints.py     slices + DeviceTaintRules -> slices with all taints
selectors.py  CEL expressions that select devices: compiled once, evaluated per device
pools.py      slices -> the devices that count: of each pool the newest complete generation
say.py        what devices say of themselves: memory, compute capability, MIG profile
match.py      devices + GPUClasses -> the devices of each class, and what is wrong with its selectors
last.py       devices of each class, with those whose slices are gone for now
unmatched.py  devices of no class
count.py      devices of a class - shared - allocated - tainted -> what each node offers
"""

from shoal.core.devices.count import NodeDevices, offered
from shoal.core.devices.facts import Claim, Device, DeviceClass, DeviceId, DeviceTaintRule, Slice, Version
from shoal.core.devices.last import KnownDevices, last_known
from shoal.core.devices.match import ClassDevices, MatchCache, match
from shoal.core.devices.pools import DevicePool, current
from shoal.core.devices.say import DeviceFacts, facts_of
from shoal.core.devices.taints import RuleTaints
from shoal.core.devices.unmatched import without_class

__all__ = [
    "Claim",
    "ClassDevices",
    "Device",
    "DeviceClass",
    "DeviceFacts",
    "DeviceId",
    "DevicePool",
    "DeviceTaintRule",
    "KnownDevices",
    "MatchCache",
    "NodeDevices",
    "RuleTaints",
    "Slice",
    "Version",
    "current",
    "facts_of",
    "last_known",
    "match",
    "offered",
    "without_class",
]
