# SPDX-License-Identifier: Apache-2.0
"""How ranks agree: two planes, and the steps drivers are made of.

Control is a key-value space with deadlines: every rank posts the outcome of each phase, the
coordinator posts one verdict that all await. Bulk moves bytes between ranks, and is entered only
after a good verdict. An error on any rank becomes the same error on every rank.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from shardkeep import errors
from shardkeep.errors import CheckpointError, MismatchError, RankError

__all__ = ["Bulk", "Control", "Coordinator", "SingleProcess", "ThreadRanks", "merge_failures"]

DEFAULT_TIMEOUT_S = 600.0


class Control(Protocol):
    """A key-value space that all ranks see."""

    def set(self, key: str, value: bytes) -> None:
        """Post a value; keys are never reused."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for a value; None once the time is over."""

    def forget(self, prefix: str) -> None:
        """Drop keys that every rank is done with."""


class Bulk(Protocol):
    """Moves bytes. All ranks call the same method in the same order."""

    def gather(self, data: bytes) -> list[bytes] | None:
        """All ranks' bytes on the coordinator, None elsewhere."""

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """To each rank its own part."""

    def broadcast(self, data: bytes | None) -> bytes:
        """To all ranks the coordinator's bytes."""


class Failure(msgspec.Struct):
    """An error as it travels: never a pickle."""

    rank: int
    kind: str
    text: str
    trace: str
    details: dict[str, Any]


def _describe(error: BaseException, rank: int) -> Failure:
    details: dict[str, Any] = {}
    if isinstance(error, MismatchError):
        details = {
            "missing": list(error.missing),
            "unexpected": list(error.unexpected),
            "mismatched": dict(error.mismatched),
        }
    elif isinstance(error, errors.CorruptionError):
        details = {"names": list(error.names)}
    elif isinstance(error, errors.StorageError):
        details = {"transient": error.transient}
    try:
        text = str(error)
    except Exception:
        text = "<no text>"
    trace = "".join(traceback.format_exception(error))[-8000:]
    kind = type(error)
    for cls in kind.__mro__:
        if cls.__module__ == errors.__name__ and cls.__name__ in errors.__all__:
            return Failure(rank, cls.__name__, text, trace, details)
    return Failure(rank, kind.__qualname__, text, trace, details)


def merge_failures(failures: Sequence[Failure]) -> CheckpointError:
    """One error for all ranks: its own class where all failed alike, else `RankError`."""
    by_rank = {f.rank: f"{f.kind}: {f.text}" for f in failures}
    kinds = {f.kind for f in failures}
    first = min(failures, key=lambda f: f.rank)
    if len(kinds) == 1 and first.kind in errors.__all__ and first.kind != "RankError":
        cls = getattr(errors, first.kind)
        ranks = ", ".join(map(str, sorted(by_rank)))
        text = (
            first.text
            if len({f.text for f in failures}) == 1
            else "\n".join(
                f"rank {f.rank}: {f.text}" for f in sorted(failures, key=lambda f: f.rank)
            )
        )
        error: CheckpointError = cls(
            f"{text} [rank {ranks}]", failures=by_rank, **_merged_details(failures)
        )
    else:
        lines = [f"rank {rank}: {text}" for rank, text in sorted(by_rank.items())]
        error = RankError("ranks failed:\n  " + "\n  ".join(lines), failures=by_rank)
    error.add_note(f"on rank {first.rank}:\n{first.trace}")
    return error


