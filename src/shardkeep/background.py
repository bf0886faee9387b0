# SPDX-License-Identifier: Apache-2.0
"""The driver of saves in the background: what happens on the caller's thread, and what behind it.

On the caller's thread: storage is set up, the plan made, and the state copied into the arena: all
of it, or all but what only an optimizer's step changes. Behind it: files are written as their bytes
arrive, and the checkpoint is committed, with all ranks, over a coordinator of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_all
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from shardkeep.arrays import StagedSource, Staging
from shardkeep.coordination import Coordinator
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.engine.arena import Arena
from shardkeep.engine.budget import usable_cores
from shardkeep.engine.process import WriterProcess
from shardkeep.engine.snapshot import (
    DEVICE_UNIT,
    HOST_UNIT,
    Copying,
    Held,
    Mask,
    Snapshot,
    StagedPlanner,
    hold,
)
from shardkeep.errors import PlanError
from shardkeep.handles import SaveHandle
from shardkeep.holding import StalePlan
from shardkeep.planner import SavePlan, SavePlanner
from shardkeep.planning import PlanMemory, Planning
from shardkeep.saving import SaveCancelled, SaveResult, Saving
from shardkeep.storage import StorageWriter

__all__ = ["Background", "OnOverlap", "SnapshotKind", "WriterKind", "wait_turn"]

log = logging.getLogger("shardkeep")

SnapshotKind: TypeAlias = Literal["eager", "lazy"]
OnOverlap: TypeAlias = Literal["wait", "skip", "error"]
WriterKind: TypeAlias = Literal["thread", "process"]

MOST_COPYING = 8
"""Threads that copy host memory: more do not make memory faster."""
EXIT_VARIABLE = "SHARDKEEP_EXIT_TIMEOUT_S"
EXIT_S = 600.0
"""How long the end of the program waits for a save that is still running."""

OF_GROUP = "background"
"""What a group's memory calls the saves in its background."""

_YES, _NO = b"\1", b"\0"


