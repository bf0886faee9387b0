# SPDX-License-Identifier: Apache-2.0
"""Boxes and values that several ranks hold without having declared it: are they equal?

The global plan says who shares what. Each rank digests what it shares, and folds the digests of
everything it shares with the same ranks into one, so that few bytes travel. Only where folded
digests differ are the digests themselves compared, to name what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from shardkeep.columns import Ints, narrow, pack, starts, unpack
from shardkeep.errors import PlanError
from shardkeep.hints import ranks_hint
from shardkeep.wording import faults_text, ranks_text

__all__ = ["Share", "Shared"]


@dataclass(frozen=True, eq=False)
class Shared:
    """Everything that must be compared, as the coordinator knows it; by rank, then by item."""

    rank: Ints
    """Who holds it."""
    item: Ints
    """What is held: rows of one item must be equal."""
    source: Ints
    """Number of the piece or value on its rank."""
    holders: Ints
    """A number for the set of ranks that hold the item."""
    first_value: int
    """Items from this one on are values, those before are boxes of tensors."""
    describe: Callable[[int], str]
    """Names an item."""
    in_full: npt.NDArray[np.bool_]
    """Whether every byte of it must be compared, whatever `check_replicas` says."""

    @classmethod
    def of(
        cls,
        rank: Ints,
        item: Ints,
        source: Ints,
        first_value: int,
        describe: Callable[[int], str],
        in_full: npt.NDArray[np.bool_] | None = None,
    ) -> Shared:
        """Sort the rows and find out who shares with whom."""
        if in_full is None:
            in_full = np.zeros(len(rank), np.bool_)
        distinct, which = np.unique(item, return_inverse=True)
        marks = np.random.default_rng(0).integers(1, 2**62, int(rank.max(initial=0)) + 1)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, which, marks[rank])
        holders = np.unique(sums, return_inverse=True)[1][which]
        order = np.lexsort((source, item, rank))
        return cls(
            rank[order],
            item[order],
            source[order],
            holders[order],
            first_value,
            describe,
            in_full[order],
        )

    def messages(self, world_size: int) -> list[bytes]:
        """What each rank must know; nothing at all where nobody shares anything."""
        if len(self.rank) == 0:
            return [b""] * world_size
        edges = np.searchsorted(self.rank, np.arange(world_size + 1))
        out = []
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            pieces = int(np.searchsorted(self.item[low:high], self.first_value))
            out.append(
                pack(
                    {
                        "pieces": narrow(self.source[low : low + pieces]),
                        "values": narrow(self.source[low + pieces : high]),
                        "holders": narrow(self.holders[low:high]),
                        "in_full": np.packbits(self.in_full[low : low + pieces]),
                    }
                )
            )
        return out

    def suspects(self, told: Sequence[bytes]) -> list[int]:
        """The sets of ranks whose folded digests are not all equal, or say too little.

        That is where one rank holds an item more than once: its fold cannot tell.
        """
        first: dict[int, bytes] = {}
        again = (self.rank[1:] == self.rank[:-1]) & (self.item[1:] == self.item[:-1])
        differ: set[int] = set(self.holders[1:][again].tolist())
        for message in told:
            for holders, digest in msgspec.msgpack.decode(message, type=list[tuple[int, bytes]]):
                if first.setdefault(holders, digest) != digest:
                    differ.add(holders)
        return sorted(differ)

    def check(self, suspects: Sequence[int], told: Sequence[bytes]) -> None:
        """Compare item by item what the suspected sets hold; `PlanError` names what differs."""
        rows = np.flatnonzero(np.isin(self.holders, suspects))
        digest = np.frombuffer(b"".join(told), "<u8").reshape(-1, 2)
        order = np.argsort(self.item[rows], kind="stable")
        rows, digest = rows[order], digest[order]
        item = self.item[rows]
        start = np.flatnonzero(np.diff(item, prepend=-1))
        first = np.repeat(start, np.diff(np.append(start, len(item))))
        bad = np.unique(item[(digest != digest[first]).any(axis=1)])
        holders = {one: set(self.rank[self.item == one].tolist()) for one in bad.tolist()}
        for what, advice, some in (
            (
                "a box is held twice on one rank, with different contents",
                "Give each box of a tensor once, or bring its copies together before saving.",
                [one for one, ranks in holders.items() if len(ranks) == 1],
            ),
            (
                "tensors under one name differ between ranks",
                "Parts of a model on different ranks (pipeline stages, experts) need different "
                "names. If each rank has its own, wrap it in shardkeep.PerRank; if they should be "
                "equal, bring them together before saving (or pass check_replicas='off').",
                [one for one in holders if one < self.first_value],
            ),
            (
                "values under one name differ between ranks",
                "If each rank has its own, wrap it in shardkeep.PerRank.",
                [one for one in holders if one >= self.first_value],
            ),
        ):
            if some:
                faults = [f"{self.describe(one)} on {ranks_text(holders[one])}" for one in some]
                raise PlanError(faults_text(what, faults, ranks_hint(faults, advice)))


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank must compare with others."""

    pieces: list[int]
    """Numbers of its pieces."""
    values: list[int]
    """Numbers of its values."""
    holders: Ints
    """The set of ranks that each is shared with: of the pieces, then of the values."""
    in_full: list[bool]
    """For each piece, whether to digest every byte of it."""

    @classmethod
    def decode(cls, message: bytes) -> Share:
        """One of `Shared.messages`."""
        part = unpack(message)
        holders = part["holders"].astype(np.int64)
        pieces = part["pieces"].tolist()
        in_full = np.unpackbits(part["in_full"], count=len(pieces)).astype(np.bool_)
        return cls(pieces, part["values"].tolist(), holders, in_full.tolist())

    def fold(self, digests: Sequence[bytes]) -> bytes:
        """One digest for each set of ranks."""
        order = np.argsort(self.holders, kind="stable")
        sets, counts = np.unique(self.holders, return_counts=True)
        every = _matrix(digests)[order]
        edges = starts(counts)
        folded = [
            (int(which), xxhash.xxh3_128_digest(every[low:high].tobytes()))
            for which, low, high in zip(sets, edges[:-1], edges[1:], strict=True)
        ]
        return msgspec.msgpack.encode(folded)

    def unfold(self, digests: Sequence[bytes], suspects: Sequence[int]) -> bytes:
        """The digests themselves of what is shared with these sets."""
        return _matrix(digests)[np.isin(self.holders, suspects)].tobytes()


def _matrix(digests: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
