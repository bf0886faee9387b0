# SPDX-License-Identifier: Apache-2.0
"""Running many small tasks on a few threads, in order, stopping at the first error."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["run_in_order"]

T = TypeVar("T")
GRACE_S = 10.0


def run_in_order(tasks: Iterable[T], work: Callable[[T], None], threads: int) -> None:
    """Do `work` on every task; tasks are started in order, and the first error is raised here.

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
        try:
            while not stopped.is_set():
                with lock:
                    task = next(source, _END)
                if task is _END:
                    break
                work(task)  # type: ignore[arg-type]
        except BaseException as error:
            stopped.set()
            ended.put(error)
        else:
            ended.put(None)

    for number in range(threads):
        threading.Thread(target=worker, name=f"shardkeep-io-{number}", daemon=True).start()
    first: BaseException | None = None
    left = threads
    try:
        while left and first is None:
            first = ended.get()
            left -= 1
    except BaseException as interrupt:
        first = interrupt
    stopped.set()
    # After an error, let the others end what they are doing; but not for ever.
    deadline = time.monotonic() + GRACE_S
    while left and first is not None and (remaining := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            ended.get(timeout=remaining)
            left -= 1
    if first is not None:
        raise first


_END = object()
