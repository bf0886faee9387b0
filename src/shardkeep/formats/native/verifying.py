# SPDX-License-Identifier: Apache-2.0
"""Checking a whole checkpoint: every byte of every file, and that the parts fit each other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.columns import Ints
from shardkeep.engine.budget import BufferPool, checked_budget, io_threads
from shardkeep.engine.digests import ContentDigests, algorithm
from shardkeep.engine.parallel import run_in_order
from shardkeep.engine.verified import DamagedBlock, VerifiedFile
from shardkeep.errors import CheckpointError, CorruptionError, StorageError
from shardkeep.formats.native.header import MAX_HEADER, read_header
from shardkeep.formats.native.names import (
    CONTENT,
    CONTENT_KEY,
    DIGESTS,
    RECORD,
    VALUES,
    entry_keys,
)
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.record import FileRow
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import storage_errors
from shardkeep.tables import ChunkTable
from shardkeep.wording import names_text

__all__ = ["Problem", "VerifyReport", "verify_checkpoint"]

log = logging.getLogger("shardkeep")

TRIES = 3
"""How often a checkpoint may be replaced while it is verified."""

_Entries = dict[str, tuple[str, tuple[int, ...], int, int]]
"""Dtype, shape, first byte and end of each entry of a header."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    file: str
    """Which file, relative to the checkpoint."""
    text: str
    """What is wrong with it."""
    block: int | None = None
    """Which block, where the damage is that local."""
    names: tuple[str, ...] = ()
    """Tensors and values that lie there."""


