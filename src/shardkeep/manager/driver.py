# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager`: the one object that a training loop talks to."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from shardkeep.background import OnOverlap, SnapshotKind, WriterKind
from shardkeep.checkpointer import Checkpointer
from shardkeep.default_planner import CheckReplicas
from shardkeep.errors import CheckpointNotFoundError, StorageError
from shardkeep.formats.native.commit import STALE_S
from shardkeep.handles import SaveHandle
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.cleaning import Cleaned, clean
from shardkeep.manager.deciding import Decider
from shardkeep.manager.keeping import KeepWhat, best_step, find_best, keep_policy
from shardkeep.manager.naming import DEFAULT_NAME, StepNames
from shardkeep.manager.pins import STALE_S as PIN_STALE_S
from shardkeep.manager.pins import Pins
from shardkeep.manager.removal import remove_steps
from shardkeep.manager.restoring import LoadOptions, Restored, restore
from shardkeep.manager.retention import Retention
from shardkeep.manager.steps import Step, user_metadata_of
from shardkeep.manager.timing import SaveWhen, save_policy
from shardkeep.manager.waiting import PinnedStep, next_step
from shardkeep.planner import SavePlanner
from shardkeep.progress import Progress
from shardkeep.saving import SaveResult
from shardkeep.storage import CheckpointId

__all__ = ["CheckpointManager", "SaveOptions"]

log = logging.getLogger("shardkeep")

POLL_S = 5.0
"""The longest pause between two looks for a new step."""


class SaveOptions(TypedDict, total=False):
    """What `shardkeep.save` takes besides the state, the place, and what the manager decides."""

    planner: SavePlanner | None
    allow_pickle: bool
    check_replicas: CheckReplicas
    memory_budget: int | None
    progress: Progress


