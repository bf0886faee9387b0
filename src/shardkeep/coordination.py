# SPDX-License-Identifier: Apache-2.0
"""The contract of groups of ranks that save and load together, and the group of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from shardkeep.errors import PlanError
from shardkeep.heartbeats import Patience
from shardkeep.planes import Part

__all__ = ["Coordinator", "Patience", "SingleProcess", "check_same", "encode_asked"]


class Coordinator(Protocol):
    """A group of ranks that save and load together; rank 0 coordinates."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def call(self, what: str) -> AbstractContextManager[None]:
        """All of a collective call: while inside, this rank gives signs of life."""

    def advance(self, nbytes: int) -> None:
        """Progress was made; from any thread. A rank that makes none for long is given up."""

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

    def exchange(
        self, phase: str, local: Callable[[], Sequence[Part]], sizes: Sequence[int]
    ) -> list[Part]:
        """Make bytes for every rank on every rank; returns what each has for this one.

        `sizes` is how many bytes each will have.
        """

    def may_commit(self) -> None:
        """Called on the coordinator just before the commit; raises if others gave it up."""

    @property
    def memory(self) -> MutableMapping[str, Any]:
        """What drivers remember from one call to the next, as long as the group is used."""

    def twin(self) -> Coordinator:
        """Another one of the same ranks, for calls beside the calls of this one.

        Made by all ranks in the same order. Remembers what this one does. May be missing: then
        other calls wait for the save in the background, and it never overlaps with another.
        """

    def close(self) -> None:
        """Let go of what outlives a call."""


class SingleProcess:
    """One process is its own group: nothing travels and errors stay as they are."""

    rank = 0
    world_size = 1
    patience = Patience()

    def __init__(self) -> None:
        """Nothing is remembered yet."""
        self.memory: dict[str, Any] = {}

    def call(self, what: str) -> AbstractContextManager[None]:
        """Nobody watches."""
        return contextlib.nullcontext()

    def advance(self, nbytes: int) -> None:
        """Nobody watches."""

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

    def exchange(
        self, phase: str, local: Callable[[], Sequence[Part]], sizes: Sequence[int]
    ) -> list[Part]:
        """What it has for itself."""
        return list(local())

    def may_commit(self) -> None:
        """Always."""

    def twin(self) -> SingleProcess:
        """Nothing travels there either."""
        other = SingleProcess()
        other.memory = self.memory
        other.patience = self.patience
        return other

    def close(self) -> None:
        """Nothing is held."""


def encode_asked(asked: Mapping[str, object]) -> bytes:
    """What a rank was asked for, for `check_same`."""
    return msgspec.msgpack.encode(dict(asked))


def check_same(told: Sequence[bytes], what: str) -> None:
    """Raise `PlanError` unless all ranks were asked for the same thing."""
    asked = [msgspec.msgpack.decode(part, type=dict[str, Any]) for part in told]
    for rank, other in enumerate(asked):
        for key in (*asked[0], *other):
            if key not in other or key not in asked[0] or other[key] != asked[0][key]:
                raise PlanError(
                    f"ranks were asked for different {what}: {key} is {asked[0].get(key)!r} on "
                    f"rank 0 and {other.get(key)!r} on rank {rank}"
                )
