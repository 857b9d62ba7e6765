"""What a container that Shoal adds to a pod leaves for the operator: its termination message."""

import json
from collections.abc import Mapping
from typing import Any

from shoal.artifacts import ArtifactError

LIMIT_BYTES = 4096
"""A kubelet cuts off what is longer."""


def fits(content: Mapping[str, Any]) -> str | None:
    """The content as JSON, or None when it is too long."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode(errors="replace")) <= LIMIT_BYTES else None


def failure_message(error: ArtifactError) -> str:
    """Reason and message, shortened until they fit."""
    message = str(error)[:2000]
    while (text := fits({"reason": error.reason, "message": message})) is None:
        message = message[: len(message) // 2]
    return text
