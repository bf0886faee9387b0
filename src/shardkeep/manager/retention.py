# SPDX-License-Identifier: Apache-2.0
"""The pass over a run that removes what no policy holds, and the thread that does it behind the
program. A save never waits for it, and nothing that goes wrong in it fails a training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from shardkeep.manager.catalog import Catalog
from shardkeep.manager.cleaning import clean
from shardkeep.manager.keeping import KeepPolicy
from shardkeep.manager.pins import Pins
from shardkeep.manager.removal import make_lasting, remove_steps
from shardkeep.manager.steps import Step

__all__ = ["Retention", "doomed"]

log = logging.getLogger("shardkeep")

CLEAN_EVERY_S = 600.0
"""Leftovers are looked for at the first pass, and then no more often than that."""


def doomed(
    steps: Sequence[Step], keep: KeepPolicy, now: float, spared: Collection[int] = ()
) -> list[Step]:
    """What may go: no policy holds it, it is not spared, and it is not the newest.

    `steps` are whole, and in ascending order.
    """
    if not steps:
        return []
    held = keep.holds(steps, now)
    newest = steps[-1].step
    return [s for s in steps if s.step not in held and s.step not in spared and s.step != newest]


class Retention:
    """Passes over one run, on its coordinator; one at a time."""

    def __init__(
        self,
        catalog: Catalog,
        pins: Pins,
        keep: KeepPolicy | None,
        *,
        stale_s: float,
        clean_every_s: float = CLEAN_EVERY_S,
        spared: Callable[[], Collection[int]] = frozenset,
        damaged: Callable[[], Collection[str]] = frozenset,
        busy: Callable[[], Collection[int]] = frozenset,
        moving: contextlib.AbstractContextManager[Any] | None = None,
        may_remove: Callable[[], bool] = lambda: True,
    ) -> None:
        """`spared` are steps that must stay, `damaged` the save ids of those that do not count,
        `busy` steps that are being saved; they change only inside of `moving`. Nothing but
        leftovers goes before `may_remove`: what is there may be damaged, all of it."""
        self._catalog = catalog
        self._pins = pins
        self._keep = keep
        self._stale_s = stale_s
        self._clean_every_s = clean_every_s
        self._spared = spared
        self._damaged = damaged
        self._busy = busy
        self._moving = moving
        self._may_remove = may_remove
        self._cleaned_at: float | None = None
        self._lasting: set[str] = set()
        """Save ids of what would survive a crash."""
        self._one = threading.Lock()
        self._changed = threading.Condition()
        self._asked = 0
        self._done = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def run(self, *, final: bool = False) -> list[str]:
        """One pass, here and now; the names that went. Leftovers are cleaned when it is time."""
        with self._one:
            listing = self._catalog.look()
            busy = set(self._busy())
            removed: list[str] = []
            if self._keep is not None and self._may_remove():
                removed = self._remove(listing.steps, self._keep, busy)
            now = time.monotonic()
            due = self._cleaned_at is None or now - self._cleaned_at >= self._clean_every_s
            if due or final or listing.leaving:
                self._cleaned_at = now
                names = {self._catalog.names.of(step) for step in busy}
                cleaned = clean(
                    self._catalog, self._pins, listing, stale_s=self._stale_s, busy=names
                )
                for problem in cleaned.problems:
                    log.warning("in %s: %s", self._catalog.root, problem)
                if cleaned.removed:
                    log.info(
                        "removed what killed saves left in %s: %d bytes",
                        self._catalog.root,
                        cleaned.nbytes,
                    )
            return removed

    def _remove(self, steps: Sequence[Step], keep: KeepPolicy, busy: set[int]) -> list[str]:
        damaged = set(self._damaged())
        whole = [step for step in steps if step.save_id not in damaged]
        victims = doomed(whole, keep, time.time(), {*self._spared(), *busy})
        if not victims:
            return []
        gone = {step.save_id for step in victims}
        kept = {step.save_id: step for step in whole if step.save_id not in gone}
        unsure = [step for save_id, step in kept.items() if save_id not in self._lasting]
        if not make_lasting(unsure, self._catalog.open_store):
            return []  # one is gone since the listing; the next pass sees what there is
        self._lasting = set(kept)
        listed = {self._catalog.names.of(step.step): step for step in victims}

        def may_go(name: str) -> bool:
            # The program has gone on since the listing, and may have saved this step again.
            step = listed[name]
            now = self._catalog.find(step.step)
            same = isinstance(now, Step) and now.save_id == step.save_id
            return same and step.step not in {*self._spared(), *self._busy()}

        done = remove_steps(
            self._catalog.store, self._pins, list(listed), moving=self._moving, may_go=may_go
        )
        if done.removed:
            log.info("removed %d steps of %s", len(done.removed), self._catalog.root)
        return list(done.removed)

    # --- behind the program

    def poke(self) -> None:
        """Ask for a pass soon; returns at once."""
        with self._changed:
            if self._closed or os.getpid() != self._process:
                return
            self._asked += 1
            if self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name="shardkeep-retention", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # the program is ending
                    thread.start()
                    self._thread = thread

    def wait(self, timeout: float | None = None) -> bool:
        """Until every pass that was asked for is done; whether that is so."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked or self._thread is None, timeout)
            return self._done >= asked  # a thread that could not be started has done nothing

    def close(self) -> None:
        """End the thread, after what it is doing; a last pass follows if there ever was one."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if self._asked and os.getpid() == self._process:
            if thread is not None:
                thread.join()
            self._try(final=True)
            with self._changed:
                self._done = self._asked

    def _serve(self) -> None:
        """Until nothing is asked for: a thread that waits would hold a manager nobody closes."""
        while True:
            with self._changed:
                if self._closed or self._done == self._asked:
                    self._thread = None
                    self._changed.notify_all()
                    return
                asked = self._asked
            self._try()
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _try(self, *, final: bool = False) -> None:
        try:
            self.run(final=final)
        except Exception as error:
            # The next pass may do better; training goes on in any case.
            log.warning("removing old steps of %s failed: %s", self._catalog.root, error)
