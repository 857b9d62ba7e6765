"""What records can be handed to.

The ledger's own store is one. Another (a Kafka topic, a ClickHouse table) fits where it keeps two promises, and then
takes the store's place behind `POST /v1/records`: gateways, spools and shippers stay as they are.
"""

from collections.abc import Sequence
from typing import Protocol

from shoal.api.ledger import BatchAnswer
from shoal.ledger.parse import Incoming


class Sink(Protocol):
    """Keeps usage records.

    1. When `take` returns, the records are durable: a gateway then forgets them. (Kafka: acks=all, and the answer
       awaited. ClickHouse: a synchronous insert.)
    2. Records that it has already, by (source, id), have no effect on anything that is counted, also when they come
       again years later or side by side. (Kafka: keyed by source and request, and whoever reads dedupes, since a
       producer's own idempotence ends with its session. ClickHouse: ReplacingMergeTree ordered by (source, request,
       attempt), with `step` as its version, read with FINAL.)
    """

    async def take(self, records: Sequence[Incoming]) -> BatchAnswer:
        """Keeps a batch.

        Raises:
            Unavailable: nothing was kept, or it is not known; the caller sends the same batch again.
        """
        ...
