# SPDX-License-Identifier: Apache-2.0
"""Signs of life: each rank posts beats while it is in a call, and others judge it by them.

Silence is counted in looks that the watcher made, not by the clock alone: a watcher that was itself
stopped has seen nothing and accuses nobody when it wakes.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shardkeep.failures import Failure

__all__ = ["Beat", "Heart", "Patience", "Watch", "default_timeout_s"]

DEFAULT_TIMEOUT_S = 600.0
TIMEOUT_VARIABLE = "SHARDKEEP_TIMEOUT_S"
DOUBT = 0.8
"""The part of `gone_s` without a beat after which a rank may have been given up."""


def default_timeout_s() -> float:
    """`SHARDKEEP_TIMEOUT_S` of the environment, or 600."""
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    if not given:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{TIMEOUT_VARIABLE} is {given!r}; it must be a positive number")
    return value


@dataclass(frozen=True, slots=True)
class Patience:
    """How often ranks give signs of life, and how long others wait for one."""

    beat_s: float = 5.0
    """Seconds between two beats of a rank."""
    gone_s: float = 60.0
    """A rank without a beat for so long is gone."""
    linger_s: float = 5.0
    """How long the coordinator stays until every rank has read the last verdict."""

    def __post_init__(self) -> None:
        """Several beats must fit into the time after which a rank is given up."""
        if not 0 < 3 * self.beat_s <= self.gone_s:
            raise ValueError(f"gone_s is {self.gone_s}; it must be at least 3 x {self.beat_s}")

    @property
    def look_s(self) -> float:
        """Seconds between two looks of a watcher."""
        return min(1.0, self.gone_s / 6)


class Beat(msgspec.Struct, array_like=True):
    """A sign of life."""

    count: int
    """Grows with every beat."""
    call: int
    """The call the rank is in, or was in last."""
    progress: int
    """Grows with bytes moved and steps entered."""
    posted: int
    """The last step of this call whose outcome this rank has posted; -1 before the first."""
    left: list[Failure] | None
    """None inside the call; empty once it ended well; else why this rank left it."""


class _Silence:
    """The time between beats, from some instant on."""

    def __init__(self, since: float | None = None) -> None:
        self.last = time.monotonic() if since is None else since
        self.longest = 0.0

    def until_now(self) -> float:
        """The longest there was."""
        return max(self.longest, time.monotonic() - self.last)

    def end(self) -> None:
        """A beat was posted."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self.last)
        self.last = now


class Heart:
    """Posts this rank's beats, from a thread that lives as long as a call."""

    def __init__(self, post: Callable[[bytes], None], patience: Patience) -> None:
        """`post` is called from two threads, never from both at once."""
        self._post = post
        self._patience = patience
        self._beat = Beat(0, -1, 0, -1, [])
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._silence = _Silence()

    def start(self, call: int, timeout_s: float, since: float | None = None) -> None:
        """Enter a call, which others may have waited for since a time of `time.monotonic`."""
        self._stop = threading.Event()
        self._silence = _Silence(since)
        with self._lock:
            self._beat.call = call
            self._beat.posted = -1
            self._beat.left = None
        self._send()
        every = min(self._patience.beat_s, timeout_s / 4)
        thread = threading.Thread(
            target=self._run, args=(self._stop, every), name="shardkeep-heartbeat", daemon=True
        )
        thread.start()

    def _run(self, stop: threading.Event, every: float) -> None:
        while not stop.wait(every):
            with contextlib.suppress(Exception):  # whoever waits on the plane itself reports it
                self._send(stop)

    def _send(self, stop: threading.Event | None = None) -> None:
        with self._lock:
            if stop is not None and stop.is_set():
                return
            silence = self._silence
            self._beat.count += 1
            self._post(msgspec.msgpack.encode(self._beat))
            silence.end()

    def advance(self, amount: int = 1) -> None:
        """Progress was made; cheap, and seen by others with the next beat."""
        self._beat.progress += amount

    def posted(self, step: int) -> None:
        """This rank has posted the outcome of a step."""
        self._beat.posted = step
        self._beat.progress += 1

    def stood_still_s(self) -> float:
        """The longest this rank was without a sign of life, if others may have given it up; else 0.

        Since the call began, or since what was before was forgotten.
        """
        longest = self._silence.until_now()
        return longest if longest > DOUBT * self._patience.gone_s else 0.0

    def forget_standstill(self) -> None:
        """The others are asked now whether they are there: only what comes is in doubt."""
        self._silence = _Silence()

    def stop(self, left: list[Failure]) -> None:
        """Leave the call, and say why."""
        self._stop.set()
        # The thread may hang in a post to a plane that is gone: then there is nobody to tell.
        if self._lock.acquire(timeout=1.0):
            try:
                self._beat.left = left
                self._beat.count += 1
                with contextlib.suppress(Exception):
                    self._post(msgspec.msgpack.encode(self._beat))
            finally:
                self._lock.release()


