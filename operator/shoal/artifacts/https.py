"""https://: one archive."""

from collections.abc import AsyncGenerator
from typing import Self

from shoal.api import reasons
from shoal.api.sources import SourceUri, shown
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError, Interrupted
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.ranges import RangedSource, patiently
from shoal.artifacts.source import Settings
from shoal.artifacts.web import Web

_NAME = "archive"
"""Its own name is nobody's promise: the last part of an address may be anything."""


class ArchiveSource(RangedSource):
    """One archive behind an https:// address."""

    def __init__(self, source: SourceUri, credentials: StoreCredentials, settings: Settings) -> None:
        super().__init__(settings)
        self._url, self._shown = source.uri, shown(source.uri)
        self._has_token = credentials.token is not None
        self._web = Web(settings, credentials.token, self._refusal)

    async def __aenter__(self) -> Self:
        await self._web.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._web.close()

    async def manifest(self) -> Manifest:
        probed = await patiently(self.settings, lambda: self._web.probe(self._url))
        if probed.size is None:
            raise ArtifactError(
                reasons.SOURCE_INVALID,
                f"{self._shown} does not say how large it is (no Content-Length): serve it as a file",
            )
        return Manifest(
            source=self._shown,
            origin=self._shown,
            revision=None,
            files=(File(_NAME, probed.size, probed.validator),),
            archive=True,
        )

    async def authorise(self, manifest: Manifest) -> None:
        """The manifest came with a byte of the content: there is nothing more to prove."""

    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        return self._web.stream(self._url, start, end, file.size, same_as=file.validator)

    def _refusal(self, url: str, status: int, _: str) -> ArtifactError | None:
        where = shown(url)
        if status in (401, 403):
            return ArtifactError(
                reasons.GATED,
                f"{where} refused the token of source.secretRef ({status}): check the Secret's key `token`"
                if self._has_token
                else f"{where} wants credentials ({status}): put a token into key `token` of a Secret and name the "
                "Secret in source.secretRef",
            )
        if status in (404, 410):
            return ArtifactError(reasons.SOURCE_NOT_FOUND, f"{where} does not exist ({status}): check source.uri")
        return Interrupted(f"{where} cannot be fetched now: it answered {status}")
