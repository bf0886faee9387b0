"""Digests put right, so that what was changed gets past them; and files that are only in memory."""

from __future__ import annotations

import re
from typing import cast

from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.engine.verified import VerifiedFile
from shardkeep.stores.reading import ReadFile

__all__ = ["BLOCK", "MemoryFile", "layout_of", "sealed", "sealed_record", "verified"]

BLOCK = 4096
"""Bytes of a digest block in all inputs: the smallest there is."""
_XXH = algorithm("xxh3-128")
_END = re.compile(rb',?\s*"digest"\s*:\s*"[^"]*"\s*\}\s*\Z')


class MemoryFile:
    """Bytes that are read as a `ReadFile` is."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        self.fd = -1

    def read_into(self, out: memoryview, offset: int) -> int:
        """Fewer only at the end, as with a file."""
        part = self.data[offset : offset + len(out)] if offset >= 0 else b""
        out[: len(part)] = part
        return len(part)

    def read(self, at: int, count: int) -> bytes:
        """The same as bytes, as `OpenedFile` has it."""
        return self.data[at : at + max(0, count)]

    def is_cold(self, offset: int, nbytes: int) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """There is nothing to let go of."""


def layout_of(payload: int) -> DigestLayout:
    """Where the digests of a file of so many bytes lie."""
    return DigestLayout(payload, BLOCK, _XXH.size)


def sealed(payload: bytes) -> tuple[bytes, bytes]:
    """What follows the payload of a file, and its root digest."""
    digest = _XXH.digest
    level1 = b"".join([digest(payload[at : at + BLOCK]) for at in range(0, len(payload), BLOCK)])
    return layout_of(len(payload)).seal(level1, _XXH)


def verified(data: bytes, payload: int, root: bytes) -> VerifiedFile:
    """A whole file that is in memory, to be read with its digests checked."""
    file = cast("ReadFile", MemoryFile(data))
    return VerifiedFile(file, "data/x", layout_of(payload), root, _XXH)


def sealed_record(body: bytes) -> bytes:
    """A record whose digest is right; `body` is JSON, with a digest at its end or without."""
    text = _END.sub(b"", body)
    if text is body or text == body:
        text = body.rstrip().removesuffix(b"}")
    head = text + b',\n "digest": "xxh3-128:'
    return head + _XXH.digest(head).hex().encode() + b'"\n}\n'
