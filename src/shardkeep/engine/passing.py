# SPDX-License-Identifier: Apache-2.0
"""Blocks passed on through windows: read by one rank into memory that others look into.

Each rank fills its window, in order and round and round, and takes from those of others what it
wants, checks it and copies it to where it goes. Nothing here fails because of another rank:
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
from shardkeep.engine.pages import HUGE_PAGE, page_aligned
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
BATCH = 1 << 20
"""Bytes of small runs that are shown to others at once."""
TOGETHER = 4
"""Runs that are taken before the others are told."""


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
        self.of_thread = threading.local()
        self.stopped = False
        self.own = np.flatnonzero(share.owner == share.member)
        self.largest = int(share.runs.blocks[self.own].max(initial=0)) * reading.block
        """Bytes of the largest run that this rank reads."""
        self.lookers = int(np.bitwise_or.reduce(share.holders[self.own], initial=0))
        """Who wants anything of what this rank reads, a bit for each."""
        self.ready: dict[int, int] = {}
        """Where stretches that have been filled in begin and end, before which others have not."""
        self.lines: dict[int, _Line] = {}
        """What is taken from each neighbour that can be reached, this rank included."""
        for owner in np.unique(share.owner).tolist():
            mine = owner == share.member
            seen = window if mine else Window.look_into(share.windows[owner])
            if seen is not None:
                rows = np.flatnonzero(share.owner == owner)
                self.lines[owner] = _Line(seen, rows.tolist(), share.turn[rows].tolist())
        for line in self.lines.values():
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
            for line in self.lines.values():
                line.window.counters[TAKEN + self.share.member] = DONE
            self.window.counters[LEFT] |= self.stopped
        filling.wait()
        self._await_need_of(0)  # until all have the window; it stays with them then

    # --- filling

    def _fill_all(self) -> None:
        try:
            run_in_order(self._batches(), self._fill, FETCHERS)
        finally:
            fence()
            self.window.counters[LEFT] = 1

    def _batches(self) -> Iterator[list[int]]:
        """Own rows, small ones together; never more than the ring has room for."""
        enough = min(BATCH, self.share.ring * self.reading.block // 4)
        batch, nbytes = [], 0
        for row, blocks in zip(
            self.own.tolist(), self.share.runs.blocks[self.own].tolist(), strict=True
        ):
            batch.append(row)
            nbytes += blocks * self.reading.block
            if nbytes >= enough:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _place(self, window: Window, row: int) -> Bytes:
        share, block = self.share, self.reading.block
        low = int(share.turn[row]) % share.ring * block
        return window.ring[low : low + int(share.runs.blocks[row]) * block]

    def _fill(self, rows: list[int]) -> None:
        share, last = self.share, rows[-1]
        begin, end = int(share.turn[rows[0]]), int(share.turn[last] + share.runs.blocks[last])
        if not self.stopped and not self._await_need_of(end - share.ring):
            self.stopped = True  # whoever is slow may still look at what is there
        if self.stopped:
            return
        for row in rows:
            self.reading.bring(share.runs, row, self._place(self.window, row), self._large_pages())
        with self.lock:
            self.ready[begin] = end
            filled = int(self.window.counters[FILLED])
            while filled in self.ready:
                filled = self.ready.pop(filled)
            fence()
            self.window.counters[FILLED] = filled

    def _large_pages(self) -> Bytes | None:
        """Of this thread: memory that ranks share has small pages, of which a disk may take only a
        few at a time. None if one would hold several runs."""
        pages: Bytes | None = getattr(self.of_thread, "pages", None)
        if pages is None and self.largest >= HUGE_PAGE:
            pages = self.of_thread.pages = page_aligned(self.largest)
        return pages

    def _await_need_of(self, number: int) -> bool:
        """Wait until nobody needs any of our blocks before this one, which is not there yet."""
        pause = _Pause()
        for member, address in enumerate(self.share.windows):
            patience = _Patience(address)
            while self.lookers >> member & 1:
                needed = int(self.window.counters[TAKEN + member])
                if needed >= number:
                    break
                if self.stopped or not patience.lasts(needed):
                    return False
                pause.sleep()
        fence()
        return True

    # --- taking

    def _arriving(self) -> Iterator[list[int]]:
        """Rows that are there to be taken, as they come; without those that never will."""
        waiting = {owner: _Patience(line.window.address) for owner, line in self.lines.items()}
        pause = _Pause()
        while waiting:
            idle = True
            for owner, patience in list(waiting.items()):
                line = self.lines[owner]
                left = bool(line.window.counters[LEFT])
                fence()  # what was filled in before that is seen below
                ready = int(line.window.counters[FILLED])
                fence()
                rows = line.next(ready)
                if rows:
                    idle = False
                    yield rows
                elif left or line.is_empty or not patience.lasts(ready):
                    del waiting[owner]
            if not idle:
                pause = _Pause()
            elif waiting:
                pause.sleep()

    def _take(self, rows: list[int]) -> None:
        line = self.lines[int(self.share.owner[rows[0]])]
        for row in rows:
            try:
                nbytes = self.reading.deliver(self.units, row, self._place(line.window, row))
            except DamagedBlock as damage:
                # The file tells whether it is damaged there, or was on its way.
                log.warning("read again, as another rank read it: %s", damage)
                continue
            self.taken[row] = True
            if line.window is not self.window:
                self.reading.count(bytes_received=nbytes)
        fence()
        line.done(rows, self.share.member)


class _Line:
    """What is taken from one window, in the order in which it comes."""

    def __init__(self, window: Window, rows: list[int], turns: list[int]) -> None:
        self.window = window
        self._next = deque(zip(rows, turns, strict=True))
        self._needed = dict(self._next)
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing more is to come."""
        return not self._next

    def next(self, ready: int) -> list[int]:
        """Some rows that lie before this block."""
        rows: list[int] = []
        while self._next and self._next[0][1] < ready and len(rows) < TOGETHER:
            rows.append(self._next.popleft()[0])
        return rows

    def tell(self, member: int) -> None:
        """Which block is needed next."""
        self.window.counters[TAKEN + member] = next(iter(self._needed.values()), DONE)

    def done(self, rows: list[int], member: int) -> None:
        """Some are not needed any more."""
        with self._lock:
            for row in rows:
                del self._needed[row]
            self.tell(member)
