"""docs/install.md tells how to remove all of Shoal: what it forgets stays in the cluster."""

import re

from shoal.api import keys, names
from shoal.api.schema import KINDS
from shoal.controllers.transport import ROLES
from shoal.manifests.certificates import process_name
from tests.firstday.pages import commands

KEPT_FOR_UPGRADES = {names.INSTALL_KEY_SECRET}
"""Of version 0.1: its operator's successor deletes it."""


def removing() -> str:
    (text,) = commands("docs/install.md", "## Removing")
    return text.replace("\\\n", " ")


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


def test_every_secret_that_processes_make_is_deleted() -> None:
    found = re.search(r"delete secret (.*?) --ignore-not-found", removing())
    assert found is not None
    made = {value for name, value in vars(names).items() if name.endswith("_SECRET")} - KEPT_FOR_UPGRADES
    made |= {names.key_secret(role) for role in (*keys.BUNDLES, *keys.PEOPLE)}
    made |= {process_name(role) for role in ROLES}
    assert set(found[1].split()) == made
