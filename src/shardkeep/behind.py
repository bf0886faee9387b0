# SPDX-License-Identifier: Apache-2.0
"""One save in the background, from the snapshot on: its threads, and how it ends."""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from shardkeep.arrays import Staging
from shardkeep.engine.snapshot import Copying, Snapshot, StagedPlanner
from shardkeep.errors import PlanError
from shardkeep.handles import SaveHandle
from shardkeep.planner import SavePlan, StalePlan
from shardkeep.saving import SaveCancelled, SaveResult, Saving
from shardkeep.taking import Steps
from shardkeep.wording import names_text

__all__ = ["Handover", "Run"]

log = logging.getLogger("shardkeep")

LOOK_S = 1.0
"""Between two looks at whether a snapshot is there or has failed, of which one is told at once."""


class Handover:
    """What a save is inside of, the coordinator's call above all, and who leaves it: the thread
    that completes the save once it has taken over; the caller after an error before that.

    An interrupt may come at any moment, so nothing is moved from one to the other: a lock decides.
    """

    def __init__(self) -> None:
        """The caller's."""
        self.stack = contextlib.ExitStack()
        """To be left."""
        self.run: Run | None = None
        """The save, once its handle can be waited for."""
        self._taken = threading.Lock()
        """Taken, for good, by the one who ends the save."""
        self._kept = False

    def take_over(self) -> bool:
        """Whether it is the thread's from now on."""
        return self._taken.acquire(blocking=False)

    def keep(self) -> bool:
        """Whether it is still the caller's, and stays so."""
        self._kept = self._kept or self._taken.acquire(blocking=False)
        return self._kept

    def __enter__(self) -> Self:
        """On the caller's thread."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error the save is over, unless the thread has it."""
        if error is None or not self.keep():
            return
        if self.run is not None:
            self.run.give_up(error, self.stack)
        else:
            self.stack.__exit__(kind, error, trace)


