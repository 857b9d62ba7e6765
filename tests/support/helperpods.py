"""Pods of a lab that run a module of the tests as their process, wherever the checkout is."""

from pathlib import Path
from typing import Any, Final

_TESTS: Final = Path(__file__).parents[1]
_INSIDE: Final = "/opt/shoal-tests"


def helper_pod(name: str, namespace: str, module: str, *arguments: str, image: str, **spec: Any) -> dict[str, Any]:
    """A pod with the label `app: name` that runs `python -m module`. `spec` is merged into the pod's.

    The tests come in by a volume: a container sees the machine's disk, but /tmp afresh, and the checkout may lie there.
    """
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "command": ["python", "-m", module, *arguments],
        "workingDir": _INSIDE,
        "env": [{"name": "PYTHONPATH", "value": _INSIDE}, {"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tests", "mountPath": f"{_INSIDE}/tests", "readOnly": True}],
        "readinessProbe": {"tcpSocket": {"port": int(arguments[0])}, "periodSeconds": 1},
    }
    volume = {"name": "tests", "hostPath": {"path": str(_TESTS)}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [container], "volumes": [volume], **spec},
    }
