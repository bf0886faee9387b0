# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a save come to their plan: the last one again, or a new one.

A plan says which boxes and values lie where, and nothing of what they hold. So a rank whose state
looks as it did proposes the last plan, and when all ranks propose the same, nothing is planned and
few bytes travel. What several ranks hold without having declared it is compared every time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardkeep.collector import paused_collector
from shardkeep.coordination import Coordinator
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.holding import Look
from shardkeep.metadata import Metadata
from shardkeep.planner import Place, SavePlan, SavePlanner, StalePlan, WriteItems
from shardkeep.sharing import Share, Shared
from shardkeep.storage import StorageWriter
from shardkeep.wire import PlanDecoder, decode_final_plan, encode_final_plan, encode_local_plan

__all__ = ["PlanMemory", "Planning"]


@dataclass(frozen=True, eq=False)
class _Remembered:
    """A plan that all ranks have, and what it followed from."""

    number: bytes
    """The same on all ranks, and of no other plan."""
    key: Hashable
    """What it followed from besides the state: world size, classes, options."""
    look: Look
    plan: SavePlan
    share: bytes
    metadata: Metadata | None
    """The coordinator's alone, as all that follows."""
    shared: Shared | None
    storage: object


@dataclass(eq=False)
class PlanMemory:
    """The last plan of a group of ranks. Holds no tensor."""

    last: _Remembered | None = None
    """None before the first plan that can be used again."""


