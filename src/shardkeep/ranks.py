# SPDX-License-Identifier: Apache-2.0
"""The steps of a group of ranks, over any control and bulk plane.

Every rank posts the outcome of each phase to the control plane, and the coordinator posts one
verdict that all await. Bulk moves bytes between ranks, and is entered only after a good verdict. An
error on any rank becomes the same error on every rank, and whoever waits watches the heartbeats of
those it waits for: no rank waits for ever for another.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec

from shardkeep.errors import RankError
from shardkeep.failures import Failure, blamed, describe, merge_failures
from shardkeep.heartbeats import Heart, Patience, Watch, beat_key, default_timeout_s
from shardkeep.planes import FAILED, Bulk, Control, Helper, Part, Prefixed

__all__ = ["Ranks"]

T = TypeVar("T")


class _Verdict(msgspec.Struct, array_like=True):
    """What was decided about a step; the same for all ranks."""

    failures: list[Failure] = []
    """Empty if it went well."""
    connect: bool = False
    """All ranks are to make the bulk plane anew."""
    word: bytes | None = None
    """What the coordinator tells all ranks, where it is small; nothing follows in bulk then."""


_SMALL = 4096
"""Bytes that may travel in a verdict."""


class Ranks:
    """The steps over any control and bulk plane."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        control: Control,
        connect: Callable[[str], Bulk],
        timeout_s: float | None = None,
        patience: Patience = Patience(),
    ) -> None:
        """One of `world_size` ranks that all make the same calls in the same order.

        `connect(name)` makes the bulk plane, on all ranks at once and with the same name.
        """
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = default_timeout_s() if timeout_s is None else timeout_s
        self.patience = patience
        self._control = control
        self._connect = connect
        self._bulk: Bulk | None = None
        self._heart = Heart(lambda beat: control.set(beat_key(rank), beat), patience)
        self._calls = itertools.count()
        self._call: _Call | None = None
        self._old_keys: list[str] = []
        self._is_awaited = False
        """Whether a rank was given up in the last call: it may come back, and asks why."""
        self._ended = -1
        """The last call that ended well here."""
        self._helper = Helper()
        self._twins = itertools.count()
        self.memory: dict[str, Any] = {}

    # --- the call

    def call(self, what: str) -> AbstractContextManager[None]:
        """Signs of life from here on; calls inside this one belong to it."""
        return self._in_call(time.monotonic())

    @contextlib.contextmanager
    def _in_call(self, since: float) -> Iterator[None]:
        if self._call is not None:
            try:
                yield
            except BaseException as error:
                self._tell_given_up(self._call, error)  # before all is unwound: that may take long
                raise
            return
        call = self._call = _Call(next(self._calls))
        left: list[Failure] = []
        try:
            self._heart.start(call.number, self.timeout_s, since)
            yield
            self._ask_back(call)
            self._ended = call.number
        except BaseException as error:
            left = self._tell_given_up(call, error)
            self._drop_bulk()
            raise
        finally:
            try:
                self._leave(call, left)
            finally:
                self._call = None
                self._helper.stop()

    def _leave(self, call: _Call, left: list[Failure]) -> None:
        """Say that this rank is out. The coordinator, whose process may host the control plane,
        stays until the others have read the last verdict."""
        self._heart.stop(left)
        silent = {failure.rank for failure in left if failure.is_silent}
        self._is_awaited = bool(silent)
        silent.discard(self.rank)
        with contextlib.suppress(RankError):
            self._control.add(f"{call.number}/left", 1)
            if self.rank == 0:
                expected = self.world_size - len(silent)
                left_by = self._control.count(
                    f"{call.number}/left", expected, self.patience.linger_s
                )
                if left_by < expected or self._is_awaited:
                    self._old_keys = []  # somebody may still read them

    def _tell_given_up(self, call: _Call, error: BaseException) -> list[Failure]:
        """Say that the call is left, if it is because of a rank that may only have stood still, or
        of the plane, with which one of them may have.

        Returns why it is left.
        """
        known = call.failures or blamed(error)
        left = known or [describe(error, self.rank)]
        lost_plane = isinstance(error, RankError) and not known
        if lost_plane or any(failure.is_silent for failure in left):
            with contextlib.suppress(RankError):
                self._control.set(f"{call.number}/lost", msgspec.msgpack.encode(left))
        return left

    def _ask_back(self, call: _Call) -> None:
        """Raise why the others left this call, if this rank stood still in it.

        Not every call ends with a verdict. Bytes that were on their way when this rank was given up
        are there when it wakes; in the next call it would wait for others who never come.
        """
        if not self._heart.stood_still_s():
            return
        with contextlib.suppress(RankError):  # with the plane all are gone who could tell
            # Who is giving this rank up just now says so before the next look.
            call.failures = self._told_given_up(call, self.patience.look_s)
        if call.failures:
            raise merge_failures(call.failures)

    def _told_given_up(self, call: _Call, timeout_s: float = 0.0) -> list[Failure]:
        told = self._control.get(f"{call.number}/lost", timeout_s)
        return [] if told is None else msgspec.msgpack.decode(told, type=list[Failure])

    def advance(self, nbytes: int) -> None:
        """Progress, told to others with the next heartbeat."""
        self._heart.advance(nbytes)

    # --- the steps

    def agree(self, phase: str, work: Callable[[], None]) -> None:
        """Do `work`, post the outcome, await the verdict."""
        with self.call(phase):
            self._outcome(phase, work)

    def gather_scatter(
        self,
        phase: str,
        local: Callable[[], bytes],
        join: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Bulk follows an agreed outcome, so no rank waits in it for one that failed."""
        with self.call(phase):
            mine, _ = self._outcome(phase, local)
            gathered = self._move(phase, lambda bulk: bulk.gather(mine))
            parts, word = self._outcome(
                phase, lambda: None if gathered is None else join(gathered), _same_for_all
            )
            # What is told with the verdict, as of a commit, reaches all ranks or none.
            return self._move(phase, lambda bulk: bulk.scatter(parts)) if word is None else word

    def lead(self, phase: str, work: Callable[[], bytes]) -> bytes:
        """The coordinator works; the others learn the outcome first, then the bytes."""
        with self.call(phase):
            made, word = self._outcome(
                phase, lambda: work() if self.rank == 0 else None, lambda made: made
            )
            return self._move(phase, lambda bulk: bulk.broadcast(made)) if word is None else word

    def exchange(
        self, phase: str, local: Callable[[], Sequence[Part]], sizes: Sequence[int]
    ) -> list[Part]:
        """Bulk follows an agreed outcome here too."""
        with self.call(phase):
            mine, _ = self._outcome(phase, local)
            return self._move(phase, lambda bulk: bulk.exchange(mine, sizes))

    def may_commit(self) -> None:
        """Others who give this rank up and this rank's commit exclude each other.

        Where the control plane cannot tell, because it was stopped with this process, the time
        without a heartbeat does.
        """
        call = self._call
        assert call is not None
        self._check_standstill()
        if self._control.claim(f"{call.number}/commit", b"commit") != b"commit":
            raise RankError(
                "the other ranks gave rank 0 up before it could commit; nothing was committed"
            )
        # A plane that stood still with this process has let it claim what the others gave up.
        self._check_standstill()
        call.claimed = True

    def _check_standstill(self) -> None:
        if stood_s := self._heart.stood_still_s():
            raise RankError(
                f"rank 0 was without a sign of life for {stood_s:.0f} s, so that the other ranks "
                "may have given it up; nothing was committed"
            )

    def _outcome(
        self, phase: str, work: Callable[[], T], tell: Callable[[Any], bytes | None] | None = None
    ) -> tuple[T, bytes | None]:
        """What `work` returned, once it went well everywhere, and the coordinator's word.

        `tell` says what of the coordinator's result all ranks need, and travels if it is small.
        """
        call = self._call
        assert call is not None
        step = call.next_step()
        self._heart.advance()
        result, caught = None, None
        try:
            result = work()
        except BaseException as error:
            caught = error
        word = tell(result) if tell is not None and result is not None else None
        if word is not None and len(word) > _SMALL:
            word = None
        verdict = self._verdict(call, step, phase, caught, word)
        if verdict.failures:
            call.failures = verdict.failures
            if caught is not None and not isinstance(caught, Exception):
                raise caught  # KeyboardInterrupt and SystemExit stay what they are, here
            raise merge_failures(call.failures) from caught
        if not call.begun:
            call.begun = True
            self._forget_earlier(call)
        if verdict.connect:
            self._drop_bulk()
            self._bulk = self._watched(phase, lambda: self._connect(str(call.number)))
        return result, verdict.word  # type: ignore[return-value]

    def _verdict(
        self,
        call: _Call,
        step: int,
        phase: str,
        caught: BaseException | None,
        word: bytes | None,
    ) -> _Verdict:
        """Post this rank's outcome; what was decided about the step."""
        control = self._control
        if self._bulk is None and step == 0:
            control.add(f"{call.number}/apart", 1)
        if caught is not None:
            failure = msgspec.msgpack.encode(describe(caught, self.rank))
            control.set(f"{call.number}/{step}/{self.rank}", failure)
        counted = control.add(f"{call.number}/n", 1 if caught is None else 1 + FAILED)
        self._heart.posted(step)
        key = f"{call.number}/{step}"
        if self.rank == 0:
            return self._decide(key, self._collect(call, step, phase, counted, word))
        watch = self._watch(call, step, phase)
        while True:
            verdict = control.get(key, self.patience.look_s)
            if verdict is not None:
                return msgspec.msgpack.decode(verdict, type=_Verdict)
            failures = watch.look()
            if not failures and watch.left:  # without a verdict, or it came just now
                failures = [Failure(0, "gone", f"left without a verdict on {phase!r}")]
            if failures and control.get(key, 0) is None:
                return self._give_up(call, key, failures)

    def _decide(self, key: str, verdict: _Verdict) -> _Verdict:
        """The verdict, or the one that somebody else gave before."""
        standing = self._control.claim(key, msgspec.msgpack.encode(verdict))
        return msgspec.msgpack.decode(standing, type=_Verdict)

    def _give_up(self, call: _Call, key: str, failures: list[Failure]) -> _Verdict:
        """Decide for all that rank 0 is lost, unless it decided something meanwhile."""
        if self._control.claim(f"{call.number}/commit", b"given up") == b"commit":
            for failure in failures:
                failure.text += "; it was committing: the checkpoint is whole if it exists"
        return self._decide(key, _Verdict(failures))

    def _collect(
        self, call: _Call, step: int, phase: str, counted: int, word: bytes | None
    ) -> _Verdict:
        """The coordinator's verdict once all have posted, or once somebody is lost."""
        control, enough = self._control, self.world_size * (step + 1)
        watch = self._watch(call, step, phase)
        failures: list[Failure] = []
        while counted % FAILED < enough:
            counted = control.count(f"{call.number}/n", enough, self.patience.look_s)
            if counted % FAILED >= enough:
                break
            self._heart.advance()
            failures = self._or_own_fault(watch.look_for_all())
            if failures:
                break
        failed = counted // FAILED - call.failed
        if failed:
            call.failed += failed
            keys = [f"{call.number}/{step}/{rank}" for rank in range(self.world_size)]
            call.keys.extend(keys)
            posted = self._await_posted(keys, failed)
            told = {failure.rank: failure for failure in posted}
            failures = [*told.values(), *(f for f in failures if f.rank not in told)]
        failures = failures or self._look_after_standstill(call, watch)
        if failures:
            return _Verdict(failures)
        apart = 0 if call.begun else control.add(f"{call.number}/apart", 0)
        return _Verdict(connect=apart > 0, word=word)

    def _or_own_fault(self, failures: list[Failure]) -> list[Failure]:
        """Who never came may have given this rank up while it stood still, and the plane with it,
        so that they could not say so: it is named as well."""
        stood_s = self._heart.stood_still_s()
        if not failures or not stood_s or any(failure.kind != "absent" for failure in failures):
            return failures
        text = (
            f"was without a sign of life for {stood_s:.0f} s, so that others may have given it up "
            "before they joined it"
        )
        return [Failure(self.rank, "gone", text), *failures]

    def _look_after_standstill(self, call: _Call, watch: Watch) -> list[Failure]:
        """What came of it that this rank stood still, if it did since the others were seen last."""
        while stood_s := self._heart.stood_still_s():
            if call.claimed:
                text = (
                    f"was without a sign of life for {stood_s:.0f} s while it was committing, so "
                    "that the others may have given it up: the checkpoint is whole if it exists"
                )
                return [Failure(0, "gone", text)]
            self._heart.forget_standstill()
            failures = self._find_who_left(call, watch)
            if failures:
                return failures
        return []

    def _find_who_left(self, call: _Call, watch: Watch) -> list[Failure]:
        """Wait for a sign of life from all others, or for one that has left or is about to.

        Where the plane stood still too, they could not say so, and what they posted comes only now.
        """
        begun, before = time.monotonic(), None
        while True:
            failures = watch.look_for_all() or self._told_given_up(call)
            now = watch.counts()
            if failures or (before is not None and all(now[rank] > before[rank] for rank in now)):
                return failures
            if before is None and time.monotonic() - begun >= self.patience.beat_s:
                before = now  # a beat from here on is of a rank that is there
            self._heart.advance()
            time.sleep(min(self.patience.look_s, self.patience.beat_s))

    def _await_posted(self, keys: list[str], number: int) -> list[Failure]:
        """The texts of failures that were counted; a text may be visible after its count."""
        deadline = time.monotonic() + self.patience.gone_s
        while True:
            posted = [data for data in self._control.get_many(keys) if data is not None]
            if len(posted) >= number or time.monotonic() > deadline:
                return [msgspec.msgpack.decode(data, type=Failure) for data in posted]
            time.sleep(0.01)

    def _forget_earlier(self, call: _Call) -> None:
        """All ranks are in this call, so none needs the keys of the one before."""
        if self.rank == 0:
            self._control.forget(self._old_keys)
            self._old_keys = call.keys

    # --- bulk

    def _move(self, phase: str, work: Callable[[Bulk], T]) -> T:
        bulk = self._bulk
        assert bulk is not None
        self._heart.advance()
        return self._watched(phase, lambda: work(bulk))

    def _watched(self, phase: str, work: Callable[[], T]) -> T:
        """Do something that blocks on other ranks, and watch them meanwhile."""
        call = self._call
        assert call is not None
        watch = self._watch(call, call.step, phase)

        def tick() -> None:
            self._heart.advance()
            call.failures = watch.look(bulk=True) or self._told_given_up(call)
            if call.failures:
                raise merge_failures(call.failures)

        try:
            return self._helper.run(work, tick, self.patience.look_s)
        except Exception as error:
            self._helper.stop()
            if call.failures or isinstance(error, RankError):
                raise
            raise self._blame(call, phase, error, tick) from error

    def _blame(
        self, call: _Call, phase: str, error: Exception, tick: Callable[[], None]
    ) -> Exception:
        """Bytes stopped flowing, and the plane they flow on names nobody: heartbeats do."""
        deadline = time.monotonic() + 2 * self.patience.gone_s
        try:
            while time.monotonic() < deadline:
                time.sleep(self.patience.look_s)
                tick()
        except RankError as found:
            return found
        text = f"exchange of bytes failed in {phase!r} though every rank is alive: {error}"
        failure = Failure(self.rank, type(error).__qualname__, text)
        if stood_s := self._heart.stood_still_s():  # they have gone on to another call since
            text = (
                f"was without a sign of life for {stood_s:.0f} s, so that the others may have "
                f"given it up; the exchange of bytes failed in {phase!r}: {error}"
            )
            failure = Failure(self.rank, "gone", text)
        call.failures = [failure]
        return merge_failures(call.failures)

    def _watch(self, call: _Call, step: int, phase: str) -> Watch:
        return Watch(
            self._control,
            [0] if self.rank else range(1, self.world_size),
            call=call.number,
            step=step,
            phase=phase,
            timeout_s=self.timeout_s,
            patience=self.patience,
            ended=self._ended,
        )

    def _drop_bulk(self) -> None:
        bulk, self._bulk = self._bulk, None
        if bulk is not None:
            with contextlib.suppress(Exception):
                bulk.close()

    def twin(self) -> Ranks:
        """Over the same planes, under names of its own."""
        name = f"twin{next(self._twins)}"
        other = Ranks(
            self.rank,
            self.world_size,
            Prefixed(self._control, f"{name}/"),
            lambda bulk: self._connect(f"{name}-{bulk}"),
            self.timeout_s,
            self.patience,
        )
        other.memory = self.memory
        return other

    def close(self) -> None:
        """End the bulk plane, and take this rank's keys out of the control plane.

        What it said last stays for a rank that was given up.
        """
        self._drop_bulk()
        with contextlib.suppress(Exception):
            beat = [] if self._is_awaited else [beat_key(self.rank)]
            self._control.forget([*beat, *self._old_keys])
        self._old_keys = []
        self._control.close()


def _same_for_all(parts: Sequence[bytes]) -> bytes | None:
    return parts[0] if all(part is parts[0] for part in parts) else None


class _Call:
    """One collective call, as far as it has come."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.step = -1
        self.keys = [f"{number}/{key}" for key in ("n", "apart", "commit", "left", "lost")]
        """What the coordinator removes once all ranks are in the next call."""
        self.begun = False
        """Whether a step went well: all ranks are in this call, and have a bulk plane."""
        self.failures: list[Failure] = []
        """Why the call failed, once ranks agree on that."""
        self.claimed = False
        """Whether the coordinator may commit, or has."""
        self.failed = 0
        """How many failed outcomes the coordinator has accounted for."""

    def next_step(self) -> int:
        self.step += 1
        self.failures = []  # a driver may go on after an error, with another attempt
        self.keys.append(f"{self.number}/{self.step}")
        return self.step
