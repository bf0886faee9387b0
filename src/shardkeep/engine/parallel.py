# SPDX-License-Identifier: Apache-2.0
"""Tasks on threads: many on a few, in order, up to the first error; handed on; one behind.

Where no thread can be started any more, because the program is ending or has too many, the caller
does the work itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sized
from types import TracebackType
from typing import Generic, TypeVar

from shardkeep.engine.turns import short_turns

__all__ = ["Behind", "Crew", "run_in_order"]

T = TypeVar("T")
GRACE_S = 10.0


def run_in_order(
    tasks: Iterable[T],
    work: Callable[[T], None],
    threads: int,
    on_stop: Callable[[], None] = lambda: None,
    *,
    alone_here: bool = False,
) -> None:
    """Do `work` on every task; tasks are started in order, and the first error is raised here.

    After an error, and also after an interrupt, `on_stop` is called to end long tasks early.

    Threads are daemons: after an error, one that is stuck in the kernel keeps neither the caller
    nor the exit waiting. Every error counts, whichever thread it happens on. One task alone is done
    by the caller if it may be, `alone_here`: a thread takes longer to start than many a task, but
    without one an interrupt waits for a disk.
    """
    if isinstance(tasks, Sized):
        threads = min(threads, len(tasks))
    if threads < 1 or (alone_here and threads == 1):
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
    with short_turns():
        try:
            for number in range(threads):
                thread = threading.Thread(target=worker, name=f"shardkeep-io-{number}", daemon=True)
                if not _start(thread, started):
                    break
            if not started:
                worker()
            first = _wait(started, ended)
        except BaseException as interrupt:
            first = interrupt
        stopped.set()
        if first is not None:
            on_stop()
            _leave(started)
            raise first


def _start(thread: threading.Thread, started: list[threading.Thread]) -> bool:
    """Start one more, unless the system refuses. An interrupted one counts as started."""
    started.append(thread)
    try:
        thread.start()
    except RuntimeError as error:
        # An interrupt while this waits for a thread to begin may leave a lock of Python's own
        # released, which is another such error. Whoever has begun is running, or has a number.
        if thread in threading.enumerate() or thread.ident is not None:
            raise error.__context__ or error from None
        started.pop()
        return False
    return True


def _leave(started: list[threading.Thread]) -> None:
    """Let threads end what they are doing, so that nothing moves after this; not for ever."""
    deadline = time.monotonic() + GRACE_S
    for thread in started:
        with contextlib.suppress(RuntimeError):  # one whose start was interrupted
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait(
    started: list[threading.Thread], ended: queue.SimpleQueue[BaseException | None]
) -> BaseException | None:
    """The first error, or None once every thread has ended without one."""
    left = max(1, len(started))  # the caller itself, where none could be started
    while left and (any(thread.is_alive() for thread in started) or not ended.empty()):
        with contextlib.suppress(queue.Empty):
            error = ended.get(timeout=0.5)
            if error is not None:
                return error
            left -= 1  # it has said that it ends, though it may still be alive for a moment
    return None


_END = object()


class Crew(Generic[T]):
    """Threads for the next step of a pipeline: each takes what was handed over first.

    After the first error no work is done any more, and everything handed over is dropped. As a
    context: on leaving it all work is done, or the first error is raised. Threads are daemons, as
    those of `run_in_order`.
    """

    def __init__(
        self, work: Callable[[T], None], drop: Callable[[T], None], threads: int, name: str
    ) -> None:
        """`drop` lets go of what a task holds, if there is no `work` on it. Without threads, work
        is done where it is handed over."""
        self._work = work
        self._drop = drop
        self._tasks: queue.SimpleQueue[T | object] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"shardkeep-{name}-{number}", daemon=True)
            for number in range(threads)
        ]

    def __enter__(self) -> Crew[T]:
        wanted, self._threads = self._threads, []
        try:
            for thread in wanted:
                if not _start(thread, self._threads):
                    break
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def hand(self, task: T) -> None:
        """Leave a task to whoever is free; never waits. An error that happened is raised here."""
        if not self._threads:
            self._work(task)
        elif self._error is None:
            self._tasks.put(task)
        else:
            self._drop(task)
            raise self._error

    def _run(self) -> None:
        # Stays to the end also after an error: whoever hands over waits for what a drop gives back.
        while (task := self._tasks.get()) is not _END:
            try:
                (self._work if self._error is None else self._drop)(task)  # type: ignore[arg-type]
            except BaseException as error:
                self._fail(error)
                self._ended.put(error)
        self._ended.put(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        for _thread in self._threads:
            self._tasks.put(_END)
        first = error
        try:
            if first is None:
                first = _wait(self._threads, self._ended)
        except BaseException as interrupt:
            self._fail(interrupt)
            first = interrupt
        if first is not None:
            _leave(self._threads)
            if first is not error:
                raise first

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error


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
        if not _start(self._thread, []):
            self._thread = None
            worker()

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
            _leave([self._thread])