class Planning:
    """One rank's way to its part of the plan of one save."""

    def __init__(
        self,
        state: object,
        writer: StorageWriter,
        planner: SavePlanner,
        coordinator: Coordinator,
        memory: PlanMemory,
    ) -> None:
        """Nothing is looked at yet."""
        self._state = state
        self._writer = writer
        self._planner = planner
        self._ours = planner if isinstance(planner, DefaultSavePlanner) else None
        self._coordinator = coordinator
        self._memory = memory
        self._place = Place(coordinator.rank, coordinator.world_size)
        self._is_set_up = False
        self.metadata: Metadata | None = None
        """On the coordinator, what is stored."""
        self.stats: dict[str, float] = {"plan_sent": 0, "plan_received": 0, "plan_reused": 0}
        """Bytes of the messages of this rank, and whether the last plan was used again."""

    @property
    def may_reuse(self) -> bool:
        """Whether there is a plan to propose; what the coordinator says here counts for all."""
        return self._memory.last is not None

    def plan(self, ask_reuse: bool) -> SavePlan:
        """This rank's part; `ask_reuse`, the same on all ranks, says to try the last plan first."""
        last = self._memory.last
        if ask_reuse and self._all_propose(last):
            assert last is not None
            self._recall(last)
            if self._compare(last.share, last.shared):
                return last.plan
        plan, share, shared = self._make()
        self._compare(share, shared)
        return plan

    def release_state(self) -> None:
        """All has been planned: the state need not be kept."""
        self._state = None

    def forget(self) -> None:
        """The plan turned out to be stale: make a new one next time, on all ranks."""
        self._memory.last = None

    def _exchange(
        self,
        phase: str,
        local: Callable[[], bytes],
        join: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Gather and scatter, counting bytes."""

        def counted() -> bytes:
            with paused_collector():
                message = local()
            self.stats["plan_sent"] += len(message)
            return message

        def joined(told: list[bytes]) -> Sequence[bytes]:
            with paused_collector():
                return join(told)

        answer = self._coordinator.gather_scatter(phase, counted, joined)
        self.stats["plan_received"] += len(answer)
        return answer

    # --- the last plan

    def _key(self) -> Hashable | None:
        planner, place = self._planner, self._place
        if type(planner) is not DefaultSavePlanner:
            return None  # anything may follow from anything
        of_writer = self._writer.plan_key()
        if of_writer is None:
            return None
        return (place, type(self._writer), of_writer, planner.check_replicas)

    def _set_up(self) -> None:
        if not self._is_set_up:
            self._planner.set_up_planner(self._state, self._writer.storage_meta(), self._place)
            self._is_set_up = True

    def _all_propose(self, last: _Remembered | None) -> bool:
        def propose() -> bytes:
            if last is None or self._ours is None or last.key != self._key():
                return b""
            self._is_set_up = True
            same = self._ours.recognise(self._state, self._place, last.look)
            return last.number if same else b""

        def decide(told: list[bytes]) -> list[bytes]:
            agreed = bool(told[0]) and len(set(told)) == 1
            return [b"\1" if agreed else b"\0"] * len(told)

        agreed = self._exchange("propose plan", propose, decide) == b"\1"
        if not agreed and self._ours is not None and self._ours.is_trusting:
            # What was recognised by its objects has not been looked at: a new plan needs a look.
            self._is_set_up = False
        return agreed

    def _recall(self, last: _Remembered) -> None:
        self.metadata = last.metadata
        if self._place.is_coordinator:
            self._writer.use_plan(last.storage)
        self.stats["plan_reused"] = 1

    # --- a new plan

    def _make(self) -> tuple[SavePlan, bytes, Shared | None]:
        planner, writer, place = self._planner, self._writer, self._place
        self._memory.last = None  # also if this one fails: there is no other
        ours = self._ours
        local: list[SavePlan] = []

        def make_local() -> bytes:
            self._set_up()
            plan = writer.prepare_local_plan(planner.create_local_plan())
            items = WriteItems.of(plan.items)
            items.check_numbers()
            local.append(replace(plan, items=items))
            return encode_local_plan(local[0]) if place.world_size > 1 else b""

        def join(told: list[bytes]) -> list[bytes]:
            decoder = PlanDecoder()
            plans = [decoder.decode(part) for part in told] if place.world_size > 1 else local[:1]
            plans, self.metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans, self.metadata)
            renamed = ours.renamed if ours is not None else [{}] * len(plans)
            to_compare = [b""] * len(plans)
            if ours is not None and ours.shared is not None:
                to_compare = ours.shared.messages(len(plans))
            number = secrets.token_bytes(16)
            return [
                msgspec.msgpack.encode((number, encode_final_plan(*of_rank)))
                for of_rank in zip(plans, renamed, to_compare, strict=True)
            ]

        answer = self._exchange("plan", make_local, join)
        number, message = msgspec.msgpack.decode(answer, type=tuple[bytes, bytes])
        plan, share = decode_final_plan(message, local[0])
        plan = planner.finish_plan(plan)
        plan = replace(plan, items=WriteItems.of(plan.items))
        shared = ours.shared if ours is not None else None
        self._remember(number, plan, share, shared)
        return plan, share, shared

    def _remember(self, number: bytes, plan: SavePlan, share: bytes, shared: Shared | None) -> None:
        key, ours = self._key(), self._ours
        if key is None or ours is None or not ours.look.is_comparable:
            return
        ours.take_trace(self._state)
        storage = self._writer.plan_memory()
        self._memory.last = _Remembered(
            number, key, ours.look, plan, share, self.metadata, shared, storage
        )

    # --- undeclared replicas

    def _compare(self, share: bytes, shared: Shared | None) -> bool:
        """Digest what is held more than once; an error names what differs. False: stale."""
        if not share:
            return True
        planner = self._ours
        assert planner is not None
        mine = Share.decode(share)
        digests: list[bytes] = []

        def fold() -> bytes:
            try:
                digests.extend(planner.digests(mine.pieces, mine.values, mine.in_full))
            except StalePlan:
                return b""
            return mine.fold(digests)

        def find(told: list[bytes]) -> list[bytes]:
            assert shared is not None
            suspects = None if b"" in told else shared.suspects(told)
            return [msgspec.msgpack.encode(suspects)] * len(told)

        def check(told: list[bytes]) -> list[bytes]:
            assert shared is not None
            shared.check(suspects or [], told)
            return [b""] * len(told)

        answer = self._exchange("compare", fold, find)
        suspects = msgspec.msgpack.decode(answer, type=list[int] | None)
        if suspects is None:
            self.stats["plan_reused"], self._is_set_up = 0, False
            return False
        if suspects:
            self._exchange("compare one by one", lambda: mine.unfold(digests, suspects), check)
        return True
