"""WebM and Matroska with one track of Opus: its packets, found by walking the file as a demuxer does.

Only what every demuxer reads in the same way is taken: elements in their places, whole, one after the other to the end
of the file, since one that finds anything else searches for what looks like audio. What the file states about its
length binds nobody, so the packets count.
"""

from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from shoal.core.fields.images import UnreadableError
from shoal.core.fields.sounds import CHANNELS, Data

_EBML: Final = 0x1A45DFA3
_SEGMENT: Final = 0x18538067
_INFO: Final = 0x1549A966
_SCALE: Final = 0x2AD7B1
_TRACKS: Final = 0x1654AE6B
_TRACK: Final = 0xAE
_NUMBER: Final = 0xD7
_KIND: Final = 0x83
_CODEC: Final = 0x86
_PRIVATE: Final = 0x63A2
_ENCODINGS: Final = 0x6D80
_CLUSTER: Final = 0x1F43B675
_TIME: Final = 0xE7
_SIMPLE: Final = 0xA3
_GROUP: Final = 0xA0
_BLOCK: Final = 0xA1
_PADDING: Final = 0x75A2
_AUDIO: Final = 2
_SKIPPED: Final = frozenset({0xEC, 0xBF})
"""Void and checksums may stand anywhere."""
_IN_SEGMENT: Final = frozenset({0x114D9B74, 0x1C53BB6B, 0x1254C367, 0x1043A770, *_SKIPPED})
"""Seek head, cues, tags and chapters, which have no audio."""
_IN_CLUSTER: Final = frozenset({0xA7, 0xAB, *_SKIPPED})
"""Positions and sizes of clusters."""
_IN_GROUP: Final = frozenset({0x9B, 0xFB, 0xFA, *_SKIPPED})
"""Durations, references and priorities of blocks."""
_OUTSIDE_CLUSTER: Final = _IN_SEGMENT - _SKIPPED | {_CLUSTER, _INFO, _TRACKS}
"""What ends a cluster that does not state its size."""
_LONGEST_ID: Final = 4
_LONGEST_NUMBER: Final = 8
_MOST_SCALE: Final = 1_000_000_000
_WORDS: Final = "WebM or Matroska with one track, of Opus"
_WHOLE: Final = "WebM or Matroska whose elements are whole"


class OpusPacket(NamedTuple):
    start: int
    length: int
    begins: int | None
    """Nanoseconds, by its block; None: it is not the first of its block."""
    discarded: int
    """Nanoseconds of the end of its block that do not count."""


class _Element(NamedTuple):
    id: int
    start: int
    """First byte of what it contains."""
    end: int | None
    """None: it does not state its size."""


