# SPDX-License-Identifier: Apache-2.0
"""The folders that hold the steps of one run: a fast one before the durable one, or that alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardkeep.coordination import Coordinator
from shardkeep.errors import StorageError
from shardkeep.manager.belonging import bind, refuse_foreign, say_whose
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.checking import checked_place, is_number
from shardkeep.manager.keeping import KeepPolicy, KeepWhat, keep_policy
from shardkeep.manager.naming import StepNames
from shardkeep.manager.pins import Pin, Pins
from shardkeep.manager.steps import DamagedStep, Listing, Step
from shardkeep.manager.wanted import joined
from shardkeep.progress import Progress
from shardkeep.storage import CheckpointId

__all__ = ["FastTier", "Tier", "Tiers", "release_all"]

CLOSE_S = 600.0
LATER_S = 1e-3
"""Between two saves of one step, at least."""


@dataclass(frozen=True)
class FastTier:
    """Where steps are saved first, to be copied to the durable root behind the program.

    A RAM disk or a local NVMe for ranks of one host; for those of several, a folder that all of
    them see.
    """

    path: CheckpointId
    """The folder; it need not exist."""
    keep: KeepWhat = 1
    """What stays there, besides what is not copied yet: a policy, or how many of the last."""
    copy_rate: float | None = None
    """Bytes a second that are copied, at most."""
    most_waiting: int = 2
    """A save waits while more steps than that are still to be copied."""
    close_s: float = CLOSE_S
    """How long `close` waits for copies."""
    progress: Progress = None
    """Of each copy: `f(done, total)` in bytes, or True for a bar."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense, when it is written and not when it is needed."""
        keep_policy(self.keep)
        checked_place(self.path, "the path of a fast tier")
        if self.copy_rate is not None and (not is_number(self.copy_rate) or not self.copy_rate > 0):
            raise ValueError(f"copy_rate is {self.copy_rate!r}; use bytes a second, or None")
        if type(self.most_waiting) is not int or self.most_waiting < 0:
            raise ValueError(f"most_waiting is {self.most_waiting!r}; use a number of steps")
        if not is_number(self.close_s) or not self.close_s >= 0:
            raise ValueError(f"close_s is {self.close_s!r}; use seconds")
        if self.copy_rate is not None:  # it may be another library's number
            object.__setattr__(self, "copy_rate", float(self.copy_rate))

    @property
    def policy(self) -> KeepPolicy | None:
        """What `keep` means."""
        return keep_policy(self.keep)


@dataclass(frozen=True)
class Tier:
    """One folder."""

    catalog: Catalog
    """What is there."""
    pins: Pins
    """What of it is being read."""

    def has(self, step: Step) -> bool:
        """Whether the very save of a step is there now."""
        found = self.catalog.find(step.step)
        return isinstance(found, Step) and found.save_id == step.save_id


