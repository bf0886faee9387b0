# SPDX-License-Identifier: Apache-2.0
"""The two planes ranks talk on: what each must do, and what it is for ranks that are threads."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["FAILED", "Bulk", "Control", "Helper", "Part", "Prefixed", "SharedDict", "ThreadBulk"]

T = TypeVar("T")

Part = npt.NDArray[np.uint8]
"""Bytes for one rank; nothing at all is an empty array."""

FAILED = 1 << 32
"""What a failed rank adds to a counter of outcomes, whose low half counts them all."""


class Control(Protocol):
    """A key-value space that all ranks see. Its methods raise `RankError` once it is lost."""

    def set(self, key: str, value: bytes) -> None:
        """Post a value. May be called from another thread, also while this one waits in `get`."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for a value; None once the time is over."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values that are there now."""

    def claim(self, key: str, value: bytes) -> bytes:
        """Post a value unless there is one; returns the one that stands."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; returns the sum."""

    def count(self, key: str, enough: int, timeout_s: float) -> int:
        """Wait until the low 32 bits of a counter reach `enough`; returns what it is at the end."""

    def forget(self, keys: Sequence[str]) -> None:
        """Drop keys that every rank is done with."""

    def close(self) -> None:
        """Let go of what outlives a call."""


class Bulk(Protocol):
    """Moves bytes. All ranks call the same method in the same order."""

    def gather(self, data: bytes) -> list[bytes] | None:
        """All ranks' bytes on the coordinator, None elsewhere."""

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """To each rank its own part."""

    def broadcast(self, data: bytes | None) -> bytes:
        """To all ranks the coordinator's bytes."""

    def exchange(self, parts: Sequence[Part], sizes: Sequence[int]) -> list[Part]:
        """To each rank its own part, from every rank; `sizes` are those of what will come."""

    def close(self) -> None:
        """End it; calls that still wait in it fail."""


class Helper:
    """Runs what blocks on a thread of its own, so that its caller can look around meanwhile.

    A call that was given up keeps its thread until it returns; the next one gets a new thread. Or,
    if all is to be done in the order it was asked for, by whichever threads, the next one waits.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        """No thread before the first call."""
        self._in_order = in_order
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Any] | None] | None = None

    def run(self, work: Callable[[], T], tick: Callable[[], None], tick_s: float) -> T:
        """What `work` returns or raises; until then `tick` is called at intervals and may raise."""
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        with self._lock:
            todo = self._work = self._work or _start_serving()
            if todo is not None:
                todo.put((work, answer))
        if todo is None:
            return work()  # the program is ending: without a look around
        try:
            while True:
                try:
                    result, error = answer.get(timeout=tick_s)
                    break
                except queue.Empty:
                    tick()
        except BaseException:
            if not self._in_order:
                self.stop()
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would keep itself, by this frame, and all that was in use
        return result  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Let the thread end once it is done with what it does."""
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                work.put(None)


def _start_serving() -> queue.SimpleQueue[tuple[Callable[[], Any], Any] | None] | None:
    todo: queue.SimpleQueue[tuple[Callable[[], Any], Any] | None] = queue.SimpleQueue()
    thread = threading.Thread(target=_serve, args=(todo,), name="shardkeep-helper", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return todo


def _serve(todo: queue.SimpleQueue[tuple[Callable[[], Any], Any] | None]) -> None:
    while (job := todo.get()) is not None:
        work, answer = job
        try:
            answer.put((work(), None))
        except BaseException as error:
            answer.put((None, error))
        del work, answer, job


class Prefixed:
    """A part of a control plane of somebody else."""

    def __init__(self, control: Control, prefix: str) -> None:
        self._control = control
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Under the prefix."""
        self._control.set(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Under the prefix."""
        return self._control.get(self._prefix + key, timeout_s)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Under the prefix."""
        return self._control.get_many([self._prefix + key for key in keys])

    def claim(self, key: str, value: bytes) -> bytes:
        """Under the prefix."""
        return self._control.claim(self._prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        """Under the prefix."""
        return self._control.add(self._prefix + key, amount)

    def count(self, key: str, enough: int, timeout_s: float) -> int:
        """Under the prefix."""
        return self._control.count(self._prefix + key, enough, timeout_s)

    def forget(self, keys: Sequence[str]) -> None:
        """Under the prefix."""
        self._control.forget([self._prefix + key for key in keys])

    def close(self) -> None:
        """The plane stays."""


class SharedDict:
    """The control plane of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._sums: dict[str, int] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Post, and wake who waits."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for a value."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """What is there."""
        with self._changed:
            return [self._values.get(key) for key in keys]

    def claim(self, key: str, value: bytes) -> bytes:
        """The first value stands."""
        with self._changed:
            standing = self._values.setdefault(key, value)
            self._changed.notify_all()
            return standing

    def add(self, key: str, amount: int) -> int:
        """Sums and values do not share keys."""
        with self._changed:
            self._sums[key] = self._sums.get(key, 0) + amount
            self._changed.notify_all()
            return self._sums[key]

    def count(self, key: str, enough: int, timeout_s: float) -> int:
        """Wait for a sum."""
        with self._changed:
            self._changed.wait_for(lambda: self._sums.get(key, 0) % FAILED >= enough, timeout_s)
            return self._sums.get(key, 0)

    def forget(self, keys: Sequence[str]) -> None:
        """Drop values and sums."""
        with self._changed:
            for key in keys:
                self._values.pop(key, None)
                self._sums.pop(key, None)

    def close(self) -> None:
        """Nothing is held."""


class ThreadBulk:
    """The bulk plane of threads, over the same dict."""

    def __init__(
        self, rank: int, world_size: int, space: SharedDict, timeout_s: float, name: str
    ) -> None:
        self._rank = rank
        self._world = world_size
        self._space = space
        self._timeout_s = timeout_s
        self._name = name
        self._count = itertools.count()

    def _turn(self) -> str:
        return f"bulk/{self._name}/{next(self._count)}"

    def _take(self, key: str) -> bytes:
        found = self._space.get(key, self._timeout_s)
        if found is None:
            raise TimeoutError(f"no message {key} within {self._timeout_s:.0f} s")
        self._space.forget([key])
        return found

    def gather(self, data: bytes) -> list[bytes] | None:
        """One message from each rank."""
        turn = self._turn()
        self._space.set(f"{turn}/{self._rank}", data)
        if self._rank != 0:
            return None
        return [self._take(f"{turn}/{rank}") for rank in range(self._world)]

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """One message to each rank."""
        turn = self._turn()
        if self._rank == 0:
            assert parts is not None
            for rank, part in enumerate(parts):
                self._space.set(f"{turn}/{rank}", part)
        return self._take(f"{turn}/{self._rank}")

    def broadcast(self, data: bytes | None) -> bytes:
        """The same message to each rank."""
        if self._rank != 0:
            return self.scatter(None)
        assert data is not None
        return self.scatter([data] * self._world)

    def exchange(self, parts: Sequence[Part], sizes: Sequence[int]) -> list[Part]:
        """Copies, as between processes: nobody sees what another does to its part later."""
        turn = self._turn()
        for rank, part in enumerate(parts):
            if rank != self._rank and len(part):
                self._space.set(f"{turn}/{self._rank}/{rank}", part.tobytes())
        return [
            np.frombuffer(self._take(f"{turn}/{rank}/{self._rank}"), np.uint8)
            if size and rank != self._rank
            else parts[self._rank]
            for rank, size in enumerate(sizes)
        ]

    def close(self) -> None:
        """Nothing is held."""
