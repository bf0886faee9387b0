# SPDX-License-Identifier: Apache-2.0
"""A file whose bytes are checked on the way, from the root in the record down to each block."""

from __future__ import annotations

import threading
from time import perf_counter

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.blocks import BlockFile
from shardkeep.engine.digests import PAGE_DIGESTS, Algorithm, DigestLayout
from shardkeep.errors import CorruptionError, FormatError
from shardkeep.stores.reading import ReadFile

__all__ = ["DamagedBlock", "VerifiedFile", "compare_digests"]


class DamagedBlock(CorruptionError):
    """A block differs from its digest; becomes a `CorruptionError` that also names what it hit."""

    def __init__(self, file: str, number: int, block: int) -> None:
        """Remember where, for whoever knows what lies there."""
        low = number * block
        super().__init__(
            f"{file}: block {number} (bytes {low} to {low + block}) differs from its digest"
        )
        self.block_range = (low, low + block)

    def touches(self, low: int, high: int) -> bool:
        """Whether bytes [low, high) of the file lie in the block."""
        return low < self.block_range[1] and high > self.block_range[0]


def compare_digests(
    file: str, first: int, found: bytes, wanted: bytes, *, size: int, block: int
) -> None:
    """Raise `DamagedBlock` for the first block whose digest, of so many bytes, is another one.

    `first` is the number of the block that the digests begin with.
    """
    if found != wanted:
        at = next(at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        raise DamagedBlock(file, first + at // size, block)


class VerifiedFile(BlockFile):
    """An open file, what its record row says of it, and the digests read so far."""

    def __init__(
        self,
        file: ReadFile,
        name: str,
        layout: DigestLayout,
        root: bytes,
        algorithm: Algorithm,
        check: bool = True,
    ) -> None:
        """Refuse a file whose size is not what the record says."""
        super().__init__(file, name, layout.block, layout.payload)
        self.layout = layout
        self.algorithm = algorithm
        self.check = check
        self._root = root
        self._level2: bytes | None = None
        self._pages: dict[int, bytes] = {}
        self._lock = threading.Lock()
        if file.size != layout.file_size:
            raise CorruptionError(
                f"{name}: the file has {file.size} bytes, the record says {layout.file_size}; "
                "it was cut, grew or was replaced"
            )

    def check_blocks(self, first: int, data: Bytes) -> None:
        """Compare whole blocks, the first of which has this number, with their digests."""
        wanted = self._digests(first, -(-len(data) // self.layout.block))
        self._compare(first, self.algorithm.digests(data.data, self.layout.block), wanted)

    def _compare(self, first: int, found: bytes, wanted: bytes) -> None:
        size, block = self.layout.size, self.layout.block
        compare_digests(self.name, first, found, wanted, size=size, block=block)

    def read_pieces(self, first: int, out: Bytes, piece: int) -> tuple[int, float, float]:
        """Read whole blocks, each piece of so many bytes digested while it is in a cache.

        Little else is done in between, as other threads wait for the interpreter meanwhile. Returns
        how many pieces there were, and the seconds that reading and checking took.
        """
        block, read, view = self.layout.block, self.file.read_into, out.data
        low, count = first * block, len(view)
        wanted = self._digests(first, -(-count // block)) if self.check else b""
        found: list[bytes] = []
        reading = digesting = 0.0
        end = perf_counter()
        for at in range(0, count, piece):
            part, begun = view[at : at + piece], end
            if read(part, low + at) != len(part):
                self._refuse_short(low + at + len(part))
            end = there = perf_counter()
            if wanted:
                found.append(self.algorithm.digests(part, block))
                end = perf_counter()
            reading += there - begun
            digesting += end - there
        if wanted:
            self._compare(first, b"".join(found), wanted)
        return -(-count // piece), reading, digesting

    def read_blocks(self, first: int, stop: int, out: Bytes) -> Bytes:
        """Read and check blocks [first, stop); returns the part of `out` that they fill."""
        layout = self.layout
        low, high = first * layout.block, min(stop * layout.block, layout.payload)
        data = out[: high - low]
        self.read_at(data, low)
        if self.check:
            self.check_blocks(first, data)
        return data

    def block_digest(self, number: int) -> bytes:
        """What the file says of one of its blocks; read and checked as all digests are."""
        return self._digests(number, 1)

    def _digests(self, first: int, count: int) -> bytes:
        """Those of blocks, one after the other."""
        size, stop = self.layout.size, first + count
        parts = []
        while first < stop:
            page, inner = divmod(first, PAGE_DIGESTS)
            held = self._pages.get(page) or self._load_page(page)
            end = min(stop - page * PAGE_DIGESTS, PAGE_DIGESTS)
            parts.append(held[inner * size : end * size])
            first += end - inner
        return b"".join(parts)

    def _load_page(self, page: int) -> bytes:
        with self._lock:
            size = self.layout.size
            if self._level2 is None:
                self._level2 = self._checked_tail()
            if page not in self._pages:
                offset, length = self.layout.page_range(page)
                data = np.empty(length, np.uint8)
                self.read_at(data, offset)
                if self.algorithm.digest(data) != self._level2[page * size : (page + 1) * size]:
                    raise CorruptionError(f"{self.name}: page {page} of its digests is damaged")
                self._pages[page] = data.tobytes()
            return self._pages[page]

    def check_digests(self) -> None:
        """Check every page of digests, also of blocks nobody read."""
        if self.layout.pages == 0:
            self._checked_tail()
        for page in range(self.layout.pages):
            self._load_page(page)

    def _checked_tail(self) -> bytes:
        """What follows level 1, compared with the root in the record."""
        tail = np.empty(self.layout.file_size - self.layout.tail_start, np.uint8)
        self.read_at(tail, self.layout.tail_start)
        if self.algorithm.digest(tail) != self._root:
            raise CorruptionError(f"{self.name}: the digests at its end do not match the record")
        return tail.tobytes()

    def read_range(self, offset: int, nbytes: int) -> bytes:
        """Some bytes, read as the blocks they lie in, and checked."""
        if nbytes == 0:
            return b""
        if not 0 <= offset <= self.layout.payload - nbytes:
            raise FormatError(f"{self.name}: has no bytes {offset} to {offset + nbytes}")
        block = self.layout.block
        first, stop = offset // block, -(-(offset + nbytes) // block)
        out = np.empty((stop - first) * block, np.uint8)
        data = self.read_blocks(first, stop, out)
        inner = offset - first * block
        return data[inner : inner + nbytes].tobytes()
