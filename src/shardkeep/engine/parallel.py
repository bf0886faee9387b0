# SPDX-License-Identifier: Apache-2.0
"""Tasks on threads: many on a few, in order, up to the first error; or one behind the caller."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["Behind", "run_in_order"]

T = TypeVar("T")
GRACE_S = 10.0


def run_in_order(
    tasks: Iterable[T],
    work: Callable[[T], None],
    threads: int,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Do `work` on every task; tasks are started in order, and the first error is raised here.

    After an error, and also after an interrupt, `on_stop` is called to end long tasks early.

    Threads are daemons: after an error, one that is stuck in the kernel keeps neither the caller
    nor the exit waiting. Every error counts, whichever thread it happens on.
    """
    if threads <= 1:
        for task in tasks:
            work(task)
        return
    source = iter(tasks)
    lock = threading.Lock()
    stopped = threading.Event()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def worker() -> None:
        error: BaseException | None = None
        try:
            while not stopped.is_set():
                with lock:
                    task = next(source, _END)
                if task is _END:
                    break
                work(task)  # type: ignore[arg-type]
        except BaseException as caught:
            stopped.set()
            error = caught
        ended.put(error)

    started: list[threading.Thread] = []
    try:
        for number in range(threads):
            thread = threading.Thread(target=worker, name=f"shardkeep-io-{number}", daemon=True)
            started.append(thread)
            thread.start()
        first = _wait(started, ended)
    except BaseException as interrupt:
        first = interrupt
    stopped.set()
    if first is not None:
        on_stop()
        # Let the others end what they are doing, so that nothing moves after this; not for ever.
        deadline = time.monotonic() + GRACE_S
        for thread in started:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise first


def _wait(
    started: list[threading.Thread], ended: queue.SimpleQueue[BaseException | None]
) -> BaseException | None:
    """The first error, or None once every thread has ended without one."""
    while any(thread.is_alive() for thread in started) or not ended.empty():
        with contextlib.suppress(queue.Empty):
            error = ended.get(timeout=0.5)
            if error is not None:
                return error
    return None


_END = object()


class Behind:
    """One task at a time on a thread of its own, while the caller goes on with something else."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def run(self, work: Callable[[], None]) -> None:
        """Begin a task, once the one before has ended; the error of that one is raised here."""
        self.wait()

        def worker() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=worker, name="shardkeep-behind", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the task has ended; its error is raised here, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def give_up(self) -> None:
        """After an error elsewhere: let the task end, but not for ever; its own error is lost."""
        if self._thread is not None:
            self._thread.join(GRACE_S)
