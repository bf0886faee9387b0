# SPDX-License-Identifier: Apache-2.0
"""What is done behind a run: each tier is kept as its policy says, steps flow to the durable one.

All of it on the coordinator. Nothing leaves the fast tier that the durable one is to have and has
not; nothing leaves the durable one before something of this run is known to be whole there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from shardkeep.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from shardkeep.manager.copier import Copier
from shardkeep.manager.keeping import KeepPolicy
from shardkeep.manager.removal import refuse_replacing
from shardkeep.manager.retention import Retention
from shardkeep.manager.steps import DamagedStep, Step
from shardkeep.manager.tiers import FastTier, Tier, Tiers
from shardkeep.manager.wanted import joined, uncopied, wanted
from shardkeep.stores.local import storage_errors

__all__ = ["Upkeep"]

FAST_STALE_S = 120.0
"""The age at which a save without a sign of life is taken for dead in the fast tier, four times
what it is silent: there is little room there, and only one job saves."""
FIRST_LOOK_S = 0.02
LAST_LOOK_S = 1.0
UNREAD_LOOKS = 5
"""In a row at a step that cannot be read, before whoever waits for its copy is told."""


class _Look(NamedTuple):
    """What was seen of both tiers."""

    wanted: list[Step]
    """What the durable root is to have."""
    durable: list[Step]
    """What it has."""
    unread: list[DamagedStep]
    """What the fast tier has and could not be read just now, which says nothing of its bytes."""


def _unread_error(unread: Sequence[DamagedStep]) -> StorageError:
    texts = "; ".join(bad.problem for bad in unread)
    return StorageError(f"whether it is copied is not known: {texts}", transient=True)


class Upkeep:
    """The retention of each tier, and the copier between them if there are two."""

    def __init__(
        self,
        tiers: Tiers,
        keep: KeepPolicy | None,
        fast: FastTier | None,
        *,
        stale_s: float,
        leads: bool,
        spared: Callable[[], Collection[int]],
        busy: Callable[[], Collection[int]],
        moving: contextlib.AbstractContextManager[Any],
    ) -> None:
        """`spared`, `busy` and `moving` are as `Retention` has them; only who `leads` acts."""
        self._tiers = tiers
        self._keep = keep
        self._fast = fast
        self._leads = leads
        self._spared = spared
        self._busy = busy
        self._damaged: dict[str, set[str]] = {tier.catalog.root: set() for tier in tiers.all}
        """Save ids of steps that were found damaged, by where: they hold nobody's place."""
        self._line: dict[str, int] = {}
        """What this run stood at, one after the other: save ids, and steps."""
        self._safe: set[str] = set()
        """Save ids of what it has copied to the durable root, saved or restored there."""
        self._last: tuple[str, int] | None = None
        """The save id and the step of what it saved last, where it is to be copied from here."""
        self._noting = threading.Lock()

        def retention(
            tier: Tier, policy: KeepPolicy | None, rule: Callable[[], set[int]]
        ) -> Retention:
            return Retention(
                tier.catalog,
                tier.pins,
                policy,
                stale_s=min(stale_s, FAST_STALE_S) if tier is tiers.fast else stale_s,
                spared=rule,
                damaged=partial(self._damaged_in, tier),
                busy=busy,
                moving=moving,
                may_remove=lambda: bool(self._line if tier is tiers.fast else self._safe),
            )

        self.retention = retention(tiers.durable, keep, self._spared_durable)
        self._retentions = [self.retention]
        self.copier: Copier | None = None
        if fast is not None:
            assert tiers.fast is not None
            self._retentions.append(retention(tiers.fast, fast.policy, self._spared_fast))
            self.copier = Copier(tiers, fast, self._ready, self._counts, moving, self._was_copied)

    # --- what the run tells

    def begin(self) -> None:
        """The program trains: what was left uncopied before is copied, without a save, and what a
        killed job left takes no room any more when there is one."""
        if self._leads and self.copier is not None and not self.copier.is_begun:
            self.poke()

    def poke(self) -> None:
        """Do soon what is to be done; returns at once."""
        if self._leads:
            for retention in self._retentions:
                retention.poke()
            if self.copier is not None:
                self.copier.poke()

    def saved(self, step: int, save_id: str, durable: bool = False) -> None:
        """A step was committed, in the first tier or in the durable one; the run would go on from
        there."""
        with self._noting:
            self._line[save_id] = step
            self._last = (save_id, step) if self._leads else None
            if durable or self.copier is None:
                self._safe.add(save_id)
            # What lies before the last one that is safe is of no interest any more.
            line = list(self._line.items())
            first = max((at for at, (each, _) in enumerate(line) if each in self._safe), default=0)
            self._line = dict(line[first:])
            self._safe &= self._line.keys()
        self.poke()

    def restored(self, step: int, save_id: str, path: str, damaged: Iterable[DamagedStep]) -> None:
        """The run stands at a step, and others were found damaged on the way there."""
        is_safe = self._tiers.of(path) is self._tiers.durable
        with self._noting:
            self._line, self._last = {save_id: step}, None
            self._safe = {save_id} if is_safe else set()
        for bad in damaged:
            tier = self._tiers.of(bad.path)
            known = tier.catalog.find(bad.step)
            if isinstance(known, Step):
                self._damaged[tier.catalog.root].add(known.save_id)

    def _was_copied(self, step: Step) -> None:
        with self._noting:
            self._safe.add(step.save_id)
        for retention in self._retentions:
            retention.poke()

    def deleted(self, step: int) -> None:
        """A step was removed because somebody wanted it to be."""
        with self._noting:
            if self._last is not None and self._last[1] == step:
                self._last = None

    def _miss_nothing(self) -> None:
        """Raise if the step that this program saved last is gone, and was never copied."""
        with self._noting:
            last, safe = self._last, set(self._safe)
        if last is None or last[0] in safe or last[1] in self._busy():
            return
        save_id, step = last
        if all(found.save_id != save_id for found in self._tiers.look().steps):
            roots = [tier.catalog.root for tier in self._tiers.all]
            raise StorageError(
                f"step {step} was saved in {roots[0]}, and is in neither that folder nor "
                f"{roots[-1]} any more: somebody removed it before it was copied. Save again, "
                "while the state is there"
            )

    # --- what follows from it

    def _damaged_in(self, tier: Tier) -> set[str]:
        found = self._damaged[tier.catalog.root]
        if tier is self._tiers.fast and self.copier is not None:
            found = found | self.copier.damaged
        return found

    def _look_at_both(self) -> _Look:
        """Both tiers, the fast one first."""
        fast = self._tiers.first
        pinned = fast.pins.held()
        listed, durable = self._tiers.look_at_each()
        ready = self._sound(fast, listed.steps)
        held = {
            step.step
            for step in ready
            if any(pin.forever for pin in pinned.get(self._tiers.names.of(step.step), ()))
        }
        steps = joined(ready, self._sound(self._tiers.durable, durable.steps))
        chosen = wanted(steps, self._keep, time.time(), {*self._spared(), *held})
        unread = [bad for bad in listed.damaged if bad.kind == StorageError.__name__]
        return _Look(chosen, list(durable.steps), unread)

    def _sound(self, tier: Tier, steps: Iterable[Step]) -> list[Step]:
        damaged = self._damaged_in(tier)
        return [step for step in steps if step.save_id not in damaged]

    def waiting(self) -> list[Step]:
        """What is to be copied, the newest first, as far as it can be read."""
        return self._uncopied()[0]

    def _uncopied(self) -> tuple[list[Step], list[DamagedStep]]:
        """What is to be copied, the newest first; and what may have to be, as it is newer than all
        that the durable root has, or of this run, and could not be read just now."""
        if self.copier is None:
            return [], []
        look = self._look_at_both()
        with self._noting:
            unsafe = {step for save_id, step in self._line.items() if save_id not in self._safe}
        newest = max((step.step for step in look.durable), default=-1)
        unread = [bad for bad in look.unread if bad.step > newest or bad.step in unsafe]
        return uncopied(look.wanted, look.durable), unread

    def _ready(self) -> list[Step]:
        """What is to be copied and is not being saved again just now."""
        for _ in range(UNREAD_LOOKS):
            busy = self._busy()
            waiting, unread = self._uncopied()
            ready = [step for step in waiting if step.step not in busy]
            if ready or not unread:
                return ready
            time.sleep(FIRST_LOOK_S)
        raise _unread_error(unread)

    def _counts(self, step: Step) -> bool:
        """Whether a save in the fast tier is there now, and the durable one has no later one."""
        if step.step in self._busy():
            return False  # it is being saved again, maybe right where the copy would go
        durable = self._tiers.durable
        there = durable.catalog.find(step.step)
        others = self._sound(durable, [there] if isinstance(there, Step) else [])
        return self._tiers.first.has(step) and joined([step], others)[0].save_id == step.save_id

    def _spared_fast(self) -> set[int]:
        """What is to be copied, is being copied, or has no other copy that is known to be sound."""
        assert self.copier is not None
        look = self._look_at_both()
        if look.durable:
            self._sync_durable()
        current = self.copier.current
        copying = set() if current is None else {current.step}
        left = uncopied(look.wanted, self._sound(self._tiers.durable, look.durable))
        unread = {bad.step for bad in look.unread}
        return {*self._spared(), *copying, *unread, *(step.step for step in left)}

    def _spared_durable(self) -> set[int]:
        if self.copier is None:
            return set(self._spared())
        # Until what was saved last is copied, the run would go on from what was copied last.
        with self._noting:
            last = [step for save_id, step in self._line.items() if save_id in self._safe][-1:]
        return {*self._spared(), *last, *(step.step for step in self._look_at_both().wanted)}

    # --- what the run asks

    def before_save(
        self, step: int, replace: bool, durable: bool, advance: Callable[[int], None]
    ) -> None:
        """On the coordinator, before a step is saved: may it be, and is there room?

        Raises what went wrong with copies, and waits while too many are still to be made.
        """
        for tier in self._tiers.all:
            tier.catalog.refuse_checkpoint()
            refuse_replacing(tier.catalog, tier.pins, step, replace=replace)
        if self.copier is None:
            return
        # The save itself looks where it goes to.
        other = (self._tiers.first if durable else self._tiers.durable).catalog
        if not replace and other.find(step) is not None:
            raise CheckpointExistsError(
                f"{other.path(step)} already holds a checkpoint; choose another step or pass "
                "overwrite=True"
            )
        if durable:
            return  # needs nothing of the fast tier; it may be the last thing there is time for
        self._tiers.bind()
        self.copier.raise_unseen()
        moved, pause = -1, FIRST_LOOK_S
        while self._is_crowded():
            failure = self.copier.failure()
            if failure is not None:
                raise failure
            self.copier.poke()
            if self.copier.moved != moved:
                moved = self.copier.moved
                advance(1)  # the others must not give this rank up
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_S)

    def _is_crowded(self) -> bool:
        assert self._fast is not None
        most = self._fast.most_waiting
        return len(self._tiers.first.catalog.look().steps) > most and len(self.waiting()) > most

    def wait_copied(
        self,
        step: int | None,
        timeout: float | None,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> bool:
        """Until a step, or all that are to be, are at the durable root; whether that is so.

        On the coordinator: only there is it known what went wrong, and that nothing copies any
        more. `advance` tells those who wait for its word that it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause, looks = FIRST_LOOK_S, 0
        while True:
            waiting, unread = self._uncopied()
            unread = [bad for bad in unread if step in (None, bad.step)]
            looks = looks + 1 if unread else 0
            if self.copier is not None:
                # Now, not before: what was found damaged meanwhile is not waited for any more.
                self.copier.raise_unseen()
                if waiting and self.copier.is_begun:
                    # Somebody took them from the durable root, or there was no thread to be had.
                    self.copier.poke()
            if looks == UNREAD_LOOKS:
                raise _unread_error(unread)
            if step is None and not waiting and not unread:
                self._miss_nothing()
                self._sync_durable()
                return True
            if step is not None and not unread and all(each.step != step for each in waiting):
                return self._is_durable(step)
            left = pause if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            advance(1)
            pause = min(2 * pause, LAST_LOOK_S)

    def _is_durable(self, step: int) -> bool:
        durable = self._tiers.durable.catalog
        found = next((each for each in self._tiers.look().steps if each.step == step), None)
        if found is None:
            raise CheckpointNotFoundError(f"no step {step} in {self._tiers.text}")
        if durable.path(step) not in found.copies:
            return False
        self._sync_durable()
        return True

    def _sync_durable(self) -> None:
        """A copy that is seen may not be durable yet: whoever gave it its name may be dead, or at
        it still."""
        if self._tiers.fast is None:
            return
        durable, fast = self._tiers.durable.catalog, self._tiers.first.catalog
        # Those that are in both: a copy may have replaced another save, in the step's own folder.
        names = [self._tiers.names.of(step.step) for step in fast.look().steps]
        with storage_errors(f"syncing {durable.root}"):
            for name in (*names, ""):
                with contextlib.suppress(FileNotFoundError):
                    durable.store.sync_directory(name)

    def wait_retention(self, timeout: float | None) -> bool:
        """Until the passes that were asked for are done; whether that is so."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            each.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for each in self._retentions
        )

    def close(self) -> None:
        """Copy what is left, then remove what is to be removed after it."""
        try:
            if self.copier is not None:
                self.copier.close()
                self._miss_nothing()
        finally:
            for retention in self._retentions:
                retention.close()
