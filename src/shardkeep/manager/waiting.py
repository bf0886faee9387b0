# SPDX-License-Identifier: Apache-2.0
"""Steps as they appear, for who evaluates; pinned while they are read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from shardkeep.checkpointer import Checkpointer
from shardkeep.coordination import Coordinator
from shardkeep.errors import StorageError
from shardkeep.manager.pins import Pin
from shardkeep.manager.steps import Step
from shardkeep.manager.tiers import Tiers, release_all

__all__ = ["PinnedStep", "next_step"]

FIRST_LOOK_S = 0.05
TRIES = 20
"""Steps that may vanish before they are pinned, until it waits as if there were none."""
PAUSE_S = 0.002
TELL_S = 5.0
"""How long it is silent, at most."""


class PinnedStep:
    """A step that is not removed before it is released; leaving `with` releases it."""

    def __init__(self, info: Step, pins: Sequence[Pin]) -> None:
        """Made by `wait_for`; each rank has pins of its own, as one may read longer."""
        self.info = info
        """What is known of it."""
        self._pins = pins

    @property
    def step(self) -> int:
        """Its number."""
        return self.info.step

    @property
    def path(self) -> str:
        """Where it lies."""
        return self.info.path

    def release(self) -> None:
        """It may be removed again."""
        release_all(self._pins)

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release it."""
        self.release()


def next_step(
    tiers: Tiers,
    keeper: Checkpointer,
    *,
    least: int,
    newest: bool,
    timeout: float | None,
    poll_s: float,
) -> PinnedStep | None:
    """Wait for a step with at least this number: that one, or the first, or the newest there is.

    None if the time is over. On all ranks alike: one looks, the others wait for its word.
    """
    kept: list[Pin] = []
    coordinator = keeper.coordinator

    def lead() -> bytes:
        if not poll_s > 0:
            raise ValueError(f"poll_s is {poll_s!r}; it must be positive")
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_LOOK_S
        while True:
            found = _look(tiers, least, newest, kept)
            if found is not None:
                return msgspec.msgpack.encode(found)
            left = pause if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return b""
            _pause(min(pause, left), coordinator)
            pause = min(2 * pause, poll_s)

    try:
        word = coordinator.lead("wait for a step", lead)
        if not word:
            return None
        told = msgspec.msgpack.decode(word, type=Step)
        found = tiers.seen_by_all(told, coordinator)
        if found is None:
            raise StorageError(f"step {told.step} lies only in {told.path}, not seen by all ranks")

        def follow() -> None:
            if coordinator.rank > 0:
                kept.extend(tiers.pin(found, "evaluation")[1])

        if coordinator.world_size > 1:
            coordinator.agree("pin a step", follow)
    except BaseException:
        release_all(kept)
        raise
    return PinnedStep(found, kept)


def _pause(seconds: float, coordinator: Coordinator) -> None:
    """To wait is what it is for: the others must not give it up, however seldom it looks."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, TELL_S))
        coordinator.advance(1)


def _look(tiers: Tiers, least: int, newest: bool, kept: list[Pin]) -> Step | None:
    for _ in range(TRIES):
        found = [step for step in tiers.look().steps if step.step >= least]
        if not found:
            return None
        step, pins = tiers.pin(found[-1 if newest else 0], "evaluation")
        kept += pins
        if step is not None:  # still there, now that it is pinned
            return step
        time.sleep(PAUSE_S)  # it made way for a newer one, or is back at once
    return None
