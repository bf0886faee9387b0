# SPDX-License-Identifier: Apache-2.0
"""The save driver: the order of steps, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardkeep.coordination import Coordinator, check_same, encode_asked
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.hosts import name_host, ranks_on_hosts
from shardkeep.metadata import Metadata, MetadataIndex
from shardkeep.planner import Place, SavePlan, SavePlanner, StalePlan, WriteItems
from shardkeep.planning import PlanMemory, Planning
from shardkeep.storage import StorageWriter, WriteResult
from shardkeep.tables import StateColumns
from shardkeep.wording import StatsText, rate

__all__ = ["SaveCancelled", "SaveResult", "Saving", "run_save"]

log = logging.getLogger("shardkeep")

_STALE = b""
"""In place of results: a rank found that the plan does not fit its state; nothing is committed."""
_CANCELLED = b"-"
"""The same where a rank was asked to cancel."""


@dataclass(frozen=True)
class SaveResult:
    """What a save did; the same on every rank but for `stats`."""

    checkpoint_id: str
    """Where it went."""
    save_id: str
    """The attempt that was committed."""
    digest: str
    """Digest of the commit record: keep it elsewhere to prove later that nothing was changed."""
    nbytes: int
    """Bytes of all tensors in it, replicas and ties counted once."""
    stats: Mapping[str, float]
    """Seconds of each phase, bytes and files of this rank; see `docs/PERFORMANCE.md`."""
    _read_metadata: Callable[[str], Metadata] = field(repr=False, compare=False, kw_only=True)

    @property
    def metadata(self) -> Metadata:
        """What was stored; opens the index when looked at, while this save is the one there."""
        return self._read_metadata(self.save_id)


class _Start(msgspec.Struct):
    """What the coordinator tells a rank once storage is set up."""

    reuse: bool
    """Whether to try the last plan."""
    ranks_on_host: int
    word: bytes
    """Of the storage, to all ranks."""


class _Committed(msgspec.Struct):
    save_id: str
    digest: str
    nbytes: int


class SaveCancelled(Exception):
    """A rank was asked to cancel, and all of them have: nothing is visible."""


class Saving:
    """One save on one rank, in two parts: `prepare` needs the state, `complete` what was taken of
    it. Both belong into one call of the coordinator, and may run on different threads.
    """

    def __init__(
        self,
        state: object,
        *,
        checkpoint_id: str,
        writer: StorageWriter,
        planner: SavePlanner,
        coordinator: Coordinator,
        options: Mapping[str, Any],
        read_metadata: Callable[[str], Metadata],
        planned: Callable[[int], None] = lambda nbytes: None,
        look_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is done yet. What `look_back` raises, on any rank, is raised on all instead."""
        self.checkpoint_id = checkpoint_id
        self.writer = writer
        self.planner = planner
        self._state = state
        self._coordinator = coordinator
        self._options = options
        self._read_metadata = read_metadata
        self._planned = planned
        self._look_back = look_back
        self._place = Place(coordinator.rank, coordinator.world_size)
        self._clock = _Clock()
        self._planning: Planning | None = None
        self._is_stale = False
        """Whether this rank found, before it wrote, that the plan does not fit its state."""

    def prepare(self) -> SavePlan:
        """Set up storage and plan, on all ranks; inside `aborting`."""
        coordinator, writer, place = self._coordinator, self.writer, self._place
        memory = coordinator.memory.setdefault("plan", PlanMemory())
        planning = Planning(self._state, writer, self.planner, coordinator, memory)
        self._planning, self._clock, self._is_stale = planning, _Clock(), False

        def ask() -> bytes:
            self._look_back()
            return name_host(encode_asked({"checkpoint_id": self.checkpoint_id, **self._options}))

        answer = coordinator.gather_scatter(
            "set up",
            ask,
            lambda told: _lead_set_up(told, writer, place, planning),
        )
        start = msgspec.msgpack.decode(answer, type=_Start)
        writer.ranks_on_host = start.ranks_on_host
        if place.world_size > 1:
            coordinator.agree("see storage", lambda: _follow_set_up(writer, place, start.word))
        self._clock.lap("set up")
        plan = planning.plan(start.reuse)
        self._planned(_item_bytes(plan))
        self._clock.lap("plan")
        return plan

    def complete(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        is_cancelled: Callable[[], bool] = lambda: False,
        written: Callable[[], None] = lambda: None,
    ) -> SaveResult | None:
        """Write and commit, on all ranks; None where the plan was stale, which is forgotten then.

        `planner` gives the elements. `SaveCancelled` is raised on all ranks if any is cancelled
        before it says what it wrote. What `written` raises, once all is written, fails the save.
        """
        coordinator, writer = self._coordinator, self.writer
        results: list[WriteResult] | None = None
        committing = False
        shared: bytes | None = None

        def write() -> None:
            nonlocal results
            if self._is_stale:
                return
            with contextlib.suppress(StalePlan):
                try:
                    share = plan if shared is None else writer.use_shared(plan, shared)
                    results = writer.write_data(share, planner)
                    written()
                except SaveCancelled:
                    if not is_cancelled():
                        raise

        def wrote() -> bytes:
            return _CANCELLED if is_cancelled() else _encode_results(results)

        with self.aborting(lambda: committing):
            if writer.base is not None:
                shared = self._compare(plan, planner, is_cancelled)
                self._clock.lap("compare")
            writer.share_writes(plan, planner, coordinator)
            coordinator.agree("write", write)
            self._clock.lap("write")
            committing = True
            answer = coordinator.gather_scatter("commit", wrote, self._commit)
            if answer == _CANCELLED:
                committing = False
                raise SaveCancelled
            if answer == _STALE:
                self.start_over()
                return None
            writer.settle()
            self._clock.lap("commit")
        assert results is not None
        return self._result(msgspec.msgpack.decode(answer, type=_Committed), results)

    def _compare(
        self, plan: SavePlan, planner: SavePlanner, is_cancelled: Callable[[], bool]
    ) -> bytes:
        """Find out what an earlier checkpoint has already; the storage's word to this rank."""
        assert self._planning is not None
        planning, writer = self._planning, self.writer

        def compare() -> bytes:
            try:
                return writer.compare_data(plan, planner)
            except StalePlan:
                self._is_stale = True
                return b""
            except SaveCancelled:
                if not is_cancelled():
                    raise
                return b""

        def share(told: list[bytes]) -> list[bytes]:
            assert planning.metadata is not None
            return writer.share_data(told, planning.metadata)

        return self._coordinator.gather_scatter("compare", compare, share)

    def follow_devices(self, inside: contextlib.ExitStack) -> None:
        """Have copies come after what devices compute, and wait for nothing, while `inside`."""
        if isinstance(self.planner, DefaultSavePlanner):
            inside.callback(setattr, self.planner, "waits", self.planner.waits)
            self.planner.waits = False

    def release_state(self) -> None:
        """The state is not needed any more: `complete` gets its elements from somewhere else."""
        self._state = None
        if self._planning is not None:
            self._planning.release_state()
        if isinstance(self.planner, DefaultSavePlanner):
            self.planner.release()

    def start_over(self) -> None:
        """The plan is stale, on all ranks: forget it, and what was set up."""
        assert self._planning is not None
        self.writer.abort()
        self._planning.forget()
        self.writer.reset(self.checkpoint_id)

    @contextlib.contextmanager
    def aborting(self, committing: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Have storage clean up after an error in what is done inside."""
        try:
            yield
        except BaseException:
            self.writer.abort(committing=committing())
            raise

    def _commit(self, told: list[bytes]) -> list[bytes]:
        """What the coordinator does with what all ranks wrote."""
        assert self._planning is not None
        word = next((word for word in (_CANCELLED, _STALE) if word in told), None)
        if word is None:
            word = _commit(told, self.writer, self._planning, self._coordinator)
        return [word] * self._place.world_size

    def _result(self, done: _Committed, results: list[WriteResult]) -> SaveResult:
        assert self._planning is not None
        laps = self._clock.laps
        stats = {**laps, **self._planning.stats, **self.writer.stats}
        written, seconds = sum(result.size_in_bytes for result in results), sum(laps.values())
        stats |= {"bytes": written, "files": len(results), "bytes_per_s": rate(written, seconds)}
        log.info(
            "saved %s: %d bytes in %.2f s; this rank: %s",
            *(self.checkpoint_id, done.nbytes, seconds, StatsText(stats)),
        )
        return SaveResult(
            self.checkpoint_id,
            done.save_id,
            done.digest,
            done.nbytes,
            stats,
            _read_metadata=self._read_metadata,
        )


def run_save(saving: Saving, coordinator: Coordinator) -> SaveResult:
    """Save from every rank of the group; returns once it is committed everywhere."""
    with coordinator.call("save"):
        while True:
            with saving.aborting():
                plan = saving.prepare()
            result = saving.complete(plan, saving.planner)
            if result is not None:
                return result


def _lead_set_up(
    told: list[bytes], writer: StorageWriter, place: Place, planning: Planning
) -> list[bytes]:
    """Ranks must have been asked for the same thing."""
    asked, counts = ranks_on_hosts(told)
    check_same(asked, "saves")
    word = writer.set_up_storage_writer(place)
    starts = {
        count: msgspec.msgpack.encode(_Start(planning.may_reuse, count, word)) for count in counts
    }
    return [starts[count] for count in counts]


def _follow_set_up(writer: StorageWriter, place: Place, word: bytes) -> None:
    if not place.is_coordinator:
        writer.set_up_storage_writer(place, word)


def _item_bytes(plan: SavePlan) -> int:
    items = WriteItems.of(plan.items)
    return int(items.chunks.nbytes(items.tensors).sum())


def _encode_results(results: list[WriteResult] | None) -> bytes:
    if results is None:
        return _STALE
    rows = [(r.index.fqn, r.index.offset, r.size_in_bytes, r.storage_data) for r in results]
    return msgspec.msgpack.encode(rows)


def _decode_results(data: bytes) -> list[WriteResult]:
    rows = msgspec.msgpack.decode(data, type=list[tuple[str, tuple[int, ...] | None, int, bytes]])
    return [
        WriteResult(MetadataIndex(fqn, offset), size, extra) for fqn, offset, size, extra in rows
    ]


def _commit(
    told: list[bytes], writer: StorageWriter, planning: Planning, coordinator: Coordinator
) -> bytes:
    metadata = planning.metadata
    assert metadata is not None
    if hasattr(writer, "before_commit"):
        writer.before_commit = coordinator.may_commit
    else:
        coordinator.may_commit()
    final = writer.finish(metadata, [_decode_results(part) for part in told])
    meta = final.storage_meta
    save_id = (meta.save_id if meta is not None else None) or ""
    state = metadata.state_dict_metadata
    if isinstance(state, StateColumns) and state.chunks is not None:
        nbytes = int(state.chunks.nbytes(state.tensors).sum())
    else:
        nbytes = sum(r.size_in_bytes for part in told for r in _decode_results(part))
    return msgspec.msgpack.encode(_Committed(save_id, getattr(writer, "digest", ""), nbytes))


class _Clock:
    """Seconds between steps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"{name.replace(' ', '_')}_s"] = now - self._last
        self._last = now
