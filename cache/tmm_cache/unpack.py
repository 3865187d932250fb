"""Reads a possibly malicious tar file, a member at a time, within limits.

Zeros compress by a factor of a thousand, and tarfile reads whatever length a header claims: half a
megabyte took 3.2 GB of memory.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from tmm_cache.errors import UsageError
from tmm_cache.files import MAX_BYTES

#: Limit of all unpacked data. 4,000 records are 10 to 60 MB.
MAX_UNPACKED: Final = 512 * 2**20
MOST_MEMBERS: Final = 2**16
#: Limits of one extension header (a long name, attributes), and of all of them. Normal ones are a
#: kilobyte each.
MAX_HEADER: Final = 2**16
MAX_HEADERS: Final = 32 * 2**20

_CHUNK: Final = 2**16
_EXTENSIONS: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


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

    Raises UsageError for a file that is not an archive, exceeds the limits above, or has a member
    that is a link or a device, or whose path escapes the target folder.
    """
    try:
        is_packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        limited = _Limited(gzip.GzipFile(fileobj=raw) if is_packed else raw)
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
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except Exception as error:
        # tarfile and gzip raise various exceptions for malformed input: OSError, EOFError,
        # zlib.error, ValueError, RecursionError, OverflowError.
        raise UsageError(f"{file}: is not a readable archive: {error}") from error


class _Limited(io.RawIOBase):
    """The unpacked bytes, up to a limit."""

    def __init__(self, source: IO[bytes] | gzip.GzipFile) -> None:
        self._source = source
        self._left = MAX_UNPACKED

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(_CHUNK if size < 0 else min(size, _CHUNK))
        self._left -= len(data)
        if self._left < 0:
            raise UsageError(f"unpacks to more than {MAX_UNPACKED} bytes")
        return data


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
                raise UsageError(f"has more than {MOST_MEMBERS} members")
            if header.type in _EXTENSIONS:
                extended += header.size
                if header.size > MAX_HEADER or extended > MAX_HEADERS:
                    raise UsageError(f"has a header of {header.size} bytes")
            # tarfile would seek past the end of the file for hours.
            if not 0 <= header.size <= MAX_UNPACKED:
                raise UsageError(f"has a member of {header.size} bytes")
            return header

    return Header


def _refuse_unsafe(member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise UsageError(f"member {member.name!r} leads out of the cache")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise UsageError(f"member {member.name!r} is neither a file nor a folder")
