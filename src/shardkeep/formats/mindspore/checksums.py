# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of files."""

from __future__ import annotations

import zlib
from pathlib import Path

from shardkeep.errors import CorruptionError
from shardkeep.stores.local import storage_errors

__all__ = ["crc_of"]

_CHUNK = 4 << 20


def crc_of(path: Path, start: int, stop: int, crc: int = 0) -> int:
    """The CRC of a stretch of a file, going on from `crc`; in bounded memory."""
    buffer = memoryview(bytearray(min(_CHUNK, max(stop - start, 1))))
    with storage_errors(f"reading {path}"), path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            got = file.readinto(buffer[: min(len(buffer), stop - start)])
            if not got:
                raise CorruptionError(f"{path} became shorter while it was read")
            crc = zlib.crc32(buffer[:got], crc)
            start += got
    return crc
