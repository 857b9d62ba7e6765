"""Termination messages: how the containers that Shoal adds to a pod report to the operator."""

import json
from collections.abc import Mapping
from typing import Any

from shoal.artifacts import ArtifactError

LIMIT_BYTES = 4096
"""The kubelet truncates longer messages."""


def fits(content: Mapping[str, Any]) -> str | None:
    """The content as JSON; None: it is too long."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode(errors="replace")) <= LIMIT_BYTES else None


def failure_message(error: ArtifactError) -> str:
    """Reason and message, shortened until they fit."""
    message = str(error)[:2000]
    while (text := fits({"reason": error.reason, "message": message})) is None:
        message = message[: len(message) // 2]
    return text
