# SPDX-License-Identifier: Apache-2.0
"""Policies that say when to save: small objects, joined with `|` and `&`.

A policy that follows from the number of the step alone is answered by each rank for itself. One
that asks for a clock, a signal or a running save is answered by the coordinator, for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardkeep.manager.checking import checked_step, is_number

__all__ = [
    "AtSteps",
    "EverySeconds",
    "EverySteps",
    "Moment",
    "OnPreemption",
    "SavePolicy",
    "SaveWhen",
    "WhenIdle",
    "save_policy",
]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy may ask for."""

    step: int
    """The step that was just trained."""
    previous: int | None = None
    """The step that was asked about, or restored, before; None at the very beginning."""
    since_s: float = 0.0
    """Seconds since the last save began, or since the manager was made; of rank 0's clock."""
    preempted: bool = False
    """Whether any rank was told to stop."""
    idle: bool = False
    """Whether no rank has a save running."""
    missed: tuple[Moment, ...] = ()
    """Those since all ranks were last asked, of which nothing but the step was known."""


class SavePolicy(ABC):
    """Says when to save."""

    follows_step: bool = False
    """Whether the answer follows from `step` and `previous` alone, so that nobody need be asked."""

    @abstractmethod
    def wants(self, moment: Moment) -> bool:
        """Whether to save now."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """When either says so."""
        return _Joined((self, _checked(other)), every=False)

    def __and__(self, other: SavePolicy) -> SavePolicy:
        """When both say so."""
        return _Joined((self, _checked(other)), every=True)


SaveWhen: TypeAlias = SavePolicy | int | None


@dataclass(frozen=True)
class _Joined(SavePolicy):
    parts: tuple[SavePolicy, ...]
    every: bool

    @property
    def follows_step(self) -> bool:  # type: ignore[override]
        return all(part.follows_step for part in self.parts)

    def wants(self, moment: Moment) -> bool:
        answers = [_says(part, moment) for part in self.parts]
        return all(answers) if self.every else any(answers)


def _says(part: SavePolicy, moment: Moment) -> bool:
    """What the step alone decides also counts where it fell between two questions to all ranks."""
    moments = (moment, *moment.missed) if part.follows_step else (moment,)
    return any(part.wants(each) for each in moments)


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Every `n` steps: at n, 2n, 3n and so on; where steps are skipped, at the next one there is.

    >>> [step for step in range(10) if EverySteps(4).wants(Moment(step, step - 1))]
    [4, 8]
    """

    n: int
    """Steps from one save to the next."""
    follows_step = True

    def __post_init__(self) -> None:
        """Refuse what is no interval."""
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"EverySteps({self.n!r}): use a whole number from 1 on")

    def wants(self, moment: Moment) -> bool:
        """Whether a multiple was reached since the step before."""
        before = moment.step - 1 if moment.previous is None else moment.previous
        if before >= moment.step:  # the loop went back
            before = moment.step - 1
        return moment.step // self.n > max(before, 0) // self.n


@dataclass(frozen=True)
class AtSteps(SavePolicy):
    """At given steps."""

    steps: frozenset[int]
    """Their numbers."""
    follows_step = True

    def __init__(self, steps: Iterable[int]) -> None:
        """Any collection of numbers."""
        if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
            raise TypeError(f"AtSteps({steps!r}): use a collection of steps, such as [1, 10]")
        object.__setattr__(self, "steps", frozenset(map(checked_step, steps)))

    def wants(self, moment: Moment) -> bool:
        """Whether it is one of them."""
        return moment.step in self.steps


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """When so much time has passed since the last save began; rank 0's clock decides."""

    seconds: float
    """From one save to the next."""

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        if not is_number(self.seconds) or not self.seconds > 0:
            raise ValueError(f"EverySeconds({self.seconds!r}): it must be a positive number")

    def wants(self, moment: Moment) -> bool:
        """Whether it has."""
        return moment.since_s >= self.seconds


@dataclass(frozen=True)
class OnPreemption(SavePolicy):
    """When any rank was told to stop; see `shardkeep.catch_preemption`."""

    def wants(self, moment: Moment) -> bool:
        """Whether one was."""
        return moment.preempted


@dataclass(frozen=True)
class WhenIdle(SavePolicy):
    """As soon as the last save is done."""

    def wants(self, moment: Moment) -> bool:
        """Whether none is running."""
        return moment.idle


def _checked(given: object) -> SavePolicy:
    if not isinstance(given, SavePolicy):
        raise TypeError(
            f"{given!r} is a {type(given).__qualname__}; use EverySteps, EverySeconds, AtSteps, "
            "OnPreemption or WhenIdle, joined with | and &"
        )
    return given


def save_policy(given: SaveWhen) -> SavePolicy | None:
    """A policy, or a number of steps, or none."""
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool):
        return EverySteps(given)
    return _checked(given)
