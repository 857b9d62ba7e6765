"""Taints that DeviceTaintRules add to devices. They count as if the driver had published them."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.core.devices.facts import DeviceTaintRule, Slice

_Made = tuple[Slice, tuple[DeviceTaintRule, ...], Slice]
"""(slice, rules, the slice with their taints)"""


class RuleTaints:
    """Adds the taints. Lives as long as its owner: a slice that nothing has changed stays the same object, so nothing
    that depends on it is computed again."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def add(self, slices: Iterable[Slice], rules: Iterable[DeviceTaintRule]) -> list[Slice]:
        """The slices, with the taints of the rules on the devices that these select. Rules of one name are one rule, as
        two versions of the API show it."""
        of_pool: dict[str | None, list[DeviceTaintRule]] = {}
        for rule in sorted({rule.name: rule for rule in rules}.values(), key=lambda rule: rule.name):
            of_pool.setdefault(rule.pool, []).append(rule)
        if not of_pool:
            self._made = {}
            return list(slices)
        made: dict[str, _Made] = {}
        found = [self._one(each, (*of_pool.get(None, ()), *of_pool.get(each.pool, ())), made) for each in slices]
        self._made = made
        return found

    def _one(self, of: Slice, rules: tuple[DeviceTaintRule, ...], made: dict[str, _Made]) -> Slice:
        if not rules:
            return of
        known = self._made.get(of.name)
        if known is None or known[0] is not of or known[1] != rules:
            known = (of, rules, _tainted(of, rules))
        made[of.name] = known
        return known[2]


def _tainted(of: Slice, rules: tuple[DeviceTaintRule, ...]) -> Slice:
    devices = list(of.devices)
    for at, device in enumerate(devices):
        taints = tuple(rule.taint for rule in rules if rule.selects(of, device))
        if taints:
            devices[at] = replace(device, taints=(*device.taints, *taints))
    same = all(a is b for a, b in zip(devices, of.devices, strict=True))
    return of if same else replace(of, devices=tuple(devices))
