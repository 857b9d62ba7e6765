"""In which order test processes that run side by side (pytest-xdist) take files. One file is run by one process.

xdist alone begins with the files of most tests, so single tests that take minutes come last, in one process while the
others have ended, and each process starts every lab there is.
"""

from collections.abc import Collection, Iterable
from typing import Final

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FIRST: Final = (
    # In a lab, or with servers, of their own.
    "tests/storm/test_short_storm.py",
    "tests/lab/test_gateway_autoscaling.py",
    "tests/e2e/test_devices.py",
    "tests/lab/test_pod_lifecycle.py",
    "tests/firstday/test_lab_guide.py",
    "tests/contract/test_sources_clouds.py",
    # Without root.
    "tests/storm/tenants/test_short_tenants.py",
    "tests/contract/test_drain_engine.py",
    "tests/contract/test_fields_fuzz.py",
    "tests/contract/test_agent_adapters_engine.py",
    "tests/unit/gateway/test_gateway_to_ledger.py",
    "tests/contract/test_fields_fuzz_scoring.py",
    "tests/property/test_schema_agrees.py",
    "tests/contract/test_any_weights.py",
    "tests/unit/gateway/test_gateway_shipping.py",
    "tests/property/test_spool_ships.py",
    "tests/contract/test_sglang_lora_life.py",
    "tests/property/test_sim_lora.py",
    "tests/unit/runtime/test_operator_collector.py",
    "tests/property/test_name_consent.py",
)
"""Few tests that take long, the longest first."""
LAST: Final = ("tests/e2e/test_upgrade.py",)
"""Leave their lab otherwise than other tests expect it."""
SHARED: Final = ("tests/e2e/operator/", "tests/e2e/", "tests/lab/")
"""Folders whose files share what a process starts once: a control plane, or a lab, with or without Shoal in it."""
WITHOUT_A_LAB: Final = tuple(
    f"tests/e2e/test_{name}" for name in ("crds", "doctor", "gateway_tokens", "keda_endpoints", "policies", "roles")
)
"""Beginnings of files in a shared folder that need no more than an API server."""
WORTH_ANOTHER: Final = 4
"""So many files must be left in a shared folder before another process starts what they share, which takes a minute."""


def shared(file: str) -> str | None:
    """The shared folder whose lab a file needs."""
    if file in FIRST or file.startswith(WITHOUT_A_LAB):
        return None
    return next((folder for folder in SHARED if file.startswith(folder)), None)


def choose(left: Iterable[str], mine: Collection[str], others: Collection[str]) -> str | None:
    """The file that a process takes next, of at least one that is `left`. `mine`, `others`: shared folders that it, and
    the others, have begun. None where it had better end: the others do the rest in the labs that they have."""
    files = list(left)
    if early := next((file for file in FIRST if file in files), None):
        return early
    files.sort(key=lambda file: file in LAST)
    foreign = set(others) - set(mine)
    own = [file for file in files if shared(file) not in foreign]
    if own:
        return min(own, key=lambda file: (file in LAST, shared(file) not in mine))
    return files[0] if len(files) >= WORTH_ANOTHER else None


class LongestFirst(LoadFileScheduling):
    """Gives each process files in the order of `choose`."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = choose(self.workqueue, self._begun(node), self._begun(*(other for other in self.nodes if other != node)))
        if file is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _begun(self, *nodes: WorkerController) -> set[str]:
        return {folder for node in nodes for file in self.assigned_work[node] if (folder := shared(file))}
