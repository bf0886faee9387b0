# SPDX-License-Identifier: Apache-2.0
"""Who reads what several ranks want, planned for all of them from what each wants.

Neighbours share, at most 16 ranks together. Those of one machine pass blocks on through memory that
they all see (`windows`); others in rounds of messages, none of which needs more memory than any
rank's budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.columns import Column, Ints, narrow, pack, unpack
from shardkeep.engine.units import Runs, segments_of
from shardkeep.engine.windows import Address
from shardkeep.storage import ReadOnce

__all__ = ["NEIGHBOURS", "WINDOW", "Share", "encode_wants", "plan_shares"]

NEIGHBOURS = 16
"""Ranks that share with each other."""
LARGEST = 4 << 20
"""Most bytes that are read and passed on as one."""
WINDOW = 16 << 20
"""Most bytes that a rank has under way in its window: few enough to stay in a cache."""
WORTH = 0.05
"""The part of all wanted bytes that must be saved for `"auto"` to share."""


@dataclass(frozen=True, eq=False)
class Share:
    """The blocks that one rank shares with its neighbours, in the order in which they travel."""

    runs: Runs
    """Which blocks."""
    holders: Column
    """Who wants each: a bit for each neighbour."""
    owner: Column
    """Who reads each: the number of a neighbour."""
    turn: Column
    """When each travels: in which round; or through windows, after how many blocks of its owner."""
    member: int
    """This rank's number among its neighbours."""
    rounds: int
    """How many rounds there are, the same on all ranks; through windows there is one."""
    ring: int
    """Blocks after which a window is filled from its begin again."""
    ranks: Ints
    """The ranks of all neighbours."""
    windows: Sequence[Address] = ()
    """Of all neighbours, where blocks travel through them."""

    def part(self, number: int) -> Share:
        """What travels in one round."""
        return self.take(np.flatnonzero(self.turn == number))

    def take(self, rows: Ints) -> Share:
        """Some rows."""
        return Share(
            self.runs.take(rows),
            self.holders[rows],
            self.owner[rows],
            self.turn[rows],
            *(self.member, self.rounds, self.ring),
            self.ranks,
            self.windows,
        )

    def encode(self) -> bytes:
        """As a message."""
        return pack(
            {
                **_columns(self.runs),
                "holders": narrow(self.holders),
                "owner": narrow(self.owner),
                "turn": narrow(self.turn),
                "numbers": np.array([self.member, self.rounds, self.ring], np.int64),
                "ranks": self.ranks,
                "windows": msgspec.msgpack.encode(self.windows),
            }
        )

    @classmethod
    def decode(cls, message: bytes) -> Share:
        """What `encode` made."""
        part = unpack(message)
        wide = {key: part[key].astype(np.int64) for key in ("holders", "owner", "turn")}
        numbers = dict(zip(_NUMBERS, part["numbers"].tolist(), strict=True))
        windows = msgspec.msgpack.decode(bytes(part["windows"]), type=list[Address])
        return cls(_runs(part), **wide, **numbers, ranks=part["ranks"], windows=windows)


_NUMBERS = ("member", "rounds", "ring")


def _columns(runs: Runs) -> dict[str, Column | bytes]:
    return {"file": narrow(runs.file), "first": narrow(runs.first), "stop": narrow(runs.stop)}


def _runs(part: dict[str, Column]) -> Runs:
    file, first, stop = (part[key].astype(np.int64) for key in ("file", "first", "stop"))
    return Runs(file, first, stop)


def encode_wants(
    runs: Runs, *, budget: int, block: int, cold: bool, window: Address | None
) -> bytes:
    """What a rank wants, for `plan_shares`: which blocks, of how many bytes each.

    `cold` says whether some must be waited for, `window` where others find what it has read.
    """
    numbers = np.array([budget, block, cold], np.int64)
    return pack({**_columns(runs), "numbers": numbers, "window": msgspec.msgpack.encode(window)})


@dataclass(frozen=True, eq=False)
class _Want:
    runs: Runs
    budget: int
    block: int
    cold: bool
    window: Address | None

    @classmethod
    def decode(cls, message: bytes) -> _Want:
        part = unpack(message)
        window = msgspec.msgpack.decode(bytes(part["window"]), type=Address | None)
        budget, block, cold = part["numbers"].tolist()
        return cls(_runs(part), budget, block, bool(cold), window)


