# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager`: the one object that a training loop talks to."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from shardkeep.background import OnOverlap, SnapshotKind, WriterKind
from shardkeep.checkpointer import Checkpointer
from shardkeep.closing import Closing
from shardkeep.default_planner import CheckReplicas
from shardkeep.errors import CheckpointError, StorageError
from shardkeep.formats.native.commit import STALE_S
from shardkeep.formats.native.record import checked_user_metadata
from shardkeep.handles import SaveHandle
from shardkeep.manager.checking import checked_place, checked_step, is_number
from shardkeep.manager.deciding import Decider
from shardkeep.manager.folder import RunFolder
from shardkeep.manager.keeping import KeepWhat, keep_policy
from shardkeep.manager.naming import DEFAULT_NAME, StepNames
from shardkeep.manager.pins import STALE_S as PIN_STALE_S
from shardkeep.manager.restoring import LoadOptions, Restored, restore
from shardkeep.manager.steps import user_metadata_of
from shardkeep.manager.tiers import FastTier, Tiers
from shardkeep.manager.timing import SaveWhen, save_policy
from shardkeep.manager.upkeep import Upkeep
from shardkeep.planner import SavePlanner
from shardkeep.progress import Progress
from shardkeep.saving import SaveResult
from shardkeep.storage import CheckpointId

__all__ = ["CheckpointManager", "SaveOptions"]

log = logging.getLogger("shardkeep")


class SaveOptions(TypedDict, total=False):
    """What `shardkeep.save` takes besides the state, the place, and what the manager decides."""

    planner: SavePlanner | None
    base: CheckpointId | None
    allow_pickle: bool
    check_replicas: CheckReplicas
    memory_budget: int | None
    progress: Progress


