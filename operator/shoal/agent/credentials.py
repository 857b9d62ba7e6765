"""Credentials for a Model's source: the mounted Secret, or the identity of the pod's ServiceAccount."""

import asyncio
import os
from pathlib import Path

from shoal.artifacts import Settings, StoreCredentials
from shoal.artifacts.identity import with_identity


async def credentials_of(uri: str, secret: Path, settings: Settings, *, identity: bool) -> StoreCredentials:
    """`identity`: whether the Model names a ServiceAccount. Raises ArtifactError and OSError."""
    found = await asyncio.to_thread(StoreCredentials.read, secret)
    return await with_identity(uri, found, settings, os.environ) if identity else found
