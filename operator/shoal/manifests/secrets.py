"""Common parts of Secrets."""

import base64
from collections.abc import Mapping

from shoal.api import names
from shoal.api.meta import JsonObject


def own_secret(namespace: str, name: str, files: Mapping[str, str]) -> JsonObject:
    """A Secret of Shoal itself, not of a Model. `files`: name -> text."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {names.LABEL_PART_OF: "shoal", names.LABEL_MANAGED_BY: names.MANAGED_BY},
        },
        "type": "Opaque",
        "data": encoded(files),
    }


def encoded(files: Mapping[str, str]) -> dict[str, str]:
    """Encodes files as `data` of a Secret."""
    return {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
