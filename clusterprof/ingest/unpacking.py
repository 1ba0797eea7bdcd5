"""Packed files, unpacked within bounds: a kilobyte of gzip or xz may hold a gigabyte."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clusterprof.errors import ReportError, UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: how many bytes a packed report may hold, in place of what follows from its size: `8G`
VARIABLE = "CLUSTERPROF_MAX_UNPACKED"

#: Traces of torch.profiler pack to a 26th with xz, exports of nsys to an 8th. What packs to less
#: than a hundredth was made to; a small file is no danger.
_RATIO = 100
_HARMLESS = 64 << 20

_SIZE = re.compile(r"([0-9]{1,15})([kKMGT]?)i?B?")
_UNITS = {"": 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}


def most(path: Path) -> int:
    """Return how many bytes may be unpacked of `path`. Raises UsageError, OSError."""
    said = os.environ.get(VARIABLE)
    if not said:
        return max(_HARMLESS, _RATIO * path.stat().st_size)
    match = _SIZE.fullmatch(said.strip())
    if match is None:
        raise UsageError(f"{VARIABLE}={said!r} is no size", "write bytes, or for instance 500M, 8G")
    return int(match[1]) << _UNITS[match[2]]


def opened(path: Path) -> IO[bytes]:
    """Open a report for reading, unpacking `.gz` and `.xz`.

    Reading raises `ReportError` where more comes out than may. Raises OSError.
    """
    if path.suffix == ".gz":
        return io.BufferedReader(_Unpacked(path, gzip.open(path)))
    if path.suffix == ".xz":
        return io.BufferedReader(_Unpacked(path, lzma.open(path)))
    return path.open("rb")


class _Unpacked(io.RawIOBase):
    """What a packed file holds, counted."""

    def __init__(self, path: Path, inner: io.BufferedIOBase) -> None:
        self.path, self.inner = path, inner
        self.most = self.left = most(path)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.inner.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self.inner.readinto(buffer)
        self.left -= count
        if self.left < 0:
            raise ReportError(
                f"{self.path} holds more than {_megabytes(self.most)} MB, packed into"
                f" {_megabytes(self.path.stat().st_size)} MB: no report packs so well",
                f"if it is one: {VARIABLE}=8G, or how much it may be",
            )
        return count


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size < 10_000_000 else f"{size / 1e6:.0f}"
