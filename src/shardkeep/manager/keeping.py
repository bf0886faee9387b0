# SPDX-License-Identifier: Apache-2.0
"""Policies that say what to keep: small objects, joined with `|`. What none holds may go."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import TypeAlias

from shardkeep.manager.checking import is_number
from shardkeep.manager.steps import Step

__all__ = [
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewer",
    "KeepPolicy",
    "KeepWhat",
    "best_rules",
    "best_step",
    "keep_policy",
]


class KeepPolicy(ABC):
    """Says which steps to keep."""

    @abstractmethod
    def holds(self, steps: Sequence[Step], now: float) -> set[int]:
        """The numbers of those to keep, among `steps` in ascending order.

        Removing what it does not hold must not change what it holds.
        """

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        """What either holds."""
        return _Any((self, _checked(other)))


KeepWhat: TypeAlias = KeepPolicy | int | None


@dataclass(frozen=True)
class _Any(KeepPolicy):
    parts: tuple[KeepPolicy, ...]

    def holds(self, steps: Sequence[Step], now: float) -> set[int]:
        return set[int]().union(*(part.holds(steps, now) for part in self.parts))


@dataclass(frozen=True)
class KeepLast(KeepPolicy):
    """The last `n` steps."""

    n: int
    """How many."""

    def __post_init__(self) -> None:
        """Refuse what is no count."""
        _check_count(self, self.n)

    def holds(self, steps: Sequence[Step], now: float) -> set[int]:
        """Those with the highest numbers."""
        return {step.step for step in steps[-self.n :]}


@dataclass(frozen=True)
class KeepEvery(KeepPolicy):
    """Every step whose number is a multiple of `n`; or, with `seconds`, one for each such time."""

    n: int | None = None
    """Steps."""
    seconds: float | None = None
    """The time from one to the next, at least."""

    def __post_init__(self) -> None:
        """One of the two is needed."""
        if (self.n is None) == (self.seconds is None):
            raise ValueError("KeepEvery needs a number of steps, or seconds=...")
        if self.n is not None:
            _check_count(self, self.n)
        if self.seconds is not None and (not is_number(self.seconds) or not self.seconds > 0):
            raise ValueError(f"KeepEvery(seconds={self.seconds!r}): it must be a positive number")

    def holds(self, steps: Sequence[Step], now: float) -> set[int]:
        """Multiples; or from the first one on, whatever comes long enough after the one before.

        One that was saved earlier than the one before shows a clock that was set back, and counts
        as a first one.
        """
        if self.n is not None:
            return {step.step for step in steps if step.step % self.n == 0}
        assert self.seconds is not None
        held, last = set(), -math.inf
        for step in steps:
            if step.saved_at < last or step.saved_at - last >= self.seconds:
                held.add(step.step)
                last = step.saved_at
        return held


@dataclass(frozen=True)
class KeepBest(KeepPolicy):
    """The best `n` steps by a metric; of equals the newer ones. One without it, or NaN, is none."""

    n: int
    """How many."""
    metric: str
    """Its name."""
    highest: bool = False
    """Whether more is better; a loss is better when it is lower."""

    def __post_init__(self) -> None:
        """Refuse what is no count, and what names no metric."""
        _check_count(self, self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"KeepBest({self.n}, {self.metric!r}): use the name of a metric")

    def holds(self, steps: Sequence[Step], now: float) -> set[int]:
        """Those."""
        return {step.step for step in self.ranked(steps)}

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        """The best first."""
        sign = 1.0 if self.highest else -1.0
        known = [s for s in steps if not math.isnan(s.metrics.get(self.metric, math.nan))]
        return nlargest(self.n, known, key=lambda s: (sign * s.metrics[self.metric], s.step))


@dataclass(frozen=True)
class KeepNewer(KeepPolicy):
    """Whatever was saved within a time."""

    seconds: float
    """How long ago, at most."""

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        if not is_number(self.seconds) or not self.seconds > 0:
            raise ValueError(f"KeepNewer({self.seconds!r}): it must be a positive number")

    def holds(self, steps: Sequence[Step], now: float) -> set[int]:
        """Those that are young."""
        return {step.step for step in steps if now - step.saved_at <= self.seconds}


def best_step(steps: Sequence[Step], metric: str, highest: bool) -> Step | None:
    """The best of them, if any has the metric."""
    return next(iter(KeepBest(1, metric, highest).ranked(steps)), None)


def best_rules(policy: KeepPolicy | None) -> list[KeepBest]:
    """The rules for the best within a policy."""
    if isinstance(policy, KeepBest):
        return [policy]
    parts = policy.parts if isinstance(policy, _Any) else ()
    return [rule for part in parts for rule in best_rules(part)]


def find_best(policy: KeepPolicy | None, metric: str | None = None) -> KeepBest | None:
    """The first rule for the best within a policy, by a metric if one is named."""
    return next((rule for rule in best_rules(policy) if metric in (None, rule.metric)), None)


def _check_count(policy: KeepPolicy, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{type(policy).__name__}({n!r}): use a whole number from 1 on")


def _checked(given: object) -> KeepPolicy:
    if not isinstance(given, KeepPolicy):
        raise TypeError(
            f"{given!r} is a {type(given).__qualname__}; use KeepLast, KeepEvery, KeepBest or "
            "KeepNewer, joined with |"
        )
    return given


def keep_policy(given: KeepWhat) -> KeepPolicy | None:
    """A policy, or how many of the last, or none: everything is kept."""
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool):
        return KeepLast(given)
    return _checked(given)