class Background:
    """The saves in the background of one `Checkpointer`: one at a time, and one arena."""

    def __init__(self, group: Coordinator, writer: WriterKind = "thread") -> None:
        """Saves go over a twin of the group's coordinator; if it has none, over itself."""
        twin = getattr(group, "twin", None)
        self.coordinator: Coordinator = group if twin is None else twin()
        """Used by nobody else while a save is running."""
        self.shares = twin is None
        """Whether it is the group's own, so that other calls must wait."""
        self.owner = os.getpid()
        """A process that is forked has no thread that could complete a save."""
        self.turn = threading.RLock()
        """Held by who takes a snapshot: there is one arena, and several threads may ask."""
        self.arena = Arena(shared=writer == "process")
        self.process = WriterProcess() if writer == "process" else None
        """Writes what is in the arena, where no thread of this process is to do so."""
        self._last: SaveHandle | None = None
        self._run: _Run | None = None
        self._content = ("", "")
        """Digest of all tensors of the last save, and where it went; on the coordinator."""
        self._group_memory = group.memory

    def _register(self) -> None:
        """To be waited for when the group is let go of, and when the program ends."""
        self._group_memory.setdefault(OF_GROUP, _Several()).add(self)
        _alive.add(self)

    # --- between saves

    @property
    def is_ours(self) -> bool:
        """Whether this is not a fork of the process whose threads run the saves."""
        return self.owner == os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self.is_ours and self._last is not None and not self._last.done()

    @property
    def where(self) -> str:
        """Where the last save goes or went."""
        return "" if self._last is None else self._last.checkpoint_id

    def wait(self, timeout: float | None = None) -> bool:
        """Until no save is running, whatever became of it; whether that is so."""
        if self._last is not None and self.is_ours:
            wait_all([self._last], timeout)
        return not self.is_busy

    def raise_unseen(self) -> None:
        """Raise the error of the last save, if nobody has looked at it."""
        last = self._last
        error = None if last is None else last.unseen_error()
        if error is not None:
            assert last is not None
            error.add_note(
                f"This is why the save of {last.checkpoint_id} in the background failed. What was "
                "asked for now has not been begun."
            )
            raise error

    def close(self) -> None:
        """Wait for the save that is running, and let go of all but what became of it."""
        if not self.is_ours:
            return
        with self.turn:
            self._close()

    def _close(self) -> None:
        self.wait()
        if self._run is not None:
            self._run.join()
            self._run = None
        if self.process is not None:
            self.process.close()
        self.arena.close()
        if not self.shares:
            self.coordinator.close()
        _alive.discard(self)

    # --- a save

    def prewarm(self, state: object, planner: SavePlanner, writer: StorageWriter) -> None:
        """Plan for such a state, and make the arena ready for it; on all ranks."""
        self._register()
        if self._run is not None:
            self._run.join()
        coordinator = self.coordinator
        memory = coordinator.memory.setdefault("plan", PlanMemory())
        planning = Planning(state, writer, planner, coordinator, memory)
        reuse = coordinator.lead("prewarm", lambda: _YES if planning.may_reuse else _NO)
        plan = planning.plan(reuse == _YES)

        def make_ready() -> None:
            held = hold(plan, planner, writer.write_order(plan))
            self._reserve(held.length)
            self.arena.prepare(held.length, planner.staging, _threads(writer))
            if isinstance(planner, DefaultSavePlanner):
                planner.deferrable(held.items, held.rows)  # optimizers are found once

        coordinator.agree("make memory ready", make_ready)

    def start(
        self, saving: Saving, inside: contextlib.ExitStack, kind: SnapshotKind, begun: float
    ) -> SaveHandle:
        """Prepare a save, take the snapshot, and leave the rest to a thread.

        `inside` is what the save is inside of, the coordinator's call above all; it is left at the
        end of the save, or here if there is an error. `begun` is when the caller began to wait.
        """
        self._register()
        with inside:
            if self._run is not None:
                self._run.join()
            saving.follow_devices(inside)
            plan, held = self._plan(saving)
            self._lend_process(saving.writer, inside)
            with saving.aborting():
                staging = saving.planner.staging
                unit = HOST_UNIT if staging is None else DEVICE_UNIT
                taken = Snapshot(held, self.arena, unit, _threads(saving.writer))
                steps = _steps(taken, staging, kind, saving)
                run = _Run(saving, plan, taken, steps, staging, self._compare, begun)
            self._last, self._run = run.handle, run
            run.begin(inside.pop_all())
        return run.handle

    def _reserve(self, nbytes: int) -> None:
        self.arena.reserve(nbytes)
        if self.process is not None:
            # At once: what it cannot have, it says before anything is copied.
            self.process.share(self.arena)

    def _lend_process(self, writer: StorageWriter, inside: contextlib.ExitStack) -> None:
        """While a save is running, a storage that knows what to do with a process has ours."""
        if self.process is None:
            return
        if not hasattr(writer, "process"):
            log.info(
                "a thread writes in place of a process: %s is not made for that",
                type(writer).__qualname__,
            )
            return
        writer.process = self.process
        inside.callback(setattr, writer, "process", None)

    def _compare(self, result: SaveResult, content: str) -> None:
        """Warn of a save that holds what the last one held: its snapshot may not be of now."""
        last, self._content = self._content, (content, result.checkpoint_id)
        if content and last[0] == content and last[1] != result.checkpoint_id and result.nbytes:
            log.warning(
                "every tensor of %s is bit-equal to %s: the state that is saved is not the one "
                "that is trained, or nothing was trained in between",
                result.checkpoint_id,
                last[1],
            )

    def _plan(self, saving: Saving) -> tuple[SavePlan, Held]:
        """A plan that fits the state as it is now, and the state looked up."""
        while True:
            plan = saving.prepare()
            found: list[Held] = []

            def look(plan: SavePlan = plan, found: list[Held] = found) -> bytes:
                try:
                    held = hold(plan, saving.planner, saving.writer.write_order(plan))
                except StalePlan:
                    return _NO
                self._reserve(held.length)
                found.append(held)
                return _YES

            def decide(told: list[bytes]) -> list[bytes]:
                return [_NO if _NO in told else _YES] * len(told)

            with saving.aborting():
                if self.coordinator.gather_scatter("take snapshot", look, decide) == _YES:
                    return plan, found[0]
            saving.start_over()


def _threads(writer: StorageWriter) -> int:
    return min(MOST_COPYING, usable_cores(writer.ranks_on_host))


@dataclass(eq=False)
class _Steps:
    """How a snapshot is taken."""

    now: list[Copying]
    """Copied before the caller goes on."""
    later: list[Copying]
    """Copied while the caller goes on."""
    alone: bool
    """Whether nothing is written before all copies are begun: to ask a device for them takes many
    turns at the interpreter, and a few to write."""
    follow: Callable[[], None]
    """Has what another thread copies come after what the caller had asked of a device."""
    changed: Callable[[], Sequence[str]]
    """Names of what was copied late and is not what it was; asked once all is there."""
    needs_state: bool = False
    """Whether what is copied later is read from the caller's arrays."""


