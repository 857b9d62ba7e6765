"""Addresses of adapters: the credentials for one, and the address pinned to what was read."""

from collections.abc import Sequence

from shoal.api.sources import covers


def credentials_for(uri: str, prefixes: Sequence[str]) -> int | None:
    """Index of the longest prefix that covers the address; None: it is read without credentials."""
    matching = [place for place, prefix in enumerate(prefixes) if covers(prefix, uri)]
    return max(matching, key=lambda place: len(prefixes[place]), default=None)


def pinned_uri(uri: str, commit: str | None) -> str:
    """The address of exactly what was read: a branch of a hub moves, a commit does not."""
    if commit is None or not uri.startswith("hf://"):
        return uri
    return f"{uri.partition('@')[0]}@{commit}"


def pinned_commit(uri: str) -> tuple[str, str | None]:
    """What `pinned_uri` made: the repository's address, and the commit of it that was read; None: of another source."""
    repository, at, commit = uri.partition("@")
    return (repository, commit) if at and uri.startswith("hf://") else (uri, None)
