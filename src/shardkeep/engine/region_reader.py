# SPDX-License-Identifier: Apache-2.0
"""What readers of files have in common: the steps of a load, its buffers, and what is counted."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkeep.arrays import Bytes, FlatSink, HostPlaces, Sink, Staging
from shardkeep.coordination import Coordinator
from shardkeep.engine.blocks import BlockFile
from shardkeep.engine.budget import KEPT, BufferPool, Spares, checked_budget, io_threads
from shardkeep.engine.byte_runs import BYTE, ByteRuns
from shardkeep.engine.read_once import read_shared
from shardkeep.engine.reading import READ_STATS, Reading
from shardkeep.engine.regions import Regions
from shardkeep.planner import LoadPlan, LoadPlanner, ReadItems
from shardkeep.storage import ColumnReader, ReadOnce
from shardkeep.stores.local import storage_errors

__all__ = ["Planned", "RegionReader", "Sinks"]

Sinks = Callable[[int], Sink]


@dataclass(frozen=True, eq=False)
class Planned:
    """The tensors of a plan, about to be read."""

    reading: Reading
    """What goes through the engine."""
    sinks: Sinks
    """Where it goes."""
    then: Callable[[], None] = lambda: None
    """Reads what does not, and looks at what was read."""
    apart: int = 0
    """Bytes of what does not."""


class RegionReader(ColumnReader):
    """A reader whose tensors lie in files; a derived one says in which, and where in them."""

    root: Path
    """Where it reads, absolute."""

    def __init__(
        self, memory_budget: int | None = None, progress: Callable[[int], None] | None = None
    ) -> None:
        """Nothing is read yet."""
        self.memory_budget = memory_budget
        self.progress = progress
        self.planned: Callable[[int], None] = lambda nbytes: None
        """Told how many bytes that will be, once a load knows what it reads."""
        self.spares: Spares | None = None
        """Keeps buffers from one read to the next, for who reads often."""
        self.kept: Spares | None = None
        """Of the budget, what others want again afterwards; unless it is more than a small part."""
        self.alone = False
        """Whether each read stays on its caller's thread, for who reads on several."""
        self._counting = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """What was begun and counted."""
        self.stats: dict[str, float] = {"files_read": 0, **dict.fromkeys(READ_STATS, 0.0)}
        """What was read since the last `reset`, and the seconds that took."""
        self._files_read: set[int] = set()
        self._begun: Planned | None = None

    # --- of a derived reader

    @property
    @abstractmethod
    def block(self) -> int:
        """Bytes in which files are read."""

    @abstractmethod
    def data_file(self, number: int) -> AbstractContextManager[BlockFile]:
        """One of the files, open."""

    @abstractmethod
    def check_places(self, regions: Regions) -> None:
        """Raise where one does not lie within its file: what tells of it may lie."""

    @abstractmethod
    def plan_tensors(
        self, items: ReadItems, sinks: Sinks, places: HostPlaces | None, staging: Staging | None
    ) -> Planned:
        """All tensors of a plan, about to be read."""

    def check_files(self, numbers: list[int]) -> None:
        """Raise where files were changed since it was found out what lies in them."""

    # --- the steps of a load

    def share_reads(
        self, plan: LoadPlan, planner: LoadPlanner, coordinator: Coordinator, read_once: ReadOnce
    ) -> None:
        """Read what several ranks want once for all of them; `read_data` then reads the rest."""
        self._begun = self.share(lambda: self._plan(plan, planner), coordinator, read_once)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> int:
        """Read the tensors of the plan, but for what `share_reads` has brought."""
        items = ReadItems.of(plan)
        begun, self._begun = self._begun, None
        planned = begun or self._plan(plan, planner)
        self.run(planned)
        planner.commit(items, planned.sinks)
        return items.nbytes

    def _plan(self, plan: LoadPlan, planner: LoadPlanner) -> Planned:
        items = ReadItems.of(plan)
        planned = self.plan_tensors(
            items, planner.sinks(items), planner.places(items), planner.staging
        )
        self.planned(planned.reading.nbytes + planned.apart)
        return planned

    # --- reading

    def share(
        self, plan: Callable[[], Planned], coordinator: Coordinator, read_once: ReadOnce
    ) -> Planned:
        """What is planned, without what one rank has read for several; on all of them."""
        planned: list[Planned] = []

        def begin() -> Reading:
            planned.append(plan())
            return planned[0].reading

        read_shared(begin, coordinator, read_once, self.budget, str(self.root))
        return planned[0]

    def read_tensors(self, items: ReadItems, sinks: Sinks) -> int:
        """Read every region of the plan into its sink; returns the bytes delivered."""
        self.run(self.plan_tensors(items, sinks, None, None))
        return items.nbytes

    @property
    def budget(self) -> int:
        """Bytes of buffers."""
        whole = checked_budget(self.memory_budget, self.ranks_on_host)
        return whole if self.kept is None else whole - self.kept.at_most(whole // KEPT)

    def read_runs(self, runs: ByteRuns, name: Callable[[int], str], out: Bytes) -> None:
        """Fill memory of the caller's with bytes as they lie in files; any thread may.

        `name` tells errors what an owner of a run is.
        """
        regions, sink = runs.regions(len(out)), FlatSink(out, out.shape, BYTE)
        self.check_places(regions)
        owner, files = runs.owner, np.unique(runs.file).tolist()

        def sinks(number: int) -> Sink:
            return sink

        reading = self.reading_of(
            regions, sinks, runs.places(out), names=lambda row: name(int(owner[row]))
        )
        self.run(Planned(reading, sinks, lambda: self.check_files(files)))

    def reading_of(
        self,
        regions: Regions,
        sinks: Sinks,
        places: HostPlaces | None,
        staging: Staging | None = None,
        names: Callable[[int], str] = str,
    ) -> Reading:
        """A reading of these regions; nothing is read yet."""
        budget, block = self.budget, self.block
        return Reading(
            self.data_file,
            regions,
            sinks,
            block=block,
            pool=lambda buffers, most: BufferPool(
                budget, buffers, block, most, staging, self.spares
            ),
            threads=io_threads(self.ranks_on_host),
            places=places,
            staging=staging,
            progress=self.progress,
            names=names,
        )

    def run(self, planned: Planned) -> None:
        """Read it, and count that."""
        with storage_errors(f"reading {self.root}"):
            planned.reading.run(alone=self.alone)
            planned.then()
        with self._counting:
            self._files_read |= planned.reading.files_read
            self.stats["files_read"] = len(self._files_read)
            for key, value in planned.reading.stats.items():
                self.stats[key] += value