class Beats(Protocol):
    """Where beats are read."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """What is posted under each key now."""


class _Seen:
    """What a watcher knows of one rank."""

    __slots__ = ("count", "idle", "progress", "silent")

    def __init__(self) -> None:
        self.count = -1
        self.progress = -1
        self.silent = 0.0
        self.idle = 0.0


class Watch:
    """Judges some ranks while this one waits for them in one step of a call."""

    def __init__(
        self,
        beats: Beats,
        ranks: Sequence[int],
        *,
        call: int,
        step: int,
        phase: str,
        timeout_s: float,
        patience: Patience,
        ended: int = -1,
    ) -> None:
        """Nothing before the first look counts against anyone. `ended` is the last call that this
        rank ended well."""
        self._beats = beats
        self._seen = {rank: _Seen() for rank in ranks}
        self._call = call
        self._step = step
        self._phase = phase
        self._timeout_s = timeout_s
        self._patience = patience
        self._ended = ended
        self._looked = time.monotonic()
        self.left: set[int] = set()
        """Ranks that have ended the call well."""

    def look(self, *, bulk: bool = False) -> list[Failure]:
        """Who is gone, stuck, never came or left with an error. In `bulk` nobody is stuck."""
        now = time.monotonic()
        passed = min(now - self._looked, 2 * self._patience.look_s)
        self._looked = now
        found: list[Failure] = []
        data = self._beats.get_many([beat_key(rank) for rank in self._seen])
        for (rank, seen), posted in zip(self._seen.items(), data, strict=True):
            beat = None if posted is None else msgspec.msgpack.decode(posted, type=Beat)
            failure = self._judge(rank, seen, beat, passed, bulk)
            if isinstance(failure, list):
                found.extend(failure)
            elif failure is not None:
                found.append(failure)
        return list({failure.rank: failure for failure in found}.values())

    def look_for_all(self) -> list[Failure]:
        """Like `look`, and who is not in the call any more, be it that they are in another one."""
        text = f"ended the call while the others were in {self._phase!r}"
        return self.look() or [Failure(rank, "gone", text) for rank in self.left]

    def counts(self) -> dict[int, int]:
        """How many beats each rank had posted when it was last looked at."""
        return {rank: seen.count for rank, seen in self._seen.items() if rank not in self.left}

    def _judge(
        self, rank: int, seen: _Seen, beat: Beat | None, passed: float, bulk: bool
    ) -> Failure | list[Failure] | None:
        if beat is not None and beat.call > self._call:
            self.left.add(rank)
            return None
        if beat is None or beat.call < self._call:
            if beat is not None and beat.left and beat.call == self._ended:
                # It gave somebody up in a call that went well here, and so will not come.
                lost = [failure for failure in beat.left if failure.is_silent]
                if lost:
                    return lost
            seen.idle += passed
            if seen.idle < self._timeout_s:
                return None
            text = (
                f"did not join the others in {self._phase!r} within {self._timeout_s:g} s: it is "
                "busy elsewhere, never made this call, or died before it"
            )
            return Failure(rank, "absent", text)
        if beat.left is not None:
            if not beat.left:
                self.left.add(rank)
            return beat.left
        seen.silent = 0.0 if beat.count != seen.count else seen.silent + passed
        seen.idle = 0.0 if beat.progress != seen.progress else seen.idle + passed
        seen.count, seen.progress = beat.count, beat.progress
        if seen.silent >= self._patience.gone_s:
            text = f"no sign of life for {self._patience.gone_s:g} s in {self._phase!r}"
            return Failure(rank, "gone", text)
        if not bulk and beat.posted < self._step and seen.idle >= self._timeout_s:
            text = f"alive, but without progress for {self._timeout_s:g} s in {self._phase!r}"
            return Failure(rank, "stuck", text)
        return None


def beat_key(rank: int) -> str:
    """Where a rank's beats are posted."""
    return f"beat/{rank}"