class OpusFile:
    """A file whose track was found. `packets` walks the clusters, once."""

    def __init__(self, data: Data, most: int) -> None:
        """`most`: elements and packets that are looked at.

        Raises:
            UnreadableError: it is no such file.
        """
        self._data, self._most, self._looked = data, most, 0
        header = self._element(0, len(data))
        if header.id != _EBML or header.end is None:
            raise UnreadableError(_WORDS)
        segment = self._element(header.end, len(data))
        if segment.id != _SEGMENT or (segment.end or len(data)) != len(data):
            raise UnreadableError(_WORDS)
        self._scale = 1_000_000
        self._track: int | None = None
        self.channels = 0
        self.skipped = 0
        """Samples of the beginning that do not count."""
        at = segment.start
        while at < len(data):
            element = self._element(at, len(data))
            if element.id == _CLUSTER:
                break
            at = self._end(element)
            if element.id == _INFO:
                self._read_info(element.start, at)
            elif element.id == _TRACKS:
                self._read_tracks(element.start, at)
            elif element.id not in _IN_SEGMENT:
                raise UnreadableError(_WORDS)
        if self._track is None:
            raise UnreadableError(_WORDS)
        self._clusters = at

    def packets(self) -> Iterator[OpusPacket]:
        """
        Raises:
            UnreadableError: the rest of the file is damaged, or has something else.
        """
        at = self._clusters
        while at < len(self._data):
            element = self._element(at, len(self._data))
            if element.id == _CLUSTER:
                at = yield from self._cluster(element)
            elif element.id in _IN_SEGMENT:
                at = self._end(element)
            else:
                raise UnreadableError(_WORDS)

    # --- the head -----------------------------------------------------------------------------------------------------

    def _read_info(self, at: int, end: int) -> None:
        for child in self._children(at, end):
            if child.id == _SCALE:
                self._scale = self._unsigned(child)
                if not 0 < self._scale <= _MOST_SCALE:
                    raise UnreadableError(_WHOLE)

    def _read_tracks(self, at: int, end: int) -> None:
        for child in self._children(at, end):
            if child.id in _SKIPPED:
                continue
            if child.id != _TRACK or self._track is not None:
                raise UnreadableError(_WORDS)
            self._read_track(child.start, self._end(child))

    def _read_track(self, at: int, end: int) -> None:
        kind, codec, head = 0, b"", b""
        for child in self._children(at, end):
            content = self._data[child.start : self._end(child)]
            if child.id == _NUMBER:
                self._track = self._unsigned(child)
            elif child.id == _KIND:
                kind = self._unsigned(child)
            elif child.id == _CODEC:
                codec = bytes(content[:16]).rstrip(b"\0")
            elif child.id == _PRIVATE:
                head = bytes(content[:19])
            elif child.id == _ENCODINGS:
                raise UnreadableError(f"{_WORDS}, and not compressed or encrypted")
        if self._track is None or (kind, codec) != (_AUDIO, b"A_OPUS"):
            raise UnreadableError(_WORDS)
        if len(head) < 19 or not head.startswith(b"OpusHead") or not 1 <= head[9] <= CHANNELS:
            raise UnreadableError(_WORDS)
        self.channels, self.skipped = head[9], int.from_bytes(head[10:12], "little")

    # --- clusters -----------------------------------------------------------------------------------------------------

    def _cluster(self, cluster: _Element) -> Generator[OpusPacket, None, int]:
        """Returns where it ends."""
        at, end, time = cluster.start, cluster.end, 0
        while at < (len(self._data) if end is None else end):
            element = self._element(at, len(self._data) if end is None else end)
            if end is None and element.id in _OUTSIDE_CLUSTER:
                return at
            at = self._end(element)
            if element.id == _TIME:
                time = self._unsigned(element)
            elif element.id == _SIMPLE:
                yield from self._block(element.start, at, time, 0)
            elif element.id == _GROUP:
                yield from self._group(element.start, at, time)
            elif element.id not in _IN_CLUSTER:
                raise UnreadableError(_WORDS)
        return at

    def _group(self, at: int, end: int, time: int) -> Iterator[OpusPacket]:
        block, discarded = None, 0
        for child in self._children(at, end):
            if child.id == _BLOCK and block is None:
                block = child
            elif child.id == _PADDING:
                found = self._data[child.start : self._end(child)]
                discarded = max(0, int.from_bytes(found, signed=True)) if len(found) <= _LONGEST_NUMBER else 0
            elif child.id not in _IN_GROUP:
                raise UnreadableError(_WORDS)
        if block is not None:
            yield from self._block(block.start, self._end(block), time, discarded)

    def _block(self, at: int, end: int, time: int, discarded: int) -> Iterator[OpusPacket]:
        number, at = self._size(at, end)
        head = self._data[at : min(at + 3, end)]
        if len(head) < 3 or number != self._track:
            raise UnreadableError(_WORDS)
        begins: int | None = (time + int.from_bytes(head[:2], signed=True)) * self._scale
        for start, length in self._laced(at + 3, end, head[2] >> 1 & 3):
            self._look()
            yield OpusPacket(start, length, begins, discarded)
            begins, discarded = None, 0

    def _laced(self, at: int, end: int, lacing: int) -> list[tuple[int, int]]:
        """Where the packets of a block are."""
        if not lacing:
            return [(at, end - at)]
        if at >= end:
            raise UnreadableError(_WHOLE)
        count, at = self._data[at] + 1, at + 1
        sizes: list[int] = []
        if lacing == 2:
            if (end - at) % count:
                raise UnreadableError(_WHOLE)
            sizes = [(end - at) // count] * (count - 1)
        elif lacing == 1:
            for _ in range(count - 1):
                size = 0
                while True:
                    if at >= end:
                        raise UnreadableError(_WHOLE)
                    byte, at = self._data[at], at + 1
                    size += byte
                    if byte < 255:
                        break
                sizes.append(size)
        else:
            for index in range(count - 1):
                before = at
                value, at = self._size(at, end)
                if index:  # the difference to the size before, with half of the numbers below zero
                    value += sizes[-1] - (1 << 7 * (at - before) - 1) + 1
                sizes.append(value)
        sizes.append(end - at - sum(sizes))
        if min(sizes) < 0:
            raise UnreadableError(_WHOLE)
        packets: list[tuple[int, int]] = []
        for size in sizes:
            packets.append((at, size))
            at += size
        return packets

    # --- EBML ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._looked += 1
        if self._looked > self._most:
            raise UnreadableError(f"WebM or Matroska of at most {self._most} elements and packets")

    def _children(self, at: int, end: int) -> Iterator[_Element]:
        while at < end:
            element = self._element(at, end)
            at = self._end(element)
            yield element

    def _element(self, at: int, limit: int) -> _Element:
        """The element at `at`, which ends before `limit`."""
        self._look()
        length = self._length(at, limit, _LONGEST_ID)
        id_ = int.from_bytes(self._data[at : at + length])
        at += length
        size, start = self._size(at, limit)
        if size == (1 << 7 * (start - at)) - 1:
            if id_ not in (_SEGMENT, _CLUSTER):
                raise UnreadableError(_WHOLE)
            return _Element(id_, start, None)
        if start + size > limit:
            raise UnreadableError(_WHOLE)
        return _Element(id_, start, start + size)

    def _end(self, element: _Element) -> int:
        if element.end is None:
            raise UnreadableError(_WHOLE)
        return element.end

    def _length(self, at: int, limit: int, most: int) -> int:
        """Bytes of the number at `at`, whose leading zero bits say it."""
        first = self._data[at] if at < limit else 0
        length = 9 - first.bit_length()
        if length > most or at + length > limit:
            raise UnreadableError(_WHOLE)
        return length

    def _size(self, at: int, limit: int) -> tuple[int, int]:
        """(a number without the bit that says its length, what follows it)."""
        length = self._length(at, limit, _LONGEST_NUMBER)
        value = int.from_bytes(self._data[at : at + length]) - (1 << 7 * length)
        return value, at + length

    def _unsigned(self, element: _Element) -> int:
        content = self._data[element.start : self._end(element)]
        if len(content) > _LONGEST_NUMBER:
            raise UnreadableError(_WHOLE)
        return int.from_bytes(content)
