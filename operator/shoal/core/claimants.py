"""Which object owns what several claim: the oldest, by creation time and then by uid."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar

from shoal.api.meta import CustomResource

K = TypeVar("K", bound=CustomResource)

_FAR: Final = datetime.max.replace(tzinfo=UTC)


def age(one: CustomResource) -> tuple[datetime, str]:
    """Sort key; the oldest sorts first."""
    return (one.metadata.creation_timestamp or _FAR, one.metadata.uid)


def oldest(claimants: Iterable[K]) -> K | None:
    """The owner; None: there are no claimants."""
    return min(claimants, key=age, default=None)


def why_first(first: CustomResource, own: CustomResource, named: str) -> str:
    """The owner `first`, as `named`, and why it comes before `own`: a creation time has whole seconds."""
    if first.metadata.creation_timestamp == own.metadata.creation_timestamp:
        return f"{named}, which was created in the same second and is first by its uid"
    return f"the older {named}"
