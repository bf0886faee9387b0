# SPDX-License-Identifier: Apache-2.0
"""Blocks that several ranks want: read by one of them and passed on, checked by each receiver.

The coordinator plans for all (`shares`). On one machine blocks are passed on through memory that
all ranks see (`passing`), else in rounds of messages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.coordination import Coordinator
from shardkeep.engine.passing import pass_on
from shardkeep.engine.reading import Reading
from shardkeep.engine.shares import NEIGHBOURS, WINDOW, Share, encode_wants, plan_shares
from shardkeep.engine.windows import Window
from shardkeep.storage import ReadOnce
from shardkeep.stores.local import storage_errors

__all__ = ["make_window", "read_shared"]


def make_window(budget: int) -> Window | None:
    """For what this rank will have under way, within its budget."""
    return Window.make(min(budget // 2, WINDOW), NEIGHBOURS)


def read_shared(
    begin: Callable[[], Reading],
    coordinator: Coordinator,
    read_once: ReadOnce,
    budget: int,
    where: str,
) -> Reading:
    """Bring what several ranks want; returns the reading, of which the rest is still to be read.

    Collective. `begin` makes this rank's reading, of files at `where`.
    """
    made: list[Reading] = []
    window = make_window(budget)

    def tell() -> bytes:
        with storage_errors(f"reading {where}"):
            made.append(begin())
            return _wants(made[0], budget, window)

    try:
        answer = coordinator.gather_scatter(
            "share reads", tell, lambda told: plan_shares(told, read_once)
        )
        reading, share = made[0], Share.decode(answer)
        for number in range(share.rounds):
            if window is not None and share.windows:
                coordinator.agree("pass blocks on", lambda: _pass_on(share, reading, window, where))
            else:
                _Round(share.part(number), reading, coordinator, where).run()
    finally:
        if window is not None:
            window.close()
    return reading


def _wants(reading: Reading, budget: int, window: Window | None) -> bytes:
    return encode_wants(
        reading.runs,
        budget=budget,
        block=reading.block,
        cold=reading.is_cold(),
        window=None if window is None else window.address,
    )


def _pass_on(share: Share, reading: Reading, window: Window, where: str) -> None:
    with storage_errors(f"reading {where}"):
        pass_on(share, reading, window)


class _Round:
    """Some blocks on their way."""

    def __init__(
        self, share: Share, reading: Reading, coordinator: Coordinator, where: str
    ) -> None:
        self.share = share
        self.reading = reading
        self.coordinator = coordinator
        self.where = where
        self.own: list[Bytes] = []
        self.received: list[Bytes] = []

    def run(self) -> None:
        world, share = self.coordinator.world_size, self.share
        sizes = [0] * world
        nbytes = share.runs.blocks * self.reading.block
        for member in range(NEIGHBOURS):
            if member != share.member:
                mine = share.owner == member
                if mine.any():
                    sizes[int(share.ranks[member])] = int(nbytes[mine].sum())
        self.received = self.coordinator.exchange("pass blocks on", self._read, sizes)
        self.coordinator.agree("take blocks", self._take)

    def _read(self) -> list[Bytes]:
        """Read what is this rank's to read, and lay it out for each that wants it."""
        share = self.share
        rows = np.flatnonzero(share.owner == share.member)
        with storage_errors(f"reading {self.where}"):
            self.own = self.reading.read_raw(share.runs.take(rows))
        parts = [_NOTHING] * self.coordinator.world_size
        for member in range(NEIGHBOURS):
            if member == share.member:
                continue
            wanted = (share.holders[rows] >> member) & 1
            chosen = [self.own[at] for at in np.flatnonzero(wanted).tolist()]
            if chosen:
                parts[int(share.ranks[member])] = np.concatenate(chosen)
        return parts

    def _take(self) -> None:
        share, own = self.share, iter(self.own)
        at = [0] * NEIGHBOURS
        data = []
        nbytes = (share.runs.blocks * self.reading.block).tolist()
        for owner, length in zip(share.owner.tolist(), nbytes, strict=True):
            if owner == share.member:
                data.append(next(own))
                continue
            come = self.received[int(share.ranks[owner])]
            data.append(come[at[owner] : at[owner] + length])
            at[owner] += length
        with storage_errors(f"reading {self.where}"):
            self.reading.take(share.runs, data)
        self.reading.stats["bytes_received"] += sum(at)


_NOTHING = np.zeros(0, np.uint8)
