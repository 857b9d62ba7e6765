"""SPDY frames as `kubectl port-forward` sends them, and what is answered."""

import struct
import zlib

import pytest

from shoal_dev.lab.node import spdy


def control(kind: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">HHI", 0x8003, kind, flags << 24 | len(payload)) + payload


class Client:
    """The other end: one compression state for all its headers."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=spdy.DICTIONARY)

    def open(self, stream: int, headers: dict[str, str], *, fin: bool = False) -> bytes:
        block = struct.pack(">I", len(headers))
        for word in (word for pair in headers.items() for word in pair):
            block += struct.pack(">I", len(word)) + word.encode()
        block = self._deflate.compress(block) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return control(1, struct.pack(">IIH", stream, 0, 0) + block, flags=1 if fin else 0)


def test_the_dictionary_is_the_protocols_own() -> None:
    # The id that each compressed header block of the protocol names.
    assert (len(spdy.DICTIONARY), zlib.adler32(spdy.DICTIONARY)) == (1423, 0xE3C6A7C2)


def test_streams_data_and_pings_also_in_pieces() -> None:
    client, peer = Client(), spdy.SPDYPeer()
    sent = (
        client.open(1, {"Streamtype": "error", "Port": "80"}, fin=True)
        + client.open(3, {"Streamtype": "data", "Port": "80"})
        + spdy.data(3, b"hello", fin=True)
        + spdy.ping(7)
        + spdy.reset(3)
        + control(7, struct.pack(">II", 3, 0))
    )
    expected = [
        spdy.StreamOpened(1, {"streamtype": "error", "port": "80"}, fin=True),
        spdy.StreamOpened(3, {"streamtype": "data", "port": "80"}, fin=False),
        spdy.Data(3, b"hello", fin=True),
        spdy.Ping(7),
        spdy.Reset(3),
        spdy.GoAway(),
    ]
    frames = [frame for byte in sent for frame in peer.receive(bytes([byte]))]
    assert frames == expected


def test_replies_are_read_by_one_decompressor() -> None:
    peer, inflate = spdy.SPDYPeer(), zlib.decompressobj(zdict=spdy.DICTIONARY)
    for stream in (1, 3):
        reply = peer.reply(stream)
        assert struct.unpack_from(">HHII", reply) == (0x8003, 2, len(reply) - 8, stream)
        assert inflate.decompress(reply[12:]) == b"\0\0\0\0"


def test_what_is_no_spdy_is_refused_and_unknown_frames_are_not() -> None:
    assert spdy.SPDYPeer().receive(control(4, b"\0" * 4) + control(9, b"\0" * 8)) == []
    with pytest.raises(spdy.SpdyError, match="version 2, expected 3"):
        spdy.SPDYPeer().receive(struct.pack(">HHI", 0x8002, 1, 0))
    with pytest.raises(spdy.SpdyError, match="broken frame"):
        spdy.SPDYPeer().receive(control(1, b"\0" * 10 + b"no zlib"))
    with pytest.raises(spdy.SpdyError, match="broken frame"):
        spdy.SPDYPeer().receive(control(3, b""))