def _steps(taken: Snapshot, staging: Staging | None, kind: SnapshotKind, saving: Saving) -> _Steps:
    held, planner = taken.held, saving.planner
    deferred = np.zeros(len(held.rows), np.bool_)
    steps = _Steps([], [], False, lambda: None, lambda: ())
    if kind == "lazy" and isinstance(planner, DefaultSavePlanner):
        deferred, steps.changed = planner.deferrable(held.items, held.rows)
    if staging is None:
        steps.now, steps.later = _host_steps(taken, ~deferred), [taken.expect(deferred)]
        steps.needs_state = bool(deferred.any())
        return steps
    if not taken.is_ready(staging) and _duplicate(taken, staging, deferred, steps):
        return steps
    steps.alone = True
    steps.now.append(taken.expect(~deferred, staging))
    if deferred.any():
        steps.later.append(taken.expect(deferred, staging))
        steps.follow = staging.here()
        steps.needs_state = True
    return steps


def _host_steps(taken: Snapshot, which: Mask) -> list[Copying]:
    """Chunks in host memory, which stand still: most are found by their addresses alone."""
    quick, left = taken.expect_memory(which)
    return [quick, taken.expect(left)]


def _duplicate(taken: Snapshot, staging: Staging, deferred: Mask, steps: _Steps) -> bool:
    """The arena takes long to make ready: has the device keep its chunks as they are meanwhile.

    False if it has no room for that.
    """
    sources = taken.held.sources(np.ones(len(deferred), np.bool_))
    on_device = np.array([isinstance(source, StagedSource) for source in sources], np.bool_)
    doubles = staging.duplicate([one for one in sources if isinstance(one, StagedSource)])
    if doubles is None:
        return False
    steps.now.extend(_host_steps(taken, ~on_device & ~deferred))
    steps.later.append(taken.expect(on_device, staging, doubles))
    steps.later.append(taken.expect(~on_device & deferred))
    steps.needs_state = bool((~on_device & deferred).any())
    if not steps.needs_state:
        steps.changed = lambda: ()
    return True


