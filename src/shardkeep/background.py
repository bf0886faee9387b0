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
import math
import os
import sys
import threading
import time
import weakref
from concurrent.futures import wait as wait_all
from typing import Literal, TypeAlias

from shardkeep.behind import Handover, Run
from shardkeep.collector import paused_collector
from shardkeep.coordination import Coordinator
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.engine.arena import Arena
from shardkeep.engine.budget import usable_cores
from shardkeep.engine.process import WriterProcess
from shardkeep.engine.snapshot import (
    DEVICE_UNIT,
    HOST_UNIT,
    Held,
    Snapshot,
    hold,
)
from shardkeep.handles import SaveHandle
from shardkeep.planner import SavePlan, SavePlanner, StalePlan
from shardkeep.planning import PlanMemory, Planning
from shardkeep.saving import SaveResult, Saving
from shardkeep.storage import StorageWriter, unchanged
from shardkeep.taking import SnapshotKind, plan_steps

__all__ = ["Background", "OnOverlap", "SnapshotKind", "WriterKind", "wait_turn"]

log = logging.getLogger("shardkeep")

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
        patience = getattr(self.coordinator, "patience", None)
        if self.process is not None and patience is not None:
            self.process.gone_s = patience.gone_s  # as for a rank
        self._last: SaveHandle | None = None
        self._run: Run | None = None
        self._content = ("", "")
        """Digest of all tensors of the last save, and where it went; on the coordinator."""
        self._group_memory = group.memory
        self.given_up = False
        """Whether its save was reported at the end of the program, which waits for it no longer."""

    def _begin(self) -> None:
        """Wait until nothing uses the arena; and be waited for when the group is let go of, and
        when the program ends."""
        self._group_memory.setdefault(OF_GROUP, _Several()).add(self)
        _alive.add(self)
        _tell_multiprocessing()
        if self._run is not None:
            self._run.join()

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
        self._begin()
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
        self, saving: Saving, inside: Handover, kind: SnapshotKind, begun: float
    ) -> SaveHandle:
        """Prepare a save, take the snapshot, and leave the rest to a thread, which takes over what
        the save is `inside` of. `begun` is when the caller began to wait.
        """
        self._begin()
        saving.follow_devices(inside.stack)
        with saving.aborting():
            plan, held = self._plan(saving)
            self._lend_process(saving.writer, inside.stack)
            staging = saving.planner.staging
            unit = HOST_UNIT if staging is None else DEVICE_UNIT
            taken = Snapshot(held, self.arena, unit, _threads(saving.writer))
            with paused_collector():  # the program waits
                steps = plan_steps(taken, staging, kind, saving.planner)
            run = Run(saving, plan, taken, steps, staging, self._compare, begun)
            inside.run = run
        self._last, self._run = run.handle, run
        run.begin(inside)
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
        same = content in (last[0], unchanged(last[1])) and last[1] != result.checkpoint_id
        if content and same and result.nbytes:
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

            @paused_collector()
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

            if self.coordinator.gather_scatter("take snapshot", look, decide) == _YES:
                return plan, found[0]
            saving.start_over()


def _threads(writer: StorageWriter) -> int:
    return min(MOST_COPYING, usable_cores(writer.ranks_on_host))


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
    running = [one for one in list(_alive) if one.is_busy and not one.given_up]
    if not running:
        return
    deadline = time.monotonic() + exit_timeout_s()
    for background in running:
        if not background.wait(max(0.0, deadline - time.monotonic())):
            background.given_up = True  # this may be asked for twice
            text = f"the program ended before {background.where} was saved"
            print(f"shardkeep: {text}", file=sys.stderr)
            if log.hasHandlers():
                log.error(text)


def _tell_multiprocessing() -> None:
    """A process that it forked ends without what `atexit` knows of."""
    global _told
    module = sys.modules.get("multiprocessing.process")
    if module is None or module.parent_process() is None or _told == os.getpid():
        return
    from multiprocessing.util import Finalize

    Finalize(None, _complete_all, exitpriority=100)
    _told = os.getpid()


_told = 0
"""The process in which `multiprocessing` was told of `_complete_all`."""


def exit_timeout_s() -> float:
    """`SHARDKEEP_EXIT_TIMEOUT_S` of the environment, or 600; no longer than a thread can wait."""
    try:
        given = float(os.environ.get(EXIT_VARIABLE, EXIT_S))
    except ValueError:
        return EXIT_S
    return EXIT_S if math.isnan(given) else min(given, threading.TIMEOUT_MAX)
