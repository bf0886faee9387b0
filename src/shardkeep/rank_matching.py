# SPDX-License-Identifier: Apache-2.0
"""What of a target is per rank, matched with what ranks have saved there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardkeep.placing import package_of
from shardkeep.restoring import Restoring, SavedRanks, find_saved_ranks
from shardkeep.structure import dotted

if TYPE_CHECKING:
    from shardkeep.metadata import Metadata
    from shardkeep.per_rank import PerRank
    from shardkeep.planner import Place
    from shardkeep.tree import FlatState

__all__ = ["RankMatch", "match_per_rank"]

_Says = Callable[[str], bool]


@dataclass
class RankMatch:
    """How the per-rank parts of a target are to be filled."""

    restoring: Restoring
    """Those that are taken as they were stored."""
    settled: set[int] = field(default_factory=set)
    """Leaves of the target of which all is said here; others go by their names."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """What cannot be filled, and why."""
    missing: set[str] = field(default_factory=set)
    """What should be stored, and is not."""
    whole: set[tuple[int, int]] = field(default_factory=set)
    """Stored leaves that are taken."""
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What is left as it is in the target, and the stored leaves there."""


def match_per_rank(
    flat: FlatState,
    metadata: Metadata,
    place: Place,
    is_asked: _Says,
    is_optional: _Says,
    allow_pickle: bool,
) -> RankMatch:
    """Which per-rank parts of a target are restored as stored, kept, or refused."""
    match = RankMatch(Restoring(metadata, place, allow_pickle))
    structure, whole = metadata.planner_data, flat.whole or {}
    if structure is None or (structure is flat.structure and not whole):
        return match
    here = find_saved_ranks(flat.structure.root)
    there = find_saved_ranks(structure.root) if here else {}
    matching = _Matching(match, flat, metadata, place, is_asked, is_optional)
    for identity, mine in here.items():
        first = mine.span[0]
        if first in whole and whole[first] == mine.path:
            matching.restore(first, mine, there.get(identity))
        elif identity in there and there[identity].world_size != place.world_size:
            matching.keep_or_refuse(mine, there[identity])
    for number in whole.keys() - match.settled:
        match.settled.add(number)
        match.mismatched[dotted(whole[number])] = (
            "is a PerRank with resize within another PerRank; take one of them away"
        )
    return match


@dataclass(frozen=True)
class _Matching:
    match: RankMatch
    flat: FlatState
    metadata: Metadata
    place: Place
    is_asked: _Says
    is_optional: _Says

    def restore(self, number: int, mine: SavedRanks, saved: SavedRanks | None) -> None:
        """A `PerRank` with `resize`: this rank's own, or all of them."""
        match, place, name = self.match, self.place, dotted(mine.path)
        own = self.flat.structure.names[number]
        match.settled.add(number)
        which = [] if saved is None else list(range(len(saved.ranks)))
        if saved is not None and saved.world_size == place.world_size:
            which = [at for at in which if saved.ranks[at] == place.rank]
        if not any(map(self.is_asked, [own, *self._names(saved, which)])):
            return
        if self.metadata.state_dict_metadata.keys() & {name, own} and saved is None:
            match.mismatched[name] = "the target is a PerRank, but it was not saved per rank"
        elif saved is None or not which:
            match.missing.add(own)
        else:
            target = cast("PerRank[Any]", self.flat.values[number])
            fault = match.restoring.want(number, target, saved, self._package(target))
            if fault is not None:
                match.mismatched[name] = fault
            match.whole |= {
                (saved.leaves[at].start, saved.leaves[at].stop) for at in which if saved.leaves[at]
            }

    def keep_or_refuse(self, mine: SavedRanks, saved: SavedRanks) -> None:
        """A `PerRank` without: it is of no use on another number of ranks."""
        name, leaves = dotted(mine.path), range(*mine.span)
        inside = [self.flat.structure.names[leaf] for leaf in leaves]
        if not any(map(self.is_asked, [name, *inside])):
            return
        if self.is_optional(name) or (inside and all(map(self.is_optional, inside))):
            self.match.kept[name] = saved.span
            self.match.settled.update(leaves)
            return
        self.match.mismatched[name] = (
            f"saved per rank by {saved.world_size} ranks, loading on {self.place.world_size}; give "
            "the PerRank a resize= that says what each rank gets, leave it out with keys=..., keep "
            "what the target has with optional=..., or read it with shardkeep.open"
        )

    def _names(self, saved: SavedRanks | None, which: list[int]) -> list[str]:
        structure = self.metadata.planner_data
        if saved is None or structure is None:
            return []
        return [structure.names[leaf] for at in which for leaf in saved.leaves[at]]

    def _package(self, target: PerRank[Any]) -> str:
        """Arrays are made by the library that the target uses there, or else anywhere."""
        others = (
            value
            for value, adapter in zip(self.flat.values, self.flat.adapters, strict=True)
            if adapter is not None
        )
        found = (package for one in (target.value, *others) if (package := package_of(one)))
        return next(found, "numpy")