def plan_shares(
    told: Sequence[bytes], read_once: ReadOnce, *, messages: bool = True
) -> list[bytes]:
    """What each rank reads for its neighbours and gets from them, from what all ranks want.

    Without `messages`, only through windows.
    """
    wants = [_Want.decode(message) for message in told]
    sets, windows = _neighbours(wants, read_once)
    plan = _Plan(wants, windows)
    groups = [plan.group(ranks) for ranks in sets]
    wanted = sum(int(want.runs.blocks.sum()) for want in wants)
    saved = sum(group.saved for group in groups)
    worth = read_once is True or (
        saved >= WORTH * wanted > 0 and (windows or any(want.cold for want in wants))
    )
    if not worth or not (windows or messages):
        groups = [plan.group(ranks, share=False) for ranks in sets]
    if windows:
        rounds = int(any(len(group.runs) for group in groups))
    else:
        rounds = 1 + max(int(group.turn.max(initial=-1)) for group in groups)
    answers = [b""] * len(wants)
    for group in groups:
        for member, rank in enumerate(group.ranks):
            answers[rank] = group.share(member, rounds).encode()
    return answers


def _neighbours(wants: Sequence[_Want], read_once: ReadOnce) -> tuple[list[list[int]], bool]:
    """Which ranks share with each other, and whether all of them do so through windows."""
    machines: dict[str, list[int]] = defaultdict(list)
    for rank, want in enumerate(wants):
        machines["" if want.window is None else want.window.machine].append(rank)
    # Through memory as good as nothing is lost, over a network it may be: one machine by itself is
    # enough where most have several ranks, unless they are to read as little as they can.
    crowded = len(wants) >= 2 * len(machines)
    near = "" not in machines and (len(machines) == 1 or (read_once == "auto" and crowded))
    sets = list(machines.values()) if near else [list(range(len(wants)))]
    cut = [
        ranks[low : low + NEIGHBOURS] for ranks in sets for low in range(0, len(ranks), NEIGHBOURS)
    ]
    return cut, near


@dataclass(frozen=True, eq=False)
class _Group:
    """Blocks that several of some ranks want, who wants each, who reads it and when."""

    ranks: list[int]
    runs: Runs
    held: npt.NDArray[np.bool_]
    owner: Ints
    turn: Ints
    ring: int
    windows: list[Address]

    @property
    def saved(self) -> int:
        """Blocks that need not be read again."""
        return int((self.runs.blocks * (self.held.sum(axis=0) - 1)).sum())

    def share(self, member: int, rounds: int) -> Share:
        """What one of them has to do with."""
        places = np.arange(len(self.held), dtype=np.int64)[:, None]
        bits = (self.held.astype(np.int64) << places).sum(axis=0)
        ranks = np.array(self.ranks, np.int64)
        whole = Share(
            *(self.runs, bits, self.owner, self.turn, member, rounds, self.ring, ranks),
            self.windows,
        )
        return whole.take(np.flatnonzero(self.held[member]))


class _Plan:
    """What is the same for all groups."""

    def __init__(self, wants: Sequence[_Want], windows: bool) -> None:
        self.wants = wants
        self.windows = windows
        self.block = max(want.block for want in wants)
        limit = min(want.budget for want in wants) // 2
        self.limit = min(limit, WINDOW) if windows else limit
        most = self.limit // 4 if windows else self.limit // (2 * NEIGHBOURS)
        self.most = max(1, min(LARGEST, most) // self.block)

    def group(self, ranks: list[int], share: bool = True) -> _Group:
        segments, held = segments_of([self.wants[rank].runs for rank in ranks])
        holders = held.sum(axis=0)
        # Large blocks that many want may not fit: each reads those by itself.
        room = 2 if self.windows else holders
        shared = np.flatnonzero((holders > 1) & (room * self.block <= self.limit) & share)
        segments, held = segments.take(shared), held[:, shared]
        counts = -(-segments.blocks // self.most)
        runs, held = segments.cut(self.most), np.repeat(held, counts, axis=1)
        holders = held.sum(axis=0)
        # In turn: each of those who want a run reads as many of them.
        chosen = np.arange(len(runs)) % np.maximum(holders, 1)
        owner = ((np.cumsum(held, axis=0) == chosen + 1) & held).argmax(axis=0).astype(np.int64)
        # A run that begins before the end of the ring may reach beyond it.
        ring = self.limit // self.block - self.most
        turn = _before(owner, runs.blocks) if self.windows else self._rounds(runs, holders)
        found = [self.wants[rank].window for rank in ranks] if self.windows else []
        windows = [window for window in found if window is not None]
        return _Group(ranks, runs, held, owner, turn, ring, windows)

    def _rounds(self, runs: Runs, holders: Ints) -> Ints:
        # A run is held once by whoever reads it, and once for everybody it is passed on to.
        cost = runs.blocks * self.block * holders
        rounds: Ints = (np.cumsum(cost) - cost) // self.limit
        return rounds


def _before(owner: Ints, blocks: Ints) -> Ints:
    """How many blocks of the same owner come before each run."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(blocks[order])
    first = np.searchsorted(owner[order], owner[order])
    begun = ends - blocks[order]
    before = np.empty(len(owner), np.int64)
    before[order] = begun - begun[first]
    return before