class Run:
    """One save, from the snapshot on."""

    def __init__(
        self,
        saving: Saving,
        plan: SavePlan,
        taken: Snapshot,
        steps: Steps,
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
        self._is_there = False
        """Whether everything is in the arena, as it was."""
        self._before_writing = steps.before_writing
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        """That one of these has changed, or that there is an error: the caller's thread may be
        interrupted anywhere, and must hold no lock that the other needs."""

    def begin(self, inside: Handover) -> None:
        """Begin to write on a thread, and take the snapshot; what goes wrong is told by the handle.

        An interrupt is raised here, and ends the save.
        """
        self._stop_when_cancelled(inside.stack)
        writing = threading.Thread(
            target=self._write, args=(inside,), name="shardkeep-save", daemon=True
        )
        try:
            try:
                writing.start()
                self._take()
            except BaseException as error:
                self._taken.fail(_named(error))
                raise
        except BaseException as error:  # also an interrupt before the first was noted
            self._taken.fail(_named(error))
            is_raised = inside.keep() or not isinstance(error, Exception)
            if is_raised:
                self._taken.error = _without_frames(error)
                self.handle.mark_seen()
            self._fail(error)
            if is_raised:
                raise

    def give_up(self, error: BaseException, inside: contextlib.ExitStack) -> None:
        """No thread has begun to write, and none will; the error is raised here."""
        told = _without_frames(error)
        self._taken.fail(told)
        self._fail(told)
        self.handle.mark_seen()
        try:
            with inside, self._saving.aborting():
                raise error
        finally:
            self.handle.end(told)

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
        steps = self._steps
        with self._settled():
            for copying in steps.now:
                self._copy(copying)
        self._stall_s = time.perf_counter() - self._begun
        if not steps.needs_state:
            self._saving.release_state()
        if any(len(copying.units) for copying in steps.later):
            stager = threading.Thread(target=self._stage, name="shardkeep-stage", daemon=True)
            self._stager = stager
            stager.start()
        else:
            self._complete()
        if not steps.needs_state:
            self._tell_staged()

    def _copy(self, copying: Copying) -> None:
        self._taken.copy(copying)
        self._before_writing -= 1
        self._told.put(None)

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
        self.handle.tell_staged()

    def _complete(self) -> None:
        """Everything is in the arena, unless something went wrong elsewhere."""
        self._taken.check()
        self._steps = Steps()
        self._taken.complete()
        self._is_there, self._before_writing = True, 0
        self._told.put(None)

    def _fail(self, error: BaseException) -> None:
        """The snapshot will not be complete."""
        self._taken.fail(_named(error))
        self._told.put(None)
        self._steps = Steps()
        self._saving.release_state()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Until something is so, or the snapshot has failed; whoever was kept from telling it."""
        while not is_so() and self._taken.error is None:
            with contextlib.suppress(queue.Empty):
                self._told.get(timeout=LOOK_S)

    def join(self) -> None:
        """Until nothing copies into the arena any more."""
        stager = self._stager
        if stager is not None and stager.ident is not None:
            stager.join()

    # --- behind it

    def _stage(self) -> None:
        try:
            self._take_rest(self._steps)
        except BaseException as error:
            _clear_frames(error)  # they hold what a device has kept
            self._fail(error)
            self.handle.fail_staged(self._taken.error or error)

    def _take_rest(self, steps: Steps) -> None:
        if self._staging is not None:
            self._staging.be_quiet()
        is_kept = False
        self._taken.check()
        try:
            with self._settled():
                steps.follow()
                is_kept = steps.keep()
                if is_kept:
                    self._let_go(steps)
                for copying in steps.later:
                    self._copy(copying)
                self._taken.wait()
        finally:
            if not is_kept:
                self._check_unchanged(steps)  # what else went wrong, went wrong by that
        self._saving.release_state()
        self._complete()
        self._tell_staged()

    def _let_go(self, steps: Steps) -> None:
        """Nothing of the caller's is read any more, nor kept. Whoever asked to be told may wait for
        the save: so on a thread of its own."""
        self._check_unchanged(steps)
        steps.changed = tuple
        self._saving.release_state()
        told = threading.Thread(target=self._tell_staged, name="shardkeep-staged", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread any more: it is told when all is there
            told.start()

    def _check_unchanged(self, steps: Steps) -> None:
        changed = steps.changed()
        if changed:
            raise PlanError(
                f"{names_text(changed)} changed before the snapshot was complete; with "
                'snapshot="lazy", call shardkeep.torch.guard(optimizer, handle) before the '
                "next step, or handle.wait_staged()"
            )

    def _wait_arrived(self) -> None:
        """Until everything is in the arena, or never will be, whoever was kept from saying so."""
        self._wait(lambda: self._is_there)
        self._taken.check()

    def _is_cancelled(self) -> bool:
        """Asked once, when all is written; what comes later comes too late."""
        cancelled = self.handle.is_cancelling
        self._is_committing = not cancelled
        return cancelled

    def _write(self, inside: Handover) -> None:
        if not inside.take_over():
            return  # the caller was interrupted before this began
        saving, handle = self._saving, self.handle
        outcome: SaveResult | BaseException | None
        try:
            with inside.stack:
                self._wait(lambda: self._before_writing <= 0)
                planner = StagedPlanner(self._taken, saving.planner.features)
                result = saving.complete(
                    self._plan, planner, self._is_cancelled, self._wait_arrived
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


def _named(error: BaseException) -> BaseException:
    """The same error, for who does not know of plans."""
    if not isinstance(error, StalePlan):
        return error
    return PlanError(
        "an array got another shape, type or place before the snapshot was complete; with "
        'snapshot="lazy", nothing but values may change before handle.wait_staged()'
    )


def _without_frames(error: BaseException) -> BaseException:
    """The same error for who asks later, without the frames that it is raised in: they hold the
    state."""
    try:
        made = copy.copy(error)
    except Exception:  # a class may take anything
        return error
    made.__traceback__ = made.__context__ = made.__cause__ = None
    return made


def _clear_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