class Tiers:
    """All of them, the fastest first."""

    def __init__(
        self, root: CheckpointId, fast: FastTier | None, names: StepNames, pin_stale_s: float
    ) -> None:
        """Nothing is touched."""
        checked_place(root, "the root of a run")
        _check_fast(fast)
        places = [root] if fast is None else [fast.path, root]
        catalogs = [Catalog(place, names) for place in places]
        if len({os.path.realpath(catalog.root) for catalog in catalogs}) < len(catalogs):
            raise ValueError(f"the fast tier and the durable root are both {catalogs[0].root}")
        self.all = tuple(Tier(each, Pins(each.store, stale_s=pin_stale_s)) for each in catalogs)
        self.names = names
        self._is_ours = False
        """Whether the fast one is known to be of the same run."""
        self._word = ""
        """Of the run, once it saves."""

    @property
    def first(self) -> Tier:
        """Where steps are saved."""
        return self.all[0]

    @property
    def durable(self) -> Tier:
        """Where they are kept."""
        return self.all[-1]

    @property
    def fast(self) -> Tier | None:
        """Where they are saved first, if that is somewhere else."""
        return self.all[0] if len(self.all) > 1 else None

    @property
    def text(self) -> str:
        """Where, for people."""
        return " and ".join(tier.catalog.root for tier in self.all)

    def look(self) -> Listing:
        """What they hold together; of each step the save that counts, with all of its copies.

        The fast one first: a step that leaves it meanwhile is in the other already.
        """
        listings = self.look_at_each()
        if len(listings) == 1:
            return listings[0]
        steps = joined(*(listing.steps for listing in listings))
        damaged = [bad for listing in listings for bad in listing.damaged]
        return Listing(tuple(steps), tuple(sorted(damaged, key=lambda bad: bad.step)))

    def look_at_each(self) -> list[Listing]:
        """What each holds; an error if the fast one is of another run."""
        listings = [tier.catalog.look() for tier in self.all]
        if len(listings) > 1 and not self._is_ours and listings[0] != Listing():
            self._is_ours = refuse_foreign(*(tier.catalog.store for tier in self.all))
        return listings

    def bind(self) -> None:
        """Before a save: the fast tier is of this run, or empty and will be."""
        if self.fast is None:
            return
        if not self._word:
            self.look_at_each()
            self._word = bind(*(tier.catalog.store for tier in self.all))
            self._is_ours = True
        # A RAM disk may be cleared under the program, and then its word is gone too.
        say_whose(self.fast.catalog.store, self._word)

    def later_than(self, step: int, now: float) -> float:
        """When a step is saved, by the clock; or just after what is there of it: the clock may have
        gone back, and what counts is the later save."""
        there = [tier.catalog.find(step) for tier in self.all]
        return max([now, *(each.saved_at + LATER_S for each in there if isinstance(each, Step))])

    def of(self, path: str) -> Tier:
        """The one in which a step lies, by its path."""
        folder = os.path.dirname(path)
        for tier in self.all:
            if tier.catalog.root == folder:
                return tier
        raise StorageError(f"{path} lies in no folder that this rank's manager was given")

    def comes_before(self, bad: DamagedStep, chosen: Step) -> bool:
        """Whether one that cannot be read would have been chosen: a newer one, or a faster copy."""
        roots = [tier.catalog.root for tier in self.all]
        places = [roots.index(os.path.dirname(path)) for path in (bad.path, chosen.path)]
        return bad.step > chosen.step or (bad.step == chosen.step and places[0] < places[1])

    def pin(self, step: Step, why: str) -> tuple[Step | None, list[Pin]]:
        """Pin all copies of a step, and look whether they are still there.

        The step with those that are, or None if there is none; and the pins.
        """
        pins, there = [], []
        for path in step.copies:
            tier = self.of(path)
            pin = tier.pins.take(self.names.of(step.step), why)
            if tier.has(step):
                there.append(path)
                pins += [] if pin is None else [pin]
            elif pin is not None:
                pin.release()
        return (replace(step, path=there[0], copies=tuple(there)) if there else None), pins

    def seen_by_all(self, step: Step, coordinator: Coordinator) -> Step | None:
        """The step, with only those copies that every rank sees; None if there is none.

        Another host's RAM disk may have the same name, and other steps or none.
        """
        if step.copies == (self.durable.catalog.path(step.step),) or coordinator.world_size == 1:
            return step

        def look() -> bytes:
            return bytes(self.of(path).has(step) for path in step.copies)

        def decide(told: list[bytes]) -> list[bytes]:
            return [bytes(map(min, *told))] * len(told)

        seen = coordinator.gather_scatter("look for the copies", look, decide)
        there = tuple(path for path, by_all in zip(step.copies, seen, strict=True) if by_all)
        return replace(step, path=there[0], copies=there) if there else None


def _check_fast(given: object) -> None:
    if given is not None and not isinstance(given, FastTier):
        raise TypeError(f"fast is {given!r}; use text, a pathlib.Path or a FastTier")


def release_all(pins: Iterable[Pin]) -> None:
    """What they held may be removed again."""
    for pin in pins:
        pin.release()