class _Run:
    """One save, from the snapshot on."""

    def __init__(
        self,
        saving: Saving,
        plan: SavePlan,
        taken: Snapshot,
        steps: _Steps,
        staging: Staging | None,
        compare: Callable[[SaveResult, str], None],
        begun: float,
    ) -> None:
        self.handle = SaveHandle(saving.checkpoint_id)
        self._saving = saving
        self._plan = plan
        self._taken = taken
        self._steps = steps
        self._staging = staging
        self._compare = compare
        self._begun = begun
        self._stall_s = 0.0
        self._is_committing = False
        self._stager: threading.Thread | None = None
        self._arrived: Future[None] = Future()
        """Done once everything is in the arena, as it was."""
        self._may_write = threading.Event()
        self._claim = threading.Lock()
        """Taken, for good, by the thread that ends the save."""
        if not steps.alone:
            self._may_write.set()

    def begin(self, inside: contextlib.ExitStack) -> None:
        """Begin to write on a thread, and take the snapshot; what goes wrong is told by the handle.

        An interrupt is raised here, and ends the save.
        """
        self._stop_when_cancelled(inside)
        writing = threading.Thread(
            target=self._write, args=(inside,), name="shardkeep-save", daemon=True
        )
        try:
            writing.start()
            self._take()
        except BaseException as error:
            self._fail(error)
            started = not self._claim.acquire(blocking=False)
            if not started or not isinstance(error, Exception):
                self.handle.mark_seen()  # it is raised here
                if not started:
                    self.handle.end(error)
                    with inside, self._saving.aborting():
                        raise
                raise

    def _stop_when_cancelled(self, inside: contextlib.ExitStack) -> None:
        """A cancelled save writes no further unit."""
        writer = self._saving.writer
        shown: Callable[[int], None] | None = getattr(writer, "progress", None)
        if shown is None:
            return

        def count(nbytes: int) -> None:
            if self.handle.is_cancelling and not self._is_committing:
                raise SaveCancelled
            shown(nbytes)

        writer.progress = count  # type: ignore[attr-defined]
        inside.callback(setattr, writer, "progress", shown)

    # --- on the caller's thread

    def _take(self) -> None:
        """Take the snapshot, or what of it cannot wait."""
        steps, taken = self._steps, self._taken
        with self._settled():
            for copying in steps.now:
                taken.copy(copying)
            if not steps.later:
                self._may_write.set()
        self._stall_s = time.perf_counter() - self._begun
        if not steps.needs_state:
            self._saving.release_state()
        if any(len(copying.units) for copying in steps.later):
            stager = threading.Thread(target=self._take_rest, name="shardkeep-stage", daemon=True)
            self._stager = stager
            stager.start()
        else:
            self._complete()
        if not steps.needs_state:
            self._tell_staged()

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """On leaving, also by an error, no device copies anything any more that was begun inside:
        the arena may be used by the next save then."""
        try:
            yield
        finally:
            if self._staging is not None:
                self._staging.fence()()

    def _tell_staged(self) -> None:
        """The state may change, or go: nothing of it is kept here."""
        with contextlib.suppress(InvalidStateError):  # the save has ended already
            self.handle.staged.set_result(None)

    def _complete(self) -> None:
        """Everything is in the arena."""
        self._steps = _Steps([], [], False, lambda: None, lambda: ())
        self._arrived.set_result(None)
        self._may_write.set()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StalePlan):
            error = PlanError(
                "an array got another shape, type or place before the snapshot was complete; with "
                'snapshot="lazy", nothing but values may change before handle.wait_staged()'
            )
        self._taken.fail(error)
        self._steps = _Steps([], [], False, lambda: None, lambda: ())
        self._saving.release_state()
        for future in (self._arrived, self.handle.staged):
            with contextlib.suppress(InvalidStateError):  # it was there, or the save has ended
                future.set_exception(error)
        self._may_write.set()

    def join(self) -> None:
        """Until nothing copies into the arena any more."""
        stager = self._stager
        if stager is not None and stager.ident is not None:
            stager.join()

    # --- behind it

    def _take_rest(self) -> None:
        try:
            if self._staging is not None:
                self._staging.be_quiet()
            with self._settled():
                self._steps.follow()
                for copying in self._steps.later:
                    self._taken.copy(copying)
                self._may_write.set()
                self._taken.wait()
            changed = self._steps.changed()
            if changed:
                raise PlanError(
                    f"{_few(changed)} changed before the snapshot was complete; with "
                    'snapshot="lazy", call shardkeep.torch.guard(optimizer, handle) before the '
                    "next step, or handle.wait_staged()"
                )
            self._saving.release_state()
            self._complete()
            self._tell_staged()
        except BaseException as error:
            self._fail(error)

    def _is_cancelled(self) -> bool:
        """Asked once, when all is written; what comes later comes too late."""
        cancelled = self.handle.is_cancelling
        self._is_committing = not cancelled
        return cancelled

    def _write(self, inside: contextlib.ExitStack) -> None:
        if not self._claim.acquire(blocking=False):
            return  # the caller was interrupted before this began
        saving, handle = self._saving, self.handle
        outcome: SaveResult | BaseException | None
        self._may_write.wait()
        try:
            with inside:
                planner = StagedPlanner(self._taken, saving.planner.features)
                result = saving.complete(
                    self._plan, planner, self._is_cancelled, self._arrived.result
                )
                assert result is not None
                outcome = replace(result, stats={**result.stats, "stall_s": self._stall_s})
                self._compare(outcome, getattr(saving.writer, "content", ""))
        except SaveCancelled:
            outcome = None
            log.info("the save of %s was cancelled", saving.checkpoint_id)
        except BaseException as error:
            outcome = error
            log.error(
                "the save of %s in the background failed", saving.checkpoint_id, exc_info=error
            )
            _clear_frames(error)  # they hold parts of the arena, and a handle may be kept for long
        self._taken.fail(RuntimeError("the save has ended"))
        handle.end(outcome)


def _clear_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class _Several(weakref.WeakSet[Background]):
    """Those of one group, in the group's memory."""

    def close(self) -> None:
        """Called when the group is let go of."""
        for background in list(self):
            background.close()


def wait_turn(group: Coordinator) -> None:
    """Until a call can be made: a coordinator without a twin does one thing at a time."""
    for background in list(group.memory.get(OF_GROUP, ())):
        if background.shares:
            background.wait()


_alive: weakref.WeakSet[Background] = weakref.WeakSet()
"""Those whose saves the end of the program waits for."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alive.clear)  # a child has none of the threads


@atexit.register
def _end_processes() -> None:
    """After `_complete_all`, as it is registered before it: nothing is left behind."""
    for background in list(_alive):
        if background.process is not None:
            background.process.interrupt()


@atexit.register
def _complete_all() -> None:
    """The program ends: saves that are running are completed, or reported."""
    running = [background for background in list(_alive) if background.is_busy]
    if not running:
        return
    deadline = time.monotonic() + exit_timeout_s()
    for background in running:
        if not background.wait(max(0.0, deadline - time.monotonic())):
            text = f"the program ended before {background.where} was saved"
            print(f"shardkeep: {text}", file=sys.stderr)
            if log.hasHandlers():
                log.error(text)


def exit_timeout_s() -> float:
    """`SHARDKEEP_EXIT_TIMEOUT_S` of the environment, or 600."""
    try:
        return float(os.environ.get(EXIT_VARIABLE, EXIT_S))
    except ValueError:
        return EXIT_S