@dataclass(slots=True)
class VerifyReport:
    """What a verification found."""

    checkpoint_id: str
    """Where."""
    digest: str = ""
    """Digest of the record."""
    files: int = 0
    """Files checked, the record among them."""
    nbytes: int = 0
    """Bytes read and checked."""
    problems: list[Problem] = field(default_factory=list)
    """Everything that is wrong; empty when all is well."""

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raise `CorruptionError` naming every problem, if there is any."""
        if self.problems:
            lines = [f"{p.file}: {p.text}" for p in self.problems]
            names = sorted({name for p in self.problems for name in p.names})
            raise CorruptionError(
                f"{self.checkpoint_id} is damaged:\n  " + "\n  ".join(lines), names=names
            )


def verify_checkpoint(
    checkpoint_id: CheckpointId,
    *,
    expect_digest: str | None = None,
    memory_budget: int | None = None,
    progress: Callable[[int], None] | None = None,
    planned: Callable[[int], None] = lambda nbytes: None,
) -> VerifyReport:
    """Check everything; damage is in the report, a checkpoint that is not there is an error.

    One that is replaced meanwhile is not damaged: what is there then is checked.
    """
    for _ in range(TRIES):
        reader = NativeReader(checkpoint_id, expect_digest=expect_digest)
        report = VerifyReport(reader.checkpoint_id)
        check = _Check(reader, report, memory_budget, progress)
        try:
            check.run(planned)
            if report.ok or not hasattr(reader, "record") or reader.is_current():
                return report
        except StorageError as error:
            if not error.transient or not hasattr(reader, "record") or reader.is_current():
                raise
        finally:
            reader.close()
        log.warning("verifying again: %s was replaced meanwhile", reader.checkpoint_id)
    raise StorageError(
        f"{os.fspath(checkpoint_id)} is replaced faster than it can be verified", transient=True
    )


def _raise_transient(error: CheckpointError) -> None:
    """What may pass says nothing of the bytes."""
    if isinstance(error, StorageError) and error.transient:
        raise error


class _Check:
    def __init__(
        self,
        reader: NativeReader,
        report: VerifyReport,
        memory_budget: int | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._reader = reader
        self._report = report
        self._budget = checked_budget(memory_budget)
        self._progress = progress
        self._lock = threading.Lock()
        self._chunks: ChunkTable | None = None
        self._are_apart = False

    def run(self, planned: Callable[[int], None]) -> None:
        report, reader = self._report, self._reader
        index_error: CheckpointError | None = None
        try:
            reader.read_metadata()
            reader.index.structure.look()
        except CheckpointError as error:
            _raise_transient(error)
            if not hasattr(reader, "record"):
                if not isinstance(error, CorruptionError):
                    raise  # nothing of ours is there to be verified
                report.problems.append(Problem(RECORD, str(error)))
                return
            if reader.unpinned:
                report.problems.append(Problem(RECORD, str(error)))
            else:
                index_error = error
        record = reader.record
        report.digest = record.digest
        report.files = 2 + len(record.files)
        planned(record.index.size + sum(row.size for row in record.files))
        if hasattr(reader, "index"):
            self._join_chunks()
        for number, row in enumerate((record.index, *record.files)):
            self._check_file(number - 1, row)
        if index_error and not any(p.file == record.index.name for p in report.problems):
            # Every byte is as it was written, and still it makes no sense.
            report.problems.append(Problem(record.index.name, str(index_error)))

    def _problem(self, problem: Problem) -> None:
        with self._lock:
            self._report.problems.append(problem)

    def _check_file(self, number: int, row: FileRow) -> None:
        try:
            with storage_errors(f"reading {row.name}"):
                file = self._reader._open(row, check=True)
                try:
                    whole = self._check_blocks(file, number)
                    if whole and number >= 0:
                        self._check_header(file, number, row)
                finally:
                    file.close()
                    self._reader.release()
        except CheckpointError as error:
            _raise_transient(error)
            self._problem(Problem(row.name, str(error), names=self._all_names(number)))

    def _check_blocks(self, file: VerifiedFile, number: int) -> bool:
        record = self._reader.record
        pool = BufferPool(self._budget, io_threads(), record.block)
        per_unit = pool.unit // record.block
        before = len(self._report.problems)
        contents = self._contents_in(number)

        def check(first: int) -> None:
            low = first * record.block
            done = min(pool.unit, file.layout.payload - low)
            with pool.buffer() as buffer:
                if file.file.is_cold(low, done):
                    file.read_cold(buffer, low, done)
                else:
                    file.read_at(buffer[:done], low)
                for at in range(0, done, record.block):
                    one = first + at // record.block
                    try:
                        file.check_blocks(one, buffer[at : min(at + record.block, done)])
                    except DamagedBlock as damage:
                        names = self._names_in(number, *damage.block_range)
                        self._problem(Problem(file.name, f"{damage}", one, names))
                if contents is not None:
                    contents.add(low, buffer[:done])
            with self._lock:
                self._report.nbytes += done
            if self._progress is not None:
                self._progress(done)

        file.check_digests()
        run_in_order(range(0, file.layout.blocks, per_unit), check, pool.threads)
        with self._lock:
            rest = file.layout.file_size - file.layout.payload
            self._report.nbytes += rest
        if self._progress is not None:
            self._progress(rest)
        whole = len(self._report.problems) == before
        if whole and contents is not None:
            self._check_contents(contents, number)
        return whole

    def _contents_in(self, number: int) -> _Contents | None:
        """The chunks of a file, if the index makes sense of them: they lie apart, and inside."""
        chunks = self._chunks
        if chunks is None or chunks.start is None or number < 0 or not self._are_apart:
            return None
        record = self._reader.record
        rows = np.array(self._rows_of(number), np.int64)
        start = chunks.start[rows]
        nbytes = chunks.take(rows).nbytes(self._reader.index.tensors)
        if not len(rows) or (start > record.files[number].payload - nbytes).any():
            return None
        digests = ContentDigests(algorithm(record.digests), nbytes)
        return _Contents(rows, start, start + nbytes, digests)

    def _check_contents(self, contents: _Contents, number: int) -> None:
        """What a later save would take for the content of a chunk must be it."""
        told, index = self._reader.content_digests(number), self._reader.index
        found = zip(contents.rows, contents.start.tolist(), contents.digests.results(), strict=True)
        assert self._chunks is not None
        wrong = [row for row, at, digest in found if told.get(at) != digest.tobytes()]
        names = {index.tensors.names[int(self._chunks.tensor[row])] for row in wrong}
        if names:
            text = f"the content digests of {names_text(sorted(names))} are not those of its bytes"
            file = self._reader.record.files[number].name
            self._problem(Problem(file, text, None, tuple(sorted(names))))

    # --- what lies where

    def _join_chunks(self) -> None:
        """All chunk rows, checked to lie apart from each other."""
        index, record = self._reader.index, self._reader.record
        try:
            # Read, they are known to tile their tensors.
            chunks, _ = index.chunks_among(np.arange(len(index.tensors)))
            self._chunks = chunks
            self._check_apart(chunks)
        except CheckpointError as error:
            self._problem(Problem(record.index.name, str(error)))

    def _check_apart(self, chunks: ChunkTable) -> None:
        """No two chunks may share bytes of a file."""
        index, record = self._reader.index, self._reader.record
        assert chunks.file is not None
        assert chunks.start is not None
        order = np.lexsort((chunks.start, chunks.file))
        file, start = chunks.file[order], chunks.start[order]
        nbytes = chunks.nbytes(index.tensors)[order]
        clash = (file[1:] == file[:-1]) & (start[1:] - start[:-1] < nbytes[:-1])
        self._are_apart = not clash.any()
        for at in np.flatnonzero(clash).tolist():
            names = {index.tensors.names[int(chunks.tensor[order[at + i]])] for i in (0, 1)}
            text = f"chunks of {' and '.join(sorted(names))} share bytes"
            self._problem(Problem(record.index.name, text, None, tuple(sorted(names))))

    def _rows_of(self, number: int) -> list[int]:
        assert self._chunks is not None
        found = np.flatnonzero(self._chunks.file == number)
        assert self._chunks.start is not None
        return found[np.argsort(self._chunks.start[found], kind="stable")].tolist()  # type: ignore[no-any-return]

    def _all_names(self, number: int) -> tuple[str, ...]:
        return self._names_in(number, 0, 2**63 - 1)

    def _names_in(self, number: int, low: int, high: int) -> tuple[str, ...]:
        if not hasattr(self._reader, "index") or number < 0:
            return ()
        index = self._reader.index
        names = set()
        chunks = self._chunks
        if chunks is not None and chunks.start is not None:
            rows = np.array(self._rows_of(number), np.int64)
            if len(rows):
                start = chunks.start[rows]
                end = start + chunks.take(rows).nbytes(index.tensors)
                for row in rows[(start < high) & (end > low)].tolist():
                    names.add(index.tensors.names[int(chunks.tensor[row])])
        row_values = self._reader.record.files[number].values
        if row_values is not None and high > row_values and index.values.file is not None:
            in_file = np.flatnonzero(index.values.file == number).tolist()
            names |= {index.values.names[at] for at in in_file}
        return tuple(sorted(names))

    def _check_header(self, file: VerifiedFile, number: int, row: FileRow) -> None:
        """The header that other tools read must say what the index says."""
        if self._chunks is None:
            return
        length = int.from_bytes(file.read_range(0, 8), "little")
        if not 0 < length <= min(MAX_HEADER, file.layout.payload - 8):
            raise CorruptionError(f"{file.name}: claims a header of {length} bytes")
        header = file.read_range(0, 8 + length)
        entries, _ = read_header(header, file.name, file.layout.file_size)
        found = {key: (e.dtype, e.shape, e.start, e.stop) for key, e in entries.items()}
        expected = self._expected_entries(number, row)
        if not (_holds(found, expected) if row.kept else found == expected):
            raise CorruptionError(f"{file.name}: its header and the index disagree")
        places = sorted((start, stop) for _, _, start, stop in found.values())
        edges = [len(header), *(stop for _, stop in places)]
        if [start for start, _ in places] != edges[:-1] or edges[-1] != row.size:
            raise CorruptionError(f"{file.name}: its entries overlap, or leave holes")
        values = self._reader.index.values
        has_values = row.values is not None and not row.kept
        if has_values or (values.file is not None and (values.file == number).any()):
            self._reader.value_directory(number, file)

    def _expected_entries(self, number: int, row: FileRow) -> _Entries:
        index, record = self._reader.index, self._reader.record
        chunks = self._chunks
        assert chunks is not None
        assert chunks.start is not None
        described = []
        for at in self._rows_of(number):
            tensor = int(chunks.tensor[at])
            box, shape = chunks.boxes[at], index.tensors.shape(tensor)
            partial = None if box.sizes == shape else box.offsets
            described.append((index.tensors.names[tensor], partial, tensor, box, at))
        keys = entry_keys((name, partial) for name, partial, _, _, _ in described)
        expected: _Entries = {}
        for key, (_, _, tensor, box, at) in zip(keys, described, strict=True):
            dtype = index.tensors.dtype(tensor)
            shape = (*box.sizes, dtype.extra_dim) if dtype.extra_dim else box.sizes
            start = int(chunks.start[at])
            nbytes = int(np.prod(box.sizes, dtype=np.int64)) * dtype.itemsize
            expected[key] = (dtype.safetensors, shape, start, start + nbytes)
        end = row.payload if row.values is None else row.values
        content = row.chunks * (CONTENT_KEY + algorithm(record.digests).size)
        if row.chunks:
            expected[CONTENT] = ("U8", (content,), end - content, end)
        if row.values is not None:
            expected[VALUES] = ("U8", (row.payload - row.values,), row.values, row.payload)
        expected[DIGESTS] = ("U8", (row.size - row.payload,), row.payload, row.size)
        return expected


@dataclass(frozen=True, eq=False)
class _Contents:
    """The chunks of a file, in the order they lie there, while its bytes pass by."""

    rows: Ints
    start: Ints
    end: Ints
    digests: ContentDigests

    def add(self, low: int, data: Bytes) -> None:
        """Bytes of the file from `low` on; each once, in any order."""
        first = int(self.end.searchsorted(low, "right"))
        last = int(self.start.searchsorted(low + len(data), "left"))
        self.digests.add_stretch(self.start, (first, last), low, data.data)


def _holds(found: _Entries, expected: _Entries) -> bool:
    """Whether a file has all entries, and perhaps more. Keys of chunks do not count: what is put
    after one that is taken twice depends on what else is in the file."""
    ours = {key for key in expected if key.startswith("__shardkeep__")}
    return all(found.get(key) == expected[key] for key in ours) and set(expected.values()) <= set(
        found.values()
    )