class CheckpointManager(RunFolder, Closing):
    """The steps of one run in one folder: saved when it is time, kept as long as asked for, found
    again after a crash. Closable, and a context manager.

    `save`, `async_save`, `should_save`, `should_stop`, `restore`, `delete`, `wait_copied`,
    `wait_for` and `watch` are collective over the process group. `steps`, `latest` and `best` look
    at the directory, on any rank. One job at a time saves into a folder; any number read it. With a
    fast tier, steps are saved there and copied to the folder behind the program.
    """

    def __init__(
        self,
        root: CheckpointId,
        *,
        save: SaveWhen = None,
        keep: KeepWhat = None,
        fast: FastTier | CheckpointId | None = None,
        step_name: str = DEFAULT_NAME,
        full_every: int | None = None,
        fall_back: bool = True,
        ask_every: int = 1,
        stale_s: float = STALE_S,
        pin_stale_s: float = PIN_STALE_S,
        checkpointer: Checkpointer | None = None,
        process_group: object = None,
        no_dist: bool = False,
        writer: WriterKind = "thread",
        memory_budget: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Nothing is touched yet; the folder need not exist.

        `save` says when `should_save` is true: a policy, or a number of steps. `keep` says what
        stays: a policy, or how many of the last steps; None keeps all. `fast` is a folder on faster
        storage where steps are saved first, see `FastTier`. With `full_every`, a save
        uses again what did not change since the one before (`base=` of `shardkeep.save`), but for
        one in so many, and the first of this manager, which write all. `fall_back` has `restore`
        pass over damaged steps. `ask_every` has all ranks asked only every so many steps, where a
        policy needs it. `stale_s` is the age at which a save without a sign of life is taken for
        dead, and its leftovers removed; `pin_stale_s` the same for a reader and its pin. A
        `checkpointer` that is given is not closed.
        """
        are_numbers = is_number(stale_s) and is_number(pin_stale_s)
        if not are_numbers or not stale_s >= 0 or not pin_stale_s > 0:
            raise ValueError(f"stale_s is {stale_s!r}, pin_stale_s is {pin_stale_s!r}; use seconds")
        if full_every is not None and (type(full_every) is not int or full_every < 1):
            raise ValueError(f"full_every is {full_every!r}; use a number of saves, or None")
        when = save_policy(save)
        first = FastTier(fast) if isinstance(fast, (str, os.PathLike)) else fast
        # Where they are now: a fork begins anew with them, and may be in another directory.
        root = os.path.abspath(checked_place(root, "the root of a run"))
        if isinstance(first, FastTier):
            first = replace(first, path=os.path.abspath(first.path))
        names = StepNames(step_name)
        self._owned = checkpointer is None
        keeper = checkpointer or Checkpointer(
            process_group=process_group,
            no_dist=no_dist,
            writer=writer,
            memory_budget=memory_budget,
            timeout_s=timeout_s,
        )
        keeps = keep_policy(keep)

        def begin() -> Upkeep:
            tiers = Tiers(root, first, names, pin_stale_s)
            super(CheckpointManager, self).__init__(tiers, keeper, keeps, stale_s)
            return Upkeep(
                tiers,
                keeps,
                first,
                stale_s=stale_s,
                leads=keeper.coordinator.rank == 0,
                spared=self._spared,
                busy=self._busy.copy,
                moving=self._moving,
            )

        self._begin = begin
        self._begin_here()
        self._fall_back = fall_back
        self._full_every = full_every
        self._is_leader = keeper.coordinator.rank == 0
        self._decider = Decider(keeper, when, self._is_busy, ask_every)
        self._reached: int | None = None
        """The step this run stands at, once it was restored or has saved."""
        self._kept: int | None = None
        """The step that this run would go on from: saved, or restored."""
        self._restored = False
        self._may_hide = True
        """Whether steps that this run did not restore may be newer than all that it saves."""
        self._closed = False

    def _begin_here(self) -> None:
        """What threads and locks belong to, for this process."""
        self._process = os.getpid()
        self._upkeep = self._begin()
        self._retention = self._upkeep.retention
        self._deleted = self._upkeep.deleted
        self._bases: list[int] = []
        """Steps that were saved one on the other, of which the first is whole."""
        self._handle: SaveHandle | None = None
        self._begun: tuple[SaveHandle, int | None] | None = None
        """A save in the background, and what the run stood at before."""

    def _follow_fork(self) -> None:
        """A fork has none of the threads that copy and remove, and may have a lock that one of them
        held; it begins with its own."""
        if self._process != os.getpid():
            self._begin_here()

    # --- saving

    def should_save(self, step: int) -> bool:
        """Whether it is time, by the policy; the same on all ranks. To be asked after every step.

        Never twice for one step: once it was saved, the answer is no.
        """
        self._follow_fork()
        self._upkeep.begin()
        return self._decider.should_save(step)

    def should_stop(self) -> bool:
        """Whether any rank was told to stop (`shardkeep.catch_preemption`); the same on all ranks.

        To be asked after `should_save`. Where that has asked all ranks anyway, as with
        `OnPreemption`, this asks nobody; else it does, and is to be called by all.
        """
        return self._decider.should_stop()

    def save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool | None = None,
        durable: bool = False,
        **options: Unpack[SaveOptions],
    ) -> SaveResult:
        """Save a step; returns once it is committed, in the fast tier if there is one.

        `metrics` are numbers and `metadata` is what JSON has; both are kept with the step, and
        those of rank 0 count. A step that exists is an error, unless the run went back: after
        `restore`, what lies beyond the step that was restored, or saved last, is replaced.
        `durable` leaves the fast tier out: it is saved where it would be copied to.
        """
        self._follow_fork()
        durable = durable and self._tiers.fast is not None
        step, path, replace, user = self._prepare(step, metrics, metadata, overwrite, durable)
        if self._add_base(options, durable) and self._handle is not None:
            self._handle.wait_ended()  # what it saves is the base, once it is committed
        self._hold(step)
        try:
            done = self._keeper.save(state, path, overwrite=replace, user_metadata=user, **options)
        except BaseException:
            self._let_go(step)
            raise
        self._busy.discard(step)
        self._note_base(step, durable)
        self._decider.saved(step)
        self._begun = None
        self._reached = self._kept = step
        self._upkeep.saved(step, done.save_id, durable)
        return done

    def async_save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool | None = None,
        durable: bool = False,
        snapshot: SnapshotKind = "eager",
        on_overlap: OnOverlap = "wait",
        **options: Unpack[SaveOptions],
    ) -> SaveHandle:
        """Save a step in the background; see `save` and `shardkeep.async_save`."""
        self._follow_fork()
        durable = durable and self._tiers.fast is not None
        step, path, replace, user = self._prepare(step, metrics, metadata, overwrite, durable)
        self._add_base(options, durable)
        self._hold(step)
        try:
            handle = self._keeper.async_save(
                state,
                path,
                overwrite=replace,
                user_metadata=user,
                snapshot=snapshot,
                on_overlap=on_overlap,
                **options,
            )
        except BaseException:
            self._let_go(step)
            raise
        if handle.skipped:
            self._let_go(step)
            return handle
        self._look_back()  # the one before has ended, on all ranks
        self._handle = handle
        self._note_base(step, durable)
        self._decider.saved(step)
        self._begun = handle, self._reached
        self._reached = step
        handle.add_done_callback(lambda done: self._ended(step, handle, durable))
        return handle

    def _prepare(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool | None,
        durable: bool,
    ) -> tuple[int, str, bool, dict[str, Any]]:
        """Its number, where it goes, whether it replaces what is there, what is told beside it; or
        one error for all ranks, before any of them begins."""
        made: list[tuple[int, str, bool, dict[str, Any]]] = []

        def look() -> None:
            if self._closed:
                raise ValueError(f"the manager of {self.root} was closed")
            number = checked_step(step)
            path = (self._tiers.durable if durable else self._tiers.first).catalog.path(number)
            self._look_back(number)
            saved_at = time.time()
            if self._is_leader:
                saved_at = self._tiers.later_than(number, saved_at)
            user = user_metadata_of(number, saved_at, metrics, metadata)
            replace = overwrite
            if replace is None:
                # Who has not looked what is there does not know whose it is.
                replace = self._restored and self._reached is not None and number > self._reached
            if self._is_leader:
                self._upkeep.before_save(number, replace, durable, group.advance)
                self._warn_of_newer(number)
                self._warn_unranked(number, metrics)
            made.append((number, path, replace, checked_user_metadata(user)))

        group = self._keeper.coordinator
        try:
            group.agree("begin a step", look)
        except CheckpointError:
            self._bases = []  # a copy may have found the last of them damaged
            raise
        return made[0]

    def _look_back(self, step: int | None = None) -> None:
        """Where the save before has failed, the run stands where it stood."""
        if self._begun is None:
            return
        handle, before = self._begun
        if step is not None and self._reached is not None and step <= self._reached:
            handle.wait_ended()  # what becomes of this step depends on it, on all ranks alike
        if not handle.done():
            return
        self._begun = None
        if handle.cancelled() or Future.exception(handle) is not None:
            self._reached = before

    def _hold(self, step: int) -> None:
        with self._moving:
            self._busy.add(step)
        # What a killed job left is cleaned while this one saves; but not under its hands.
        self._upkeep.poke()

    def _let_go(self, step: int) -> None:
        """Nothing came of it: what was there before is to be kept and copied as ever."""
        self._busy.discard(step)
        self._upkeep.poke()

    def _add_base(self, options: SaveOptions, durable: bool) -> bool:
        """The step before, which all ranks have begun, if any; where it failed, all is written."""
        if self._full_every is None or "base" in options or durable:
            return False
        if len(self._bases) >= self._full_every:
            self._bases.clear()
        if self._bases:
            options["base"] = self._catalog.path(self._bases[-1])
        return bool(self._bases)

    def _note_base(self, step: int, durable: bool) -> None:
        """Files are shared within a tier."""
        self._bases = [] if durable else [*self._bases, step]

    def _ended(self, step: int, handle: SaveHandle, durable: bool) -> None:
        """On the thread of the save."""
        # The handle's own `exception` would count as somebody having looked.
        if handle.cancelled() or Future.exception(handle) is not None:
            self._let_go(step)
            return
        self._busy.discard(step)
        self._kept = step
        self._upkeep.saved(step, Future.result(handle).save_id, durable)

    def _is_busy(self) -> bool:
        return self._handle is not None and not self._handle.done()

    def _spared(self) -> set[int]:
        """What this run would be resumed from, also where newer steps of an abandoned one lie."""
        return {step for step in (self._kept, self._reached) if step is not None}

    # --- loading

    def restore(
        self,
        state: object,
        step: int | None = None,
        *,
        fall_back: bool | None = None,
        drop_newer: bool = False,
        **options: Unpack[LoadOptions],
    ) -> Restored | None:
        """Fill a state from the newest whole step, or from a given one; None if there is none yet.

        The same step on every rank, checked as it is loaded. A damaged one is logged, named in the
        result, and passed over, unless `fall_back` is false or the step was asked for by number. If
        steps are there and none is whole, that is a `CorruptionError`. `drop_newer` removes the
        steps beyond the one restored, so that a restart does not return to them; pinned ones, and
        those that were passed over, stay. A save in the background is waited for.
        """
        self._follow_fork()
        if self._handle is not None:
            self._handle.wait_ended()  # it reads what would be loaded into, may become the newest
        falls = (self._fall_back if fall_back is None else fall_back) and step is None
        self._agree_on("restores", step, fall_back=falls, drop_newer=drop_newer)
        step = None if step is None else checked_step(step)
        bases, self._bases = self._bases, []  # until it is known that none is damaged
        found = restore(
            state,
            step,
            self._tiers,
            self._keeper,
            fall_back=falls,
            options=options,
        )
        self._restored = True
        self._begun = None
        if found is None:
            self._reached = -1
            return None
        if not found.damaged:
            self._bases = bases
        with self._moving:
            self._reached = self._kept = found.step
        self._decider.restored(found.step)
        self._upkeep.restored(found.step, found.save_id, found.path, found.damaged)
        self._may_hide = step is not None
        if drop_newer:
            passed = {bad.step for bad in found.damaged} | set(found.hidden)
            self._keeper.coordinator.lead(
                "drop newer steps", lambda: self._drop_newer(found.step, passed)
            )
        return found

    def _warn_of_newer(self, step: int) -> None:
        """Once, when a run that went back, or never looked what was there, saves for the first
        time."""
        may_hide, self._may_hide = self._may_hide, False
        with contextlib.suppress(StorageError):  # the save meets it too, if it lasts
            if may_hide:
                self._tell_of_newer(step if self._reached is None else self._reached)

    def wait_retention(self, timeout: float | None = None) -> bool:
        """Until the passes over old steps that were asked for are done; whether that is so."""
        self._follow_fork()
        return self._upkeep.wait_retention(timeout)

    def wait_copied(self, step: int | None = None, timeout: float | None = None) -> bool:
        """Until a step is at the durable root, or all that its policy wants there; whether it is.

        False at once for a step that is not to be copied, as newer ones have taken its place. What
        went wrong with a copy is raised, on all ranks. Copies are made by a program that saves,
        from its first `should_save` or `save` on. The `timeout` of rank 0 counts.
        """
        self._follow_fork()
        self._agree_on("copies", step)
        step = None if step is None else checked_step(step)
        group = self._keeper.coordinator

        def lead() -> bytes:
            return bytes([self._upkeep.wait_copied(step, timeout, group.advance)])

        return group.lead("wait for copies", lead) == b"\1"

    # --- the end

    def close(self) -> None:
        """Wait for the save in the background and for copies, and remove what is to be removed.

        An error of theirs which nobody has looked at is raised.
        """
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid():
            return  # nothing was saved in this fork, and what its parent has begun is its parent's
        with contextlib.ExitStack() as last:
            last.callback(self._upkeep.close)
            if self._handle is not None and not self._owned:
                self._handle.wait_ended()
            if self._owned:
                self._keeper.close()
