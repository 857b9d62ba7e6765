"""Parses the header of a safetensors file: 8 bytes of length (little-endian), JSON, then the tensors (see the format's
README)."""

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
HEADER_LIMIT = 16 << 20
"""Limit in bytes. The format allows 100 MB; the header of 100,000 tensors in one file has 10 MB."""
_DIMENSIONS = 16
_TYPE_LETTERS = 32
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class Tensors:
    """Totals over the tensors of headers."""

    parameters: int = 0
    """Elements of all tensors."""
    bytes: int = 0
    by_type: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes per type, such as BF16."""


def header_bytes(prefix: bytes, size: int, what: str, limit: int = HEADER_LIMIT) -> int:
    """Length of the header of a file of `size` bytes that begins with `prefix`. Raises ArtifactError(SourceInvalid)."""
    length = struct.unpack("<Q", prefix[:PREFIX_BYTES])[0] if len(prefix) >= PREFIX_BYTES else size
    if limit < length <= size - PREFIX_BYTES:
        raise ArtifactError(
            reasons.SOURCE_INVALID, f"{what} has a header of {length >> 20} MiB, which no model has: split the file"
        )
    if length > size - PREFIX_BYTES:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{what} is not a whole safetensors file")
    return length


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


def tensors(header: bytes, size: int, what: str) -> Tensors:
    """Parses a header and checks its offsets against the file size. Raises ArtifactError(SourceInvalid)."""
    parameters, by_type = 0, Counter[str]()
    for entry in entries(header, size, what).values():
        parameters += math.prod(entry.shape)
        by_type[entry.dtype] += entry.bytes
    return Tensors(parameters, sum(by_type.values()), by_type)


def entries(header: bytes, size: int, what: str) -> dict[str, TensorEntry]:
    """The tensors by name, with offsets checked against the file size. Raises ArtifactError(SourceInvalid)."""
    found: dict[str, TensorEntry] = {}
    end = 0
    try:
        for name, tensor in cast("dict[str, Any]", json.loads(header)).items():
            if name == "__metadata__":
                continue
            start, stop = (_size(offset) for offset in tensor["data_offsets"])
            if len(tensor["shape"]) > _DIMENSIONS or stop < start or len(tensor["dtype"]) > _TYPE_LETTERS:
                raise ValueError("no tensor is like this")
            shape = tuple(_size(length) for length in tensor["shape"])
            found[name] = TensorEntry(str(tensor["dtype"]), shape, stop - start)
            end = max(end, stop)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(
            reasons.SOURCE_INVALID, f"{what} has a header that is not that of a safetensors file"
        ) from None
    expected = PREFIX_BYTES + len(header) + end
    if size != expected:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{what} has {size} bytes where its header promises {expected}")
    return found


def _size(value: object) -> int:
    """A size or an offset. Raises ValueError for an invalid one: products of sizes are computed."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("no size")
    return value


def total(parts: Iterable[Tensors]) -> Tensors:
    """Totals over several files."""
    parameters, by_type = 0, Counter[str]()
    for part in parts:
        parameters += part.parameters
        by_type.update(part.by_type)
    return Tensors(parameters, sum(by_type.values()), by_type)
