# SPDX-License-Identifier: Apache-2.0
"""Writing this rank's ranges of files that all ranks write."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.pages import page_aligned
from shardkeep.engine.parallel import run_in_order
from shardkeep.formats.huggingface.building import Building
from shardkeep.formats.huggingface.dealing import UNIT
from shardkeep.formats.huggingface.gathering import Gathering
from shardkeep.stores.local import WriteFile, storage_errors

__all__ = ["RangeFiles"]

DIRECT_FROM = 1 << 20
"""Smaller files go through the page cache."""
PAGE = 4096


class RangeFiles:
    """The files that all ranks write, as one of them does: jobs put together, and written."""

    def __init__(
        self,
        building: Building,
        names: Sequence[tuple[str, int]],
        headers: Sequence[bytes],
        jobs: Gathering,
        threads: int,
    ) -> None:
        """`headers` are the coordinator's to write; others have none."""
        self.written: dict[str, int] = {}
        """Bytes of each file that this rank wrote."""
        self.stats: dict[str, float] = {"written_bytes": 0, "copy_s": 0.0, "pwrite_s": 0.0}
        self._building = building
        self._names = names
        self._headers = headers
        self._jobs = jobs
        self._threads = threads
        self._open: dict[int, WriteFile] = {}
        self._tails: list[tuple[int, bytes, int]] = []
        self._lock = threading.Lock()
        self._own = threading.local()

    def write(
        self,
        jobs: Sequence[int],
        come: dict[int, dict[int, list[Bytes]]],
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Put jobs together and write them."""

        def work(job: int) -> None:
            progress(self._write_job(job, come.get(job)))

        run_in_order(jobs, work, min(self._threads, len(jobs)))

    def _write_job(self, job: int, come: dict[int, list[Bytes]] | None) -> int:
        deal = self._jobs.deal
        number = int(deal.file[job])
        low = int(deal.low[job] - deal.base[number])
        nbytes = int(deal.high[job] - deal.low[job])
        out = self._buffer()[:nbytes]
        begun = time.perf_counter()
        if self._headers and low < len(self._headers[number]):
            head = self._headers[number][low : low + nbytes]
            out[: len(head)] = np.frombuffer(head, np.uint8)
        self._jobs.fill(job, out, come)
        filled = time.perf_counter()
        with storage_errors(f"writing {self._building.path / self._names[number][0]}"):
            file = self._file(number)
            whole = nbytes // PAGE * PAGE
            file.write_at(memoryview(out[:whole]), low)  # type: ignore[arg-type]
        with self._lock:
            if whole < nbytes:
                # The last bytes of a file are no whole page: they go when all else is written.
                self._tails.append((number, out[whole:].tobytes(), low + whole))
            name = self._names[number][0]
            self.written[name] = self.written.get(name, 0) + nbytes
            self.stats["written_bytes"] += nbytes
            self.stats["copy_s"] += filled - begun
            self.stats["pwrite_s"] += time.perf_counter() - filled
        return nbytes

    def _buffer(self) -> Bytes:
        found: Bytes | None = getattr(self._own, "buffer", None)
        if found is None:
            found = self._own.buffer = page_aligned(UNIT)
        return found

    def _file(self, number: int) -> WriteFile:
        with self._lock:
            file = self._open.get(number)
            if file is None:
                name, size = self._names[number]
                file = self._open[number] = self._building.open(name)
                if size >= DIRECT_FROM:
                    file.begin_direct()
            return file

    def finish(self) -> None:
        """Make all of it durable."""
        begun = time.perf_counter()
        for number, data, at in self._tails:
            with storage_errors(f"writing {self._names[number][0]}"):
                self._file(number).write_at(memoryview(data), at)
        for number, file in self._open.items():
            with storage_errors(f"writing {self._names[number][0]}"):
                file.sync()
                file.close()
        self._open = {}
        self.stats["sync_s"] = time.perf_counter() - begun

    def close(self) -> None:
        """After an error: let go of all files."""
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
        self._open = {}
