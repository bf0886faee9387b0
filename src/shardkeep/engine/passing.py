# SPDX-License-Identifier: Apache-2.0
"""Blocks passed on through windows: read by one rank into memory that others look into.

Each rank fills the slots of its window, in order and over again, and takes from those of others
what it wants, checks it and copies it to where it goes. Nothing here fails because of another rank:
what one does not pass on, because it failed, ended or makes no progress, each reads for itself in
the end. Nothing is overwritten that anybody may still look at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.parallel import Behind, run_in_order
from shardkeep.engine.reading import Reading
from shardkeep.engine.shares import Share
from shardkeep.engine.verified import DamagedBlock
from shardkeep.engine.windows import DONE, FILLED, LEFT, TAKEN, Address, Window, fence

__all__ = ["pass_on"]

log = logging.getLogger("shardkeep")

STALL_S = 30.0
"""Without progress of a neighbour that is waited for, it is done without."""
LOOK_S = 0.5
"""Between two looks at whether a process is still there."""
FETCHERS = 2
"""Reads that wait for the disk at the same time."""


def pass_on(share: Share, reading: Reading, window: Window) -> None:
    """Read what is this rank's to read for its neighbours, and take what they have read for it.

    What did not come is left to be read. The window is closed.
    """
    passing = _Passing(share, reading, window)
    try:
        passing.run()
    finally:
        window.close()
    reading.runs = reading.runs.without(share.runs.take(np.flatnonzero(passing.taken)))


class _Patience:
    """With one neighbour, whose progress is waited for."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._seen: object = None
        self._since = self._looked = time.monotonic()

    def lasts(self, seen: object) -> bool:
        """Whether there is any point in waiting on; `seen` is what progress changes."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._looked > LOOK_S:
            self._looked = now
            if not self._address.is_alive():
                return False
        return now - self._since < STALL_S


class _Pause:
    """Sleeps, longer each time in a row."""

    def __init__(self) -> None:
        self._next_s = 1e-4

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(2e-3, 1.5 * self._next_s)


class _Passing:
    def __init__(self, share: Share, reading: Reading, window: Window) -> None:
        self.share = share
        self.reading = reading
        self.window = window
        self.units = reading.members(share.runs)
        self.taken = np.zeros(len(share.runs), np.bool_)
        self.lock = threading.Lock()
        self.stopped = False
        self.own = np.flatnonzero(share.owner == share.member)
        self.filled = np.zeros(len(self.own), np.bool_)
        self.places: dict[int, _Line] = {}
        """What is taken from each neighbour that can be reached, this rank included."""
        for owner in np.unique(share.owner).tolist():
            mine = owner == share.member
            seen = window if mine else Window.look_into(share.windows[owner])
            if seen is not None:
                rows = np.flatnonzero(share.owner == owner)
                self.places[owner] = _Line(seen, rows.tolist(), share.turn[rows].tolist())
        for line in self.places.values():
            line.tell(share.member)

    def run(self) -> None:
        filling = Behind()
        filling.run(self._fill_all)
        try:
            run_in_order(self._arriving(), self._take, self.reading.threads)
        except BaseException:
            self.stopped = True
            filling.give_up()
            raise
        finally:
            for line in self.places.values():
                line.window.counters[TAKEN + self.share.member] = DONE
            self.window.counters[LEFT] |= self.stopped
        filling.wait()
        self._await_lookers()

    # --- filling

    def _fill_all(self) -> None:
        try:
            run_in_order(range(len(self.own)), self._fill, FETCHERS)
        finally:
            fence()
            self.window.counters[LEFT] = 1

    def _slot(self, window: Window, row: int) -> Bytes:
        share, block = self.share, self.reading.block
        size = share.slot * block
        low = int(share.turn[row]) % share.slots * size
        return window.slots[low : low + int(share.runs.blocks[row]) * block]

    def _fill(self, number: int) -> None:
        before = number - self.share.slots
        if before >= 0 and not self._is_free(before):
            self.stopped = True  # whoever is slow may still look at what is there
        if self.stopped:
            return
        row = int(self.own[number])
        self.reading.bring(self.share.runs, row, self._slot(self.window, row))
        with self.lock:
            self.filled[number] = True
            ready = int(self.filled.argmin()) if not self.filled.all() else len(self.filled)
            fence()
            self.window.counters[FILLED] = ready

    def _is_free(self, number: int) -> bool:
        """Wait until everybody is done with a run of ours."""
        return self._await(int(self.share.holders[self.own[number]]), number)

    def _await_lookers(self) -> None:
        """Until all who want something have the window; it stays with them then."""
        self._await(int(np.bitwise_or.reduce(self.share.holders[self.own], initial=0)), -1)

    def _await(self, holders: int, number: int) -> bool:
        """Wait until each of some neighbours needs no run up to this number any more."""
        pause = _Pause()
        for member, address in enumerate(self.share.windows):
            patience = _Patience(address)
            while holders >> member & 1:
                seen = int(self.window.counters[TAKEN + member])
                if seen > number:
                    break
                if self.stopped or not patience.lasts(seen):
                    return False
                pause.sleep()
        fence()
        return True

    # --- taking

    def _arriving(self) -> Iterator[int]:
        """Rows that are there to be taken, as they come; without those that never will."""
        waiting = {owner: _Patience(line.window.address) for owner, line in self.places.items()}
        pause = _Pause()
        while waiting:
            idle = True
            for owner, patience in list(waiting.items()):
                line = self.places[owner]
                left = bool(line.window.counters[LEFT])
                fence()  # what was filled in before that is seen below
                ready = int(line.window.counters[FILLED])
                if line.turns and line.turns[0] < ready:
                    fence()
                    line.turns.popleft()
                    idle = False
                    yield line.rows.popleft()
                elif left or not line.turns or not patience.lasts(ready):
                    del waiting[owner]
            if not idle:
                pause = _Pause()
            elif waiting:
                pause.sleep()

    def _take(self, row: int) -> None:
        line = self.places[int(self.share.owner[row])]
        data = self._slot(line.window, row)
        try:
            nbytes = self.reading.deliver(self.units, row, data)
        except DamagedBlock as damage:
            # The file tells whether it is damaged there, or was on its way.
            log.warning("read again, as another rank read it: %s", damage)
        else:
            self.taken[row] = True
            if line.window is not self.window:
                self.reading.count(bytes_received=nbytes)
        fence()
        line.done(row, self.share.member)


class _Line:
    """What is taken from one window, in the order in which it comes."""

    def __init__(self, window: Window, rows: list[int], turns: list[int]) -> None:
        self.window = window
        self.rows = deque(rows)
        self.turns = deque(turns)
        self._lock = threading.Lock()
        self._open = dict(zip(rows, turns, strict=True))

    def tell(self, member: int) -> None:
        """Which one is needed next; all before it are not needed any more."""
        self.window.counters[TAKEN + member] = next(iter(self._open.values()), DONE)

    def done(self, row: int, member: int) -> None:
        """One is not needed any more."""
        with self._lock:
            del self._open[row]
            self.tell(member)
