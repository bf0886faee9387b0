# SPDX-License-Identifier: Apache-2.0
"""The thread that copies steps to the durable root, behind the program.

What is to be copied follows from what the two folders hold, each time anew: whoever takes over from
a process that was killed needs nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.engine.pace import Pace
from shardkeep.errors import CheckpointNotFoundError, CorruptionError, StorageError
from shardkeep.manager.publishing import copy_step
from shardkeep.manager.steps import Step
from shardkeep.manager.tiers import FastTier, Tiers
from shardkeep.progress import tracked

__all__ = ["Copier"]

log = logging.getLogger("shardkeep")

RETRY_S = 1.0
"""The pause after a first failure; each next one is twice as long."""
MOST_RETRY_S = 60.0
PAUSE_S = 0.01
"""After a step that was gone when it was to be copied, or to appear."""
GRACE_S = 5.0
"""How long a copy that is no longer wanted may take to notice."""


@dataclass
class _Failure:
    """A step that could not be copied."""

    error: Exception
    due: float
    """When to try again, by the monotonic clock; never, for what is damaged."""
    pause: float


class _Stopped(Exception):
    """The program is ending."""


class Copier:
    """Copies from the fast tier of one run, one step at a time, the newest first."""

    def __init__(
        self,
        tiers: Tiers,
        options: FastTier,
        waiting: Callable[[], Sequence[Step]],
        counts: Callable[[Step], bool],
        moving: contextlib.AbstractContextManager[Any],
        copied: Callable[[Step], None] = lambda step: None,
    ) -> None:
        """`waiting` says what is to be copied, in this order, and `counts` whether one still is
        once its copy is made; `copied` is told what was."""
        assert tiers.fast is not None
        self._fast = tiers.fast.catalog
        self._durable = tiers.durable.catalog
        self._counts = counts
        self._options = options
        self._waiting = waiting
        self._moving = moving
        self._copied = copied
        self._stop = threading.Event()
        self._pace = Pace(options.copy_rate, sleep=self._stop.wait)
        self._changed = threading.Condition()
        self._asked = 0
        self._done = 0
        self._failures: dict[str, _Failure] = {}
        """By save id."""
        self._unseen: Exception | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self.current: Step | None = None
        """What is being copied."""
        self.moved = 0
        """Bytes, so that who waits sees whether there is any progress."""

    @property
    def is_begun(self) -> bool:
        """Whether it was ever asked for anything."""
        return self._asked > 0

    @property
    def damaged(self) -> set[str]:
        """Save ids of what was found damaged in the fast tier."""
        failures = dict(self._failures)
        return {key for key, each in failures.items() if isinstance(each.error, CorruptionError)}

    # --- from outside

    def poke(self, *, again: bool = False) -> None:
        """Look soon for what is to be copied, also for what has failed with `again`."""
        with self._changed:
            if self._stop.is_set() or os.getpid() != self._process:
                return
            self._asked += 1
            for failure in self._failures.values():
                if again and not isinstance(failure.error, CorruptionError):
                    failure.due = 0.0
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="shardkeep-copier", daemon=True)
                with contextlib.suppress(RuntimeError):  # the program is ending
                    thread.start()
                    self._thread = thread
            self._changed.notify_all()

    def raise_unseen(self) -> None:
        """Raise what went wrong since somebody last looked, unless it has gone well since."""
        with self._changed:
            error, self._unseen = self._unseen, None
        if error is not None:
            raise error

    def failure(self) -> Exception | None:
        """What keeps steps from being copied just now; what is damaged keeps no others."""
        with self._changed:
            errors = [each.error for each in self._failures.values()]
        return next((each for each in errors if not isinstance(each, CorruptionError)), None)

    def wait(self, timeout: float | None) -> bool:
        """Until there is nothing left to copy that can be; whether that is so."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked or self._thread is None, timeout)
            return self._done >= asked  # a thread that could not be started has done nothing

    def close(self) -> None:
        """Copy what is left, as long as that may take; raises what could not be copied."""
        if not self.is_begun or os.getpid() != self._process:
            return
        try:
            self.poke(again=True)
            in_time = self.wait(self._options.close_s)
        finally:
            self._stop.set()
            with self._changed:
                self._changed.notify_all()
                thread = self._thread
            if thread is not None:
                thread.join(GRACE_S)
        self.raise_unseen()
        failure = self.failure()
        if failure is not None:
            raise failure
        left = "" if in_time else ", ".join(str(step.step) for step in self._waiting())
        if left:
            text = (
                f"steps {left} were not copied from {self._fast.root} to {self._durable.root} "
                f"within {self._options.close_s:g} s. They are whole there; the next manager with "
                "this fast tier that saves copies them"
            )
            log.error(text)
            raise StorageError(text, transient=True)

    # --- behind the program

    def _serve(self) -> None:
        """Until nothing is asked for: a thread that waits would hold a manager nobody closes."""
        while not self._stop.is_set():
            with self._changed:
                asked = self._asked
            step = self._next()
            if step is not None:
                self._try(step)
                continue
            with self._changed:
                self._done = asked
                self._changed.notify_all()
                due = self._until_due()
                if due is None and self._asked == asked:
                    self._thread = None
                    return
                self._changed.wait_for(
                    lambda asked=asked: self._stop.is_set() or self._asked > asked,  # type: ignore[misc]
                    due,
                )

    def _next(self) -> Step | None:
        """What to copy now."""
        try:
            waiting = self._waiting()
        except Exception as error:
            self._failed("", error)  # one of the folders does not answer
            return None
        with self._changed:
            ids = {step.save_id for step in waiting}
            for gone in [key for key in self._failures if key not in ids and self._may_forget(key)]:
                if self._failures.pop(gone).error is self._unseen and gone == "":
                    self._unseen = None  # they answer again
            now = time.monotonic()
            for step in waiting:
                failure = self._failures.get(step.save_id)
                if failure is None or failure.due <= now:
                    return step
        return None

    def _may_forget(self, key: str) -> bool:
        """What is damaged stays known, as long as it is there."""
        return not isinstance(self._failures[key].error, CorruptionError)

    def _until_due(self) -> float | None:
        due = min((failure.due for failure in self._failures.values()), default=float("inf"))
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _try(self, step: Step) -> None:
        self.current = step
        began = time.monotonic()
        try:
            with tracked(self._options.progress, f"copying step {step.step}") as counter:

                def count(nbytes: int) -> None:
                    self.moved += nbytes
                    counter(nbytes)

                done = copy_step(
                    step,
                    self._fast,
                    self._durable,
                    moving=self._moving,
                    may_appear=lambda: self._counts(step),
                    pace=self._let_by,
                    planned=counter.expect,
                    progress=count,
                )
        except _Stopped:
            return
        except CheckpointNotFoundError as error:
            log.info("step %d is not copied: %s", step.step, error)
            self._stop.wait(PAUSE_S)
            return
        except Exception as error:
            self._failed(step.save_id, error, step)
            return
        finally:
            self.current = None
        if done is None:
            self._stop.wait(PAUSE_S)
            return
        with self._changed:
            self._failures.pop(step.save_id, None)
            if not isinstance(self._unseen, CorruptionError):
                self._unseen = None  # it goes well again
        log.info(
            "copied step %d to %s: %d bytes, %d linked, %.1f s",
            step.step,
            self._durable.root,
            done.nbytes,
            done.linked,
            time.monotonic() - began,
        )
        self._copied(step)

    def _let_by(self, nbytes: int) -> None:
        self._pace(nbytes)
        if self._stop.is_set():
            raise _Stopped

    def _failed(self, key: str, error: Exception, step: Step | None = None) -> None:
        what = "the steps" if step is None else f"step {step.step}"
        damaged = isinstance(error, CorruptionError)
        with self._changed:
            before = self._failures.get(key)
            pause = RETRY_S if before is None else min(2 * before.pause, MOST_RETRY_S)
            due = float("inf") if damaged else time.monotonic() + pause
            self._failures[key] = _Failure(error, due, pause)
            if before is None:
                self._unseen = error
        error.add_note(
            f"This is why {what} of {self._fast.root} could not be copied to {self._durable.root}."
        )
        log.log(
            logging.ERROR if before is None else logging.WARNING,
            "%s could not be copied from %s to %s%s: %s",
            what,
            self._fast.root,
            self._durable.root,
            "" if damaged else f", and will be tried again in {pause:.0f} s",
            error,
        )
