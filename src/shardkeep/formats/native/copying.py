# SPDX-License-Identifier: Apache-2.0
"""A committed checkpoint, copied into another directory: every byte checked on its way.

The copy has the same files and the same record, so that it is the same checkpoint by every digest.
As with a save, a lease comes first and the record last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.digests import algorithm
from shardkeep.engine.pages import page_aligned
from shardkeep.engine.verified import compare_digests
from shardkeep.errors import CheckpointError, CheckpointNotFoundError, CorruptionError
from shardkeep.formats.native.commit import Lease, read_record, read_record_bytes
from shardkeep.formats.native.names import DATA
from shardkeep.formats.native.record import FileRow, Record, decode_record
from shardkeep.stores.local import LocalStore, ReadFile, storage_errors

__all__ = ["CopyResult", "Known", "copy_checkpoint", "known_files"]

UNIT = 2 << 20
"""Bytes that are read, checked and written at once: all the memory it takes, but for digests."""
DIRECT_FROM = 1 << 20
"""Smaller files go through the page cache, as those of a save do."""

Key = tuple[str, int, str, int, int]
Known = dict[Key, tuple[LocalStore, str]]
"""Files by what they hold: where there is one."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What a copy did."""

    record: Record
    """Of both."""
    data: bytes
    """The same, as it is stored."""
    nbytes: int
    """Bytes that were copied."""
    linked: int
    """Bytes of files that were there, and got another name."""


def _key(record: Record, row: FileRow) -> Key:
    return record.digests, record.block, row.root, row.size, row.payload


def known_files(stores: Iterable[LocalStore]) -> Known:
    """The files of other checkpoints, which a copy beside them need not bring again."""
    known: Known = {}
    for store in stores:
        with contextlib.suppress(CheckpointError, OSError):
            record = read_record(store)
            for row in record.files:
                known.setdefault(_key(record, row), (store, row.name))
    return known


def copy_checkpoint(
    source: LocalStore,
    target: LocalStore,
    *,
    save_id: str,
    known: Known | None = None,
    pace: Callable[[int], None] = lambda nbytes: None,
    planned: Callable[[int], None] = lambda nbytes: None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> CopyResult:
    """Copy what a save has committed into a directory of the copy's own, which is made.

    `known` files are linked where that can be done. `pace` is called before bytes are written, and
    may wait or raise; `progress` after. What is damaged is a `CorruptionError`, and what is no
    longer there a `CheckpointNotFoundError`; then nothing is committed.
    """
    data = read_record_bytes(source)
    record = decode_record(data, str(source.root))
    if record.save_id != save_id:
        raise CheckpointNotFoundError(f"{source.root} was replaced before it could be copied")
    rows = (*record.files, record.index)
    planned(sum(row.size for row in rows))
    with storage_errors(f"making the directory {target.root}"):
        target.make_directory("")
        target.make_directory(DATA)
    lease = Lease(target, record.save_id)
    copied = linked = 0
    try:
        copy = _Copy(source, target, record, pace, progress)
        for row in rows:
            if known and copy.link(row, known):
                linked += row.size
            else:
                copy.copy(row)
                copied += row.size
        with storage_errors(f"syncing {target.root / DATA}"):
            target.sync_directory(DATA)
        lease.commit(data, overwrite=False, same=lambda found: found == data)
    finally:
        lease.release()
    with storage_errors(f"syncing {target.root}"):
        target.sync_directory()  # without the lease's name
    return CopyResult(record, data, copied, linked)


class _Copy:
    """The files of one checkpoint, one after the other, through one buffer."""

    def __init__(
        self,
        source: LocalStore,
        target: LocalStore,
        record: Record,
        pace: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> None:
        self._source = source
        self._target = target
        self._record = record
        self._pace = pace
        self._progress = progress
        self._algorithm = algorithm(record.digests)
        self._buffer = page_aligned(max(UNIT, record.block))

    def link(self, row: FileRow, known: Known) -> bool:
        """Give a file that is there another name, if it seems to be what the row says."""
        store, name = known.get(_key(self._record, row), (None, ""))
        if store is None:
            return False
        try:
            with contextlib.closing(store.open(name)) as file:
                self._digests(file, row)
            self._target.link_from(store, name, row.name)
            self._target.sync_file(row.name)
        except (OSError, CorruptionError):
            with contextlib.suppress(OSError):
                self._target.unlink(row.name)
            return False  # it went, or links are not to be had, or it is damaged: copied, then
        self._progress(row.size)
        return True

    def copy(self, row: FileRow) -> None:
        """Copy a file; on return it is durable, though its name is not."""
        file = self._open(row)
        try:
            digests = self._digests(file, row)
            where = self._target.root / row.name
            with storage_errors(f"writing {where}"):
                made = self._target.create(row.name)
                try:
                    made.allocate(row.size)
                    if row.size >= DIRECT_FROM:
                        made.begin_direct()
                    for low in range(0, row.payload, len(self._buffer)):
                        part = self._checked(file, row, digests, low)
                        self._pace(len(part))
                        made.write_at(part.data, low)
                        self._progress(len(part))
                    self._pace(len(digests))
                    made.write_at(memoryview(digests), row.payload)
                    self._progress(len(digests))
                    made.sync()
                finally:
                    made.close()
        finally:
            file.close()

    def _open(self, row: FileRow) -> ReadFile:
        where = self._source.root / row.name
        try:
            with storage_errors(f"reading {where}"):
                return self._source.open(row.name)
        except OSError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if read_record(self._source).save_id != self._record.save_id:
                raise CheckpointNotFoundError(
                    f"{self._source.root} was replaced while it was copied"
                ) from error
            raise CorruptionError(f"{where} is named by the record, and is not there") from error

    def _digests(self, file: ReadFile, row: FileRow) -> bytes:
        """What follows the payload: one digest for each block, and what proves them."""
        if file.size != row.size:
            raise CorruptionError(f"{file.path} has {file.size} bytes, the record says {row.size}")
        layout = self._record.layout(row)
        found = np.empty(row.size - row.payload, np.uint8)
        self._read(file, found, row.payload, len(found))
        data = found.tobytes()
        made, root = layout.seal(data[: layout.level1], self._algorithm)
        if root.hex() != row.root or made != data:
            raise CorruptionError(f"{file.path}: the digests at its end do not match the record")
        return data

    def _checked(self, file: ReadFile, row: FileRow, digests: bytes, low: int) -> Bytes:
        """The next piece of a file, whole blocks, once they are what their digests say."""
        block, size = self._record.block, self._algorithm.size
        part = self._buffer[: min(len(self._buffer), row.payload - low)]
        self._read(file, self._buffer, low, len(part))
        first, found = low // block, self._algorithm.digests(part.data, block)
        wanted = digests[first * size : first * size + len(found)]
        compare_digests(str(file.path), first, found, wanted, size=size, block=block)
        return part

    def _read(self, file: ReadFile, out: Bytes, low: int, nbytes: int) -> None:
        with storage_errors(f"reading {file.path}"):
            if out is self._buffer and file.is_cold(low, nbytes):
                got, _ = file.read_direct(out.data, low, nbytes)
            else:
                got = file.read_into(out[:nbytes].data, low)
        if got != nbytes:
            raise CorruptionError(f"{file.path} was cut while it was copied")
