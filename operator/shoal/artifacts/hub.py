"""hf://: a repository of the Hugging Face hub, or of a mirror.

The list of files comes from the hub's API; files are read by ranges, as from other sources, over the client that checks
every address and redirect (`web`). Every response has a size limit.
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final, Self, cast
from urllib.parse import quote

from yarl import URL

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError, Interrupted, Unreached
from shoal.artifacts.manifest import File, Manifest, require_count, sort, wanted_files
from shoal.artifacts.ranges import RangedSource, with_retries
from shoal.artifacts.source import Settings
from shoal.artifacts.web import Web

HUB = "https://huggingface.co"
_LIST_BYTES: Final = 64 << 20
"""Size limit of the list of a repository's files; the longest lists have 10 MiB."""


class HubSource(RangedSource):
    """A repository at one commit: `pinned`, or the commit of its revision when it is first requested."""

    def __init__(
        self, source: SourceUri, credentials: StoreCredentials, settings: Settings, pinned: str | None
    ) -> None:
        super().__init__(settings)
        self._source, self._pinned = source, pinned
        self._token = credentials.token
        self._endpoint = (settings.hub_endpoint or HUB).rstrip("/")
        self._commit = pinned
        # The platform configures the mirror, which may be at any address except that of a metadata server.
        host = URL(self._endpoint).host
        network = settings.network.with_hosts([host] if host else [])
        self._web = Web(replace(settings, network=network), self._token, self._refusal)

    async def __aenter__(self) -> Self:
        await self._web.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._web.close()

    async def manifest(self) -> Manifest:
        commit, siblings = await with_retries(self.settings, self._info)
        self._commit = commit
        wanted = wanted_files(siblings)
        if not wanted:
            raise ArtifactError(reasons.SOURCE_INVALID, f"{self._source.uri} has no files that an engine could read")
        return Manifest(
            source=self._source.uri,
            origin=f"{self._endpoint}/{self._source.repo}",
            revision=commit,
            files=sort(self._file(name, siblings[name], commit) for name in wanted),
        )

    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        if self._commit is None:
            raise RuntimeError("the manifest of a repository is asked for before its files")
        url = f"{self._endpoint}/{self._source.repo}/resolve/{quote(self._commit, safe='')}/{quote(file.name)}"
        return self._web.stream(url, start, end, file.size)

    async def _info(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """The commit, and the hub's data about each file. Raises ArtifactError."""
        revision = self._pinned or self._source.revision
        at = f"/revision/{quote(revision, safe='')}" if revision else ""
        url = f"{self._endpoint}/api/models/{self._source.repo}{at}?blobs=true"
        try:
            content = await self._web.text(url, _LIST_BYTES)
        except Unreached as error:
            raise Interrupted(
                f"the hub cannot be reached for {self._source.repo} ({error}): check the network, or the chart's hub "
                "mirror and proxy settings"
            ) from None
        try:
            answer = json.loads(content)
            commit, rows = answer["sha"], cast("list[dict[str, Any]]", answer.get("siblings") or [])
            require_count(len(rows), self._source.uri)
            siblings = {str(row["rfilename"]): row for row in rows}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._unexpected("does not list files as a hub does") from None
        if not isinstance(commit, str) or not commit:
            raise self._unexpected("the hub named no commit")
        return commit, siblings

    def _file(self, name: str, row: dict[str, Any], commit: str) -> File:
        size, lfs, blob = row.get("size"), row.get("lfs"), row.get("blobId")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise self._unexpected(f"the hub names no size of {name}")
        if isinstance(lfs, dict):
            sha256 = cast("dict[str, Any]", lfs).get("sha256")
            if not isinstance(sha256, str):
                raise self._unexpected(f"the hub names no SHA-256 of {name}")
            return File(name, size, f"sha256:{sha256}", sha256)
        if isinstance(blob, str):
            return File(name, size, f"git:{blob}")
        return File(name, size, f"commit:{commit}")

    def _unexpected(self, what: str) -> ArtifactError:
        return ArtifactError(reasons.SOURCE_UNREACHABLE, f"{self._source.uri}: {what}; check the mirror")

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

    def _refusal(self, url: str, status: int, code: str) -> ArtifactError | None:
        repo = self._source.repo
        if code == "RevisionNotFound":
            return self._no_revision()
        if status in (401, 403):
            return ArtifactError(reasons.GATED, self._gated(status))
        if status in (404, 410) and f"/api/models/{repo}" in url:
            return ArtifactError(reasons.SOURCE_NOT_FOUND, f"the hub has no repository {repo}: check source.uri")
        if status in (404, 410):
            name = url.rpartition("/")[2]
            return ArtifactError(
                reasons.SOURCE_CHANGED,
                f"{self._source.uri} lists {name}, but does not have it any more ({status}): upload it again, or name "
                "another revision in source.uri",
            )
        return Interrupted(f"the hub answered {status} for {repo}; trying again")

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
