"""Addresses of adapters: which credentials open one, and how it is pinned to what was read of it."""

from collections.abc import Sequence

from shoal.api.sources import covers


def credentials_for(uri: str, prefixes: Sequence[str]) -> int | None:
    """Place of the longest prefix that covers the address; None: it is read without credentials."""
    matching = [place for place, prefix in enumerate(prefixes) if covers(prefix, uri)]
    return max(matching, key=lambda place: len(prefixes[place]), default=None)


def pinned_uri(uri: str, commit: str | None) -> str:
    """The address of what was read: a hub's branch moves, its commit does not."""
    if commit is None or not uri.startswith("hf://"):
        return uri
    return f"{uri.partition('@')[0]}@{commit}"
