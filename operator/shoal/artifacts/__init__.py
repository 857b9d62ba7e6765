"""Sources of weights: one class per URI scheme, with a common interface.

    source = open_source(uri, credentials, settings)
    manifest = await source.manifest()              # files, sizes, and validators that detect changes
    await source.authorise(manifest)                # checks that the credentials may read the files
    await source.read(file, start, length)          # a few bytes: configs, headers
    await source.download(file, path, on_bytes)     # resumed, in parallel ranges, verified, synced to disk

Used by the init container that stages a model, by the Job that reads its facts, and by the node cache. `source` defines
the interface and `errors` its exceptions; `https`, `hub`, `bucket` and `folder` implement the schemes; `ranges`
downloads; `archive` unpacks; `folders` checks downloaded files.
"""

from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError, Interrupted
from shoal.artifacts.kinds import open_source, secret_advice
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.source import ArtifactSource, Settings

__all__ = [
    "ArtifactError",
    "ArtifactSource",
    "File",
    "Interrupted",
    "Manifest",
    "Settings",
    "StoreCredentials",
    "open_source",
    "secret_advice",
]
