# SPDX-License-Identifier: Apache-2.0
"""Blocks that several ranks want: read by one of them and passed on, checked by each receiver.

Neighbours share, at most 16 ranks together. The coordinator plans for all: which rank reads which
blocks, and in which rounds they travel, so that no round needs more memory than any rank's budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import Bytes
from shardkeep.columns import Column, Ints, narrow, pack, unpack
from shardkeep.coordination import Coordinator
from shardkeep.engine.reading import Reading
from shardkeep.engine.units import Runs, segments_of
from shardkeep.storage import ReadOnce
from shardkeep.stores.local import storage_errors

__all__ = ["plan_shares", "read_shared"]

NEIGHBOURS = 16
"""Ranks that share with each other."""
LARGEST = 2 << 20
"""Most bytes that are read and passed on as one."""
WORTH = 0.1
"""The part of all wanted bytes that must be saved for `"auto"` to share."""


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

    def tell() -> bytes:
        with storage_errors(f"reading {where}"):
            made.append(begin())
            return _encode_wants(made[0], budget)

    answer = coordinator.gather_scatter(
        "share reads", tell, lambda told: plan_shares(told, read_once)
    )
    reading, share = made[0], Share.decode(answer)
    for number in range(share.rounds):
        _Round(share.part(number), reading, coordinator, where).run()
    return reading


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
                    sizes[share.first_rank + member] = int(nbytes[mine].sum())
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
                parts[share.first_rank + member] = np.concatenate(chosen)
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
            come = self.received[share.first_rank + owner]
            data.append(come[at[owner] : at[owner] + length])
            at[owner] += length
        with storage_errors(f"reading {self.where}"):
            self.reading.take(share.runs, data)
        self.reading.stats["bytes_received"] += sum(at)


_NOTHING = np.zeros(0, np.uint8)


@dataclass(frozen=True, eq=False)
class Share:
    """The blocks that one rank shares with its neighbours, in the order in which they travel."""

    runs: Runs
    """Which blocks."""
    holders: Column
    """Who wants each: a bit for each neighbour."""
    owner: Column
    """Who reads each: the number of a neighbour."""
    round: Column
    """When each travels."""
    member: int
    """This rank's number among its neighbours."""
    first_rank: int
    """Rank of the first of them."""
    rounds: int
    """How many rounds there are, the same on all ranks."""

    def part(self, number: int) -> Share:
        """What travels in one round."""
        return self.take(np.flatnonzero(self.round == number))

    def take(self, rows: Ints) -> Share:
        """Some rows."""
        return Share(
            self.runs.take(rows),
            self.holders[rows],
            self.owner[rows],
            self.round[rows],
            self.member,
            self.first_rank,
            self.rounds,
        )

    def encode(self, rounds: int) -> bytes:
        """As a message, with how many rounds all ranks go through."""
        return pack(
            {
                **_columns(self.runs),
                "holders": narrow(self.holders),
                "owner": narrow(self.owner),
                "round": narrow(self.round),
                "numbers": np.array([self.member, self.first_rank, rounds], np.int64),
            }
        )

    @classmethod
    def decode(cls, message: bytes) -> Share:
        """What `encode` made."""
        part = unpack(message)
        wide = {key: part[key].astype(np.int64) for key in ("holders", "owner", "round")}
        return cls(
            _runs(part), **wide, **dict(zip(_NUMBERS, part["numbers"].tolist(), strict=True))
        )


_NUMBERS = ("member", "first_rank", "rounds")


def _columns(runs: Runs) -> dict[str, Column | bytes]:
    return {"file": narrow(runs.file), "first": narrow(runs.first), "stop": narrow(runs.stop)}


def _runs(part: dict[str, Column]) -> Runs:
    file, first, stop = (part[key].astype(np.int64) for key in ("file", "first", "stop"))
    return Runs(file, first, stop)


def _encode_wants(reading: Reading, budget: int) -> bytes:
    numbers = np.array([budget, reading.block, reading.is_cold()], np.int64)
    return pack({**_columns(reading.runs), "numbers": numbers})


def plan_shares(told: Sequence[bytes], read_once: ReadOnce) -> list[bytes]:
    """What each rank reads for its neighbours and gets from them, from what all ranks want."""
    parts = [unpack(message) for message in told]
    wants = [_runs(part) for part in parts]
    budgets, blocks, cold = zip(*(part["numbers"].tolist() for part in parts), strict=True)
    limit, block = min(budgets) // 2, max(blocks)
    groups = [
        _plan_group(wants[low : low + NEIGHBOURS], limit, block)
        for low in range(0, len(wants), NEIGHBOURS)
    ]
    wanted = sum(int(runs.blocks.sum()) for runs in wants)
    saved = sum(int((group[0].blocks * (group[1].sum(axis=0) - 1)).sum()) for group in groups)
    if read_once == "auto" and (not any(cold) or saved < WORTH * wanted):
        groups = [_plan_group([_NO_RUNS] * len(held), limit, block) for _, held, _, _ in groups]
    rounds = 1 + max(int(group[3].max(initial=-1)) for group in groups)
    messages = []
    for rank in range(len(wants)):
        number, member = divmod(rank, NEIGHBOURS)
        runs, held, owner, turn = groups[number]
        bits = (held.astype(np.int64) << np.arange(len(held), dtype=np.int64)[:, None]).sum(axis=0)
        share = Share(runs, bits, owner, turn, member, number * NEIGHBOURS, rounds)
        messages.append(share.take(np.flatnonzero(held[member])).encode(rounds))
    return messages


def _plan_group(
    wants: Sequence[Runs], limit: int, block: int
) -> tuple[Runs, npt.NDArray[np.bool_], Ints, Ints]:
    """Blocks that several want, who wants each, who reads it and when."""
    segments, held = segments_of(wants)
    holders = held.sum(axis=0)
    # Large blocks that many want may not fit into a round: each reads those by itself.
    shared = np.flatnonzero((holders > 1) & (holders * block <= limit))
    segments, held = segments.take(shared), held[:, shared]
    most = max(1, min(LARGEST, limit // (2 * NEIGHBOURS)) // block)
    counts = -(-segments.blocks // most)
    runs, held = segments.cut(most), np.repeat(held, counts, axis=1)
    holders = held.sum(axis=0)
    # In turn: each of those who want a run reads as many of them.
    turn = np.arange(len(runs)) % np.maximum(holders, 1)
    owner = ((np.cumsum(held, axis=0) == turn + 1) & held).argmax(axis=0).astype(np.int64)
    # A run is held once by whoever reads it, and once for everybody it is passed on to.
    cost = runs.blocks * block * holders
    return runs, held, owner, (np.cumsum(cost) - cost) // limit


_NO_RUNS = Runs(*(np.zeros(0, np.int64),) * 3)
