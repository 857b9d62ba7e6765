"""The chart's admission policies: those of policies/admission, named and bound by the release."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_dev.generate.admission import chart_policies
from tests.support.charts import CHART, ROOT, helm, rendered

ALL = {"admission": {name: {"enabled": True} for name in ("loraPools", "children", "nodes")}}
SERVED = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"


def policies(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kind and name, without the release's part -> object."""
    found = [o for o in objects if o["kind"].startswith("ValidatingAdmissionPolicy")]
    return {f"{o['kind']}/{o['metadata']['name'].partition('.')[0]}": o for o in found}


def template(*args: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    done = helm("template", *args, values=values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_the_chart_refuses_what_the_files_refuse_that_people_apply_by_hand() -> None:
    chart = policies(rendered(ALL))
    by_hand: dict[str, dict[str, Any]] = {}
    for path in sorted((ROOT / "policies" / "admission").glob("*.yaml")):
        by_hand |= policies(list(yaml.safe_load_all(path.read_text())))

    assert chart.keys() == by_hand.keys()
    for key, one in chart.items():
        name = by_hand[key]["metadata"]["name"]
        if "policyName" in one["spec"]:
            assert one["spec"].pop("policyName") == f"{name}.shoal.shoal-system"
            del by_hand[key]["spec"]["policyName"]
        assert one["spec"] == by_hand[key]["spec"]
        assert one["metadata"]["name"] == f"{name}.shoal.shoal-system"
        assert one["metadata"]["labels"]["app.kubernetes.io/part-of"] == "shoal"


def test_the_policies_are_there_unless_they_are_switched_off() -> None:
    assert set(policies(rendered({}))) == {
        f"{kind}/{name}"
        for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        for name in (
            "shoal-children",
            "shoal-lora-pools",
            "shoal-lora-models",
            "shoal-lora-pool-per-model",
            "shoal-nodes",
        )
    }
    off = {name: {"enabled": False} for name in ALL["admission"]}
    assert policies(rendered({"admission": off})) == {}


def test_each_release_has_policies_of_its_own_names_and_trusts_its_own_operator() -> None:
    one = template("shoal", str(CHART), "--namespace", "east", values=ALL)
    other = template("second", str(CHART), "--namespace", "west", values=ALL)

    names = [{o["metadata"]["name"] for o in policies(objects).values()} for objects in (one, other)]
    assert names[0].isdisjoint(names[1])
    for objects, namespace in ((one, "east"), (other, "west")):
        for name in ("shoal-children", "shoal-nodes"):
            written = str(policies(objects)[f"ValidatingAdmissionPolicy/{name}"]["spec"])
            assert f"system:serviceaccount:{namespace}:shoal-operator" in written
            assert "shoal-system" not in written


def test_an_api_server_without_such_policies_gets_the_rest() -> None:
    off = {"admission": {"children": {"enabled": False}}}
    without = template("shoal", str(CHART), "--api-versions", "v1/Pod", values=off)
    assert policies(without) == {}
    assert {o["kind"] for o in without} >= {"Deployment", "StatefulSet", "ClusterRole"}
    assert policies(template("shoal", str(CHART), "--api-versions", "v1/Pod", "--api-versions", SERVED))

    # Nobody is left to believe that the one that keeps pods out is there.
    done = helm("template", "shoal", str(CHART), "--api-versions", "v1/Pod")
    assert done.returncode != 0
    assert "admission.children.enabled: this API server has no ValidatingAdmissionPolicy" in done.stderr


@pytest.mark.parametrize(("version", "installs"), [("1.33.0", True), ("1.29.0", False)])
def test_rendered_without_a_cluster_its_version_decides(version: str, installs: bool) -> None:
    done = helm("template", "shoal", str(CHART), "--kube-version", version)
    assert (done.returncode == 0) is installs
    if installs:
        assert policies(list(filter(None, yaml.safe_load_all(done.stdout))))
    else:
        assert "chart requires kubeVersion: >=1.33.0-0 which is incompatible with Kubernetes v1.29.0" in done.stderr


def test_a_policy_without_a_name_of_the_release_is_not_generated(tmp_path: Path) -> None:
    folder = tmp_path / "policies" / "admission"
    folder.mkdir(parents=True)
    for path in (ROOT / "policies" / "admission").glob("*.yaml"):
        (folder / path.name).write_text(path.read_text())
    assert chart_policies(tmp_path) == (CHART / "templates" / "admission.yaml").read_text()

    (folder / "children.yaml").write_text((folder / "children.yaml").read_text().replace("name: shoal-c", "name: c"))
    with pytest.raises(ValueError, match="each object needs a name 'shoal-"):
        chart_policies(tmp_path)
