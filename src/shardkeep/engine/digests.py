# SPDX-License-Identifier: Apache-2.0
"""Digests: of blocks, of blocks of digests, and of a chunk's content wherever it lies.

A file of T payload bytes has one digest per block (level 1), one per page of 4096 of those
(level 2), and a root over everything after level 1. One block is then checked with one page, level
2 and the root, whatever the size of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from shardkeep.columns import Column, Ints
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

    def digests(self, data: bytes | memoryview, size: int) -> bytes:
        """Those of all pieces of so many bytes, one after the other; the last may be short.

        Cut first and digested then, with nothing in between: whoever else waits for the
        interpreter finds it free the sooner, the less is done while it is held.
        """
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        return b"".join(map(self.digest, pieces))


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
        level2 = algorithm.digests(level1, page)
        tail = level2.ljust(self.file_size - self.tail_start, b"\0")
        return level1 + tail, algorithm.digest(tail)


class ContentDigests:
    """The digest of each chunk's own bytes, gathered from buffers that cut chunks anywhere.

    A chunk's content digest is the digest of the digests of its 1 MiB pieces. Of a piece that
    several buffers share, what comes in order goes into the state of a hash; what comes too early
    waits as a copy. Chunks may be added from several threads.
    """

    def __init__(self, algorithm: Algorithm, lengths: Ints | Sequence[int]) -> None:
        """`lengths` are the bytes of each chunk."""
        self.algorithm = algorithm
        self._lengths = np.asarray(lengths, np.int64)
        self._digests = bytearray(len(self._lengths) * algorithm.size)
        self._missing = len(self._lengths)
        self._chunks: dict[int, _Pieces] = {}
        self._shared: dict[tuple[int, int], _SharedPiece] = {}
        self._lock = threading.Lock()

    def add_run(self, first: int, starts: Sequence[int], parts: Sequence[memoryview]) -> None:
        """Take a part of each of some chunks, numbered from `first` on, as one buffer holds them.

        `starts` says how far into its chunk each part begins. Each byte is added exactly once.
        """
        digest, size, digests = self.algorithm.digest, self.algorithm.size, self._digests
        lengths = self._lengths[first : first + len(parts)].tolist()
        whole = 0
        # Backwards: the buffer after this one may be waiting for how this one ends, and the buffer
        # before it, which this one would have to wait for, then has more time.
        for at in range(len(parts) - 1, -1, -1):
            part, length = parts[at], lengths[at]
            if len(part) == length <= CONTENT_PIECE:
                place = (first + at) * size
                digests[place : place + size] = digest(digest(part))
                whole += 1
            else:
                self._add(first + at, starts[at], part, length)
        if whole:
            with self._lock:
                self._missing -= whole

    def add_stretch(self, start: Ints, rows: tuple[int, int], low: int, view: memoryview) -> None:
        """Take what the chunks [first, last) have in a stretch of bytes that begins at `low`.

        `start` says where each chunk begins, counted as `low` is.
        """
        first, last = rows
        if first == last:
            return
        begin = start[first:last] - low
        end = begin + self._lengths[first:last]
        parts = [view[max(a, 0) : b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        self.add_run(first, np.maximum(-begin, 0).tolist(), parts)

    def _add(self, chunk: int, start: int, data: memoryview, length: int) -> None:
        """Cut a part of a chunk into pieces, and digest those that are whole."""
        end = start + len(data)
        first, last = -(-start // CONTENT_PIECE), end // CONTENT_PIECE
        if end == length:
            last = -(-end // CONTENT_PIECE)  # the last piece of all is short
        if last < first:  # less than a piece, and neither of its ends
            self._share(chunk, last, start, data, length)
            return
        low, high = first * CONTENT_PIECE, min(last * CONTENT_PIECE, end)
        if high < end:
            self._share(chunk, last, high, data[high - start :], length)
        if first < last:
            whole = data[low - start : high - start]
            self._finish_pieces(chunk, first, self.algorithm.digests(whole, CONTENT_PIECE))
        if start < low:
            self._share(chunk, first - 1, start, data[: low - start], length)

    def _share(self, chunk: int, piece: int, start: int, part: memoryview, length: int) -> None:
        """Take a part of a piece that begins at this byte of the chunk."""
        key, at = (chunk, piece), start - piece * CONTENT_PIECE
        length = min(CONTENT_PIECE, length - piece * CONTENT_PIECE)
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _SharedPiece(self.algorithm.stream())
            if shared.busy or at != shared.done:
                shared.early[at] = bytes(part)
                return
            shared.busy = True
        # Only one thread at a time gets here for a piece; it also takes what waited behind it.
        following: memoryview | bytes | None = part
        while following is not None:
            shared.state.update(following)
            with self._lock:
                shared.done += len(following)
                following = shared.early.pop(shared.done, None)
                complete = shared.done == length
                if complete:
                    del self._shared[key]
                elif following is None:
                    shared.busy = False
        if complete:
            self._finish_pieces(chunk, piece, shared.state.digest())

    def _finish_pieces(self, chunk: int, first: int, found: bytes) -> None:
        """Digests of whole pieces, from this one on."""
        size = self.algorithm.size
        with self._lock:
            pieces = self._chunks.get(chunk)
            if pieces is None:
                count = -(-int(self._lengths[chunk]) // CONTENT_PIECE)
                pieces = self._chunks[chunk] = _Pieces(bytearray(count * size), count)
            pieces.digests[first * size : first * size + len(found)] = found
            pieces.missing -= len(found) // size
            if pieces.missing:
                return
            del self._chunks[chunk]
            self._missing -= 1
        place = chunk * size
        self._digests[place : place + size] = self.algorithm.digest(pieces.digests)

    def results(self) -> Column:
        """One row for each chunk, all of whose bytes must have been added."""
        if self._missing:
            raise AssertionError(f"{self._missing} chunks were not digested to their end")
        return np.frombuffer(bytes(self._digests), np.uint8).reshape(-1, self.algorithm.size)


@dataclass(slots=True)
class _Pieces:
    """A chunk of several pieces."""

    digests: bytearray
    missing: int


@dataclass(slots=True)
class _SharedPiece:
    """A piece that lies in more than one buffer."""

    state: Any
    done: int = 0
    busy: bool = False
    early: dict[int, bytes] = field(default_factory=dict)
