"""Where weights come from: one Source for each kind of address, all with the same four questions.

    source = open_source(uri, credentials, settings)
    manifest = await source.manifest()              # the files, their sizes, and what proves that they did not change
    await source.authorise(manifest)                # these credentials may read them
    await source.read(file, start, length)          # a few bytes: configs, headers
    await source.download(file, path, on_bytes)     # resumed, in parallel ranges, verified, on disk

Used by the init container that stages a model, by the Job that reads its facts, and by the node cache. `errors` says
how they fail; `source` has the contract; `http`, `hub`, `bucket` and `folder` are the kinds; `ranges` downloads;
`archive` unpacks; `folders` checks what arrived.
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
