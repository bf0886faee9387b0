# SPDX-License-Identifier: Apache-2.0
"""Digests: of blocks, of blocks of digests, and of a chunk's content wherever it lies.

A file of T payload bytes has one digest per block (level 1), one per page of 4096 of those
(level 2), and a root over everything after level 1. One block is then checked with one page, level
2 and the root, whatever the size of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shardkeep.arrays import Bytes
from shardkeep.errors import FormatError, MissingDependencyError

__all__ = ["PAGE_DIGESTS", "Algorithm", "ContentDigests", "DigestLayout", "algorithm"]

PAGE_DIGESTS = 4096
CONTENT_PIECE = 1 << 20
FILE_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to digest bytes."""

    name: str
    """As written in the record."""
    size: int
    """Bytes of a digest."""
    digest: Callable[[Any], bytes]
    """Digest of one buffer."""
    stream: Callable[[], Any]
    """An object with `update` and `digest`."""


def _blake3() -> Algorithm:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingDependencyError(
            "digests of kind blake3 need the package blake3: pip install 'shardkeep[blake3]'"
        ) from error
    return Algorithm("blake3", 32, lambda data: blake3(data).digest(), blake3)


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name; an unknown one is a `FormatError`."""
    if name == "xxh3-128":
        return Algorithm(name, 16, xxhash.xxh3_128_digest, xxhash.xxh3_128)
    if name == "blake3":
        return _blake3()
    raise FormatError(
        f"digest algorithm {name!r} is unknown: its name is damaged, or a newer version wrote it"
    )


@dataclass(frozen=True, slots=True)
class DigestLayout:
    """Where the digests of a file lie, given where its payload ends."""

    payload: int
    """T: bytes covered by block digests, counted from the start of the file."""
    block: int
    """Bytes of a block; the last may be shorter."""
    size: int
    """Bytes of one digest."""

    @property
    def blocks(self) -> int:
        """Number of blocks, and of level 1 digests."""
        return -(-self.payload // self.block)

    @property
    def pages(self) -> int:
        """Number of level 2 digests."""
        return -(-self.blocks // PAGE_DIGESTS)

    @property
    def level1(self) -> int:
        """Bytes of level 1."""
        return self.blocks * self.size

    @property
    def tail_start(self) -> int:
        """Where level 2 begins."""
        return self.payload + self.level1

    @property
    def file_size(self) -> int:
        """The whole file: digests padded with zeros to a multiple of 4096."""
        end = self.tail_start + self.pages * self.size
        return -(-end // FILE_ALIGNMENT) * FILE_ALIGNMENT

    def page_range(self, page: int) -> tuple[int, int]:
        """First byte and length in the file of one page of level 1."""
        first = page * PAGE_DIGESTS
        count = min(PAGE_DIGESTS, self.blocks - first)
        return self.payload + first * self.size, count * self.size

    def seal(self, level1: bytes, algorithm: Algorithm) -> tuple[bytes, bytes]:
        """The digest entry, and the root over what follows level 1."""
        page = PAGE_DIGESTS * self.size
        level2 = b"".join(
            algorithm.digest(level1[at : at + page]) for at in range(0, len(level1), page)
        )
        tail = level2.ljust(self.file_size - self.tail_start, b"\0")
        return level1 + tail, algorithm.digest(tail)


@dataclass(slots=True)
class ContentDigests:
    """The digest of each chunk's own bytes, gathered from buffers that cut chunks anywhere.

    A chunk's content digest is the digest of the digests of its 1 MiB pieces. A piece that two
    buffers share is finished by whichever comes second; the earlier half waits as the state of the
    hash, or, if the halves come out of order, as a copy.
    """

    algorithm: Algorithm
    """How to digest."""
    lengths: list[int]
    """Bytes of each chunk."""
    _pieces: dict[int, list[bytes | None]] = field(default_factory=dict)
    _parts: dict[tuple[int, int], list[tuple[int, bytes | Any]]] = field(default_factory=dict)
    _done: dict[int, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, chunk: int, at: int, data: Bytes) -> None:
        """Take the bytes of a chunk that begin `at` bytes into it; each byte exactly once."""
        length = self.lengths[chunk]
        if at == 0 and len(data) == length <= CONTENT_PIECE:
            digest = self.algorithm.digest
            self._done[chunk] = digest(digest(data))
            return
        end = at + len(data)
        while at < end:
            piece = at // CONTENT_PIECE
            piece_start = piece * CONTENT_PIECE
            piece_end = min(piece_start + CONTENT_PIECE, length)
            stop = min(piece_end, end)
            part = data[len(data) - (end - at) : len(data) - (end - stop)]
            if at == piece_start and stop == piece_end:
                self._finish(chunk, piece, self.algorithm.digest(part))
            else:
                self._partial(chunk, piece, at - piece_start, piece_end - piece_start, part)
            at = stop

    def _partial(self, chunk: int, piece: int, at: int, length: int, part: Bytes) -> None:
        key = (chunk, piece)
        with self._lock:
            waiting = self._parts.setdefault(key, [])
            waiting.append((at, bytes(part)))
            if sum(len(data) for _, data in waiting) < length:
                return
            del self._parts[key]
        state = self.algorithm.stream()
        for _, data in sorted(waiting, key=lambda item: item[0]):
            state.update(data)
        self._finish(chunk, piece, state.digest())

    def _finish(self, chunk: int, piece: int, digest: bytes) -> None:
        with self._lock:
            count = -(-self.lengths[chunk] // CONTENT_PIECE)
            pieces = self._pieces.setdefault(chunk, [None] * count)
            pieces[piece] = digest
            if None not in pieces:
                del self._pieces[chunk]
                self._done[chunk] = self.algorithm.digest(b"".join(pieces))  # type: ignore[arg-type]

    def result(self, chunk: int) -> bytes:
        """The content digest of a chunk all of whose bytes have been added."""
        return self._done[chunk]