def _merged_details(failures: Sequence[Failure]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for failure in failures:
        for key, value in failure.details.items():
            if isinstance(value, list):
                merged[key] = sorted(set(merged.get(key, [])) | set(value))
            elif isinstance(value, dict):
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged[key] = value
    return merged


class Coordinator(Protocol):
    """A group of ranks that save and load together; rank 0 coordinates."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def agree(self, phase: str, work: Callable[[], None]) -> None:
        """Do `work` on every rank; an error on any is raised on all."""

    def gather_scatter(
        self,
        phase: str,
        local: Callable[[], bytes],
        join: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Make bytes on every rank, join them on the coordinator, and give each rank its part."""

    def lead(self, phase: str, work: Callable[[], bytes]) -> bytes:
        """Do `work` on the coordinator and give every rank what it returns."""

    def close(self) -> None:
        """Let go of what outlives a call."""


class SingleProcess:
    """One process is its own group: nothing travels and errors stay as they are."""

    rank = 0
    world_size = 1

    def agree(self, phase: str, work: Callable[[], None]) -> None:
        """Just do it."""
        work()

    def gather_scatter(
        self,
        phase: str,
        local: Callable[[], bytes],
        join: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Join the one message there is."""
        return join([local()])[0]

    def lead(self, phase: str, work: Callable[[], bytes]) -> bytes:
        """Just do it."""
        return work()

    def close(self) -> None:
        """Nothing is held."""


_OK = b"ok"


class Ranks:
    """The steps over any control and bulk plane."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        control: Control,
        bulk: Bulk,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """One of `world_size` ranks that all make the same calls in the same order."""
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._control = control
        self._bulk = bulk
        self._epoch = itertools.count()

    def agree(self, phase: str, work: Callable[[], None]) -> None:
        """Do `work`, post the outcome, await the verdict."""
        self._outcome(phase, work)

    def gather_scatter(
        self,
        phase: str,
        local: Callable[[], bytes],
        join: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Bulk follows an agreed outcome, so no rank waits in it for one that failed."""
        mine = self._outcome(f"{phase}/local", local)
        gathered = self._bulk.gather(mine)
        parts = self._outcome(
            f"{phase}/join", lambda: join(gathered) if gathered is not None else None
        )
        return self._bulk.scatter(parts)

    def lead(self, phase: str, work: Callable[[], bytes]) -> bytes:
        """The coordinator works; the others learn the outcome first, then the bytes."""
        made = self._outcome(phase, lambda: work() if self.rank == 0 else None)
        return self._bulk.broadcast(made)

    def _outcome(self, phase: str, work: Callable[[], Any]) -> Any:
        prefix = f"{next(self._epoch)}/{phase}"
        result, caught = None, None
        try:
            result = work()
            posted = _OK
        except BaseException as error:
            caught = error
            posted = msgspec.msgpack.encode(_describe(error, self.rank))
        self._control.set(f"{prefix}/{self.rank}", posted)
        if self.rank == 0:
            self._control.set(f"{prefix}/verdict", self._collect(prefix, phase))
        verdict = self._control.get(f"{prefix}/verdict", 2 * self.timeout_s)
        if verdict is None:
            raise RankError(
                f"rank 0 gave no verdict on {phase} within {2 * self.timeout_s:.0f} s",
                failures={0: "no answer"},
            )
        if verdict != _OK:
            failures = msgspec.msgpack.decode(verdict, type=list[Failure])
            merged = merge_failures(failures)
            if caught is not None and not isinstance(caught, Exception):
                raise caught  # KeyboardInterrupt and SystemExit stay what they are, here
            raise merged from caught
        return result

    def _collect(self, prefix: str, phase: str) -> bytes:
        """All outcomes, or who is missing once the time is over."""
        deadline = time.monotonic() + self.timeout_s
        failures = []
        for rank in range(self.world_size):
            posted = self._control.get(f"{prefix}/{rank}", max(0.0, deadline - time.monotonic()))
            if posted is None:
                text = f"no answer to {phase} within {self.timeout_s:.0f} s"
                failures.append(Failure(rank, "gone", text, "", {}))
            elif posted != _OK:
                failures.append(msgspec.msgpack.decode(posted, type=Failure))
        return msgspec.msgpack.encode(failures) if failures else _OK

    def close(self) -> None:
        """Nothing is held."""


class _SharedDict:
    """The control plane of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def forget(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]


class _ThreadBulk:
    """The bulk plane of threads, over the same dict."""

    def __init__(self, rank: int, world_size: int, space: _SharedDict, timeout_s: float) -> None:
        self._rank = rank
        self._world = world_size
        self._space = space
        self._timeout_s = timeout_s
        self._count = itertools.count()

    def _take(self, key: str) -> bytes:
        found = self._space.get(key, self._timeout_s)
        if found is None:
            raise RankError(f"no message {key} within {self._timeout_s:.0f} s")
        return found

    def gather(self, data: bytes) -> list[bytes] | None:
        turn = next(self._count)
        self._space.set(f"bulk/{turn}/{self._rank}", data)
        if self._rank != 0:
            return None
        gathered = [self._take(f"bulk/{turn}/{rank}") for rank in range(self._world)]
        self._space.forget(f"bulk/{turn}/")
        return gathered

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        turn = next(self._count)
        if self._rank == 0:
            assert parts is not None
            for rank, part in enumerate(parts):
                self._space.set(f"bulk/{turn}/{rank}", part)
        return self._take(f"bulk/{turn}/{self._rank}")

    def broadcast(self, data: bytes | None) -> bytes:
        turn = next(self._count)
        if self._rank == 0:
            assert data is not None
            self._space.set(f"bulk/{turn}/all", data)
        return self._take(f"bulk/{turn}/all")


class ThreadRanks:
    """N ranks as threads of one process: for tests and simulations.

    >>> ThreadRanks(3).run(lambda coordinator: coordinator.rank * 10)
    [0, 10, 20]
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        """A group of `world_size` ranks that share memory and nothing else."""
        self.world_size = world_size
        self.timeout_s = timeout_s

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """Run `work(coordinator)` on every rank; returns what each gave, or raises rank 0's error.

        Errors of all ranks are in the `failures` of a `CheckpointError`; `outcomes` gives them one
        by one.
        """
        results = self.outcomes(work)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def outcomes(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """Like `run`, with the error of a rank in place of its result."""
        space = _SharedDict()
        results: list[Any] = [None] * self.world_size

        def rank_main(rank: int) -> None:
            bulk = _ThreadBulk(rank, self.world_size, space, self.timeout_s)
            ranks = Ranks(rank, self.world_size, space, bulk, self.timeout_s)
            try:
                results[rank] = work(ranks)
            except BaseException as error:
                results[rank] = error

        if self.world_size == 1:
            rank_main(0)
            return results
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
