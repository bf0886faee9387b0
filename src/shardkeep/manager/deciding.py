# SPDX-License-Identifier: Apache-2.0
"""Whether to save, and whether to stop: decisions that all ranks take alike.

Clocks differ between ranks, a signal comes to some of them, and a save may have ended on one and
not on another. So what follows from those is decided by the coordinator, once, for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shardkeep.checkpointer import Checkpointer
from shardkeep.errors import PlanError
from shardkeep.manager.checking import checked_step
from shardkeep.manager.timing import Moment, SavePolicy
from shardkeep.preemption import is_preempted

__all__ = ["Decider"]

_SAVE, _STOP = 1, 2


class _Told(msgspec.Struct, array_like=True):
    """What a rank says."""

    step: int
    preempted: bool
    busy: bool


class Decider:
    """Asked after every step, on every rank."""

    def __init__(
        self,
        keeper: Checkpointer,
        policy: SavePolicy | None,
        is_busy: Callable[[], bool],
        ask_every: int = 1,
    ) -> None:
        """`ask_every`: in how many calls all ranks are asked once, where they must be."""
        if isinstance(ask_every, bool) or not isinstance(ask_every, int) or ask_every < 1:
            raise ValueError(f"ask_every is {ask_every!r}; use a whole number from 1 on")
        self._keeper = keeper
        self._policy = policy
        self._is_busy = is_busy
        self._ask_every = ask_every
        self._since = time.monotonic()
        self._asked: int | None = None
        self._previous: int | None = None
        self._saved: int | None = None
        self._missed: list[Moment] = []
        """Since all ranks were last asked, or a save was wanted."""
        self._stopping = False
        self._told: bool | None = None
        """Whether all ranks know who is to stop, since `should_save` was called last; None if it
        never was."""
        self._calls = 0

    @property
    def asks_all(self) -> bool:
        """Whether `should_save` asks all ranks."""
        return self._policy is not None and not self._policy.follows_step

    def restored(self, step: int) -> None:
        """The run stands at a step; what it saved beyond that is to be saved again."""
        self._asked = self._previous = step
        if self._saved != step:
            self._saved = None
        self._missed.clear()

    def saved(self, step: int) -> None:
        """A save of a step has begun."""
        self._saved = step
        self._missed.clear()
        self._since = time.monotonic()

    def should_save(self, step: int) -> bool:
        """The same on all ranks."""
        step = checked_step(step)
        if step != self._asked:
            self._previous, self._asked = self._asked, step
        self._told = False
        if self._policy is None or step == self._saved:
            return False
        moment = Moment(step, self._previous)
        self._calls += 1
        self._told = self.asks_all
        if not self.asks_all or self._calls % self._ask_every:
            # Without a word from the others nothing is known but the step.
            wants = self._policy.wants(moment)
            if wants:
                self._missed.clear()
            elif self.asks_all:
                self._missed.append(moment)
            return wants
        answer = self._keeper.coordinator.gather_scatter(
            "should save", lambda: self._tell(step), self._decide
        )[0]
        self._missed.clear()
        self._stopping = self._stopping or bool(answer & _STOP)
        return bool(answer & _SAVE)

    def should_stop(self) -> bool:
        """Whether any rank was told to stop; the same on all ranks.

        Asks them itself, once, unless `should_save` has: which follows from the order of the calls.
        """
        if not self._stopping and not self._told:
            self._stopping = self._keeper.should_stop()
            if self.asks_all and self._told is False:
                self._told = True  # who looks once more, perhaps on one rank only, asks nobody
        return self._stopping

    def _tell(self, step: int) -> bytes:
        return msgspec.msgpack.encode(_Told(step, is_preempted(), self._is_busy()))

    def _decide(self, told: list[bytes]) -> list[bytes]:
        """On the coordinator."""
        assert self._policy is not None
        ranks = [msgspec.msgpack.decode(part, type=_Told) for part in told]
        for rank, word in enumerate(ranks):
            if word.step != ranks[0].step:
                raise PlanError(
                    f"ranks ask about different steps: {ranks[0].step} on rank 0, {word.step} on "
                    f"rank {rank}; should_save is to be called by all ranks after each step"
                )
        preempted = any(word.preempted for word in ranks)
        moment = Moment(
            ranks[0].step,
            self._previous,
            time.monotonic() - self._since,
            preempted,
            not any(word.busy for word in ranks),
            tuple(self._missed),
        )
        wants = self._policy.wants(moment)
        return [bytes([_SAVE * wants + _STOP * preempted])] * len(told)
