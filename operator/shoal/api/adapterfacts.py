"""Facts of a LoRA adapter: what one revision of its source says without its weights being read.

A small Job reads the facts for a batch of a pool's adapters (`AdapterBatch` in its environment) and writes them to its
termination message (`core.adapters.facts`). An agent reads them again from the files that it staged.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from shoal.api.loraadapter import Digest
from shoal.api.meta import MOST_COUNT, Bytes, Count, Positive
from shoal.api.replica import Message

BATCH_ENV: Final = "SHOAL_ADAPTER_FACTS"
"""Environment variable of the Job: `AdapterBatch` as JSON."""
BATCH_ADAPTERS: Final = 16
"""Adapters per Job at most: their facts must fit into a termination message."""

MOST_RANK: Final = 1_000_000
MOST_MODULES: Final = 256
"""Distinct modules of one adapter at most; no base model has as many."""
MOST_LAYERS: Final = 100_000

ModuleName = Annotated[str, StringConstraints(max_length=256)]
Need = Literal[
    "rsLoRA", "rankPattern", "alphaPattern", "targetPattern", "partOfAttention", "partOfGate", "initialization"
]
"""What an adapter needs of its engine beyond a plain LoRA, and not every engine does."""
Widths = tuple[Count, Count]
"""Input and output width of a layer."""


class AdapterFacts(Message):
    """The facts of one revision of an adapter that an engine can serve on a matching base model."""

    revision: Digest
    """Digest of the manifest of its source: names, sizes and validators of all files."""
    commit: Annotated[str, StringConstraints(max_length=128)] | None = None
    """hf: the commit that the source's branch was resolved to."""
    rank: Annotated[int, Field(ge=1, le=MOST_RANK)]
    """The largest of its modules."""
    alpha: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
    """LoRA alpha; the adapter's update is scaled by alpha / rank."""
    size_bytes: Bytes
    """Size of the weights file."""
    file_bytes: Bytes
    """Size of all files that a replica needs."""
    modules: Annotated[dict[ModuleName, Widths | None], Field(max_length=MOST_MODULES)]
    """Modules that the adapter's tensors change -> widths; None: the widths differ between layers. Names of expert
    modules begin with `experts.`."""
    targets: Annotated[tuple[ModuleName, ...], Field(max_length=MOST_MODULES)]
    """Last part (after the last dot) of the module names in adapter_config.json; ("all",): the config says
    all-linear."""
    layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)]
    """Least number of decoder layers that the base model must have."""
    base: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Base model named in the adapter's config. It is shown to people and not validated."""
    added_token: Annotated[int, Field(ge=-MOST_COUNT, le=MOST_COUNT)] | None = None
    """Highest token id in added_tokens.json. An id outside the base model's vocabulary is a new token."""
    needs: dict[Need, Annotated[str, StringConstraints(max_length=256)]] = {}
    """What it needs of its engine -> the detail for a message."""


class AdapterToRead(Message):
    """One adapter source of a batch."""

    key: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    """`revisions.read_key` of the adapter: identifies it in the answer."""
    uri: str
    digest: Digest | None = None
    """Required digest of the content."""


class AdapterBatch(Message):
    """Input of one Job."""

    adapters: Annotated[tuple[AdapterToRead, ...], Field(max_length=BATCH_ADAPTERS)]
    credentials: tuple[str, ...] = ()
    """URI prefixes of the pool's credentials, in the order of the folders in ADAPTER_SECRETS_DIR."""
    max_bytes: Positive
    """Size limit for the files of one adapter, in bytes: a larger archive is not fetched."""
