"""A container's environment and the downward API, without a node."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_dev.lab.node import quantity
from shoal_dev.lab.node.config import ImageConfig
from shoal_dev.lab.node.context import Gpus
from shoal_dev.lab.node.env import ConfigError, expand, field_value, resource_value
from shoal_dev.lab.node.launch import user

POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"b": "2", "a": "1"}},
    "spec": {},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("kill $$", "kill $"),
        ("$A ${A}", "$A ${A}"),
        ("$(B)", "$(A)"),  # expanded once only
    ],
)
def test_expansion_is_the_api_documentations(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "$(A)"}) == expected


@given(st.text(alphabet="abc ()-_"))
def test_text_without_dollars_stays(text: str) -> None:
    assert expand(text, {"a": "1"}) == text


def test_field_references() -> None:
    assert field_value(POD, "metadata.name", "10.244.1.2", "node", "10.200.0.1") == "p"
    assert field_value(POD, "status.podIP", "10.244.1.2", "node", "10.200.0.1") == "10.244.1.2"
    assert field_value(POD, "metadata.labels['a']", "", "", "") == "1"
    assert field_value(POD, "metadata.labels", "", "", "") == 'a="1"\nb="2"'
    with pytest.raises(ConfigError, match=r"unsupported fieldPath status\.phase"):
        field_value(POD, "status.phase", "", "", "")


@pytest.mark.parametrize(
    ("limits", "reference", "expected"),
    [
        ({"cpu": "1500m"}, {"resource": "limits.cpu"}, "2"),
        ({"cpu": "1500m"}, {"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"memory": "1Gi"}, {"resource": "limits.memory", "divisor": "1Mi"}, "1024"),
        ({}, {"resource": "limits.memory", "divisor": "1Gi"}, "512"),  # no limit: the node's
        ({}, {"resource": "requests.cpu"}, "0"),
    ],
)
def test_resource_references(limits: dict[str, str], reference: dict[str, Any], expected: str) -> None:
    container = {"resources": {"limits": limits}}
    assert resource_value(container, reference, {"memory": "512Gi", "cpu": "64"}) == expected


def test_quantities() -> None:
    assert quantity.ceiling("64Mi") == 64 * 2**20
    assert quantity.ceiling("1e3") == 1000
    with pytest.raises(ValueError, match="not a quantity"):
        quantity.parse("5iK")


def test_users() -> None:
    image = ImageConfig(user=1000)
    assert user({}, {}, image)["uid"] == 1000
    both = user({"securityContext": {"runAsUser": 1, "fsGroup": 7}}, {"securityContext": {"runAsUser": 2}}, image)
    assert (both["uid"], both["groups"]) == (2, [7])
    with pytest.raises(ConfigError, match="runAsNonRoot"):
        user({"securityContext": {"runAsNonRoot": True}}, {}, ImageConfig())
    dropped = user({}, {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}}, image)
    assert dropped["capabilities"] == ["NET_BIND_SERVICE"]


def test_a_node_without_gpus_has_none_to_hand_out_and_does_not_refuse() -> None:
    assert Gpus(0).take(2) == []
    with pytest.raises(ValueError, match=r"unavailable for nvidia\.com/gpu\. Requested: 2, Available: 1"):
        Gpus(1).take(2)
