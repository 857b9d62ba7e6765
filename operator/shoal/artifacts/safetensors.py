"""The header of a safetensors file: 8 bytes of length (little-endian), JSON, then the tensors (its format's README)."""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError

PREFIX_BYTES = 8
HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """What the headers say of the tensors."""

    parameters: int = 0
    """Elements of all tensors."""
    bytes: int = 0
    by_type: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes per type, such as BF16."""


def header_bytes(prefix: bytes, size: int, what: str) -> int:
    """Length of the header of a file of `size` bytes that begins with `prefix`. Raises ArtifactError(SourceInvalid)."""
    length = struct.unpack("<Q", prefix[:PREFIX_BYTES])[0] if len(prefix) >= PREFIX_BYTES else size
    if length > min(size - PREFIX_BYTES, HEADER_LIMIT):
        raise ArtifactError(reasons.SOURCE_INVALID, f"{what} is not a whole safetensors file")
    return length


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, as a header tells of it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


def tensors(header: bytes, size: int, what: str) -> Tensors:
    """Reads a header and holds its offsets against the file's size. Raises ArtifactError(SourceInvalid)."""
    parameters, by_type = 0, Counter[str]()
    for entry in entries(header, size, what).values():
        parameters += math.prod(entry.shape)
        by_type[entry.dtype] += entry.bytes
    return Tensors(parameters, sum(by_type.values()), by_type)


def entries(header: bytes, size: int, what: str) -> dict[str, Entry]:
    """The tensors by name, with their offsets held against the file's size. Raises ArtifactError(SourceInvalid)."""
    found: dict[str, Entry] = {}
    end = 0
    try:
        for name, tensor in cast("dict[str, Any]", json.loads(header)).items():
            if name == "__metadata__":
                continue
            start, stop = (int(offset) for offset in tensor["data_offsets"])
            shape = tuple(int(length) for length in tensor["shape"])
            found[name] = Entry(str(tensor["dtype"]), shape, stop - start)
            end = max(end, stop)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(
            reasons.SOURCE_INVALID, f"{what} has a header that is not that of a safetensors file"
        ) from None
    expected = PREFIX_BYTES + len(header) + end
    if size != expected:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{what} has {size} bytes where its header promises {expected}")
    return found


def total(parts: Iterable[Tensors]) -> Tensors:
    """Of several files together."""
    parameters, by_type = 0, Counter[str]()
    for part in parts:
        parameters += part.parameters
        by_type.update(part.by_type)
    return Tensors(parameters, sum(by_type.values()), by_type)
