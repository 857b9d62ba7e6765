"""docs/install.md tells how to remove all of Shoal: what it forgets stays in the cluster."""

import re

from shoal.api import keys, names
from shoal.api.model import ModelSpec
from shoal.api.schema import KINDS
from shoal.controllers.transport import ROLES
from shoal.manifests.cache import labels
from shoal.manifests.certificates import process_name
from shoal.manifests.pod import GRACE_SECONDS
from tests.firstday.pages import ROOT, commands, lines

KEPT_FOR_UPGRADES = {names.INSTALL_KEY_SECRET}
"""Of version 0.1: its operator's successor deletes it."""


def removing(block: int = 0) -> str:
    """The commands for a removal in order (0), and those for what another order leaves (1)."""
    in_order, left = commands("docs/install.md", "## Removing")
    return (in_order, left)[block].replace("\\\n", " ")


def test_every_kind_is_deleted_with_its_objects_before_the_operator_goes() -> None:
    text = removing()
    found = re.search(r"kubectl delete crd \{([^}]*)\}\.shoal\.dev", text)
    assert found is not None
    assert sorted(found[1].split(",")) == sorted(kind.plural for kind in KINDS)
    before, _, _ = text.partition("helm uninstall shoal ")
    spread = set(",".join(re.findall(r"kubectl delete ([a-z,]+) --all --all-namespaces", before)).split(","))
    whole = set(",".join(re.findall(r"kubectl delete ([a-z,]+) --all$", before, re.MULTILINE)).split(","))
    assert spread == {kind.plural for kind in KINDS if kind.scope == "Namespaced"}
    assert whole == {kind.plural for kind in KINDS if kind.scope == "Cluster"}


def test_the_operator_goes_when_it_has_cleaned_up() -> None:
    """Until engines have drained, their claims and volumes in the node cache stay, and only the operator deletes
    them."""
    before, _, _ = removing().partition("helm uninstall shoal ")
    pods, volumes = (line for line in lines(before) if "wait --for=delete" in line)
    assert f"-l {names.LABEL_MODEL} --all-namespaces" in pods
    longest = ModelSpec.model_fields["drain_seconds"].default + GRACE_SECONDS
    (minutes,) = re.findall(r"--timeout=(\d+)m", pods)
    assert int(minutes) * 60 > longest
    of_the_cache = f"-l {names.LABEL_NAME}={labels()[names.LABEL_NAME]}"
    assert f"pv {of_the_cache}" in volumes
    left = lines(removing(1))
    assert f"kubectl delete pvc --all-namespaces {of_the_cache}" in left
    assert f"kubectl delete pv {of_the_cache}" in left
    assert f"kubectl label nodes --all {names.QUARANTINE_PREFIX}CLASS-" in left


def test_no_object_has_a_finalizer_of_shoal() -> None:
    """One would keep a namespace for ever once the operator has gone. The page says that there is none."""
    code, charts = list((ROOT / "operator" / "shoal").rglob("*.py")), list((ROOT / "charts").rglob("templates/*"))
    assert min(len(code) // 100, len(charts)) > 3
    assert [str(path) for path in code if '"finalizers": ' in path.read_text()] == [], "of an object, or a patch"
    assert [str(path) for path in charts if "finalizers:" in path.read_text()] == []


def test_every_secret_that_processes_make_is_deleted() -> None:
    found = re.search(r"delete secret (.*?) --ignore-not-found", removing())
    assert found is not None
    made = {value for name, value in vars(names).items() if name.endswith("_SECRET")} - KEPT_FOR_UPGRADES
    made |= {names.key_secret(role) for role in (*keys.BUNDLES, *keys.PEOPLE)}
    made |= {process_name(role) for role in ROLES}
    assert set(found[1].split()) == made


def test_the_config_map_that_the_operator_makes_is_deleted() -> None:
    assert f"kubectl -n shoal-system delete configmap {names.AUTHORITY_CONFIG_MAP} --ignore-not-found" in lines(
        removing()
    )
