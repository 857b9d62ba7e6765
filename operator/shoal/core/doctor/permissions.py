"""What Shoal's processes may do at the API server."""

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from shoal.api import names
from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers import faults
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread


def check(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Each permission of each process that is installed, grouped by what it is needed for."""
    name, row = "permissions", faults.FAULTS[faults.PERMISSION_MISSING]
    if isinstance(seen.permissions, Unread):
        yield unread(name, Layer.CONTROL, seen.permissions)
        return
    there = None if isinstance(seen.workloads, Unread) else {each.component for each in seen.workloads}
    needed = [each for each in seen.permissions if there is None or each.component in there]
    if there is not None and not needed:
        return
    missing: dict[tuple[str, str, str | None], list[str]] = {}
    for each in needed:
        if not each.allowed:
            missing.setdefault((each.component, each.why, each.namespace), []).append(f"{each.verb} {each.resource}")
    for (component, why, namespace), listed in missing.items():
        where = f"in namespace {namespace}" if namespace is not None else "in the cluster"
        text = f"the {_SHOWN.get(component, component)} may not {some(listed, 8)} {where}: needed to {why}"
        yield result(name, "error", faults.PERMISSION_MISSING, row.layer, text, row.do)
    if not missing:
        asked = {each.namespace for each in needed} & set(seen.scope)
        where = f", in {len(asked)} of its {len(seen.scope)} namespaces" if len(asked) < len(seen.scope) else ""
        yield ok(name, Layer.CONTROL, f"Shoal's processes have all {len(needed)} permissions that they need{where}")


_SHOWN: Final = {names.COMPONENT_GATEWAY: "gateways' account", names.COMPONENT_CACHE: "node cache"}
