# SPDX-License-Identifier: Apache-2.0
"""What a caller holds of a save that goes on behind it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from types import TracebackType
from typing import Any, Self

from shardkeep.saving import SaveResult

__all__ = ["SaveHandle"]


class SaveHandle(Future[SaveResult]):
    """A save in the background: a `Future` of its `SaveResult`, awaitable and usable in `with`.

    `result()` raises what went wrong. Who never asks is told by the next save.
    """

    def __init__(self, checkpoint_id: str) -> None:
        """Made by `async_save`."""
        super().__init__()
        self.checkpoint_id = checkpoint_id
        """Where it goes."""
        self.staged: Future[None] = Future()
        """Done once every byte is in memory of ours: the state may change from then on."""
        self.staged.set_running_or_notify_cancel()  # cannot be cancelled by itself
        self.skipped = False
        """Whether it was never begun, because another was running: `on_overlap="skip"`."""
        self._cancelling = threading.Event()
        self._seen = False
        self._is_staged = False
        self._process = os.getpid()

    @property
    def staging_completion(self) -> Future[None]:
        """`staged`, as torch calls it."""
        return self.staged

    @property
    def upload_completion(self) -> SaveHandle:
        """This, as torch calls it."""
        return self

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state may change; raises what went wrong before."""
        self.staged.result(timeout)

    def cancel(self) -> bool:
        """Ask for an end without a checkpoint; False if it has ended already.

        All ranks agree on it at the next phase: `cancelled()` is true then, on all of them. A save
        that had begun to commit is completed.
        """
        if self.done():
            return False
        self._cancelling.set()
        return True

    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.done()

    def result(self, timeout: float | None = None) -> SaveResult:
        """What the save did, once it is committed everywhere; or its error."""
        self._look(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, or None."""
        self._look(timeout)
        return super().exception(timeout)

    def _look(self, timeout: float | None) -> None:
        try:
            super().exception(timeout)
        finally:
            self._seen = self._seen or self.done()

    def __await__(self) -> Generator[Any, None, SaveResult]:
        """The same, in a coroutine."""
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __enter__(self) -> Self:
        """Usable in `with`: leaving it waits for the save."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait; the save's error is raised unless there is another one, or it was cancelled."""
        wait([self])
        self.mark_seen()
        if error is None and not self.cancelled():
            self.result()

    # --- for whoever runs it

    @property
    def is_cancelling(self) -> bool:
        """Whether somebody asked for an end."""
        return self._cancelling.is_set()

    def wait_ended(self) -> None:
        """Until it has ended, whatever became of it; at once in a process that was forked
        meanwhile, where no thread completes it."""
        if self._process == os.getpid():
            wait([self])

    def mark_seen(self) -> None:
        """Whoever must know how it ended knows."""
        self._seen = True

    def unseen_error(self) -> BaseException | None:
        """What went wrong, if nobody has looked; from now on it counts as seen."""
        if self._seen or not self.done() or self.cancelled():
            return None
        return self.exception()

    def tell_staged(self) -> None:
        """The state may change. Who is interrupted in here may leave a lock of the future's taken,
        so that nobody else touches it once this has begun."""
        self._is_staged = True
        with contextlib.suppress(InvalidStateError):  # the save has ended already
            self.staged.set_result(None)

    def fail_staged(self, error: BaseException) -> None:
        """The state may change, and was not copied; not from a thread that may be interrupted."""
        if not self._is_staged:
            with contextlib.suppress(InvalidStateError):
                self.staged.set_exception(error)

    def end(self, outcome: SaveResult | BaseException | None) -> None:
        """The save has ended: well, with an error, or cancelled."""
        if isinstance(outcome, SaveResult):
            self.set_result(outcome)
            return
        self.fail_staged(CancelledError() if outcome is None else outcome)
        if outcome is None:
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_exception(outcome)
