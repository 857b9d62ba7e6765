"""Archives that mean harm."""

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from functools import cache

MIB = 1 << 20


def tar(build: Callable[[tarfile.TarFile], None], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    extra = {"compresslevel": 1} if mode == "w:gz" else {}
    with tarfile.open(fileobj=buffer, mode=mode, **extra) as out:  # pyright: ignore[reportCallIssue, reportArgumentType]
        build(out)
    return buffer.getvalue()


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size, found.type, found.linkname = size, kind, link
    return found


class Zeros(io.RawIOBase):
    """So many zeros."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._left = size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        self._left -= size
        return bytes(size)


@cache
def zeros(count: int = 24 * MIB, mode: str = "w:gz") -> bytes:
    """Some hundred KiB that unpack to `count` bytes."""
    return tar(lambda out: out.addfile(member("model.safetensors", count), Zeros(count)), mode)  # pyright: ignore[reportArgumentType]


@cache
def sparse(count: int = 1 << 40) -> bytes:
    """A GNU sparse file without any content, of `count` bytes."""
    found = member("model.safetensors", 0, tarfile.GNUTYPE_SPARSE)
    header = bytearray(found.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = tarfile.itn(count, 12, tarfile.GNU_FORMAT)  # pyright: ignore[reportAttributeAccessIssue]
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return gzip.compress(bytes(header) + bytes(10240))


@cache
def many(count: int = 21_000) -> bytes:
    """So many empty files."""
    return _named(f"{i}.json" for i in range(count))


def _named(names: Iterable[str]) -> bytes:
    def build(out: tarfile.TarFile) -> None:
        for name in names:
            out.addfile(member(name))

    return tar(build)


def deep(parts: int = 400) -> bytes:
    return tar(lambda out: out.addfile(member("/".join("d" * 2 for _ in range(parts)) + "/config.json")))


@cache
def folders(count: int = 700, depth: int = 30) -> bytes:
    """Each file brings `depth` folders of its own."""
    names = ("/".join(f"{i}-{j}" for j in range(depth)) for i in range(count))
    return _named(f"{name}/x" for name in names)


@cache
def header(count: int = 64 * MIB) -> bytes:
    """An extended header of `count` bytes, which the library would read into memory."""
    first = member("././@PaxHeader", count, tarfile.XHDTYPE).tobuf(tarfile.USTAR_FORMAT)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as out:
        out.write(first)
        for _ in range(count // MIB):
            out.write(bytes(MIB))
        out.write(member("config.json").tobuf() + bytes(10240))
    return buffer.getvalue()


@cache
def directory(count: int = 21_000) -> bytes:
    """A zip with a long list of files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        for i in range(count):
            out.writestr(zipfile.ZipInfo(f"{i}"), b"")
    return buffer.getvalue()


@cache
def zipped(count: int = 24 * MIB, claims: int | None = None) -> bytes:
    """A zip that unpacks to `count` bytes and says that it has `claims`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out, out.open("model.safetensors", "w") as content:
        for _ in range(count // MIB):
            content.write(bytes(MIB))
    data = bytearray(buffer.getvalue())
    if claims is not None:
        at = data.rindex(b"PK\x01\x02")
        data[at + 24 : at + 28] = claims.to_bytes(4, "little")
    return bytes(data)


def linked(kind: bytes, link: str) -> bytes:
    def build(out: tarfile.TarFile) -> None:
        out.addfile(member("way", 0, kind, link))
        out.addfile(member("way/config.json", 2), io.BytesIO(b"{}"))

    return tar(build)


def zip_link(link: str = "/etc") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        found = zipfile.ZipInfo("way")
        found.external_attr = (stat.S_IFLNK | 0o777) << 16
        out.writestr(found, link)
    return buffer.getvalue()


def named(name: str) -> bytes:
    return tar(lambda out: out.addfile(member(name)))
