# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a save uses again, looked at while that save is set up and planned.

Its tables are read on one thread. On the coordinator its files are made durable on another: it may
be a copy that somebody just made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from shardkeep.engine.parallel import Behind
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.commit import read_record
from shardkeep.formats.native.reader import NativeReader
from shardkeep.stores.local import FileId, LocalStore
from shardkeep.tables import ChunkTable

__all__ = ["Earlier"]


class Earlier:
    """A base, as one rank knows it."""

    def __init__(self, reader: NativeReader, store: LocalStore | None, *, all_of_it: bool) -> None:
        """Begins at once. With `store`, files are synced; `all_of_it` has every row read."""
        self.chunks: ChunkTable | None = None
        """All chunks, where all of it was asked for."""
        self._reader = reader
        self._store = store
        self._all = all_of_it
        self._synced: dict[str, FileId] = {}
        self._reading, self._syncing = Behind(), Behind()
        self._reading.run(self._read)
        if store is not None:
            self._syncing.run(self._sync)

    def tables(self) -> NativeReader:
        """What it holds, once that is known; a `CheckpointError` where it cannot be read."""
        self._reading.wait()
        return self._reader

    def synced(self) -> Mapping[str, FileId]:
        """Its files that are durable, by name."""
        self._syncing.wait()
        return self._synced

    def close(self) -> None:
        """Let go of it, whatever became of it."""
        self._reading.give_up()
        self._syncing.give_up()
        self._reader.close()

    def _read(self) -> None:
        reader = self._reader
        reader.read_tables()
        if self._all:
            chunks, _ = reader.index.chunks_among(np.arange(len(reader.index.tensors)))
            assert chunks.file is not None
            assert chunks.start is not None
            reader.contents_at(chunks.file, chunks.start)
            self.chunks = chunks

    def _sync(self) -> None:
        assert self._store is not None
        with contextlib.suppress(CheckpointError):
            for row in read_record(self._store).files:
                with contextlib.suppress(OSError):
                    self._synced[row.name] = self._store.sync_file(row.name)
