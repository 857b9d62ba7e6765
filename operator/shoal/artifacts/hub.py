"""hf://: a repository of a Hugging Face hub, or of a mirror of one.

The hub's own library asks for the metadata and knows the hub's errors; the files come by ranges like everybody else's.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Self

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.credentials import Credentials
from shoal.artifacts.errors import ArtifactError, Interrupted
from shoal.artifacts.manifest import File, Manifest, sort
from shoal.artifacts.ranges import RangedSource, patiently
from shoal.artifacts.source import Settings
from shoal.artifacts.wanted import wanted_files
from shoal.artifacts.web import Web

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

API_SECONDS = 30.0
HUB = "https://huggingface.co"


class HubSource(RangedSource):
    """A repository at one commit: `pinned`, or the one to which its revision leads when it is first asked."""

    def __init__(self, source: SourceUri, credentials: Credentials, settings: Settings, pinned: str | None) -> None:
        super().__init__(settings)
        self._source, self._pinned = source, pinned
        self._token = credentials.token
        self._endpoint = (settings.hub_endpoint or HUB).rstrip("/")
        self._commit = pinned
        self._web = Web(settings, self._token, self._refusal)

    async def __aenter__(self) -> Self:
        await self._web.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._web.close()

    async def manifest(self) -> Manifest:
        info = await patiently(self.settings, lambda: asyncio.to_thread(self._info))
        if info.sha is None:
            raise ArtifactError(
                reasons.SOURCE_UNREACHABLE, f"{self._source.uri}: the hub named no commit; check the mirror"
            )
        self._commit = info.sha
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        wanted = wanted_files(siblings)
        if not wanted:
            raise ArtifactError(reasons.SOURCE_INVALID, f"{self._source.uri} has no files that an engine could read")
        return Manifest(
            source=self._source.uri,
            origin=f"{self._endpoint}/{self._source.repo}",
            revision=info.sha,
            files=sort(self._file(siblings[name], info.sha) for name in wanted),
        )

    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        from huggingface_hub import hf_hub_url

        if self._commit is None:
            raise RuntimeError("the manifest of a repository is asked for before its files")
        url = hf_hub_url(self._source.repo, file.name, revision=self._commit, endpoint=self._endpoint)
        return self._web.stream(url, start, end, file.size)

    def _file(self, sibling: "RepoSibling", commit: str) -> File:
        size = sibling.size
        if size is None:
            raise ArtifactError(
                reasons.SOURCE_UNREACHABLE,
                f"{self._source.uri}: the hub names no size of {sibling.rfilename}; check the mirror",
            )
        if sibling.lfs is not None:
            return File(sibling.rfilename, size, f"sha256:{sibling.lfs.sha256}", sibling.lfs.sha256)
        if sibling.blob_id is not None:
            return File(sibling.rfilename, size, f"git:{sibling.blob_id}")
        return File(sibling.rfilename, size, f"commit:{commit}")

    def _info(self) -> "ModelInfo":
        _prepare()
        from huggingface_hub import HfApi

        try:
            return HfApi(endpoint=self._endpoint, token=self._token or False).model_info(
                self._source.repo,
                revision=self._pinned or self._source.revision,
                files_metadata=True,
                timeout=API_SECONDS,
            )
        except Exception as error:
            raise self._explain(error) from None

    def _explain(self, error: Exception) -> ArtifactError:
        """What an error of the library means for the person who wrote the Model."""
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        repo = self._source.repo
        chain = list(_chain(error))
        for cause in chain:
            if isinstance(cause, RevisionNotFoundError):
                return self._no_revision()
            if not isinstance(cause, HfHubHTTPError):
                continue
            status = cause.response.status_code
            if isinstance(cause, GatedRepoError) or status in (401, 403):
                return ArtifactError(reasons.GATED, self._gated(status))
            if isinstance(cause, RepositoryNotFoundError) or status == 404:
                return ArtifactError(reasons.SOURCE_NOT_FOUND, f"the hub has no repository {repo}: check source.uri")
            return Interrupted(f"the hub answered {status} for {repo}; trying again")
        last = chain[-1]
        detail = next(iter(str(last).splitlines()), "") or type(last).__name__
        return Interrupted(
            f"the hub cannot be reached for {repo} ({detail}): check the network, or the chart's hub mirror and "
            "proxy settings"
        )

    def _no_revision(self) -> ArtifactError:
        repo = self._source.repo
        if self._pinned is not None and self._pinned != self._source.revision:
            return ArtifactError(
                reasons.SOURCE_CHANGED,
                f"{repo} has no commit {self._pinned} any more, to which {self._source.revision or 'its branch'} was "
                "pinned: its history was rewritten. Edit source.uri to take what is there now",
            )
        return ArtifactError(
            reasons.SOURCE_NOT_FOUND, f"{repo} has no revision {self._source.revision!r}: check source.uri"
        )

    def _refusal(self, url: str, status: int) -> ArtifactError | None:
        if status in (401, 403):
            return ArtifactError(reasons.GATED, self._gated(status))
        if status in (404, 410):
            name = url.rpartition("/")[2]
            return ArtifactError(
                reasons.SOURCE_CHANGED,
                f"{self._source.uri} lists {name}, but does not have it any more ({status}): upload it again, or name "
                "another revision in source.uri",
            )
        return Interrupted(f"the hub answered {status} for {self._source.repo}; trying again")

    def _gated(self, status: int) -> str:
        repo = self._source.repo
        if self._token:
            return (
                f"the hub refuses {repo} to the token of source.secretRef ({status}): accept the repository's terms "
                "with that account, and check the Secret's key `token`"
            )
        return (
            f"{repo} is gated, private or does not exist ({status}): put a hub token into key `token` of a Secret and "
            "name the Secret in source.secretRef"
        )


def _prepare() -> None:
    # Read when the library is imported. Its progress bars and its telemetry have no place in a pod.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
