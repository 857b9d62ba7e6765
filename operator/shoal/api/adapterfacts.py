"""What is known of a LoRA adapter without its weights: the facts of one revision of its source.

A small Job reads them for a batch of a pool's adapters (`AdapterBatch` in its environment) and leaves them in its
termination message (`core.adapters.facts`); an agent reads them again from the files that it staged.
"""

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from shoal.api.loraadapter import Digest
from shoal.api.meta import MOST_COUNT, Bytes, Count, Positive
from shoal.api.replica import Message

BATCH_ENV: Final = "SHOAL_ADAPTER_FACTS"
"""Environment variable of the Job: `AdapterBatch` as JSON."""
BATCH_ADAPTERS: Final = 16
"""Most of one Job: their facts have to fit into a termination message."""

MOST_RANK: Final = 1_000_000
MOST_MODULES: Final = 256
"""Different ones, of one adapter; no base has so many."""
MOST_LAYERS: Final = 100_000

ModuleName = Annotated[str, StringConstraints(max_length=256)]
Widths = tuple[Count, Count]
"""What a layer reads and what it writes."""


class AdapterFacts(Message):
    """The facts of one revision of an adapter that SGLang could serve, on a base that fits."""

    revision: Digest
    """Digest of the manifest of its source: names, sizes and validators of all files."""
    commit: Annotated[str, StringConstraints(max_length=128)] | None = None
    """hf: the commit to which the source's branch was resolved."""
    rank: Annotated[int, Field(ge=1, le=MOST_RANK)]
    alpha: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
    """The adapter is scaled by alpha / rank."""
    size_bytes: Bytes
    """Of the weights' file."""
    file_bytes: Bytes
    """Of all files that a replica needs."""
    modules: Annotated[dict[ModuleName, Widths | None], Field(max_length=MOST_MODULES)]
    """Modules that its tensors change -> widths; None: layers differ. An expert's begin with `experts.`."""
    targets: Annotated[tuple[ModuleName, ...], Field(max_length=MOST_MODULES)]
    """Modules that its config names, without what stands before the last dot; ("all",): it says all-linear."""
    layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)]
    """Decoder layers that its base needs at least."""
    base: Annotated[str, StringConstraints(max_length=256)] | None = None
    """The base that its config names: nobody checks that name, so it is for people only."""
    added_token: Annotated[int, Field(ge=-MOST_COUNT, le=MOST_COUNT)] | None = None
    """The highest id in added_tokens.json: one outside the base's vocabulary is a new token."""


class AdapterToRead(Message):
    """One source of a batch."""

    key: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    """`loraadapter.source_key` of it: names it in the answer."""
    uri: str
    digest: Digest | None = None
    """Digest that its content must have."""


class AdapterBatch(Message):
    """What a Job reads."""

    adapters: Annotated[tuple[AdapterToRead, ...], Field(max_length=BATCH_ADAPTERS)]
    credentials: tuple[str, ...] = ()
    """Prefixes of sources, in the order of the folders of ADAPTER_SECRETS_DIR."""
    max_bytes: Positive
    """Most that the files of one adapter may have: an archive that is larger is not fetched."""