class CheckpointManager:
    """The steps of one run in one folder: saved when it is time, kept as long as asked for, found
    again after a crash. Closable, and a context manager.

    `save`, `async_save`, `should_save`, `should_stop`, `restore`, `delete`, `wait_for` and `watch`
    are collective over the process group. `steps`, `latest` and `best` look at the directory, on
    any rank. One job at a time saves into a folder; any number read it.
    """

    def __init__(
        self,
        root: CheckpointId,
        *,
        save: SaveWhen = None,
        keep: KeepWhat = None,
        step_name: str = DEFAULT_NAME,
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
        stays: a policy, or how many of the last steps; None keeps all. `fall_back` has `restore`
        pass over damaged steps. `ask_every` has all ranks asked only every so many steps, where a
        policy needs it. `stale_s` is the age at which a save without a sign of life is taken for
        dead, and its leftovers removed; `pin_stale_s` the same for a reader and its pin. A
        `checkpointer` that is given is not closed.
        """
        if not stale_s >= 0 or not pin_stale_s > 0:
            raise ValueError(f"stale_s is {stale_s!r}, pin_stale_s is {pin_stale_s!r}; use seconds")
        self._save_policy = save_policy(save)
        self._keep_policy = keep_policy(keep)
        self._catalog = Catalog(root, StepNames(step_name))
        self._fall_back = fall_back
        self._owned = checkpointer is None
        self._keeper = checkpointer or Checkpointer(
            process_group=process_group,
            no_dist=no_dist,
            writer=writer,
            memory_budget=memory_budget,
            timeout_s=timeout_s,
        )
        self._is_leader = self._keeper.coordinator.rank == 0
        self._pins = Pins(self._catalog.store, stale_s=pin_stale_s)
        self._decider = Decider(self._keeper, self._save_policy, self._is_busy, ask_every)
        self._retention = Retention(
            self._catalog,
            self._pins,
            self._keep_policy,
            stale_s=stale_s,
            spared=self._spared,
            damaged=lambda: self._damaged,
            busy=self._running,
        )
        self._reached: int | None = None
        """The step this run stands at, once it was restored or has saved."""
        self._busy: set[int] = set()
        """Steps that are being saved."""
        self._handle: SaveHandle | None = None
        self._damaged: set[str] = set()
        """Save ids of steps that a restore found damaged: they hold nobody's place."""
        self._kept: int | None = None
        """The newest step that this manager saved."""
        self._rewound = False
        """Whether a step was restored by its number, and newer ones may be there."""
        self._stale_s = stale_s
        self._closed = False

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return self._catalog.root

    @property
    def checkpointer(self) -> Checkpointer:
        """What it saves and loads with."""
        return self._keeper

    # --- saving

    def should_save(self, step: int) -> bool:
        """Whether it is time, by the policy; the same on all ranks. To be asked after every step.

        Never twice for one step: once it was saved, the answer is no.
        """
        return self._decider.should_save(step)

    def should_stop(self) -> bool:
        """Whether any rank was told to stop (`shardkeep.catch_preemption`); the same on all ranks.

        To be asked after `should_save`. Where that has asked all ranks anyway, as with
        `OnPreemption`, this asks nobody.
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
        **options: Unpack[SaveOptions],
    ) -> SaveResult:
        """Save a step; returns once it is committed and durable.

        `metrics` are numbers and `metadata` is what JSON has; both are kept with the step, and
        those of rank 0 count. A step that exists is an error, unless the run went back: what lies
        beyond the step that was restored, or saved last, is replaced.
        """
        path, replace, user = self._prepare(step, metrics, metadata, overwrite)
        self._busy.add(step)
        try:
            done = self._keeper.save(state, path, overwrite=replace, user_metadata=user, **options)
        finally:
            self._busy.discard(step)
        self._saved(step)
        return done

    def async_save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool | None = None,
        snapshot: SnapshotKind = "eager",
        on_overlap: OnOverlap = "wait",
        **options: Unpack[SaveOptions],
    ) -> SaveHandle:
        """Save a step in the background; see `save` and `shardkeep.async_save`."""
        path, replace, user = self._prepare(step, metrics, metadata, overwrite)
        self._busy.add(step)
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
            self._busy.discard(step)
            raise
        if handle.skipped:
            self._busy.discard(step)
            return handle
        self._handle = handle
        self._decider.saved(step)
        self._reached = step
        handle.add_done_callback(lambda done: self._ended(step, handle))
        return handle

    def _prepare(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool | None,
    ) -> tuple[str, bool, dict[str, Any]]:
        if self._closed:
            raise ValueError(f"the manager of {self.root} was closed")
        replace = overwrite
        if replace is None:
            replace = self._reached is not None and step > self._reached
        user = user_metadata_of(step, time.time(), metrics, metadata)
        if self._is_leader:
            self._warn_of_newer()
            self._retention.poke()  # what a killed job left is cleaned while this one saves
        return self._catalog.path(step), replace, user

    def _saved(self, step: int) -> None:
        self._decider.saved(step)
        self._reached = self._kept = step
        if self._is_leader:
            self._retention.poke()

    def _ended(self, step: int, handle: SaveHandle) -> None:
        """On the thread of the save."""
        self._busy.discard(step)
        # The handle's own `exception` would count as somebody having looked.
        if handle.cancelled() or Future.exception(handle) is not None:
            return
        self._kept = step
        if self._is_leader:
            self._retention.poke()

    def _is_busy(self) -> bool:
        return self._handle is not None and not self._handle.done()

    def _running(self) -> set[int]:
        return self._busy.copy()

    def _spared(self) -> set[int]:
        """What this run would be resumed from, also where newer steps of an abandoned one lie."""
        return {step for step in (self._kept, self._reached) if step is not None}

    # --- looking

    def steps(self) -> list[Step]:
        """The committed steps, in ascending order, with metrics and metadata; reads no data."""
        return list(self._catalog.look().steps)

    def latest(self) -> Step | None:
        """The newest step; derived from the directory each time."""
        steps = self._catalog.look().steps
        return steps[-1] if steps else None

    def best(self, metric: str | None = None, *, highest: bool | None = None) -> Step | None:
        """The best step by a metric: the one named, or that of the `KeepBest` in `keep`."""
        rule = find_best(self._keep_policy)
        if metric is None:
            if rule is None:
                raise ValueError("pass the name of a metric, or keep=KeepBest(...)")
            metric = rule.metric
        if highest is None:
            highest = rule is not None and rule.metric == metric and rule.highest
        return best_step(self._catalog.look().steps, metric, highest)

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
        steps beyond the one restored, so that a restart does not return to them.
        """
        falls = (self._fall_back if fall_back is None else fall_back) and step is None
        found = restore(
            state,
            step,
            self._catalog,
            self._pins,
            self._keeper,
            fall_back=falls,
            options=options,
        )
        if found is None:
            self._reached = -1
            return None
        self._reached = found.step
        self._decider.restored(found.step)
        for bad in found.damaged:
            known = self._catalog.find(bad.step)
            if isinstance(known, Step):
                self._damaged.add(known.save_id)
        self._rewound = step is not None
        if drop_newer:
            self._keeper.coordinator.lead("drop newer steps", self._drop_newer)
        return found

    def _newer(self) -> list[int]:
        return [s.step for s in self._catalog.look().steps if s.step > (self._reached or 0)]

    def _drop_newer(self) -> bytes:
        self._remove(self._newer(), force=True)
        return b""

    def _warn_of_newer(self) -> None:
        """Once, when a run that went back saves for the first time."""
        newer = self._newer() if self._rewound else []
        self._rewound = False
        if newer:
            log.warning(
                "steps %d to %d of %s are newer than step %d, which was restored: a restart would "
                "resume from them. Remove them with restore(..., drop_newer=True), or delete(step)",
                newer[0],
                newer[-1],
                self.root,
                self._reached,
            )

    # --- removing

    def delete(self, step: int, *, force: bool = False) -> None:
        """Remove a step. One that is pinned, or the only one there is, only with `force`."""

        def lead() -> bytes:
            listing = self._catalog.look()
            there = [found.step for found in listing.steps]
            if step not in there and all(found.step != step for found in listing.damaged):
                raise CheckpointNotFoundError(f"no step {step} in {self.root}")
            if not force and there == [step]:
                raise StorageError(
                    f"step {step} is the only whole one in {self.root}; pass force=True to be left "
                    "with none"
                )
            self._remove([step], force=force)
            return b""

        self._keeper.coordinator.lead("delete", lead)

    def _remove(self, steps: Sequence[int], *, force: bool) -> None:
        names = [self._catalog.names.of(step) for step in steps]
        done = remove_steps(self._catalog.store, self._pins, names, force=force)
        if done.pinned:
            held = self._pins.held()
            who = self._pins.describe([pin for name in done.pinned for pin in held.get(name, [])])
            raise StorageError(
                f"{', '.join(done.pinned)} in {self.root} is pinned by {who}; wait, or pass "
                "force=True",
                transient=True,
            )
        if done.failed:
            raise StorageError(f"{', '.join(done.failed)} in {self.root} could not be removed")

    def clean(self, *, dry_run: bool = False) -> Cleaned:
        """Remove now what killed saves and removals left, as saving does by itself; local."""
        return clean(
            self._catalog,
            self._pins,
            self._catalog.look(),
            stale_s=self._stale_s,
            busy={self._catalog.names.of(step) for step in self._running()},
            dry_run=dry_run,
        )

    def wait_retention(self, timeout: float | None = None) -> bool:
        """Until the passes over old steps that were asked for are done; whether that is so."""
        return self._retention.wait(timeout)

    # --- for who evaluates

    def wait_for(
        self, step: int | None = None, timeout: float | None = None, *, poll_s: float = POLL_S
    ) -> PinnedStep:
        """Wait for a step, or for the first newer one there is; without a number, for any: the
        newest. It is pinned until it is released, or `with` is left. `TimeoutError` if none comes.
        """
        found = self._next(0 if step is None else step, step is None, timeout, poll_s)
        if found is None:
            what = "a step" if step is None else f"step {step} or a newer one"
            raise TimeoutError(f"{what} did not appear in {self.root} within {timeout} s")
        return found

    def watch(
        self,
        after: int | None = None,
        timeout: float | None = None,
        *,
        newest: bool = False,
        poll_s: float = POLL_S,
    ) -> Iterator[Step]:
        """Steps as they appear, each pinned until the next is asked for; also what is there now.

        Begins beyond `after`; with `newest`, leaves out what is not the newest when it is asked
        for. Ends when none comes for `timeout` seconds.
        """
        least = 0 if after is None else after + 1
        while True:
            found = self._next(least, newest, timeout, poll_s)
            if found is None:
                return
            with found:
                yield found.info
            least = found.step + 1

    def _next(
        self, least: int, newest: bool, timeout: float | None, poll_s: float
    ) -> PinnedStep | None:
        return next_step(
            self._catalog,
            self._pins,
            self._keeper,
            least=least,
            newest=newest,
            timeout=timeout,
            poll_s=poll_s,
        )

    # --- the end

    def close(self) -> None:
        """Wait for the save in the background, and remove what is to be removed after it.

        An error of that save which nobody has looked at is raised.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:
            last.callback(self._retention.close)
            if self._handle is not None and not self._owned:
                wait([self._handle])
            if self._owned:
                self._keeper.close()

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; an error that is on its way goes before that of a save in the background."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):
            self.close()
