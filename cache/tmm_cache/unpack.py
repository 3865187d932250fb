"""Reads a possibly malicious tar file, a member at a time, within limits.

Zeros compress by a factor of a thousand, and tarfile reads whatever length a header claims: half a
megabyte took 3.2 GB of memory.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from tmm_cache.errors import UsageError
from tmm_cache.files import MAX_BYTES

#: Limit of all unpacked data. 4,000 records are 10 to 60 MB.
MAX_UNPACKED: Final = 512 * 2**20
MOST_MEMBERS: Final = 2**16
#: Limits of one extension header (a long name, attributes), and of all of them. Normal ones are a
#: kilobyte each.
MAX_HEADER: Final = 2**16
MAX_HEADERS: Final = 32 * 2**20

#: xz's strongest preset takes 65 MB to unpack.
_XZ_MEMORY: Final = 128 * 2**20
_CHUNK: Final = 2**16
_EXTENSIONS: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class ArchiveError(UsageError):
    """A file that is not an archive of records, or could not have been written by `export`."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file of an archive; its content can be read until the next member is requested."""

    name: str
    size: int
    _content: IO[bytes] | None

    def data(self) -> bytes:
        """Its content. Raises ValueError if it is too large for a record."""
        if self.size > MAX_BYTES:
            raise ValueError(f"is larger than {MAX_BYTES} bytes")
        if self._content is None:
            raise ValueError("has no content")
        return self._content.read()


def members(file: Path, raw: IO[bytes]) -> Iterator[Member]:
    """The regular files of an archive; `file` names it in errors.

    Raises ArchiveError for a file that is not an archive, exceeds the limits above, or has a member
    that is a link or a device, or whose path escapes the target folder.
    """
    try:
        limited = _Limited(_unpacked(raw))
        with tarfile.open(fileobj=limited, mode="r|", tarinfo=_counting()) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # a kilobyte per member
                _refuse_unsafe(member)
                if member.isreg():
                    name = posixpath.normpath(member.name)
                    yield Member(name, member.size, archive.extractfile(member))
        # tarfile stops at the last member and would not notice a truncated checksum.
        while limited.read(_CHUNK):
            pass
    except ArchiveError as error:
        raise ArchiveError(f"{file}: {error}") from None
    except Exception as error:
        # tarfile and the decompressors raise various exceptions for malformed input: OSError,
        # EOFError, zlib.error, LZMAError, ValueError, RecursionError, OverflowError.
        raise ArchiveError(f"{file}: is not a readable archive: {error}") from error


class _Limited(io.RawIOBase):
    """The unpacked bytes, up to a limit."""

    def __init__(self, source: _Readable) -> None:
        self._source = source
        self._left = MAX_UNPACKED

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(_CHUNK if size < 0 else min(size, _CHUNK))
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveError(f"unpacks to more than {MAX_UNPACKED} bytes")
        return data


class _Xz:
    """Unpacks xz within a memory limit, which `lzma.LZMAFile` cannot set."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)

    def read(self, size: int, /) -> bytes:
        while not self._decoder.eof:
            packed = self._raw.read(_CHUNK) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not packed:
                raise EOFError("it ends early")
            if data := self._decoder.decompress(packed, size):
                return data
        return b""


def _unpacked(raw: IO[bytes]) -> _Readable:
    magic = raw.read(6)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    return _Xz(raw) if magic == b"\xfd7zXZ\0" else raw


def _counting() -> type[tarfile.TarInfo]:
    """A header class that checks count and size before tarfile reads that far."""
    count = extended = 0

    class Header(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, *arguments: Any) -> Header:
            nonlocal count, extended
            header = super().frombuf(*arguments)
            count += 1
            if count > MOST_MEMBERS:
                raise ArchiveError(f"has more than {MOST_MEMBERS} members")
            if header.type in _EXTENSIONS:
                extended += header.size
                if header.size > MAX_HEADER or extended > MAX_HEADERS:
                    raise ArchiveError(f"has a header of {header.size} bytes")
            # tarfile would seek past the end of the file for hours.
            if not 0 <= header.size <= MAX_UNPACKED:
                raise ArchiveError(f"has a member of {header.size} bytes")
            return header

    return Header


def _refuse_unsafe(member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise ArchiveError(f"member {member.name!r} leads out of the cache")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ArchiveError(f"member {member.name!r} is neither a file nor a folder")
