# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: a callback, or a bar on the terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

__all__ = ["Progress", "tracked"]

Progress: TypeAlias = Callable[[int, int], None] | bool | None
"""`f(done, total)` in bytes, called from any thread but never from two at once; or True: a bar."""


class Counter:
    """Adds up what threads report."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        """`show(done, total)` is called after each report, never from two threads at once."""
        self.total = 0
        self._done = 0
        self._show = show
        self._lock = threading.Lock()

    def expect(self, total: int) -> None:
        """Say how many bytes there will be."""
        self.total = total

    def __call__(self, nbytes: int) -> None:
        """Count bytes just moved."""
        with self._lock:
            self._done += nbytes
            self._show(self._done, max(self.total, self._done))

    def finish(self) -> None:
        """All is done: what was expected was an upper bound."""
        with self._lock:
            if self._done < self.total:
                self._done = self.total
                self._show(self._done, self.total)


@contextlib.contextmanager
def tracked(progress: Progress, title: str) -> Iterator[Counter]:
    """A counter that feeds `progress`; tell it what to `expect` once that is known."""
    if progress is None or progress is False:
        yield Counter(lambda done, total: None)
    elif progress is True:
        with _bar(title) as show:
            counter = Counter(show)
            yield counter
            counter.finish()
    else:
        counter = Counter(progress)
        yield counter
        counter.finish()


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bar(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
